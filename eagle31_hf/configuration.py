"""`Eagle31Config`: what a drafter is, field by field, and which values are refused."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .json_file import read_json
from .names import refuse_unknown

LAYER_TYPES = ("full_attention", "sliding_attention")
# Bounds of what is built from a config before a tensor has shown its size: a drafter has one layer or two, the largest
# vocabularies have a sixtieth of MAX_SIZE, and no rope has ten parameters.
MAX_LAYERS = 256
MAX_SIZE = 2**24
MAX_LENGTH = 2**31
MAX_ROPE_PARAMETERS = 32
DTYPES = ("float32", "float16", "bfloat16", "float64")
FLOATS = ("attention_dropout", "rms_norm_eps", "initializer_range", "logit_scale")
# What `PreTrainedConfig` takes besides its fields, from a person or out of its own `to_dict()`.
BASE_NAMES = (
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
)
# What a config.json may set besides this class's own fields. All else is left unread: it may not size a table of
# labels, name code for attention, or turn this model's outputs into tuples.
FILE_NAMES = (
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "_name_or_path",
    "rope_theta", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
FROM_DICT_NAMES = (
    "return_unused_kwargs", "_from_auto", "_from_pipeline",
    "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder",
)  # fmt: skip

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


Completer = Callable[[Mapping[str, Any], Mapping[str, Any]], "Eagle31Config"]
_COMPLETERS = list[Completer]()


def completes_configs(function: Completer) -> Completer:
    """Registers the function that completes a config which only points to its weights.

    It is called with the values of config.json and the keyword arguments of the `from_pretrained` under way. A config
    knows nothing of formats; `checkpoints`, which does and is always loaded with this package, registers its own.
    """
    _COMPLETERS[:] = [function]
    return function


def default_layer_ids(num_target_layers: int) -> list[int]:
    """The field's default capture points `[2, L // 2, L - 3]` for a target of `num_target_layers` layers (L >= 7).

    Raises ValueError for a target too shallow to have three distinct ones.
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
    r"""Configuration of an EAGLE 3.1 (or EAGLE 3) drafter. Every field is written out when saved; readers disagree on
    defaults.

    Args:
        vocab_size: target vocabulary V, padding rows included (ids the embedding accepts).
        draft_vocab_size: draft vocabulary Vd, the ids the drafter can propose; `None` means V.
        hidden_size: drafter width h.
        target_hidden_size: target width ht; `None` means h.
        aux_hidden_state_layer_ids: ascending indices into the target's `hidden_states` tuple (0: embedding output, i: output of
            the i-th layer, always before the target's final norm). `None`: `[2, L // 2, L - 3]` of the target it is run with.
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
        kv_lora_rank: set for MLA layers (DeepSeek, Kimi): keys and values are cached as one latent of this width. `q_lora_rank` (None: no
            query latent), `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim` are MLA's other sizes; rope is interleaved.
        target_model: name of the target this drafter was trained for.
        weights_from: `{"repo_id", "revision"}` of the EAGLE 3 weights a repository with only a config refers to. They are fetched with
            the `token`, `cache_dir`, `local_files_only`, `force_download` and `proxies` given to `from_pretrained`, always at the revision
            named here (without one, "main"): `revision` and `subfolder` given there say where this config is.

    Raises huggingface_hub's StrictDataclassError for contradicting fields and ValueError for a keyword that is none; of
    a config.json, fields of other models are left unread. Source: EAGLE-3 (arXiv 2503.01840), Attention Drift (arXiv
    2605.09992).
    """

    model_type = "eagle31"
    keys_to_ignore_at_inference = ["past_key_values"]

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
    target_model: str | None = None
    weights_from: dict | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown(name for name in kwargs if not name.startswith("_"))
        self._check_bounds()
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.kv_lora_rank is not None:
            self.head_dim = self.qk_rope_head_dim  # what transformers' rope functions read
        elif self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As in transformers; fields that contradict each other or have the wrong type are a ValueError that names the
        file."""
        try:
            with hub_options(kwargs):
                return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{pretrained_model_name_or_path}: config.json: {error}") from error

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers; a config that only points to its weights (`weights_from`) is completed by the checkpoint
        it points to.

        That is fetched with the Hub options of the `from_pretrained` that calls this; in a call of its own, with those
        given here. Of `config_dict` only this class's fields are read. Raises ValueError for a keyword that is none of
        them, unless `return_unused_kwargs` asks for those.
        """
        if not kwargs.get("return_unused_kwargs"):
            cls._refuse_unknown(kwargs.keys() - set(FROM_DICT_NAMES))
        if config_dict.get("weights_from") is not None:
            [complete] = _COMPLETERS
            config_dict = complete(config_dict, HUB_OPTIONS_GIVEN.get({}) | kwargs).to_dict()
        return super().from_dict(cls._read_part(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        """As in transformers, within bounds: see `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def _dict_from_json_file(cls, json_file) -> dict[str, Any]:
        """What transformers reads a config.json with; this one refuses a file that could exhaust memory or the stack."""
        values = read_json(Path(json_file))
        values.pop("configuration_files", None)  # would name other files to read instead
        return values

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Raises ValueError where the folder or repository holds something else, a target passed by mistake for one."""
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

    @classmethod
    def _own_names(cls) -> set[str]:
        """The fields this class adds to `PreTrainedConfig`, a subclass's too."""
        inherited = {field.name for field in fields(PreTrainedConfig)} - Eagle31Config.__annotations__.keys()
        return {field.name for field in fields(cls)} - inherited

    @classmethod
    def base_names(cls) -> set[str]:
        """The names `PreTrainedConfig` takes, which this class's constructor does, too."""
        return {*(field.name for field in fields(PreTrainedConfig)), *BASE_NAMES}

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        unknown = set(names) - cls.base_names()
        refuse_unknown(unknown, cls._own_names(), "fields of Eagle31Config")

    @classmethod
    def _read_part(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a config.json that is read. Raises ValueError for a dtype that weights do not have."""
        read = {name: value for name, value in values.items() if name in cls._own_names() or name in FILE_NAMES}
        for name in ("dtype", "torch_dtype"):
            dtype = str(read.get(name)).removeprefix("torch.")
            if dtype not in (*DTYPES, "None"):
                raise ValueError(f"Eagle31Config: {name} is {dtype[:80]}; expected {', '.join(DTYPES)}.")
        return read

    @property
    def num_aux_states(self) -> int:
        """n, the number of captured target states."""
        return 3 if self.aux_hidden_state_layer_ids is None else len(self.aux_hidden_state_layer_ids)

    @property
    def is_eagle31(self) -> bool:
        return self.fc_norm and self.norm_output

    def resolve_layer_ids(self, num_target_layers: int) -> list[int]:
        """The capture points for a target of that many layers. Raises ValueError when one lies outside it."""
        ids = self.aux_hidden_state_layer_ids or default_layer_ids(num_target_layers)
        if ids[-1] > num_target_layers:
            raise ValueError(
                f"aux_hidden_state_layer_ids {ids} reach past the target: it has {num_target_layers} layers, so ids may"
                f" be 0 to {num_target_layers}. Is this the target the drafter was trained for"
                f" ({self.target_model or 'not named'})?"
            )
        return ids

    def _check_bounds(self) -> None:
        """Raises ValueError for sizes no drafter has, before anything is as long as one of them says."""
        limits = {"num_hidden_layers": MAX_LAYERS, "sliding_window": MAX_LENGTH, "max_position_embeddings": MAX_LENGTH}
        for name in self._own_names():
            value = getattr(self, name)
            if type(value) is int and not name.endswith("_token_id") and value > limits.get(name, MAX_SIZE):
                raise ValueError(f"Eagle31Config: {name} is {value}; expected at most {limits.get(name, MAX_SIZE)}.")
        if isinstance(self.rope_parameters, dict) and len(self.rope_parameters) > MAX_ROPE_PARAMETERS:
            count = len(self.rope_parameters)
            raise ValueError(
                f"Eagle31Config: rope_parameters are {count}; expected a rope of transformers, at most"
                f" {MAX_ROPE_PARAMETERS}."
            )

    def _sizes(self) -> dict[str, int | None]:
        """What has to be above 0."""
        names = ["hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
        latent = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] + ["q_lora_rank"] * (
            self.q_lora_rank is not None
        )
        names += ["max_position_embeddings", *(["head_dim"] if self.kv_lora_rank is None else latent)]
        return {name: getattr(self, name) for name in names}

    def validate_architecture(self):
        """Refuses contradicting fields; called by the strict dataclass after construction."""
        ids = self.aux_hidden_state_layer_ids
        rules = (
            (
                all((size or 0) > 0 for size in self._sizes().values()),
                (
                    f"{', '.join(f'{name} is {size}' for name, size in self._sizes().items() if (size or 0) <= 0)};"
                    " expected sizes above 0"
                ),
            ),
            (
                self.kv_lora_rank is None or not (self.qk_norm or (self.qk_rope_head_dim or 1) % 2),
                (
                    f"MLA layers (kv_lora_rank={self.kv_lora_rank}) with qk_norm={self.qk_norm},"
                    f" qk_rope_head_dim={self.qk_rope_head_dim}; expected no qk_norm and an even qk_rope_head_dim"
                ),
            ),
            (
                all(isfinite(getattr(self, name)) for name in FLOATS),
                f"{', '.join(f'{name} is {getattr(self, name)}' for name in FLOATS)}; expected finite numbers",
            ),
            (
                _is_share((self.rope_parameters or {}).get("partial_rotary_factor", 1.0)),
                (
                    f"rope_parameters are {str(self.rope_parameters)[:200]}; expected a partial_rotary_factor above 0"
                    " and at most 1"
                ),
            ),
            (self.num_hidden_layers >= 1, f"num_hidden_layers is {self.num_hidden_layers}; expected at least 1"),
            (
                0 < self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to vocab_size ({self.vocab_size})",
            ),
            (
                self.num_attention_heads % max(1, self.num_key_value_heads) == 0,
                (
                    f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads"
                    f" ({self.num_key_value_heads})"
                ),
            ),
            (
                not (self.fc_norm and self.norm_before_fc),
                (
                    "fc_norm and norm_before_fc are both true; expected at most one: fc_norm norms each captured state,"
                    " norm_before_fc their concatenation"
                ),
            ),
            (
                ids is None
                or (len(ids) > 0 and min(ids) >= 0 and sorted(set(ids)) == list(ids) and bool not in map(type, ids)),
                f"aux_hidden_state_layer_ids is {str(ids)[:200]}; expected distinct ids >= 0 in ascending order",
            ),
            (
                len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
                f"layer_types is {str(self.layer_types)[:200]}; expected {self.num_hidden_layers} of {LAYER_TYPES}",
            ),
            (
                "sliding_attention" not in self.layer_types or (self.sliding_window or 0) > 0,
                (
                    f"layer_types asks for sliding attention but sliding_window is {self.sliding_window}; expected"
                    " tokens > 0"
                ),
            ),
            (
                not self.share_target_embeddings or self.hidden_size == self.target_hidden_size,
                (
                    f"share_target_embeddings needs hidden_size ({self.hidden_size}) == target_hidden_size"
                    f" ({self.target_hidden_size}); give the drafter its own table (share_target_embeddings=False)"
                ),
            ),
            (
                not self.share_target_head
                or (self.hidden_size == self.target_hidden_size and self.draft_vocab_size == self.vocab_size),
                (
                    f"share_target_head needs equal widths ({self.hidden_size}, {self.target_hidden_size}) and a full"
                    f" draft vocabulary ({self.draft_vocab_size} of {self.vocab_size}); give the drafter its own head"
                    " (share_target_head=False)"
                ),
            ),
        )
        for holds, message in rules:
            if not holds:
                raise ValueError(f"Eagle31Config: {message}.")


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1
