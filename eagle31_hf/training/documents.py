"""Packed sequences: which text (document) each of their tokens belongs to, and its position there.

Positions may be spread by a skip in each text, so that short texts teach a drafter the distances of long ones. Source:
PoSE (arXiv 2309.10400).

B sequences, T tokens, S positions. `documents` (B, T) numbers the texts of a sequence from 1; padding is 0.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..configuration import Eagle31Config


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


def reach_within(config: Eagle31Config, reach: int, depth: int) -> int:
    """Returns how far positions can be spread, at most `reach`, so that those of the last of `depth` steps, too, stay
    within the drafter's `max_position_embeddings`. A longrope drafter's stay within the length up to which prompts are
    served with the frequencies of short texts: one text beyond it would change those of its whole batch."""
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    limit = config.max_position_embeddings
    if rope.get("rope_type") == "longrope":
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return max(0, min(reach, limit - depth + 1))


def position_skips(documents: Tensor, reach: int, generator: torch.Generator | None = None) -> Tensor:
    """Draws a place and a size for each text: tokens before the place keep their positions, those from it on are moved
    up by the size. No position reaches `reach`, except in a text that is longer itself. Returns what is added to the
    position of each token (B, T); 0 for padding. `generator`: of the CPU, by default torch's."""
    positions = positions_of(documents, documents.shape[1], documents.device)
    texts = (positions == 0).flatten().cumsum(0).view_as(positions) - 1
    lengths = texts.flatten().bincount()
    draws = torch.rand(2, len(lengths), generator=generator).to(documents.device)
    places = (draws[0] * lengths).long()
    sizes = (draws[1] * (reach - lengths + 1).clamp(min=0)).long()
    return torch.where((positions >= places[texts]) & (documents > 0), sizes[texts], 0)
