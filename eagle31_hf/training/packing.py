"""Training examples, packed into sequences and collated into batches.

An example is {"input_ids" (T,), "answers" (T,) bool}, or what `kinds.tokens_of` reads as one; with the target's states
also {"states" (T, n*ht), "last_states" (T, ht)}: n aux hidden states, ht target width. B sequences, T tokens.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Subset

from .kinds import Tokens, tokens_of

Example = Mapping[str, Any]
COLUMNS = ("input_ids", "answers", "documents")  # of a batch, each (B, T)
STATE_COLUMNS = ("states", "last_states")  # (T, n*ht) and (T, ht)


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Packs examples of these lengths into sequences of at most `max_length` tokens, best-fit decreasing.

    Returns the indices of the examples of each sequence, in the order of the first of each. Raises ValueError for an
    example that is longer.
    """
    if len(lengths) and max(lengths) > max_length:
        index = lengths.index(max(lengths))
        raise ValueError(
            f"row {index} has {lengths[index]} tokens; expected at most {max_length}, the max_length. Cut rows to"
            " the length of the packs, or raise it."
        )
    packs: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # ascending; there are at most `max_length` of them, however many the packs
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, lengths[index])
        if place < len(rooms):
            room = rooms[place]
            best = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        else:
            room, best = max_length, []
            packs.append(best)
        best.append(index)
        left = room - lengths[index]
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(best)
    return sorted(sorted(indices) for indices in packs)


class PackedExamples(Dataset):
    """Lists of examples that fit into a sequence of `max_length` tokens together; `lengths` are those of the sequences.

    Takes the `lengths` of the examples where they are known. Raises ValueError for an example that is longer.
    """

    def __init__(self, examples: Any, max_length: int):
        lengths = getattr(examples, "lengths", None)
        if lengths is None:
            lengths = [len(examples[index]["input_ids"]) for index in range(len(examples))]
        self.examples = examples
        self.packs = pack(lengths, max_length)
        self.lengths = [sum(lengths[index] for index in indices) for indices in self.packs]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Example]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[list[Example]]:
        """Returns several lists; examples that are asked for elsewhere are asked for at once."""
        packs = [self.packs[index] for index in indices]
        wanted = [index for pack in packs for index in pack]
        at_once = getattr(self.examples, "__getitems__", None)
        found = iter(at_once(wanted) if at_once else [self.examples[index] for index in wanted])
        return [[next(found) for _ in pack] for pack in packs]


class Collator:
    """Makes a batch of examples, or of lists of examples to lie end to end in one sequence each.

    Returns `input_ids`, `answers` and `documents`, all (B, T), T the longest. `documents` numbers the examples of a
    sequence from 1; padding is 0, and answers nowhere. Examples with states give `states` (B, T, n*ht) and
    `last_states` (B, T, ht), zero in the padding. Raises ValueError for examples without ids or answers, and for states
    that only some examples have, or not for all tokens.
    """

    def __call__(self, items: Sequence[Example | Sequence[Example]]) -> dict[str, Tensor]:
        sequences = [self._sequence([item] if isinstance(item, Mapping) else item) for item in items]
        if len({frozenset(sequence) for sequence in sequences}) > 1:
            columns = " or ".join(sorted({", ".join(sequence) for sequence in sequences}))
            raise ValueError(f"rows have {columns}; expected the same in all of a batch.")
        return {
            name: pad_sequence([sequence[name] for sequence in sequences], batch_first=True) for name in sequences[0]
        }

    @staticmethod
    def _sequence(examples: Sequence[Example]) -> dict[str, Tensor]:
        """Joins the columns of the examples of one sequence."""
        tokens = [tokens_of(example) for example in examples]
        sequence = {
            "input_ids": torch.cat([part.input_ids for part in tokens]),
            "answers": torch.cat([part.answers for part in tokens]),
            "documents": torch.cat([torch.full_like(part.input_ids, 1 + number) for number, part in enumerate(tokens)]),
        }
        for name in STATE_COLUMNS:
            if any(name in example for example in examples):
                lengths = [len(example[name]) if name in example else 0 for example in examples]
                expected = [len(part.input_ids) for part in tokens]
                if lengths != expected:
                    raise ValueError(f"rows of {expected} tokens have {name} of {lengths}; expected as many.")
                sequence[name] = torch.cat([torch.as_tensor(example[name]) for example in examples])
        return sequence


class Part(Subset):
    """The examples of another dataset at these indices, with their lengths."""

    def __init__(self, examples: Any, indices: Sequence[int]):
        super().__init__(examples, indices)
        self.examples, self.lengths = examples, [examples.lengths[index] for index in indices]

    def tokens(self, index: int) -> Tokens:
        """Returns the tokens of an example, without its states."""
        return tokens_at(self.examples, self.indices[index])


def tokens_at(examples: Any, index: int) -> Tokens:
    """Returns the tokens of an example; of a store they are read without its states."""
    return examples.tokens(index) if hasattr(examples, "tokens") else tokens_of(examples[index])
