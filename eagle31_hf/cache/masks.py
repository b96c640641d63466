"""Masks for sequences that differ in length and for trees, which no model builds itself.

B sequences, Q query tokens, N new tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .transfer import Mirrored

ALIGNMENT = 8  # keys: GPU kernels copy a mask whose rows are not a multiple of it


@dataclass(frozen=True)
class SlotMask:
    """The part of a mask that all windows of one forward share.

    A query sees the slots before `starts[b]`, less those where `seen` (B, L) is False, and of the N new tokens, at
    slots from `starts[b]` on, those where `visible` (B, Q, N) is True. With a window, a query and a new token stand at
    `starts[b]` plus `query_depths` (B, Q) and `new_depths` (B, N).
    """

    starts: Mirrored
    visible: Tensor
    query_depths: Tensor | None = None
    new_depths: Tensor | None = None
    seen: Tensor | None = None

    def additive(self, end: int, dtype: torch.dtype, seen_from: int = 0, window: int | None = None) -> Tensor:
        """-> (B, 1, Q, end - seen_from): 0 where a query may look, the dtype's least number elsewhere.

        With a `window` a query sees only that many positions, its own included. Slots before `seen_from` are not among
        the keys.
        """
        num_sequences, num_queries, num_new = self.visible.shape
        begin = self.starts.host[0]
        least = torch.finfo(dtype).min
        if self.starts.is_uniform and window is None and self.seen is None and seen_from == 0:
            mask = _zeros((num_sequences, num_queries, end), dtype, self.visible.device)
            mask[..., begin : begin + num_new].masked_fill_(~self.visible, least)
            if begin + num_new < end:  # slots of a static cache that are not in use
                mask[..., begin + num_new :] = least
            return mask[:, None]
        allowed = self._allowed(min(seen_from, *self.starts.host), end, window)[..., seen_from - end :]
        mask = _zeros(allowed.shape, dtype, self.visible.device)
        return mask.masked_fill_(~allowed, least)[:, None]

    def _allowed(self, first: int, end: int, window: int | None) -> Tensor:
        """Returns where a query may look (B, Q, end - first), of the slots from `first` on: new tokens may have left
        the window, too."""
        visible, device = self.visible, self.visible.device
        begin = self.starts.on(device)[..., None]
        slot = torch.arange(first, end, device=device)
        allowed = (slot < begin).expand(-1, visible.shape[1], -1)
        if window is not None:
            assert self.query_depths is not None
            assert self.new_depths is not None
            allowed = allowed & (slot > begin + self.query_depths[..., None] - window)
            visible = visible & (self.new_depths[:, None] > self.query_depths[..., None] - window)
        if self.seen is not None and first < self.seen.shape[1]:
            seen = self.seen[:, None, first:end].to(device)
            inside = seen.shape[2]
            allowed = torch.cat((allowed[..., :inside] & seen, allowed[..., inside:]), dim=-1)
        places = begin + torch.arange(visible.shape[2], device=device) - first
        return allowed.clone().scatter_(2, places.expand_as(visible), visible)


def windows_by_kind(layer_types: Iterable[str], window: int | None) -> dict[str, int | None]:
    """The sliding window of each type of layers in use, in tokens; None for full attention."""
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: windows[kind] for kind in set(layer_types)}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape, whose rows lie a multiple of ALIGNMENT apart."""
    width = shape[-1]
    return torch.zeros(*shape[:-1], -(-width // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)[..., :width]


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Parents (B, K) of the nodes 1 to K of a tree, each before its children and none deeper than `depth`; node 0 is
    the root -> whether node j is on the path to node i (B, K + 1, K + 1), i itself included."""
    num_sequences, count = parents.shape
    paths = torch.eye(count + 1, device=parents.device).repeat(num_sequences, 1, 1)
    paths[:, 1:].scatter_(2, parents[:, :, None], 1.0)  # who is at most one step up
    for _ in range((depth - 1).bit_length()):
        paths = (paths @ paths).clamp_(max=1.0)  # at most twice as many steps up
    return paths > 0
