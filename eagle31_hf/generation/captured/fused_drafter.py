"""The drafter's forward over an arena by the operations of `kernels`: eleven nodes of a graph a forward, with
its head.

B sequences, T tokens, h drafter width, n*ht width of a token's captured states, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from ...attention import GQAttention, Norm
from ...kernels.norms import embed_norms
from ...modeling import Eagle31DecoderLayer, Eagle31DrafterModel, normed_target_states
from ...quantized import QuantizedLinear
from ...targets.decoder_layer import arena_layer, attend, eps_of, norm_sum, products, through_layer, through_mlp
from ...targets.ends import ACTIVATION_DTYPES
from ..unread_states import gathered

LAYERS = Eagle31DecoderLayer, GQAttention, LlamaMLP
KINDS = (*LAYERS, SiLUActivation, nn.SiLU, nn.Linear, QuantizedLinear, Norm)  # of modules in a layer


@dataclass
class DrafterInput:
    """The arguments of a drafter's forward over an arena."""

    ids: Tensor  # (B, T)
    source: dict[str, Tensor]  # `target_hidden_states` (B, T, n*ht) or `hidden_states` (B, T, h)
    rope: list[Tensor]  # cos and sin (B or 1, T, P)
    spans: dict[str, Tensor]  # masks (B, 1, T, 3) by type of layers
    cache: Cache  # lies in an arena
    last: Tensor | None  # (B, 1): the token whose output alone is wanted; None: that of all


def run_fused(drafter: Eagle31DrafterModel, given: DrafterInput) -> tuple[Tensor, Tensor]:
    """Runs the drafter by operations. Returns the states (B, T, h) and draft logits (B, T, Vd) that its own forward
    computes, T 1 where the last token's alone are wanted."""
    states = given.source.get("hidden_states")
    if states is None:
        states = given.source["target_hidden_states"].to(drafter.like.dtype)
        states = products([drafter.fc], normed_target_states(drafter, states))[0]
    layers: list[Any] = list(drafter.layers)
    x, residual = _through_first(drafter, layers[0], states, given)
    for index in range(1, len(layers)):
        mask = given.spans[layers[index].attention_type]
        x, residual = through_layer(layers[index], x, residual, given.rope, mask, arena_layer(given.cache, index))
    normed, total = norm_sum(drafter.norm, x, residual)
    if given.last is not None:
        normed = gathered(normed, given.last)
        total = total if drafter.config.norm_output else gathered(total, given.last)
    return normed if drafter.config.norm_output else total, drafter.score(normed)


def run_alone(drafter: Eagle31DrafterModel, given: DrafterInput) -> tuple[Tensor, Tensor]:
    """Runs the drafter's own forward, for a drafter that cannot be fused; returns what `run_fused` does."""
    last = given.last
    out = drafter(
        given.ids,
        **given.source,
        position_embeddings=tuple(given.rope),
        attention_mask=given.spans,
        past_key_values=given.cache,
        logits_to_keep=0 if last is None else last[:, 0],  # of each sequence its own
        return_dict=True,
    )
    return out.last_hidden_state if last is None else gathered(out.last_hidden_state, last), out.logits


def _through_first(
    drafter: Eagle31DrafterModel, layer: Any, states: Tensor, given: DrafterInput
) -> tuple[Tensor, Tensor]:
    """The layer that reads [embedding, state]: states (B, T, h) before it -> after it, as a sum of two."""
    norms = layer.input_layernorm, layer.hidden_norm
    table: Any = drafter.get_input_embeddings()
    x = embed_norms(given.ids, table.weight, norms[0].weight, states, norms[1].weight, eps_of(norms[0]))
    residual = x[..., states.shape[-1] :] if layer.norm_before_residual else states
    attended = attend(layer.self_attn, x, given.rope, given.spans[layer.attention_type], arena_layer(given.cache, 0))
    normed, residual = norm_sum(layer.post_attention_layernorm, attended, residual)
    return through_mlp(layer.mlp, normed), residual


def can_fuse(drafter: Eagle31DrafterModel) -> bool:
    """Returns whether `run_fused` computes what the drafter's forward does: it is the library's own, with multi-head or
    grouped-query attention, and nothing of it is offloaded, wrapped or replaced, or quantized by others."""
    if type(drafter) is not Eagle31DrafterModel or "forward" in vars(drafter):
        return False
    norms = [drafter.norm, *filter(None, [drafter.input_norm]), *(drafter.fc_norm or ())]
    modules = [module for layer in drafter.layers for module in layer.modules()]
    are_ours = all(type(module) in KINDS for module in (*modules, drafter.fc, *norms))
    is_plain = not any("forward" in vars(module) or hasattr(module, "_hf_hook") for module in (*modules, *norms))
    return are_ours and is_plain and _can_look_up(drafter.get_input_embeddings())


def _can_look_up(table: Any) -> bool:
    """Returns whether a row of an embedding's weight is what a drafter reads of a token; see `ends.rows_of`."""
    is_read = type(table) is nn.Embedding and table.max_norm is None and "forward" not in vars(table)
    is_read = is_read or (isinstance(table, nn.Embedding) and hasattr(table, "embed_scale"))
    return is_read and table.weight.dtype in ACTIVATION_DTYPES and not table.weight.is_meta
