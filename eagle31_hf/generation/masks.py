"""Masks for rows that differ in length and for trees, which no model builds itself. B rows, Q query tokens, N new
tokens."""

import torch
from torch import Tensor


def additive_mask(
    starts: list[int],
    own: Tensor,
    query_depths: Tensor,
    own_depths: Tensor,
    end: int,
    dtype: torch.dtype,
    seen_from: int = 0,
    window: int | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """-> (B, 1, Q, end - seen_from): 0 where a query of row b may look, the dtype's least number elsewhere.

    A query sees the slots before `starts[b]`, less those where `seen` (B, L) is False, and of the N new tokens, at
    slots from `starts[b]` on, those where `own` (B, Q, N) is True. Query and new token stand at `starts[b]` plus
    `query_depths` (B, Q) and `own_depths` (B, N): with a `window` the query sees only that many positions, its own
    included. Slots before `seen_from` are not among the keys.
    """
    rows, num_queries, num_new = own.shape
    begin = torch.tensor(starts, device=own.device)[:, None, None]
    first = min(seen_from, *starts)  # new tokens may have left the window too
    slot = torch.arange(first, end, device=own.device)
    allowed = (slot < begin).expand(rows, num_queries, -1)
    if window is not None:
        allowed = allowed & (slot > begin + query_depths[..., None] - window)
        own = own & (own_depths[:, None] > query_depths[..., None] - window)
    if seen is not None:
        inside = slot[slot < seen.shape[1]]
        allowed = torch.cat((allowed[..., : len(inside)] & seen[:, None, inside], allowed[..., len(inside) :]), dim=-1)
    allowed = allowed.clone().scatter_(
        2, (begin + torch.arange(num_new, device=own.device) - first).expand_as(own), own
    )
    allowed = allowed[..., seen_from - first :]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=own.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
