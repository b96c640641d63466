"""Positions spread by a skip in each text, so that short texts teach a drafter the distances of long ones. Source: PoSE
(arXiv 2309.10400).

B sequences, T tokens. `documents` (B, T) numbers the texts of a sequence from 1; padding is 0.
"""

from typing import Any

import torch
from torch import Tensor

from ..configuration import Eagle31Config
from .documents import positions_of


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
