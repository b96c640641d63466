"""The target's accepted states that the drafter has not read yet.

B sequences, M tokens, n*ht width of a token's captured states, concatenated.
"""

import torch
from torch import Tensor

from ..cache.transfer import Mirrored


class AuxStates:
    """Captured states `states` (B, M, n*ht) and the tokens after them (B, M), of which sequence b has the first
    `counts[b]`."""

    def __init__(self, states: Tensor, tokens: Tensor, counts: Mirrored | list[int]):
        self.states = states
        self.tokens = tokens
        self.counts = counts if isinstance(counts, Mirrored) else Mirrored(counts)

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return self.tokens.shape[1]

    @property
    def is_full(self) -> bool:
        """Returns whether every sequence has all `len(self)` tokens."""
        return min(self.counts.host) == len(self)

    @classmethod
    def joined(cls, parts: list["AuxStates"]) -> "AuxStates":
        """Parts one after the other, each sequence's own tokens first."""
        if len(parts) == 1:
            return parts[0]
        states = torch.cat([part.states for part in parts], dim=1)
        tokens = torch.cat([part.tokens for part in parts], dim=1)
        counts = parts[0].counts
        for part in parts[1:]:
            counts = counts + part.counts
        if all(part.is_full for part in parts[:-1]):
            return cls(states, tokens, counts)
        device = tokens.device
        is_own = [torch.arange(len(part), device=device) < part.counts.on(device) for part in parts]
        order = torch.cat(is_own, dim=1).sort(dim=1, descending=True, stable=True).indices[:, : max(counts.host)]
        return cls(gathered(states, order), tokens.gather(1, order), counts)

    def at_most(self, counts: list[int]) -> "AuxStates":
        """The first `counts[b]` tokens of every sequence b, or as many as there are."""
        counts = [min(pair) for pair in zip(counts, self.counts.host, strict=True)]
        return AuxStates(self.states[:, : max(counts)], self.tokens[:, : max(counts)], counts)

    def of_rows(self, rows: list[int]) -> "AuxStates":
        """The states of these sequences, in this order."""
        return AuxStates(self.states[rows], self.tokens[rows], [self.counts.host[row] for row in rows])

    def copied(self) -> "AuxStates":
        """The same in memory of its own."""
        return AuxStates(self.states.clone(), self.tokens.clone(), self.counts)

    def without_first(self, skipped: list[int]) -> "AuxStates":
        """Without the first `skipped[b]` tokens of each sequence b, which must have them."""
        counts = [max(n - s, 0) for n, s in zip(self.counts.host, skipped, strict=True)]
        if max(skipped) == 0:
            return self
        if min(skipped) == max(skipped):
            return AuxStates(self.states[:, skipped[0] :], self.tokens[:, skipped[0] :], counts)
        device = self.tokens.device
        places = Mirrored(skipped).on(device) + torch.arange(max(counts), device=device)
        places = places.clamp_(max=len(self) - 1)
        return AuxStates(gathered(self.states, places), self.tokens.gather(1, places), counts)


def gathered(states: Tensor, places: Tensor) -> Tensor:
    """States (B, T, w) at places (B, M) of each sequence -> (B, M, w)."""
    index = places.to(states.device)[..., None].expand(-1, -1, states.shape[2])
    return states.gather(1, index)
