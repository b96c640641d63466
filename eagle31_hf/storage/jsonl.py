"""The library's one reader of JSON lines: files with one JSON value on each line."""

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class JsonLines(Sequence):
    """The values of a file with one on each line, parsed as they are asked for; blank lines count for nothing.

    In memory is only where the lines begin, so that a file may be larger than memory. `parse` makes a value of the
    bytes of a line. Asking for a value raises ValueError, RecursionError or what else `parse` raises. Raises OSError
    where the file cannot be read.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Any] = json.loads):
        self.path = path
        self._parse = parse
        self._starts = array("Q")  # byte offsets
        self._numbers = array("Q")
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index):
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return self._parse(file.readline())

    def line_number(self, index: int) -> int:
        """Returns the line of the value with that index, counted from 1."""
        return self._numbers[index]
