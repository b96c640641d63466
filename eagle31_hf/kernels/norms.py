"""RMSNorm together with what stands before it: y = x / sqrt(mean(x^2) + eps) * weight.

B sequences, T tokens, h width, V vocabulary.
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
