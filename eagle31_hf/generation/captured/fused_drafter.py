"""The drafter's forward over an arena by the operations of `kernels`: eleven nodes of a graph a forward, with
its head.

B sequences, T tokens, h drafter width, n*ht width of a token's captured states, Vd draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from ...attention import GQAttention, Norm
from ...kernels.layer_parts import embed_norms
from ...modeling import Eagle31DecoderLayer, Eagle31DrafterModel, normed_target_states
from ...quantized import QuantizedLinear
from ...targets.decoder_layer import after_norm, arena_layer, eps_of, norm_sum, products, through_layer
from ...targets.ends import ACTIVATION_DTYPES
from ...targets.masks import spans_of
from ..unread_states import gathered

LAYERS = Eagle31DecoderLayer, GQAttention, LlamaMLP
KINDS = (*LAYERS, SiLUActivation, nn.SiLU, nn.Linear, QuantizedLinear, Norm)  # of modules in a layer


@dataclass
class Layout:
    """The positions and masks of T tokens that the drafter reads in one or several forwards. `places` (B, T): the slots
    of its cache they belong to; `begins` (B, T) the first slots they see, and `spans` (B, 1, T, 3) their masks, both by
    type of layers; `rope`: cos and sin of their positions, (B, T, P) each."""

    places: Tensor
    begins: dict[str, Tensor]
    spans: dict[str, Tensor]
    rope: list[Tensor]

    def part(self, columns: slice) -> "Layout":
        """The layout of some of the tokens. Views: no operation."""
        return Layout(
            self.places[:, columns],
            {kind: begin[:, columns] for kind, begin in self.begins.items()},
            {kind: mask[:, :, columns] for kind, mask in self.spans.items()},
            [part[:, columns] for part in self.rope],
        )

    def of_level(self, level: int, bits: Tensor) -> "Layout":
        """The layout of a tree's nodes, F of one level, which all have the position of a chain's token of that level.
        `bits` (B, F): which nodes each of them sees."""
        here, width = self.part(slice(level, level + 1)), bits.shape[1]
        first, places = self.places[:, :1], here.places.expand(-1, width)
        spans = {kind: spans_of(first, begin, places, bits, None) for kind, begin in here.begins.items()}
        return replace(here, places=places, spans=spans, rope=[part.expand(-1, width, -1) for part in here.rope])


def run_fused(
    drafter: Eagle31DrafterModel, ids: Tensor, source: dict[str, Tensor], layout: Layout, cache: Cache, last: Any
) -> tuple[Tensor, Tensor]:
    """Runs the drafter by operations over tokens (B, T) and their `source`, `target_hidden_states` (B, T, n*ht) or
    `hidden_states` (B, T, h). Returns the states (B, T, h) and draft logits (B, T, Vd) that its own forward computes,
    or, unless `last` (B, 1) is None, those of that token alone. `cache` lies in an arena."""
    states = source.get("hidden_states")
    if states is None:
        states = source["target_hidden_states"].to(drafter.like.dtype)
        states = products([drafter.fc], normed_target_states(drafter, states))[0]
    layers: list[Any] = list(drafter.layers)
    x, residual = _through_first(drafter, states, ids, layout, arena_layer(cache, 0))
    for index in range(1, len(layers)):
        mask = layout.spans[layers[index].attention_type]
        x, residual = through_layer(layers[index], x, residual, layout.rope, mask, arena_layer(cache, index))
    normed, total = norm_sum(drafter.norm, x, residual)
    if last is not None:
        normed = gathered(normed, last)
        total = total if drafter.config.norm_output else gathered(total, last)
    return normed if drafter.config.norm_output else total, drafter.score(normed)


def run_alone(
    drafter: Eagle31DrafterModel, ids: Tensor, source: dict[str, Tensor], layout: Layout, cache: Cache, last: Any
) -> tuple[Tensor, Tensor]:
    """Runs the drafter's own forward, for a drafter that cannot be fused; takes and returns what `run_fused` does."""
    out = drafter(
        ids,
        **source,
        position_embeddings=tuple(layout.rope),
        attention_mask=layout.spans,
        past_key_values=cache,
        logits_to_keep=0 if last is None else last[:, 0],  # of each sequence its own
        return_dict=True,
    )
    return out.last_hidden_state if last is None else gathered(out.last_hidden_state, last), out.logits


def _through_first(
    drafter: Eagle31DrafterModel, states: Tensor, ids: Tensor, layout: Layout, kv: Any
) -> tuple[Tensor, Tensor]:
    """The layer that reads [embedding, state]: states (B, T, h) before it -> after it, as a sum of two."""
    layer: Any = drafter.layers[0]
    norms = layer.input_layernorm, layer.hidden_norm
    table: Any = drafter.get_input_embeddings()
    x = embed_norms(ids, table.weight, norms[0].weight, states, norms[1].weight, eps_of(norms[0]))
    residual = x[..., states.shape[-1] :] if layer.norm_before_residual else states
    return after_norm(layer, x, residual, layout.rope, layout.spans[layer.attention_type], kv)


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
