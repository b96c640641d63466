"""The state that one captured round hands to the next: tensors that stay at one address.

B rows: a sequence each, and the last ones idle where a call has fewer sequences. M tokens a round commits at most, C
slots of an arena, n*ht width of a token's captured states, V target vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...cache.transfer import to_device
from ..noise import Noise
from ..planning.buckets import DEEPEST

OPTIONAL = ("noise", "rope")  # tensors of a carry that are made where a call needs them; no round writes to them
FEW_ROWS = 8  # up to which numbers of rows are powers of two; beyond, multiples of it


@dataclass
class Carry:
    """All but `states`, `is_behind`, `noise` and `rope` are int64.

    `text` (B, C): the tokens so far; `length` (B, 1): how many they are, left padding included; the last one's key is
    not in the cache yet. `going` (B, 1): 0 for a sequence that has ended, and for an idle row. Not read by the drafter
    yet: the target's states (B, M, n*ht), and the tokens after them (B, M), `count` (B, 1) of each sequence; so many
    tokens recurrent states are to be advanced over, where `is_behind` (B, 1), bool.

    `padding` (B, 1): tokens of left padding; `position` (B, 1), or (axes, B, 1): what is added to a slot to give the
    target's position; `most_position`, of the same shape: the greatest one it may be asked for; `first_slot` (B, 1): of
    the text, the first one that the drafter reads.

    `noise` (B, S, V): of the slots the next rounds draw at, slot s at s mod S; None until a call samples. `rope` (C,
    2P): the drafter's cos and sin, side by side, of every position that a text may have; None until a round needs it.
    """

    text: Tensor
    length: Tensor
    going: Tensor
    count: Tensor
    is_behind: Tensor
    tokens: Tensor
    states: Tensor
    padding: Tensor
    position: Tensor
    most_position: Tensor
    first_slot: Tensor
    noise: Tensor | None = None
    rope: Tensor | None = None

    @classmethod
    def empty(cls, positions: tuple[int, ...], width: int, capacity: int, like: Tensor) -> "Carry":
        """A carry for texts of at most `capacity` tokens. `positions`: the shape of `position`; `like` (..., n*ht)
        gives width, dtype and device of the states."""
        device = like.device
        num_rows = positions[-2]
        shapes: dict[str, tuple[int, ...]] = {"text": (num_rows, capacity), "tokens": (num_rows, width)}
        shapes |= dict.fromkeys(("position", "most_position"), positions)
        names = [f.name for f in fields(cls) if f.name not in ("states", *OPTIONAL)]
        dtypes = {"is_behind": torch.bool}
        tensors = {
            name: torch.zeros(shapes.get(name, (num_rows, 1)), dtype=dtypes.get(name, torch.long), device=device)
            for name in names
        }
        return cls(**tensors, states=like.new_zeros(num_rows, width, like.shape[-1]))

    @property
    def width(self) -> int:
        """Tokens a round commits at most."""
        return self.tokens.shape[1]

    @property
    def num_rows(self) -> int:
        return self.text.shape[0]

    def rest(self) -> None:
        """Makes all rows idle: each holds a text of one token that has ended. States of an earlier call may not be
        finite."""
        for name in ("going", "count", "is_behind", "padding", "first_slot", "position", "most_position", "states"):
            getattr(self, name).zero_()
        self.length.fill_(1)

    def send(self, name: str, values: list[int]) -> None:
        """Sets one of the tensors (B, 1) of the first rows; the host does not wait."""
        rows = getattr(self, name)[: len(values)]
        rows.copy_(to_device(self.text.device, values)[0][:, None], non_blocking=True)

    def hold_noise(self, vocab_size: int) -> None:
        """Makes room for noise, which stays once it is there."""
        if self.noise is None:
            # As many slots as a round and the next draft may ask for: the host knows a length one round late.
            shape = self.num_rows, 2 * self.width, vocab_size
            with torch.inference_mode(False):  # another call may write to it in another mode
                self.noise = torch.zeros(shape, dtype=torch.float32, device=self.text.device)

    def add_noise(self, noise: Noise, lengths: list[int], begins: list[int]) -> list[int]:
        """Adds the noise of slots from `begins[b]` on, as far as two rounds may draw for texts of these lengths;
        that of their own tokens is forgotten. Returns the first slot of each sequence whose noise is lacking then."""
        assert self.noise is not None
        ends = [max(begin, length + 2 * self.width) for begin, length in zip(begins, lengths, strict=True)]
        for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            for slot in range(begin, end):
                self.noise[b, slot % self.noise.shape[1]].copy_(noise.of_slot(b, slot))
        noise.forget(lengths)
        return ends

    def copied(self) -> dict[str, Tensor]:
        """Copies of all tensors but the optional ones."""
        return {f.name: getattr(self, f.name).clone() for f in fields(self) if f.name not in OPTIONAL}

    def put_back(self, copies: dict[str, Tensor]) -> None:
        """Makes the carry what it was when it was copied."""
        for name, values in copies.items():
            getattr(self, name).copy_(values)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that leaves the carry as it found it."""
        found = self.copied()
        try:
            yield
        finally:
            self.put_back(found)


def rows_for(num_sequences: int) -> int:
    """Returns the rows of a carry that serves so many sequences, so that few captures serve batches of every size."""
    if num_sequences > FEW_ROWS:
        return -(-num_sequences // FEW_ROWS) * FEW_ROWS
    return 1 << (num_sequences - 1).bit_length()


def most_tokens(settings: Any) -> int:
    """Tokens that a round commits at most."""
    return 1 + (DEEPEST if settings.is_auto else settings.depth)
