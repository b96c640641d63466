"""The small operations of a decoder layer: RMSNorm with the sum before it, y = x / sqrt(mean(x^2) + eps) * weight; and
the rotary embedding, with keys and values written into their buffers, at slots that the device holds.

B sequences, T new tokens, h width, V vocabulary, H heads of queries, Hkv of keys, D head width, P <= D the part of it
that is rotated, C slots of the buffers. Sequence b writes its tokens to the slots `starts[b]` to `starts[b] + T - 1`.
"""

import torch
from torch import Tensor

from .operation import operation


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@operation()
def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and the residual (..., h), rounded to the dtype of x, and the RMSNorm of that rounded sum:
    (normed, sum), both contiguous. Without a residual the sum is a copy of x."""
    total = x.clone() if residual is None else (x + residual).to(x.dtype)
    total = total.contiguous()
    return _normed(total, weight, eps).to(x.dtype), total


@operation()
def embed_norms(
    ids: Tensor, table: Tensor, table_weight: Tensor, state: Tensor, state_weight: Tensor, eps: float
) -> Tensor:
    """The input of a drafter's first layer: [RMSNorm of the embedding, RMSNorm of the state], (B, T, 2h).

    `ids` (B, T) int64 index the rows of `table` (V, h), whose dtype may be another one; `state` (B, T, h), whose rows
    may lie apart; `table_weight`, `state_weight` (h,) of the two norms."""
    embeds = torch.nn.functional.embedding(ids, table).to(state.dtype)
    parts = _normed(embeds, table_weight, eps), _normed(state, state_weight, eps)
    return torch.cat(parts, dim=-1).to(state.dtype)


def append(new: list[Tensor], buffers: list[Tensor], slots: Tensor) -> None:
    """Writes keys (B, Hkv, T, D) and values (B, Hkv, T, Dv) to slots (B, T) of the buffers (B, Hkv, C, D) and (B, Hkv,
    C, Dv)."""
    for buffer, states in zip(buffers, new, strict=True):
        buffer.scatter_(2, slots[:, None, :, None].expand(*states.shape), states.to(buffer.dtype))


@operation(
    mutates=("buffers",), shapes=lambda qkv, *args: torch.empty_like(qkv[0], memory_format=torch.contiguous_format)
)
def rope_append(
    qkv: list[Tensor], rope: list[Tensor], norms: list[Tensor], eps: float, buffers: list[Tensor], starts: Tensor
) -> Tensor:
    """Rotates queries and keys, after the RMSNorm of each head by `norms`, the weights (D,) for queries and for
    keys, empty where there is none, and appends keys and values to the buffers (B, Hkv, C, D) and (B, Hkv, C, Dv),
    contiguous in their last dimension. `starts` (B, 1) int64. Slots must lie inside the buffers: of one outside the
    kernel drops the token, the reference raises. Returns the rotated queries (B, T, H, D).

    `qkv`: queries (B, T, H, D), keys (B, T, Hkv, D) and values (B, T, Hkv, Dv). `rope`: cos and sin (B or 1, T, P),
    each angle twice, in halves: of the first P entries of a head, x becomes x * cos + (-x[P/2:], x[:P/2]) * sin."""
    q, k, v = qkv
    q_weight, k_weight = norms or (None, None)
    q = _rotated(q, q_weight, eps, *rope)
    k = _rotated(k, k_weight, eps, *rope)
    slots = starts + torch.arange(k.shape[1], device=starts.device)
    append([k.transpose(1, 2), v.transpose(1, 2)], buffers, slots)
    return q


def _rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, T, H, D) normed, where there is a weight, and rotated."""
    dtype = x.dtype
    x = x.float() if weight is None else _normed(x, weight, eps)
    rotated, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos.float()[:, :, None] + turned * sin.float()[:, :, None]
    return torch.cat((rotated, rest), dim=-1).to(dtype)
