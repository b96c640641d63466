"""The queue between the target's forwards and the drafter: states that were captured and accepted, not read yet.

B sequences, L tokens of the prompt, M tokens, n*ht width of a token's captured states, concatenated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..cache.transfer import Commit, Mirrored

READ_AT_ONCE = 1024  # tokens that a drafter's forward takes


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
        """Returns a copy of these states and tokens, in memory that later forwards do not write over."""
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


class UnreadStates:
    """Collects the states that the drafter is to read, and has them read in time.

    `read`: hands states to the drafter. `first_slots`: the first slot of each sequence that it reads. `num_cached`:
    tokens of the prompt that the target's cache already held, whose states are not captured.
    """

    def __init__(self, read: Callable[[AuxStates], object], first_slots: list[int], num_cached: int):
        self._read = read
        self.first_slots = first_slots
        self._captured_from = num_cached
        self._parts: list[AuxStates] = []
        self._last_state: Tensor | None = None  # of the prompt, until the token after it is known
        self.captured: Any = None  # a `CapturedStates`, set while the target's states are captured

    def __len__(self) -> int:
        """Tokens of each sequence that the drafter reads before it drafts."""
        return sum(map(len, self._parts))

    def take(self) -> AuxStates:
        """Everything that is unread, as read from now on."""
        parts, self._parts = self._parts, []
        return AuxStates.joined(parts)

    def put(self, part: AuxStates) -> None:
        """Adds states that are to be read next."""
        self._parts.append(part)

    @contextmanager
    def reading_prompt(self, input_ids: Tensor) -> Iterator[None]:
        """A context in which every forward of the target is a piece of the prompt (B, L), read as soon as it has
        run."""
        self.read_all()  # of a text that this one goes on from

        def read() -> None:
            for part in self.of_text(input_ids):
                self._read(part)

        self.captured.on_forward = read
        try:
            yield
        finally:
            self.captured.on_forward = None

    def of_text(self, input_ids: Tensor) -> Iterator[AuxStates]:
        """The states captured of the texts (B, L), piece by piece, as far as the tokens after them are known. The state
        of their last token is kept apart."""
        length = input_ids.shape[1]
        for states in self.captured.pieces(READ_AT_ONCE):
            first = self._captured_from
            self._captured_from += states.shape[1]
            end = min(self._captured_from, length - 1)
            if self._captured_from >= length:
                self._last_state = states[:, length - 1 - first : length - first]
            count = max(end - first, 0)
            part = AuxStates(states[:, :count], input_ids[:, first + 1 : end + 1], [count] * len(states))
            part = part.without_first([min(max(slot - first, 0), count) for slot in self.first_slots])
            if max(part.counts.host) > 0:
                yield part

    def queue_text(self, input_ids: Tensor) -> None:
        """Queues the states captured of the text (1, L) since the last call. Captured states of rejected drafts, which
        follow the accepted ones, are dropped."""
        for part in self.of_text(input_ids):
            self.read_all()
            self.put(part)
        self._captured_from = input_ids.shape[1] - 1

    def queue(self, commit: Commit) -> None:
        """Queues the states of the last forward at the nodes of a commit's paths; its tokens follow them."""
        states = self.captured.take() if self._last_state is None else self._last_state
        self._last_state = None
        count = commit.ids.shape[1]
        states = states[:, :count] if commit.path is None else gathered(states, commit.path[:, :count])
        part = AuxStates(states, commit.ids, commit.counts)
        if len(self) + len(part) > READ_AT_ONCE:  # nothing was drafted for long; the next draft reads what comes last
            self.read_all()
        self.put(part)

    def read_all(self) -> None:
        """Has everything that is unread read."""
        if self._parts:
            self._read(self.take())


def gathered(states: Tensor, places: Tensor) -> Tensor:
    """States (B, T, w) at places (B, M) of each sequence -> (B, M, w)."""
    index = places.to(states.device)[..., None].expand(-1, -1, states.shape[2])
    return states.gather(1, index)
