"""A decoder layer of the Llama form as it runs few rows on a CPU, and a prompt where that is faster: some twenty
operations of torch in place of sixty, four matrix products in place of seven, and no modules called. Between products
that read all weights an operation finds nothing of what it needs in the processor's caches, and takes three times as
long as it does alone.

B sequences, T tokens, h width, H heads of queries, Hkv of keys, D head width, P the part of it that is rotated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat
from torch.nn.functional import layer_norm, silu
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..kernels.tree_attention import is_spans
from .decoder_layer import GATED, NORMS, QKV, eps_of, head_norms
from .few_rows import MOST_ROWS, run_of, takes_rows
from .layers import has_global_hooks, has_hooks
from .linear_kernels import Run
from .tree_attention import attend_by_group, attend_by_position, mask_of_group, takes_positions

KEPT = "eagle31_rows"  # attribute of a tensor that all layers get: what they make of it


class Norm:
    """An RMSNorm as a layer norm, which torch has one kernel for, where RMSNorm is ten operations: a row x followed by
    -x has the mean 0, and the mean of its squares for a variance. In 16 bits rows are rounded before they are weighed,
    as those of Llama are."""

    def __init__(self, norm: Any):
        self.weight, self.eps = norm.weight.detach(), eps_of(norm)

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return layer_norm(cat((x, -x), dim=-1), (2 * width,), None, None, self.eps)[..., :width] * self.weight


@dataclass
class RowsLayer:
    """The parts of a layer for which `why_not_fused` has no reason, looked up once a call. `norms`: before attention
    and before the MLP; `head_norms`: of queries and of keys, or none; `runs`: what multiplies by the weights of
    queries, keys and values, of attention's output, of gate and up, and of the MLP's output; `num_heads`: H and Hkv."""

    norms: list[Norm]
    head_norms: list[Norm]
    runs: Sequence[Run]
    num_heads: tuple[int, int]
    attention: Any  # the module
    takes_prompts: bool

    @classmethod
    def of(cls, layer: Any) -> "RowsLayer | None":
        """The parts of a layer; None where its products are not prepared for few rows, or it does more."""
        attention, mlp = layer.self_attn, layer.mlp
        norms, of_heads = [getattr(layer, name) for name in NORMS], head_norms(attention)
        qkv, gated = [getattr(attention, name) for name in QKV], [getattr(mlp, name) for name in GATED]
        runs = run_of(*qkv), run_of(attention.o_proj), run_of(*gated), run_of(mlp.down_proj)
        if layer.training or has_global_hooks() or any(map(has_hooks, (attention, *mlp.modules(), *norms, *of_heads))):
            return None
        if any(norm.weight.dtype != qkv[0].weight.dtype for norm in (*norms, *of_heads)):
            return None
        prepared = [run for run in runs if run is not None]
        if len(prepared) < len(runs) or attention.k_proj.out_features != attention.v_proj.out_features:
            return None
        return cls(
            norms=[*map(Norm, norms)],
            head_norms=[*map(Norm, of_heads)],
            runs=prepared,
            num_heads=(qkv[0].out_features // attention.head_dim, qkv[1].out_features // attention.head_dim),
            attention=attention,
            takes_prompts=all(run.takes_prompts for run in prepared),
        )

    def takes(self, states: Any, mask: Tensor | None, cache: Cache | None) -> bool:
        """Returns whether it is to run states (B, T, h): of a drafted call, with a mask of torch's attention."""
        if cache is None or not isinstance(states, Tensor):
            return False
        is_usual = mask is None or (mask.dim() == 4 and mask.shape[1] == 1 and not is_spans(mask))
        return is_usual and takes_rows(states.shape[:-1].numel(), self.takes_prompts)

    def __call__(self, states: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache) -> Tensor:
        """Runs states (B, T, h). `rope`: cos and sin (B or 1, T, P), each angle twice, in halves; `mask` (B, 1, T, S),
        True or 0 where a position is seen, or None, all are."""
        qkv, out, gated, down = self.runs
        states = states + out(self._attend(qkv(self.norms[0](states)), rope, mask, cache))
        gate, up = gated(self.norms[1](states)).chunk(2, dim=-1)
        return states + down(silu(gate).mul_(up))

    def _attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache) -> Tensor:
        """Attention: qkv (B, T, (H + 2 Hkv) * D) -> (B, T, H * D)."""
        size, num_queries, num_keys = qkv.shape[:2], *self.num_heads
        heads = qkv.view(*size, -1, self.attention.head_dim)
        turned, values = heads.split((num_queries + num_keys, num_keys), dim=2)
        if self.head_norms:
            parts = turned.split((num_queries, num_keys), dim=2)
            turned = cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=2)
        queries, keys = _rotated(turned, *rope).transpose(1, 2).split((num_queries, num_keys), dim=1)
        keys, values = cache.update(keys, values.transpose(1, 2), self.attention.layer_idx)
        scale, group = self.attention.scaling, num_queries // num_keys
        if takes_positions(queries, keys, values, {}):
            out = attend_by_position(queries, keys, values, scale)
        elif size.numel() > MOST_ROWS or (mask is None and size[1] > 1):  # a prompt, which transformers' own serves
            out, _ = sdpa_attention_forward(self.attention, queries, keys, values, mask, scaling=scale)
        else:
            if mask is not None:  # made once for all layers that have as many heads
                mask = _kept(mask, (group, queries.dtype), lambda mask: mask_of_group(mask, group, queries.dtype))
            out = attend_by_group(queries, keys, values, mask, scale)
        return out.reshape(*size, -1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads (B, T, n, D): x * cos + (-x[P/2:], x[:P/2]) * sin of their first P entries, both products rounded
    before they are added up, as Llama's are."""
    width = cos.shape[-1]
    rotated = heads[..., :width]
    turned = rotated.roll(width // 2, dims=-1).mul_(_kept(sin, (), _signed)[:, :, None])
    rotated = turned.add_(rotated * cos[:, :, None])
    return rotated if width == heads.shape[-1] else cat((rotated, heads[..., width:]), dim=-1)


def _signed(sin: Tensor) -> Tensor:
    """Sines for a head whose halves are swapped: minus for the first."""
    first, second = sin.chunk(2, dim=-1)
    return cat((-first, second), dim=-1)


def _kept(source: Tensor, key: tuple, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns what is made of a tensor that all layers get: once, unless it is written to."""
    key = *key, None if source.is_inference() else source._version
    known = getattr(source, KEPT, None)
    if known is None or known[0] != key:
        known = key, make(source)
        setattr(source, KEPT, known)
    return known[1]
