"""`Eagle31Config`: the fields of a drafter's config, and how they are read from and written to config.json."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .cache_names import CACHE
from .config_rules import check_bounds, check_rules, is_mla
from .json_file import read_json
from .names import refuse_unknown

DTYPES = ("float32", "float16", "bfloat16", "float64")
# The names that `PreTrainedConfig` takes, which `Eagle31Config` takes too: its fields, and keywords from a person or
# out of its own `to_dict()`.
BASE_NAMES = frozenset(field.name for field in fields(PreTrainedConfig)) | {
    "model_type",
    "name_or_path",
    "torch_dtype",
    "num_labels",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "per_layer_config",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "quantization_config",
    "transformers_weights",
    "auto_map",
    "use_return_dict",
    "use_cache",
}
# Fields that a config.json may set besides this class's own. All others are left unread: a file may not size a table
# of labels, name code for attention, or turn this model's outputs into tuples.
FILE_NAMES = (
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "_name_or_path",
    "rope_theta", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
# Arguments of a `from_pretrained` that say where on the Hub, and how, files are fetched.
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
# Keywords that `from_dict` takes besides fields.
FROM_DICT_NAMES = ("return_unused_kwargs", "_from_auto", "_from_pipeline", *HUB_OPTIONS)

# Options of the `from_pretrained` under way. transformers drops them before `from_dict`, where a config with
# `weights_from` is completed.
HUB_OPTIONS_GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("HUB_OPTIONS_GIVEN")


@contextmanager
def hub_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Makes the keyword arguments of a `from_pretrained` known to every `Eagle31Config.from_dict` within the block."""
    token = HUB_OPTIONS_GIVEN.set(options)
    try:
        yield
    finally:
        HUB_OPTIONS_GIVEN.reset(token)


def default_layer_ids(num_target_layers: int) -> list[int]:
    """Returns the layer ids that are captured by default, `[2, L // 2, L - 3]` for a target of L layers.

    Raises ValueError for a target of fewer than 7 layers, which does not have three distinct ones.
    """
    ids = [2, num_target_layers // 2, num_target_layers - 3]
    if sorted(set(ids)) != ids:
        raise ValueError(
            f"a target of {num_target_layers} layers has no default capture points: [2, L // 2, L - 3] gives {ids},"
            " expected three ascending ids; set aux_hidden_state_layer_ids in the drafter's config, e.g. [1, 2, 3]."
        )
    return ids


@strict
class Eagle31Config(PreTrainedConfig):
    r"""Configuration of an EAGLE 3.1 or EAGLE 3 drafter.

    Every field is written out when saved, because readers of config.json disagree on defaults.

    Args:
        vocab_size: target vocabulary V: the ids that the target's embedding accepts, padding included.
        draft_vocab_size: draft vocabulary Vd, the ids the drafter can propose; `None` means V.
        hidden_size: drafter width h.
        target_hidden_size: target width ht; `None` means h.
        aux_hidden_state_layer_ids: ascending indices into the target's `hidden_states` tuple (0: the embedding's
            output, i: the output of the i-th layer, always before the target's final norm). `None`:
            `[2, L // 2, L - 3]` for the L layers of the target it is run with.
        fc_norm: an RMSNorm on each captured state before `fc` (EAGLE 3.1).
        norm_output: the post-norm state is fed to the next step (EAGLE 3.1); otherwise the pre-norm one (EAGLE 3).
        norm_before_fc: one RMSNorm over the concatenated states before `fc`; excludes `fc_norm`.
        norm_before_residual: the residual of layer 0 starts from the normed state.
        qk_norm: RMSNorm over each query and key head before rope (Qwen3 layers).
        layer_types: per layer "full_attention" or "sliding_attention" (then `sliding_window` tokens); `None`: all full.
        rope_parameters: as in transformers, `partial_rotary_factor` included, any `rope_type`.
        share_target_embeddings: the checkpoint holds no `embed_tokens`; the target's table is used (needs h == ht).
        share_target_head: the checkpoint holds no `lm_head`; the target's is used (needs h == ht and Vd == V).
        logit_scale: factor on the draft logits.
        fc_bias: `fc` has a bias.
        kv_lora_rank: width of the latent that MLA layers (DeepSeek, Kimi) cache for keys and values; `None`: layers
            are not MLA. `q_lora_rank` (`None`: no query latent), `qk_nope_head_dim`, `qk_rope_head_dim` and
            `v_head_dim` are MLA's other sizes; rope is interleaved.
        mask_token_id: token that a P-EAGLE drafter reads in place of drafts it does not know yet, with one learnt
            vector, `mask_hidden`, in place of the target's states: it drafts all levels in one forward. `None`: EAGLE
            3 or 3.1, level after level.
        target_model: name of the target this drafter was trained for.
        weights_from: `{"repo_id", "revision"}` of the EAGLE 3 weights to which a repository with only a config points.
            They are fetched at the revision named here (by default "main"), with the `token`, `cache_dir`,
            `local_files_only`, `force_download` and `proxies` given to `from_pretrained`; a `revision` or `subfolder`
            given there says where this config is.

    Raises huggingface_hub's StrictDataclassError for fields that contradict each other, ValueError for a keyword that
    is no field. Fields of other models in a config.json are left unread. Source: EAGLE-3 (arXiv 2503.01840), Attention
    Drift (arXiv 2605.09992), P-EAGLE (arXiv 2602.01469).
    """

    model_type = "eagle31"
    keys_to_ignore_at_inference = [CACHE]
    complete = None  # `complete_config`, which `checkpoints.read` sets: a config knows nothing of formats

    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    hidden_size: int = 4096
    target_hidden_size: int | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    qk_norm: bool = False
    fc_bias: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    intermediate_size: int = 14336
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    logit_scale: float = 1.0
    share_target_embeddings: bool = True
    share_target_head: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    mask_token_id: int | None = None
    target_model: str | None = None
    weights_from: dict | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        unknown = {name for name in kwargs if not name.startswith("_")} - BASE_NAMES
        refuse_unknown(unknown, FIELDS, "fields of Eagle31Config")
        check_bounds(self, FIELDS)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if is_mla(self):
            self.head_dim = self.qk_rope_head_dim  # what transformers' rope functions read
        elif self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """Reads the config of a folder or Hub repository, with the arguments of transformers' `from_pretrained`.

        Raises ValueError, naming the file, for fields that contradict each other or have the wrong type.
        """
        try:
            with hub_options(kwargs):
                return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{pretrained_model_name_or_path}: config.json: {error}") from error

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Makes a config of a dict; only this class's fields are read from it.

        A config that only points to its weights (`weights_from`) is completed by the checkpoint it points to, which is
        fetched with the Hub options given here, or to the `from_pretrained` that calls this. Raises ValueError for a
        keyword that is no field, unless `return_unused_kwargs` asks for those, and for a dtype that weights do not
        have.
        """
        if not kwargs.get("return_unused_kwargs"):
            refuse_unknown(kwargs.keys() - BASE_NAMES - {*FROM_DICT_NAMES}, FIELDS, "fields of Eagle31Config")
        if config_dict.get("weights_from") is not None:
            config_dict = cls.complete(config_dict, HUB_OPTIONS_GIVEN.get({}) | kwargs).to_dict()
        read = {name: value for name, value in config_dict.items() if name in FIELDS or name in FILE_NAMES}
        for name in ("dtype", "torch_dtype"):
            dtype = str(read.get(name)).removeprefix("torch.")
            if dtype not in (*DTYPES, "None"):
                raise ValueError(f"Eagle31Config: {name} is {dtype[:80]}; expected {', '.join(DTYPES)}.")
        given = {name: kwargs.pop(name) for name in FIELDS & kwargs.keys()}
        return super().from_dict(read | given, **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        """Reads a config from a JSON file, as `from_dict` does from a dict."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def _dict_from_json_file(cls, json_file) -> dict[str, Any]:
        """Reads a config.json in place of transformers' reader, and refuses a file that could exhaust memory or the
        stack."""
        values = read_json(Path(json_file))
        values.pop("configuration_files", None)  # would name other files to read instead
        return values

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Returns the values of a folder's or repository's config.json.

        Raises ValueError where they are those of another model, as of a target passed by mistake.
        """
        # transformers 5.17 loses it
        token = {name: value for name, value in HUB_OPTIONS_GIVEN.get({}).items() if name == "token"}
        values, unused = super().get_config_dict(pretrained_model_name_or_path, **token | kwargs)
        if values.get("model_type") != cls.model_type:
            raise ValueError(
                f"{pretrained_model_name_or_path}: config.json says model_type {values.get('model_type')!r}; expected"
                " 'eagle31', a drafter in this library's format. Is this the target rather than its drafter, or an"
                " EAGLE 3 checkpoint of another library?"
            )
        return values, unused

    @property
    def num_aux_states(self) -> int:
        """The number n of target layers whose hidden states are captured."""
        return 3 if self.aux_hidden_state_layer_ids is None else len(self.aux_hidden_state_layer_ids)

    @property
    def is_eagle31(self) -> bool:
        """True for EAGLE 3.1, which norms every captured state and the state it feeds back; False for EAGLE 3."""
        return self.fc_norm and self.norm_output

    @property
    def is_parallel(self) -> bool:
        """True for P-EAGLE, which drafts all levels in one forward."""
        return self.mask_token_id is not None

    def resolve_layer_ids(self, num_target_layers: int) -> list[int]:
        """Returns the layer ids to capture in a target of that many layers. Raises ValueError where one lies outside
        it."""
        ids = self.aux_hidden_state_layer_ids or default_layer_ids(num_target_layers)
        if ids[-1] > num_target_layers:
            raise ValueError(
                f"aux_hidden_state_layer_ids {ids} reach past the target: it has {num_target_layers} layers, so ids may"
                f" be 0 to {num_target_layers}. Is this the target the drafter was trained for"
                f" ({self.target_model or 'not named'})?"
            )
        return ids

    def validate_architecture(self):
        """Raises ValueError for fields that contradict each other; the strict dataclass calls it after construction."""
        check_rules(self)


FIELDS = frozenset(Eagle31Config.__annotations__)  # its own names, and those of the base whose defaults it sets
