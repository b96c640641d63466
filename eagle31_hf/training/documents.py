"""Packed sequences: which text (document) each of their tokens belongs to.

B sequences, T tokens, S positions. `documents` (B, T) numbers the texts of a sequence from 1; padding is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """A text in a batch, or a part of one: its sequence, and the positions of its first token and after its last."""

    sequence: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def runs(numbers: Tensor) -> list[tuple[int, Text]]:
    """Returns every run of equal numbers side by side in (B, T), in order: the number, and where it stands."""
    found = list[tuple[int, Text]]()
    for sequence, line in enumerate(numbers.cpu()):
        values, counts = line.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        starts = (ends - counts).tolist()
        places = [Text(sequence, start, end) for start, end in zip(starts, ends.tolist(), strict=True)]
        found += zip(values.tolist(), places, strict=True)
    return found


def texts_of(documents: Tensor) -> list[Text]:
    """Returns the texts of a batch, in order; padding is none."""
    return [text for number, text in runs(documents) if number > 0]


def positions_of(documents: Tensor | None, num_positions: int, device: torch.device) -> Tensor:
    """Returns each position counted from the start of its text: (B, S); (1, S) without `documents` (B, S)."""
    positions = torch.arange(num_positions, device=device)[None]
    if documents is None:
        return positions
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - torch.where(is_first, positions, 0).cummax(dim=1).values
