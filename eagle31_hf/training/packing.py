"""Rows of tokens, packed and padded into batches. B rows, T tokens, n*ht captured states, ht target width."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .kinds import tokens_of

Row = Mapping[str, Any]
STATE_COLUMNS = ("states", "last_states")  # (T, n*ht) and (T, ht)


class Rows(Dataset):
    """Rows held in memory, end to end: ids (N,) int32, answers (N,) bool, and where each row begins and the last ends
    (R + 1,)."""

    def __init__(self, input_ids: Tensor, answers: Tensor, offsets: Tensor):
        self.input_ids = input_ids
        self.answers = answers
        self.offsets = offsets
        self.lengths: list[int] = offsets.diff().tolist()

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> "Rows":
        """Copies rows of any kind into memory, end to end. Raises ValueError where there are none."""
        ids = list[Tensor]()
        answers = list[Tensor]()
        offsets = [0]
        for row in rows:
            tokens = tokens_of(row)
            ids.append(tokens.input_ids.int())
            answers.append(tokens.answers)
            offsets.append(offsets[-1] + len(tokens.input_ids))
        if not ids:
            raise ValueError("there are no rows; expected at least one.")
        return cls(torch.cat(ids), torch.cat(answers), torch.tensor(offsets))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = range(len(self))[index]
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {"input_ids": self.input_ids[span].long(), "answers": self.answers[span]}


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Best-fit decreasing: which rows share a row of at most `max_length` tokens, in the order of the first of each.

    Raises ValueError for a row that is longer.
    """
    if len(lengths) and max(lengths) > max_length:
        index = lengths.index(max(lengths))
        raise ValueError(
            f"row {index} has {lengths[index]} tokens; expected at most {max_length}. Cut rows to the length of the"
            " packs."
        )
    packs: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = defaultdict(list)
    rooms: list[int] = []  # ascending; there are at most `max_length` of them, however many the packs
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, lengths[index])
        best = list[int]()
        room = max_length
        if place < len(rooms):
            room = rooms[place]
            best = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        else:
            packs.append(best)
        best.append(index)
        left = room - lengths[index]
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(best)
    return sorted(sorted(rows) for rows in packs)


class PackedRows(Dataset):
    """Items are lists of rows that fit into `max_length` tokens together; `lengths` is theirs, summed.

    Takes the rows' own `lengths` where they have them. Raises ValueError for a row that is longer.
    """

    def __init__(self, rows: Any, max_length: int):
        lengths = (
            rows.lengths if hasattr(rows, "lengths") else [len(rows[index]["input_ids"]) for index in range(len(rows))]
        )
        self.rows, self.packs = rows, pack(lengths, max_length)
        self.lengths = [sum(lengths[index] for index in indices) for indices in self.packs]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Row]:
        return [self.rows[index] for index in self.packs[index]]


@dataclass
class Collator:
    """Rows, or lists of rows to lie end to end -> `input_ids`, `answers` and `documents`, all (B, T), T the longest.

    `documents` numbers the rows that lie end to end from 1; padding is 0, an answer nowhere. Rows with `states` (T,
    n*ht) and `last_states` (T, ht) give (B, T, n*ht) and (B, T, ht), zero in the padding. T is rounded up to a multiple
    of `pad_to_multiple_of`. Raises ValueError for rows without ids or answers, and for states that only some rows have,
    or not for all tokens.
    """

    pad_to_multiple_of: int | None = None

    def __call__(self, items: Sequence[Row | Sequence[Row]]) -> dict[str, Tensor]:
        texts = [self._text([item] if isinstance(item, Mapping) else item) for item in items]
        if len({frozenset(text) for text in texts}) > 1:
            raise ValueError(
                f"rows have {' or '.join(sorted({', '.join(text) for text in texts}))}; expected the same in all of a"
                " batch."
            )
        longest = max(len(text["input_ids"]) for text in texts)
        # The first is padded to the length of all: `pad_sequence` pads the others to the longest it is given.
        length = longest + -longest % (self.pad_to_multiple_of or 1)
        return {name: self._padded([text[name] for text in texts], length) for name in texts[0]}

    @staticmethod
    def _padded(parts: list[Tensor], length: int) -> Tensor:
        first = parts[0].new_zeros(length, *parts[0].shape[1:])
        first[: len(parts[0])] = parts[0]
        return pad_sequence([first, *parts[1:]], batch_first=True)

    @staticmethod
    def _text(rows: Sequence[Row]) -> dict[str, Tensor]:
        tokens = [tokens_of(row) for row in rows]
        text = {
            "input_ids": torch.cat([part.input_ids for part in tokens]),
            "answers": torch.cat([part.answers for part in tokens]),
            "documents": torch.cat([torch.full_like(part.input_ids, 1 + number) for number, part in enumerate(tokens)]),
        }
        for name in STATE_COLUMNS:
            if any(name in row for row in rows):
                lengths = [len(row[name]) if name in row else 0 for row in rows]
                if lengths != [len(part.input_ids) for part in tokens]:
                    raise ValueError(
                        f"rows of {[len(part.input_ids) for part in tokens]} tokens have {name} of {lengths}; expected"
                        " as many."
                    )
                text[name] = torch.cat([torch.as_tensor(row[name]) for row in rows])
        return text


class Part(Dataset):
    """Rows from `start` to `end` of others, with their lengths."""

    def __init__(self, rows: Any, start: int, end: int):
        self.rows = rows
        self.start = start
        self.lengths = rows.lengths[start:end]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        return self.rows[self.start + range(len(self))[index]]
