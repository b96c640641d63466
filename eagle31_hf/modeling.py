"""The drafter: captured target states are normed and fused, one fused decoder layer (and plain ones) follow, a head scores.

B batch, T tokens, h drafter width, ht target width, n captured states, V target vocabulary, Vd draft vocabulary.
"""

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, embedding
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.utils import ModelOutput, logging

from . import vocab
from .attention import GQAttention, MLAttention
from .checkpoints.files import HUB_OPTIONS
from .checkpoints.producers import NATIVE
from .checkpoints.read import Checkpoint, read_checkpoint
from .checkpoints.sharing import settled
from .configuration import Eagle31Config
from .hub import CARD, CardFacts, render_card, upload

logger = logging.get_logger(__name__)
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


@dataclass
class Eagle31DrafterOutput(ModelOutput):
    """Draft logits (B, T, Vd), the state the next step is fed (B, T, h), and the drafter's cache."""

    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None


class Eagle31DecoderLayer(GradientCheckpointingLayer):
    """Layer 0 attends over [normed embedding, normed state]; later layers are ordinary pre-norm decoder layers."""

    def __init__(self, config: Eagle31Config, layer_idx: int):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.attention_type = config.layer_types[layer_idx]
        is_fused = layer_idx == 0
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if is_fused else None
        attention = GQAttention if config.kv_lora_rank is None else MLAttention
        self.self_attn = attention(config, layer_idx, (2 if is_fused else 1) * config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, mask: Any, past_key_values: Cache | None) -> Tensor:
        """State `x` (B, T, h) and token embeddings (B, T, h) -> (B, T, h)."""
        residual = x
        if self.hidden_norm is None:
            x = self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)  # (B, T, 2h), embedding half first
        x = residual + self.self_attn(x, cos, sin, mask, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle31DrafterModel(PreTrainedModel):
    """EAGLE 3.1 (or EAGLE 3) drafter of a frozen target; see `Eagle31Config` for what its flags mean.

    `num_assistant_tokens` ("auto", the default: chosen as it goes), `assistant_confidence_threshold`, `draft_tree_top_k` (1: chains) and
    `draft_tree_total_tokens` of `generation_config` are its drafting knobs.
    """

    config_class = Eagle31Config
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Eagle31DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    # Headers are compared with the config before anything is loaded; of these, what a file lacks is made, see Checkpoint.made.
    _keys_to_ignore_on_load_missing = [r"^d2t$", r"^t2d$", r"o_proj\.bias$"]
    _keys_to_ignore_on_load_unexpected = [r".*"]

    def __init__(self, config: Eagle31Config):
        super().__init__(config)
        h, eps, n = config.hidden_size, config.rms_norm_eps, config.num_aux_states
        fused_width = n * config.target_hidden_size
        self.embed_tokens = None if config.share_target_embeddings else nn.Embedding(config.vocab_size, h)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(n)) if config.fc_norm else None
        self.input_norm = nn.RMSNorm(fused_width, eps=eps) if config.norm_before_fc else None
        self.fc = nn.Linear(fused_width, h, bias=config.fc_bias)
        self.layers = nn.ModuleList(Eagle31DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(h, eps=eps)
        self.lm_head = None if config.share_target_head else nn.Linear(h, config.draft_vocab_size, bias=False)
        self.rotary_emb = Phi3RotaryEmbedding(config)  # type: ignore[arg-type]
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        else:
            self.d2t = self.t2d = None
        # A tuple, so that the target's modules are neither saved, moved nor trained with the drafter.
        self._target_modules: tuple[nn.Module, nn.Module | None] | None = None
        self.generation_config = default_generation_config()
        self.checkpoint: Checkpoint | None = None  # what it was loaded from
        self.card_facts = CardFacts()
        self.upgrade_report: Any = None  # of `upgrade_to_eagle31`
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.d2t is not None:
            init.zeros_(self.d2t)
            init.copy_(self.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    def get_input_embeddings(self) -> nn.Module | None:
        """Its own table, else the target's, else None while no target has been seen."""
        if self.embed_tokens is not None:
            return self.embed_tokens
        return self._target_modules[0] if self._target_modules else None

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Gives the drafter a table (V, h) of its own."""
        self.embed_tokens = value  # type: ignore[assignment]
        self.config.share_target_embeddings = False

    def get_output_embeddings(self) -> nn.Module | None:
        if self.lm_head is not None:
            return self.lm_head
        return self._target_modules[1] if self._target_modules else None

    def load_target_embeddings(self, target: Any) -> None:
        """Ties the drafter to the target's input embedding, and to its head where the checkpoint has none, without a copy.

        Raises ValueError when the target's width or vocabulary is not the one the drafter was made for.
        """
        embedding: Any = target.get_input_embeddings()
        head = target.get_output_embeddings()
        rows, width = embedding.weight.shape
        trained_for = f"the drafter was made for {self.config.target_model or 'a target it does not name'}; pass that target."
        target_width = target.config.get_text_config().hidden_size
        if target_width != self.config.target_hidden_size:
            raise ValueError(f"the target's width is {target_width}, the drafter expects {self.config.target_hidden_size}: {trained_for}")
        if self.embed_tokens is None and width != self.config.hidden_size:
            raise ValueError(f"the target's embedding is {width} wide, the drafter that shares it {self.config.hidden_size}: {trained_for}")
        if not vocab.same_vocabulary(self.config.vocab_size, rows):
            raise ValueError(
                f"the target's vocabulary has {rows} ids, the drafter's {self.config.vocab_size} (more than padding apart): {trained_for}"
            )
        if self._target_modules is None or self._target_modules[0] is not embedding:
            self._target_modules = (embedding, head)
            if self.embed_tokens is not None and unrelated(self.embed_tokens.weight, embedding.weight):
                logger.warning(
                    "the drafter's own embedding has nothing in common with the target's, as in checkpoints of TorchSpec before March "
                    "2026, where it is random. If it was not trained from scratch, load with share_target_embeddings=True."
                )

    def draft_to_target_ids(self) -> Tensor | None:
        """The target id of every draft id (Vd,); None for a full draft vocabulary, where the two are the same."""
        return None if self.d2t is None else vocab.target_ids(self.d2t)

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Sets which target ids (Vd,) the rows of the head stand for. Raises ValueError unless distinct and in range."""
        if self.d2t is None or len(ids) != len(self.d2t):
            raise ValueError(f"got {len(ids)} ids for a draft vocabulary of {self.config.draft_vocab_size} of {self.config.vocab_size}.")
        d2t = vocab.offsets(ids.to(self.d2t.device))
        vocab.check_mapping(d2t, self.config.vocab_size)
        self.d2t.copy_(d2t)
        self.t2d.copy_(vocab.membership(vocab.target_ids(d2t), self.config.vocab_size))

    def fuse_target_states(self, states: Tensor) -> Tensor:
        """Captured states (B, T, n*ht), concatenated in ascending layer order, -> fused states (B, T, h)."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.split(self.config.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) -> embeddings (B, T, h) on the drafter's device, unscaled even where the target scales its own."""
        table: Any = self.get_input_embeddings()
        if table is None:
            raise RuntimeError(
                "the drafter has no embedding yet: its checkpoint shares the target's. Call drafter.load_target_embeddings(target)."
            )
        input_ids = input_ids.to(table.weight.device)
        # Gemma's table multiplies its rows; drafters read the rows themselves.
        embeds = embedding(input_ids, table.weight) if hasattr(table, "embed_scale") else table(input_ids)
        return embeds.to(self.norm.weight)  # a norm is never quantized: its device and dtype are the activations'

    def score(self, normed: Tensor) -> Tensor:
        """Post-norm states (B, T, h) -> draft logits (B, T, Vd)."""
        head: Any = self.get_output_embeddings()
        if head is None:
            raise RuntimeError(
                "the drafter has no head yet: its checkpoint shares the target's. Call drafter.load_target_embeddings(target)."
            )
        logits = head(normed.to(head.weight) if head.weight.is_floating_point() else normed).to(normed)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def forward(
        self,
        input_ids: Tensor,
        target_hidden_states: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = 0,
    ) -> Eagle31DrafterOutput:
        """One drafting step over T rows; row t stands at a position whose *next* token is `input_ids[:, t]` (B, T).

        Exactly one of `target_hidden_states` (B, T, n*ht), captured from the target, and `hidden_states` (B, T, h), the state an
        earlier call returned. `attention_mask` is 2-D over cached and new rows, 4-D in the form of the attention implementation,
        or a dict of 4-D masks by layer type. `logits_to_keep`: score the last so many rows only (0: all; None: none), or
        one row of every sequence (B,).
        Raises ValueError when neither or both states are given.
        """
        if (target_hidden_states is None) == (hidden_states is None):
            given = "neither" if hidden_states is None else "both"
            raise ValueError(f"got {given} of target_hidden_states and hidden_states; expected exactly one.")
        x = self.fuse_target_states(target_hidden_states) if hidden_states is None else hidden_states
        embeds = self.embed(input_ids)
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        masks = self._masks(x, attention_mask, past_key_values, position_ids)
        cos, sin = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            kind: Any = layer.attention_type
            x = layer(x, embeds, cos, sin, masks[kind], past_key_values)
        normed = self.norm(x)
        if isinstance(logits_to_keep, Tensor):
            scored = normed[torch.arange(len(normed), device=normed.device), logits_to_keep.to(normed.device)][:, None]
        else:
            scored = None if logits_to_keep is None else normed[:, -logits_to_keep:]
        return Eagle31DrafterOutput(
            logits=None if scored is None else self.score(scored),
            last_hidden_state=normed if self.config.norm_output else x,
            past_key_values=past_key_values,
        )

    def _masks(self, x: Tensor, mask: Tensor | dict | None, past: Cache | None, position_ids: Tensor) -> dict[str, Any]:
        """The attention mask of each layer type in use, in the form of the attention implementation."""
        if isinstance(mask, dict):
            return mask
        return {
            kind: MASKS[kind](self.config, inputs_embeds=x, attention_mask=mask, past_key_values=past, position_ids=position_ids)
            for kind in set(self.config.layer_types)
        }

    @classmethod
    @settled("pretrained_model_name_or_path")
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, config=None, aux_layer_convention=None, output_loading_info: bool = False, **kwargs
    ):
        """As `PreTrainedModel.from_pretrained`, for every EAGLE 3 and 3.1 format and for configs that only point to their weights.

        Fields of `Eagle31Config` given as keywords win over the checkpoint's. `aux_layer_convention`, "boundary" or "output", says how
        a checkpoint counts the target's layers where it does not say so itself. `drafter.checkpoint` keeps what was found.
        A folder converted meanwhile is read as it was before or is after. Raises OSError when something is not there; ValueError when
        tensors are missing, extra, misshapen or not finite, it is no EAGLE 3 drafter, or may mean two things (the text names what decides).
        """
        if pretrained_model_name_or_path is None:  # weights are in kwargs["state_dict"]
            return super().from_pretrained(None, *args, config=config, output_loading_info=output_loading_info, **kwargs)
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        overrides = {name: kwargs.pop(name) for name in Eagle31Config.__annotations__ if name in kwargs}
        if isinstance(config, Eagle31Config):
            overrides = {name: getattr(config, name) for name in Eagle31Config.__annotations__} | overrides
        checkpoint = read_checkpoint(pretrained_model_name_or_path, overrides, aux_layer_convention, **hub)
        for note in checkpoint.notes:
            logger.warning("%s: %s.", checkpoint.source, note)
        kwargs["ignore_mismatched_sizes"] = True  # shapes are known to fit, but for a t2d of another size, which is rebuilt
        config = deepcopy(checkpoint.config)
        config.transformers_weights = checkpoint.files.config.get("transformers_weights")  # where weights have another name
        loaded: Any = super().from_pretrained(
            str(checkpoint.folder), *args, config=config, key_mapping=checkpoint.key_mapping, output_loading_info=True, **kwargs
        )
        model, info = loaded
        del model.config.transformers_weights
        model.config.name_or_path = str(pretrained_model_name_or_path)
        fill_in(model, checkpoint)
        check_finite(model, checkpoint)
        if checkpoint.format == NATIVE:
            with suppress(OSError):  # the file is optional
                model.generation_config = GenerationConfig.from_pretrained(str(checkpoint.folder))
        model.checkpoint = checkpoint
        info["missing_keys"] = set(info["missing_keys"]) - checkpoint.made.keys()
        info["unexpected_keys"] = set(info["unexpected_keys"]) - checkpoint.dropped.keys()
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """Writes the native format, whatever was loaded: config, weights under their native names, drafting knobs, and a model card
        (`drafter.card_facts` adds license, data, training and acceptance to it) where the folder has none yet.
        """
        names = ("repo_id", "commit_message", "commit_description", "private", "create_pr", "revision", "tags")
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs | {"save_original_format": False})
        self.generation_config.save_pretrained(save_directory)
        config: Any = self.config
        card = Path(save_directory, CARD)
        if not card.exists():
            card.write_text(render_card(config, self.card_facts, hub.get("repo_id", card.parent.name)), encoding="utf-8")
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", card.parent.name), token=kwargs.get("token"), **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """Saves and uploads in one commit, the card included unless the repository has one. Returns the commit's URL.

        Raises OSError when the Hub refuses; what an interrupted upload has brought over is not sent again.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            config: Any = self.config
            facts = replace(self.card_facts, tags=[*self.card_facts.tags, *(tags or [])])
            Path(folder, CARD).write_text(render_card(config, facts, repo_id), encoding="utf-8")
            message = commit_message or "Upload drafter with eagle31_hf"
            return upload(HfApi(token=token), Path(folder), repo_id, private, revision, create_pr, message, commit_description)

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        num_assistant_tokens: int | str | None = None,
        assistant_confidence_threshold: float | None = None,
        draft_tree_top_k: int | str | None = None,
        draft_tree_total_tokens: int | str | None = None,
        **model_kwargs: Any,
    ):
        """For `target.generate(**inputs, custom_generate=drafter.decode)`: the same as `assistant_model=drafter`, without the hook.

        The drafting knobs may be given to that `generate`. transformers hands neither a
        streamer nor a tokenizer on to such a callable: bind the streamer, `custom_generate=functools.partial(drafter.decode,
        streamer=streamer)`; stop strings need `assistant_model=drafter`.
        """
        from .generation.decoding import decode_with  # the model does not depend on generation, this entry point does

        knobs = {
            "num_assistant_tokens": num_assistant_tokens, "assistant_confidence_threshold": assistant_confidence_threshold,
            "draft_tree_top_k": draft_tree_top_k, "draft_tree_total_tokens": draft_tree_total_tokens,
        }  # fmt: skip
        return decode_with(
            model,
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            knobs,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )


def default_generation_config() -> GenerationConfig:
    return GenerationConfig(num_assistant_tokens="auto", assistant_confidence_threshold=0.0)


@torch.no_grad()
def unrelated(table: Tensor, other: Tensor) -> bool:
    """Whether rows of two embeddings (V, h) of one width point in unrelated directions, seen on up to 256 rows."""
    if table.shape[1] != other.shape[1] or not other.is_floating_point() or "meta" in (table.device.type, other.device.type):
        return False
    rows = torch.linspace(0, min(len(table), len(other)) - 1, 256, dtype=torch.long).unique()
    similarity = cosine_similarity(table[rows.to(table.device)].float(), other[rows.to(other.device)].float().to(table.device))
    return bool(similarity.mean() < 4 / (len(rows) * table.shape[1]) ** 0.5)  # four standard deviations of random directions


@torch.no_grad()
def fill_in(model: Eagle31DrafterModel, checkpoint: Checkpoint) -> None:
    """Writes the tensors that the files lack, or hold in a form that is not trusted, into the loaded model."""
    for name, value in checkpoint.made.items():
        tensor = model.get_buffer(name) if name in ("d2t", "t2d") else model.get_parameter(name)
        if tensor.device.type != "meta":
            tensor.copy_(value)


def check_finite(model: Eagle31DrafterModel, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming the first parameter with a NaN or an infinity in it."""
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.device.type != "meta" and not tensor.isfinite().all():
            hint = {
                "embed_tokens.weight": "speculators writes NaN where the verifier's table was never filled in",
                "lm_head.weight": "speculators writes NaN where the verifier's head was never filled in",
            }.get(name, "save or download it again")
            raise ValueError(f"{checkpoint.source}: {name} holds NaN or infinite values; expected finite weights: {hint}.")
