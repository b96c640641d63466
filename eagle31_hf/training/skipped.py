"""Records of which no training example can be made: counted by reason, with the places of the first few of each."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN = 3  # records of a reason that are named
LONGEST = 100  # characters of what a template or a tokenizer says


class Skipped(ValueError):  # noqa: N818 -- no error of the program: only this record is skipped
    """Raised for a record that gives no training example.

    `reason`: a few words, the same for all records that fail so: they are counted by it. `details`: the text, by
    default the reason. `place`: the file and line, where they are known already.
    """

    def __init__(self, reason: str, details: str | None = None, place: str = ""):
        super().__init__(reason, details, place)
        self.reason, self.place = reason, place
        self.details = (details or reason).encode("utf-8", "backslashreplace").decode()  # it may quote invalid Unicode

    def __str__(self) -> str:
        return f"{self.place}: {self.details}" if self.place else self.details


@contextmanager
def refused_by(what: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Raises Skipped instead of the `errors` that `what` raises in the block, by default whatever a template or a
    tokenizer does: a template is a program that came with the model, and tokenizers raise plain `Exception`."""
    try:
        yield
    except MemoryError:
        raise
    except errors as error:
        said = " ".join(str(error).encode("ascii", "backslashreplace").decode().split()) or type(error).__name__
        raise Skipped(f"{what} refused it: {said[:LONGEST]}") from None


class Skips:
    """Counts skipped records by reason, and reports where the first ones of each reason are.

    `place_of`: a record's number -> its file and line. `report` is told a line for each of these.
    """

    def __init__(self, place_of: Callable[[int], str], report: Callable[[str], None] | None = None):
        self.place_of, self.report = place_of, report
        self.first: list[str] = []  # where the first few are, and why they are skipped
        self.shown: list[tuple[int, Skipped]] = []  # the first few of each reason
        self._counts, self._reported = Counter[str](), Counter[str]()

    def add(self, number: int, refusal: Skipped | str) -> None:
        """Counts the record of that number, and reports it if it is one of the first few of its reason."""
        refusal = Skipped(refusal) if isinstance(refusal, str) else refusal
        self._counts[refusal.reason] += 1
        self._reported[refusal.reason] += 1
        if self._reported[refusal.reason] > SHOWN:
            return
        refusal.place = refusal.place or self.place_of(number)
        self.shown.append((number, refusal))
        if len(self.first) < SHOWN:
            self.first.append(str(refusal))
        if self.report is not None:
            self.report(f"skipped {refusal}")

    def taken(self) -> Counter[str]:
        """Returns the counts since they were last taken."""
        counts, self._counts = self._counts, Counter[str]()
        return counts
