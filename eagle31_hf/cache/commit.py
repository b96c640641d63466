"""The outcome of one forward for a cache: which of its nodes are kept, and the tokens chosen there.

B sequences of the batch, W of which go on.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .transfer import Mirrored, to_device


class Commit:
    """The tokens that one forward adds to every sequence, on the host and, by one copy, on the device.

    `paths[b]` are the nodes of the forward at which the tokens of sequence b were chosen; `counts`: how many they
    are; `ids` (B, M): the tokens, padded with 0, which every embedding has, since the drafter reads them; `path` (B,
    P): the paths, padded with nodes that stay where they are, or None where all of them are the first nodes;
    `going`: which sequences go on, on the host.
    """

    def __init__(self, device: torch.device, tokens: list[list[int]], paths: list[list[int]], finished: Sequence[bool]):
        self.paths = paths
        self.going = [b for b, has_finished in enumerate(finished) if not has_finished]
        counts = [len(new) for new in tokens]
        longest = max(counts)
        columns: list[Sequence] = [[new + [0] * (longest - len(new)) for new in tokens]]
        has_moves = any(path != list(range(len(path))) for path in paths)
        if has_moves:
            deepest = max(len(path) for path in paths)
            columns.append([[*path, *range(len(path), deepest)] for path in paths])
        is_batch = len(tokens) > 1
        if is_batch:  # of one sequence nobody asks which, and its count needs no copy
            columns += [counts, self.going]
        self.ids, *sent = to_device(device, *columns)
        self.path = sent[0] if has_moves else None
        self.counts = Mirrored(counts, sent[-2][:, None] if is_batch else None)
        self._going = sent[-1] if is_batch else None

    @cached_property
    def going_index(self) -> Tensor:
        """The sequences that go on (W,), on the device."""
        return torch.arange(len(self.going), device=self.ids.device) if self._going is None else self._going

    @cached_property
    def is_going(self) -> Tensor:
        """1 for each sequence that goes on, else 0 (B, 1), on the device."""
        return torch.zeros_like(self.counts.on(self.ids.device)).index_fill_(0, self.going_index, 1)
