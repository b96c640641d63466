"""A file of measurements, written as they come, so that a run that was stopped goes on where it was."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..checkpoints.sharing import try_lock
from ..printable import printable
from .prompts import Prompts

FILE = "measured.jsonl"


class Journal(dict[str, Any]):
    """Figures by name, in memory and, unless `file` is None, in a binary file of one JSON object a line."""

    def __init__(self, file: Any, figures: dict[str, Any]):
        super().__init__(figures)
        self._file = file

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the figures of that name: measured now, and kept, unless they are there already."""
        if name not in self:
            found = measure()
            if self._file is not None:
                self._file.write(json.dumps({name: found}).encode() + b"\n")
                self._file.flush()
            self[name] = found
        return self[name]


@dataclass(frozen=True)
class Study:
    """A study of drafters: decodes prompts one after the other, and keeps their figures in the journal as they come.
    `target` is a PreTrainedModel."""

    target: Any
    prompts: Prompts
    journal: Journal


def counted(numbers: Iterable[int], what: str) -> Iterable[int]:
    """Shows a progress bar on stderr while the numbers are gone through."""
    return tqdm(numbers, desc=printable(what), file=sys.stderr, unit="prompt", mininterval=1.0)


def place(who: str, condition: str, number: int) -> str:
    """Returns the name under which the journal keeps the figures of a prompt or a batch, by its number."""
    return f"{who}: {condition}: prompt {number}"


def check_folder(folder: Path, resume: bool) -> None:
    """Raises ValueError where a report cannot be begun in a folder, or, with `resume`, gone on with."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; expected a folder to write the report into.")
    has_report = (folder / FILE).is_file()
    if folder.is_dir() and any(folder.iterdir()) and not has_report:
        raise ValueError(f"{folder}: holds something else than a report; expected a new or empty folder.")
    if has_report and (folder / FILE).stat().st_size and not resume:
        raise ValueError(f"{folder}: holds a report already; name another folder, or go on with it (--resume).")


@contextmanager
def open_journal(folder: Path, facts: dict[str, Any], resume: bool) -> Iterator[Journal]:
    """Opens the journal in a folder, which is made where it is missing, for this process alone.

    `facts`: what the figures are of, as plain values; figures of other facts are not mixed with them. Raises ValueError
    where there is a journal already and `resume` is false, where it is of other facts, where another process writes it,
    and where the folder holds something else.
    """
    facts = json.loads(json.dumps(facts))
    check_folder(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a+b") as file:
        with suppress(OSError):  # a system or file system without locks
            if not try_lock(file.fileno()):
                raise ValueError(
                    f"{folder}: another process is measuring into it; wait for it, or name another folder."
                )
        lines = _whole_lines(file)
        if not lines:
            file.write(json.dumps(facts).encode() + b"\n")
            file.flush()
        found = lines[0] if lines else facts
        names = [name for name in {**found, **facts} if found.get(name) != facts.get(name)]
        if names:
            said = "; ".join(f"{name} {_short(found.get(name))}, now {_short(facts.get(name))}" for name in names)
            raise ValueError(
                f"{folder}: was measured with other settings ({said}); name another folder, or use the same."
            )
        yield Journal(file, {name: found for line in lines[1:] for name, found in line.items()})


def _whole_lines(file: Any) -> list[Any]:
    """Returns the values of all lines, and cuts off a last one that a kill left incomplete."""
    file.seek(0)
    data = file.read()
    end = data.rfind(b"\n") + 1
    file.truncate(end)
    file.seek(end)
    try:
        lines = [json.loads(line) for line in data[:end].splitlines()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no JSON object")
        return lines
    except ValueError as error:
        raise ValueError(f"{file.name}: is no journal of figures ({error}); name another folder.") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
