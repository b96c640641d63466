"""The drafter: captured target states are normed and fused, one fused decoder layer (and plain ones) follow, a head
scores.

B batch, T tokens, h drafter width, ht target width, n captured states, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.utils import ModelOutput, logging
from transformers.utils.output_capturing import capture_outputs

from . import vocab
from .attention import GQAttention, MLAttention, Norm, rounded_once
from .cache_names import CACHE, IS_RENAMED
from .config_rules import is_mla
from .configuration import FIELDS, Eagle31Config
from .errors import DraftingRefusedError
from .names import refuse_unknown
from .pretrained import Eagle31PreTrainedModel
from .shared_target import SharesTarget
from .targets.ends import TargetTie

logger = logging.get_logger(__name__)
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


@dataclass
class Eagle31DrafterOutput(ModelOutput):
    """Draft logits (B, T, Vd), the state the next step is fed (B, T, h), and the drafter's cache.

    Where they are asked for: the loss; the fused states and each layer's, the last being `last_hidden_state` (layers +
    1, each (B, T, h)); and the attention weights of each layer (B, H, T, S).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    if IS_RENAMED:
        cache: Cache | None = None
    else:
        past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class Eagle31DecoderLayer(GradientCheckpointingLayer):
    """Layer 0 attends over [normed embedding, normed state]; later layers are ordinary pre-norm decoder layers."""

    def __init__(self, config: Eagle31Config, layer_idx: int):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.attention_type = config.layer_types[layer_idx]
        is_fused = layer_idx == 0
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps) if is_fused else None
        attention = MLAttention if is_mla(config) else GQAttention
        self.self_attn = attention(config, layer_idx, (2 if is_fused else 1) * config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, mask: Any, past_key_values: Cache | None
    ) -> Tensor:
        """State `x` (B, T, h) and token embeddings (B, T, h) -> (B, T, h)."""
        residual = x
        if self.hidden_norm is None:
            x = self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)  # (B, T, 2h), embedding half first
        attended, _ = self.self_attn(rounded_once(x), cos, sin, mask, past_key_values)
        x = residual + attended
        return x + self.mlp(rounded_once(self.post_attention_layernorm(x)))


class Eagle31DrafterModel(SharesTarget, Eagle31PreTrainedModel):
    """EAGLE 3.1 (or EAGLE 3, or P-EAGLE) drafter of a frozen target; see `Eagle31Config` for what its flags mean.

    Its drafting knobs are fields of `generation_config`: `num_assistant_tokens` ("auto", the default: chosen as it
    goes), `draft_tree_top_k` (1: chains), `draft_tree_total_tokens`, `assistant_confidence_threshold`, which ends
    chains of a fixed depth after a token the drafter gives less probability, and `prompt_lookup_num_tokens`, of a chain
    that is taken from the text where its last tokens stood before (0: none).
    """

    main_input_name = "input_ids"
    _no_split_modules = ["Eagle31DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    # The loop behind `decode`, which `import eagle31_hf` sets: generation depends on the model, not the model on it.
    decoding_method: ClassVar[Callable[..., Any]]
    accepts_loss_kwargs = True  # a Trainer says how many labels of several batches the loss is the mean of
    _can_record_outputs = {"hidden_states": Eagle31DecoderLayer, "attentions": [GQAttention, MLAttention]}

    def __init__(self, config: Eagle31Config, **unknown: Any):
        refuse_unknown(unknown, FIELDS, "fields of Eagle31Config or arguments of from_pretrained")
        super().__init__(config)
        h = config.hidden_size
        eps = config.rms_norm_eps
        n = config.num_aux_states
        fused_width = n * config.target_hidden_size
        self.embed_tokens = None if config.share_target_embeddings else nn.Embedding(config.vocab_size, h)
        self.fc_norm = (
            nn.ModuleList(Norm(config.target_hidden_size, eps=eps) for _ in range(n)) if config.fc_norm else None
        )
        self.input_norm = Norm(fused_width, eps=eps) if config.norm_before_fc else None
        self.fc = nn.Linear(fused_width, h, bias=config.fc_bias)
        self.mask_hidden = nn.Parameter(torch.empty(fused_width)) if config.is_parallel else None
        self.layers = nn.ModuleList(Eagle31DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(h, eps=eps)
        self.lm_head = None if config.share_target_head else nn.Linear(h, config.draft_vocab_size, bias=False)
        self.rotary_emb = Phi3RotaryEmbedding(config)  # type: ignore[arg-type]
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", vocab.membership(torch.arange(config.draft_vocab_size), config.vocab_size))
        else:
            self.d2t = self.t2d = None
        self.loss_type = "ForCausalLM"
        self.tie = TargetTie()  # to modules that are none of the drafter's: not saved, moved or trained with it
        self.upgrade_report: Any = None  # of `upgrade_to_eagle31`
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.mask_hidden is not None:
            init.normal_(self.mask_hidden, std=self.config.initializer_range)
        if module is self and self.d2t is not None:
            init.zeros_(self.d2t)
            init.copy_(self.t2d, vocab.membership(torch.arange(len(self.d2t)), len(self.t2d)))

    def draft_to_target_ids(self) -> Tensor | None:
        """The target id of every draft id (Vd,); None for a full draft vocabulary, where the two are the same."""
        return None if self.d2t is None else vocab.target_ids(self.d2t)

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Sets which target ids (Vd,) the rows of the head stand for. Raises ValueError unless distinct and in
        range."""
        if self.d2t is None or len(ids) != len(self.d2t):
            raise ValueError(
                f"got {len(ids)} ids for a draft vocabulary of {self.config.draft_vocab_size} of"
                f" {self.config.vocab_size}."
            )
        d2t = vocab.offsets(ids.to(self.d2t.device))
        vocab.check_mapping(d2t, self.config.vocab_size)
        self.d2t.copy_(d2t)
        self.t2d.copy_(vocab.membership(vocab.target_ids(d2t), self.config.vocab_size))

    def fuse_target_states(self, states: Tensor, is_mask: Tensor | None = None) -> Tensor:
        """Captured states (B, T, n*ht), concatenated in ascending layer order, -> fused states (B, T, h). Where
        `is_mask` (B, T) is set, `mask_hidden` stands in their place."""
        if is_mask is not None:
            states = torch.where(is_mask[..., None], self.mask_hidden, states)
        return self.fc(normed_target_states(self, states))

    @capture_outputs
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
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        is_mask: Tensor | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Eagle31DrafterOutput:
        """Runs one drafting step over T tokens; token t stands where the *next* id is `input_ids[:, t]` (B, T).

        Exactly one of `target_hidden_states` (B, T, n*ht), captured from the target, and `hidden_states` (B, T, h),
        the state an earlier call returned. `is_mask` (B, T): masks of a P-EAGLE drafter, whose states are not read.
        `attention_mask` is 2-D over cached and new tokens, 4-D in the form of the attention implementation, or a dict
        of 4-D masks by layer type. `logits_to_keep`: score the last so many tokens only (0: all; None: none), or some
        of every sequence, (B,) or (B, k). `position_embeddings`: cos and sin (B or 1, T, D) for `position_ids`.

        `labels` (B, T) are target ids, usually `input_ids` themselves, or -100 for a token that does not count. Logits
        at token t are scored against `labels[:, t + 1]`. `loss` is the mean cross-entropy over the labels that count
        and are in the draft vocabulary, or their sum divided by `num_items_in_batch`; NaN where there is none. Others
        are as in transformers. Raises ValueError for neither or both states, and labels that do not fit the logits.
        """
        _check_one_of(target_hidden_states, hidden_states)
        x = self.fuse_target_states(target_hidden_states, is_mask) if hidden_states is None else hidden_states
        embeds = self.embed(input_ids)
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        if position_ids is None and position_embeddings is None:
            position_ids = _positions_after(past_key_values, x)
        masks = self._masks(x, attention_mask, past_key_values, position_ids)
        cos, sin = self.rotary_emb(x, position_ids) if position_embeddings is None else position_embeddings
        for layer in self.layers:
            x = layer(x, embeds, cos, sin, masks[layer.attention_type], past_key_values)  # type: ignore[index]
        normed = self.norm(x)
        logits = self._logits(normed, logits_to_keep)
        return Eagle31DrafterOutput(
            loss=None if labels is None else next_token_loss(self, logits, labels, num_items_in_batch),
            logits=logits,
            last_hidden_state=normed if self.config.norm_output else x,
            **{CACHE: past_key_values},  # type: ignore[arg-type]
        )

    def _logits(self, normed: Tensor, logits_to_keep: int | Tensor | None) -> Tensor | None:
        """Post-norm states (B, T, h) -> the logits of those of them that are wanted."""
        if logits_to_keep is None:
            return None
        if isinstance(logits_to_keep, Tensor):
            rows = torch.arange(len(normed), device=normed.device)[:, None]
            return self.score(normed[rows, logits_to_keep.to(normed.device).view(len(normed), -1)])
        return self.score(normed[:, -logits_to_keep:])

    def _masks(self, x: Tensor, mask: Tensor | dict | None, past: Cache | None, position_ids: Tensor) -> dict[str, Any]:
        """The attention mask of each layer type in use, in the form of the attention implementation."""
        if isinstance(mask, dict):
            return mask
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": position_ids, CACHE: past}
        return {kind: MASKS[kind](self.config, inputs_embeds=x, **given) for kind in set(self.config.layer_types)}

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
        prompt_lookup_num_tokens: int | str | None = None,
        **model_kwargs: Any,
    ):
        """Decodes for `target.generate(**inputs, custom_generate=drafter.decode)`: the same as
        `assistant_model=drafter`, without the hook.

        The drafting knobs may be given to that `generate`. transformers hands neither a streamer nor a tokenizer on
        to such a callable: bind the streamer, `custom_generate=functools.partial(drafter.decode,
        streamer=streamer)`; stop strings need `assistant_model=drafter`.
        """
        knobs = {
            "num_assistant_tokens": num_assistant_tokens,
            "assistant_confidence_threshold": assistant_confidence_threshold,
            "draft_tree_top_k": draft_tree_top_k,
            "draft_tree_total_tokens": draft_tree_total_tokens,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        }
        model_kwargs |= {"knobs": knobs, "synced_gpus": synced_gpus, "streamer": streamer}
        model_kwargs |= {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        return Eagle31DrafterModel.decoding_method(model, self, input_ids, generation_config, **model_kwargs)


def refuse_parallel(drafter: Eagle31DrafterModel, what: str) -> None:
    """Raises ValueError for a P-EAGLE drafter; `what`: what it cannot be, a participle as "trained"."""
    if drafter.config.is_parallel:
        raise ValueError(
            f"a P-EAGLE drafter (mask_token_id is {drafter.config.mask_token_id}), which drafts all levels at once,"
            f" cannot be {what}; expected an EAGLE 3 or 3.1 drafter."
        )


def next_token_loss(
    drafter: Eagle31DrafterModel, logits: Tensor | None, labels: Tensor, num_items_in_batch: Tensor | int | None
) -> Tensor:
    """Draft logits (B, T, Vd) and labels (B, T) as `forward` takes them -> the loss, a scalar in fp32."""
    if logits is None or logits.shape[:2] != labels.shape:
        found = "none" if logits is None else f"of shape {tuple(logits.shape)}"
        raise ValueError(
            f"labels are of shape {tuple(labels.shape)}, logits {found}; expected a label and logits for every token."
        )
    labels = labels.to(logits.device)
    if drafter.d2t is not None:
        labels = vocab.draft_labels(labels, drafter.draft_to_target_ids(), drafter.config.vocab_size)
    return drafter.loss_function(
        logits, labels, vocab_size=drafter.config.draft_vocab_size, num_items_in_batch=num_items_in_batch
    )


def _check_one_of(target_hidden_states: Tensor | None, hidden_states: Tensor | None) -> None:
    """Raises ValueError when neither or both of a drafter's two inputs are given."""
    if (target_hidden_states is None) == (hidden_states is None):
        given = "neither" if hidden_states is None else "both"
        raise ValueError(f"got {given} of target_hidden_states and hidden_states; expected exactly one.")


def _positions_after(past: Cache | None, x: Tensor) -> Tensor:
    """Positions (1, T) of states (B, T, h) that follow those in a cache."""
    seen = 0 if past is None else past.get_seq_length()
    return torch.arange(seen, seen + x.shape[1], device=x.device)[None]


def normed_target_states(drafter: Eagle31DrafterModel, states: Tensor) -> Tensor:
    """Captured states (B, T, n*ht) -> normed, as far as the drafter does: what `fc` reads."""
    if drafter.input_norm is not None:
        states = drafter.input_norm(states)
    if drafter.fc_norm is not None:
        parts = states.split(drafter.config.target_hidden_size, dim=-1)
        states = torch.cat([norm(part) for norm, part in zip(drafter.fc_norm, parts, strict=True)], dim=-1)
    return states


def drafter_in(model: Any) -> Any:
    """Returns the drafter that an assistant model is or wraps, or None where there is none.

    A compiled module is returned as it is: its attributes are the drafter's, and a call of it runs the compiled
    forward, unless it was compiled around data parallelism. For a PEFT model it is the adapted drafter, whose adapters
    stay active. Raises ValueError for a drafter in a wrapper that cannot draft.
    """
    compiled, inner = None, model
    while isinstance(inner, nn.Module) and not isinstance(inner, Eagle31DrafterModel):
        if "_orig_mod" in inner._modules:  # torch.compile's
            compiled, inner = inner if compiled is None else compiled, inner._orig_mod
        elif isinstance(inner, DataParallel | DistributedDataParallel):
            compiled, inner = None, inner.module  # what is compiled around it has not the drafter's attributes
        elif hasattr(inner, "get_base_model"):  # PEFT's
            base, adapter = inner.get_base_model(), inner.active_peft_config
            if getattr(adapter, "is_prompt_learning", False) and isinstance(base, Eagle31DrafterModel):
                raise DraftingRefusedError(
                    f"EAGLE drafting: the drafter's adapter is a {adapter.peft_type}, whose virtual tokens have no"
                    " target states; expected one that changes weights, such as LoRA, or none."
                )
            inner = base
        elif any(isinstance(part, Eagle31DrafterModel) for part in inner.modules()):
            # plain assisted generation would fail on it much later
            raise DraftingRefusedError(
                f"EAGLE drafting: assistant_model is a {type(inner).__name__} around a drafter; expected the drafter"
                " itself, or one in torch.compile, PEFT, DataParallel or DistributedDataParallel. Pass the drafter"
                " without this wrapper."
            )
        else:
            return None
    if not isinstance(inner, Eagle31DrafterModel):
        return None
    return inner if compiled is None else compiled
