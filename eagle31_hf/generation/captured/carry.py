"""The state that one captured round hands to the next: tensors that stay at one address.

B sequences, M tokens a round commits at most, C slots of an arena, n*ht width of a token's captured states, V target
vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Carry:
    """All but `states` and `noise` are int64.

    `text` (B, C): the tokens so far; `length` (B, 1): how many they are, left padding included; the last one's key is
    not in the cache yet. `going` (B, 1): 0 for a sequence that has ended. Not read by the drafter yet: the target's
    states (B, M, n*ht), and the tokens after them (B, M), `count` (B, 1) of each sequence.

    `padding` (B, 1): tokens of left padding; `position` (B, 1), or (axes, B, 1): what is added to a slot to give the
    target's position; `last_position`, of the same shape: the greatest one it may be asked for; `first_slot` (B, 1): of
    the text, the first one that the drafter reads; `draft_position` (B, 1): the position of the first token it
    reads.

    `noise` (B, S, V): of the slots the next rounds draw at, slot s at s mod S; None where nothing is drawn.
    """

    text: Tensor
    length: Tensor
    going: Tensor
    count: Tensor
    tokens: Tensor
    states: Tensor
    padding: Tensor
    position: Tensor
    last_position: Tensor
    first_slot: Tensor
    draft_position: Tensor
    noise: Tensor | None = None

    @classmethod
    def empty(cls, positions: torch.Size, width: int, capacity: int, like: Tensor, vocab_size: int | None) -> "Carry":
        """A carry for texts of at most `capacity` tokens. `positions`: the shape of `position`; `like` (..., n*ht)
        gives width, dtype and device of the states; `vocab_size`: of the noise, None for none."""
        device = like.device
        num_sequences = positions[-2]
        shapes: dict[str, tuple[int, ...]] = {"text": (num_sequences, capacity), "tokens": (num_sequences, width)}
        shapes |= dict.fromkeys(("position", "last_position"), tuple(positions))
        names = [f.name for f in fields(cls) if f.name not in ("states", "noise")]
        integers = {
            name: torch.zeros(shapes.get(name, (num_sequences, 1)), dtype=torch.long, device=device) for name in names
        }
        return cls(
            **integers,
            states=like.new_zeros(num_sequences, width, like.shape[-1]),
            noise=None
            if vocab_size is None
            else torch.zeros(num_sequences, noise_slots(width), vocab_size, dtype=torch.float32, device=device),
        )

    @property
    def width(self) -> int:
        """Tokens a round commits at most."""
        return self.tokens.shape[1]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that leaves the carry as it found it."""
        found = {f.name: getattr(self, f.name).clone() for f in fields(self) if f.name != "noise"}
        try:
            yield
        finally:
            for name, values in found.items():
                getattr(self, name).copy_(values)


def noise_slots(width: int) -> int:
    """Slots of noise that a round and the next draft may ask for: the host knows a length one round late."""
    return 2 * width
