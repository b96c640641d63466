"""A record of the text that a drafter has read of a target's cache, kept with the cache from call to call: a call that
goes on from an earlier one's cache drafts as if it had read the whole text.

A caller may do anything with a cache between two calls. So each token in it has a mark, worked out of its keys, and
what was read is used as far as the marks are the same.

B sequences, S slots of the target's cache, T tokens that the drafter has read, H heads, D width.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..cache import adopt as cache_of
from ..modeling import Eagle31DrafterModel
from .drafter_runner import DrafterRunner
from .unread_states import AuxStates, UnreadStates

ATTRIBUTE = "_eagle31_read_text"  # of a target's cache: a copy of the cache has it, too
TOLERANCE = 1e-5  # of marks, beside the sum of what is added up: sums of the same numbers may differ by rounding


@dataclass(frozen=True)
class Marks:
    """The sum of a token's keys and the sum of their sizes (B, S, 2), in fp32, for the slots from `first` on."""

    sums: Tensor
    first: int

    @classmethod
    def of(cls, cache: Cache) -> "Marks | None":
        """The marks of the accepted tokens in a cache, None where it keeps no keys that can be read. They are those of
        one layer, the last: its keys depend on all tokens before."""
        found = cache_of.accepted_keys(cache)
        if found is None:
            return None
        keys, end = found
        both = keys.sum((1, 3), dtype=torch.float32), keys.abs().sum((1, 3), dtype=torch.float32)
        return cls(torch.stack(both, dim=-1), end - keys.shape[-2])

    def common(self, found: "Marks") -> tuple[list[int], int]:
        """Returns which of these sequences each one of `found` is, and how many first slots all of them have in common
        with it."""
        first = max(self.first, found.first)
        end = min(self.first + self.sums.shape[1], found.first + found.sums.shape[1])
        if first >= end:
            return [], 0
        ours = self.sums[:, first - self.first : end - self.first].to(found.sums.device)
        theirs = found.sums[:, first - found.first : end - found.first]
        is_last = _are_close(ours[None, :, -1], theirs[:, None, -1])  # (B found, B)
        as_before = torch.arange(len(theirs), device=theirs.device).clamp_(max=len(ours) - 1)
        rows = torch.where(is_last.any(dim=1), is_last.int().argmax(dim=1), as_before)
        lengths = _are_close(ours[rows], theirs).long().cumprod(dim=1).sum(dim=1)
        *order, least = torch.cat((rows, lengths.min()[None])).tolist()
        return order, first + least if least else 0


def _are_close(ours: Tensor, theirs: Tensor) -> Tensor:
    """Marks (..., 2) -> which of them are the same (...). Keys of padding may be NaN."""
    are_close = (ours - theirs).abs() <= TOLERANCE * theirs[..., 1:]
    return (are_close | (ours == theirs) | (ours.isnan() & theirs.isnan())).all(dim=-1)


@dataclass(frozen=True)
class ReadText:
    """The texts that a drafter has read of a cache, with its keys of them; nothing of it is ever written to.

    `layers`: keys and values (B, H, T, D) of the drafter's layers, of a layer with a window the last ones. Of sequence
    b the drafter has read `lengths[b]` tokens, the first of which stands at slot `first_slots[b]` of the target's
    cache; `unread`: those after them; a token's position is its slot less `padding[b]`.
    """

    drafter: "weakref.ref[Eagle31DrafterModel]"
    marks: Marks
    layers: list[list[Tensor]]
    lengths: list[int]
    unread: AuxStates | None
    first_slots: list[int]
    padding: list[int]

    @property
    def counts(self) -> list[int]:
        """The tokens of every sequence that are read, or will be."""
        unread = [0] * len(self.lengths) if self.unread is None else self.unread.counts.host
        return [a + b for a, b in zip(self.lengths, unread, strict=True)]

    def of_rows(self, rows: list[int]) -> "ReadText":
        """Returns the record of sequences in another order, some of them more than once or not at all."""
        if rows == [*range(len(self.lengths))]:
            return self
        return replace(
            self,
            layers=[[states[rows] for states in layer] for layer in self.layers],
            lengths=[self.lengths[row] for row in rows],
            unread=self.unread and self.unread.of_rows(rows),
            first_slots=[self.first_slots[row] for row in rows],
            padding=[self.padding[row] for row in rows],
        )

    def up_to(self, slot: int) -> "ReadText | None":
        """Returns the record of the text before a slot; None where a window has dropped keys before it."""
        wanted = [max(0, slot - first) for first in self.first_slots]
        lengths = [min(pair) for pair in zip(self.lengths, wanted, strict=True)]
        dropped = max(self.lengths) - max(lengths)
        if dropped and any(states.shape[-2] < max(self.lengths) for states, _ in self.layers):
            return None
        layers = [[states[..., : states.shape[-2] - dropped, :] for states in layer] for layer in self.layers]
        left = [want - length for want, length in zip(wanted, lengths, strict=True)]
        unread = self.unread.at_most(left) if self.unread is not None and max(left) > 0 else None
        return replace(self, layers=layers, lengths=lengths, unread=unread)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadText":
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()  # in another process there is no drafter that has read it


def read_text_of(cache: Cache, drafter: Eagle31DrafterModel) -> ReadText | None:
    """Returns what a drafter has read of the text that a cache holds now, None where that is nothing."""
    kept: ReadText | None = getattr(cache, ATTRIBUTE, None)
    if kept is None or kept.drafter() is not drafter:
        return None
    found = Marks.of(cache)
    if found is None:
        return None
    rows, end = kept.marks.common(found)
    text = kept.of_rows(rows).up_to(end) if end else None
    return text if text is not None and max(text.counts) > 0 else None


def keep_read_text(cache: Cache, num_before: int, runner: DrafterRunner, unread: UnreadStates) -> None:
    """Keeps with a cache what the drafter has read of its text, and is yet to read. `num_before`: tokens in it before
    the first one of the call's inputs."""
    marks = Marks.of(cache)
    if marks is None:
        return
    left = unread.take() if len(unread) else None
    first_slots = [slot + num_before for slot in unread.first_slots]
    padding = [slot - position for slot, position in zip(first_slots, runner.first_positions, strict=True)]
    read = runner.held(), runner.lengths.host, left and left.copied()
    setattr(cache, ATTRIBUTE, ReadText(weakref.ref(runner.drafter), marks, *read, first_slots, padding))
