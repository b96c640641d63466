"""Attention of a few new tokens, a chain's or a tree's, over a cache whose lengths the device holds.

B sequences, T query tokens, H heads of queries, Hkv of keys, D and Dv widths of keys and values, C slots of the
buffers.
"""

from typing import Any

import torch
from torch import Tensor

from .operation import operation

MOST_NEW = 63  # new tokens that a query's bits can tell apart
START, BEGIN, BITS = range(3)  # columns of `spans`


@operation()
def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries (B, H, T, D) over keys (B, Hkv, C, D) and values (B, Hkv, C, Dv) -> (B, T, H, Dv), H a multiple of Hkv.

    `spans` (B, 1, T, 3) int64, a mask, says what each query sees: the slots from `begin` up to, not including, `start`,
    and of the MOST_NEW slots from `start` on, those whose bit is set in `bits` (bit j: slot start + j). All queries of
    a sequence have the same `start`, at most C; of slots beyond C there are none, whatever the bits. A query that sees
    nothing gives 0. Slots that no query of the sequence sees may hold anything, NaN too; NaN in one that some query
    sees may show in all of the sequence.

    Scores are q k `scale`, with a `softcap` above 0 made softcap tanh(score / softcap). `sinks` (H,): a score of each
    head that takes part in the softmax and has no value (GPT-OSS).
    """
    group = q.shape[1] // keys.shape[1]
    seen = seen_slots(spans[:, 0], keys.shape[2])[:, None, None]  # (B, 1, 1, T, C)
    is_seen = seen.any(dim=3, keepdim=True).mT  # (B, 1, 1, C, 1)
    k, v = (x[:, :, None].float().masked_fill(~is_seen, 0.0) for x in (keys, values))
    scores = (q.unflatten(1, (-1, group)).float() @ k.mT) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, -1, group, 1, 1).expand(len(q), -1, -1, q.shape[2], -1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
    return (weights @ v).flatten(1, 2).to(q.dtype).transpose(1, 2).contiguous()


def seen_slots(spans: Tensor, capacity: int) -> Tensor:
    """The slots that queries see, of spans (B, T, 3) -> (B, T, capacity), bool; see `tree_attention`."""
    slot = torch.arange(capacity, device=spans.device)
    start, begin, bits = (spans[..., column, None] for column in (START, BEGIN, BITS))
    new = slot - start
    is_old = (new < 0) & (slot >= begin)
    return is_old | ((new >= 0) & (new < MOST_NEW) & (((bits >> new.clamp(0, MOST_NEW)) & 1) == 1))


def is_spans(mask: Any) -> bool:
    """Returns whether a mask is one of spans (B, 1, T, 3): of masks of four dimensions the only one of integers."""
    return isinstance(mask, Tensor) and mask.dtype == torch.long and mask.dim() == 4
