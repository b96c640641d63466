"""A decoder layer of the Llama form, run over an arena by eight calls of the operations of `kernels`; four of these
are matrix products.

B sequences, T tokens, h width, H heads of queries, Hkv of keys, D head width, P the part of it that is rotated.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import Cache

from ..cache.arena import ArenaLayer
from ..kernels.joint_linear import gated_linear, joint_linear
from ..kernels.layer_parts import add_rms_norm, rope_append
from ..kernels.tree_attention import tree_attention
from .layers import has_hooks
from .users import StandIn

QKV = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
PROJECTIONS = (*QKV, "o_proj")
MLP_PROJECTIONS = (*GATED, "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
KNOWN_MODULES = {*NORMS, *(f"self_attn.{part}" for part in (*PROJECTIONS, *HEAD_NORMS))}
KNOWN_MODULES |= {f"mlp.{part}" for part in MLP_PROJECTIONS}
KNOWN_WEIGHTS = {f"{name}.{kind}" for name in KNOWN_MODULES for kind in ("weight", "bias")}


def attend(attention: Any, x: Tensor, rope: Any, mask: Tensor, layer: Any) -> Tensor:
    """The attention of a layer: x (B, T, h), normed, -> (B, T, h). Keys and values go to the cache's layer, an
    `ArenaLayer`.

    `rope`: cos and sin (B or 1, T, P); `mask`: of spans (B, 1, T, 3)."""
    shape = (*x.shape[:2], -1, attention.head_dim)
    qkv = [part.view(shape) for part in products([getattr(attention, name) for name in QKV], x)]
    norms = head_norms(attention)
    keys, values = layer.ready(qkv[1].transpose(1, 2), qkv[2].transpose(1, 2))
    eps = eps_of(norms[0]) if norms else 0.0
    weights = [norm.weight for norm in norms]
    q = rope_append(qkv, list(rope), weights, eps, [keys, values], layer.placement.on_device)
    out = tree_attention(q.transpose(1, 2), keys, values, mask, attention.scaling)
    return products([attention.o_proj], out.flatten(2))[0]


def through_mlp(mlp: Any, x: Tensor) -> Tensor:
    """The gated MLP of a layer: x (B, T, h), normed, -> (B, T, h)."""
    pair = [getattr(mlp, name) for name in GATED]
    if all(is_plain(layer) and layer.bias is None for layer in pair):
        gated = gated_linear(x, *(layer.weight for layer in pair))
    else:
        gate, up = products(pair, x)
        gated = silu(gate).mul_(up)
    return products([mlp.down_proj], gated)[0]


def products(layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
    """Multiplies x (..., K) by the weight of each layer, adding its bias -> (..., N) of each: in one operation where
    they are plain."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not all(map(is_plain, layers)) or len(biases) not in (0, len(layers)):
        return [layer(x) for layer in layers]
    out = joint_linear(x, [layer.weight for layer in layers], biases)
    return out.split([layer.out_features for layer in layers], dim=-1)


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a linear layer is torch's own, over a weight that is a tensor like any: torchao's, say, is none
    to a kernel."""
    is_linear = type(layer) is nn.Linear and "forward" not in vars(layer)
    return is_linear and not any(hasattr(one, "__tensor_flatten__") for one in layer.parameters(recurse=False))


def norm_sum(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual (B, T, h), and the sum."""
    return add_rms_norm(x, residual, norm.weight, eps_of(norm))


def through_layer(
    layer: Any, x: Tensor, residual: Tensor | None, rope: Any, mask: Tensor, kv: Any
) -> tuple[Tensor, Tensor]:
    """A pre-norm layer over states (B, T, h), handed in as a sum of two, x and residual, and returned so."""
    normed, total = norm_sum(layer.input_layernorm, x, residual)
    return after_norm(layer, normed, total, rope, mask, kv)


def after_norm(layer: Any, normed: Tensor, residual: Tensor, rope: Any, mask: Tensor, kv: Any) -> tuple[Tensor, Tensor]:
    """Runs the part of `through_layer` that comes after the first norm."""
    attended = attend(layer.self_attn, normed, rope, mask, kv)
    normed, residual = norm_sum(layer.post_attention_layernorm, attended, residual)
    return through_mlp(layer.mlp, normed), residual


def eps_of(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def head_norms(attention: Any) -> list[Any]:
    """The norms of queries and keys, empty where there are none."""
    norms = [getattr(attention, name, None) for name in HEAD_NORMS]
    return [norm for norm in norms if norm is not None]


def arena_layer(cache: Cache | None, index: int) -> ArenaLayer | None:
    """A cache's layer, where it lies in an arena and writes to slots that the device holds."""
    layers = [] if cache is None else cache.layers
    layer = layers[index] if index < len(layers) else None
    return layer if isinstance(layer, ArenaLayer) and layer.placement.on_device is not None else None


def forward_of(module: nn.Module) -> tuple[Any, Any]:
    """The forward that a module runs, by references to its own, where it has one, and to its class's: another one
    computes something else. What stands in for it within `fused.fused_layers` does not count."""
    own = vars(module).get("forward")
    return None if own is None or isinstance(own, StandIn) else _reference(own), _reference(type(module).forward)


def _reference(function: Any) -> Any:
    """A reference that keeps nothing alive, and equals one to the same function only, also when that is gone."""
    if isinstance(function, MethodType):
        return WeakMethod(function)
    try:
        return ref(function)
    except TypeError:
        return id(function)


def why_not_fusable(layer: nn.Module) -> str | None:
    """Returns why a layer has not the parts that `through_layer` runs; None where it has them, and no others.
    Whether it puts them together so is another question."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return "it has not the parts of a Llama layer"
    linear = [getattr(attention, name, None) for name in PROJECTIONS]
    linear += [getattr(mlp, name, None) for name in MLP_PROJECTIONS]
    if any(type(part) is not nn.Linear for part in linear):
        return "its projections are not plain linear layers"
    others = {name for name, _ in layer.named_parameters()} - KNOWN_WEIGHTS
    if others:
        return f"it has other weights: {min(others)}"
    heads = head_norms(attention)
    norms = [getattr(layer, name, None) for name in NORMS] + heads
    if any(why_no_norm(norm) for norm in norms):
        return "its norms are not RMSNorms"
    if not hasattr(attention, "head_dim") or not isinstance(getattr(attention, "scaling", None), float):
        return "its attention does not say its scale"
    if any(norm.weight.shape != (attention.head_dim,) for norm in heads):
        return "it norms queries and keys over all heads"
    if len(heads) not in (0, 2) or len({eps_of(norm) for norm in heads}) > 1:
        return "its head norms differ"
    for name, module in layer.named_modules():
        if forward_of(module)[0] is not None:
            return f"the forward of {name or 'it'} has been replaced"
        if name and has_hooks(module):
            return f"{name} has hooks"
    return None


def why_no_norm(norm: Any) -> str | None:
    """Returns why a module has not the parts of an RMSNorm: a weight and an eps; None where it has."""
    weights = [name for name, _ in norm.named_parameters()] if isinstance(norm, nn.Module) else []
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return None if weights == ["weight"] and isinstance(eps, float) else "it has no weight alone, or no eps"
