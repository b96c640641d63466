"""The demo's text: the source of Python's standard library, read from the running interpreter."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Never trained on, by the target or by a drafter; the demo's prompts and every reported acceptance come from these.
HELD_OUT = (
    "calendar.py", "configparser.py", "csv.py", "fractions.py", "ftplib.py", "graphlib.py",
    "heapq.py", "queue.py", "sched.py", "shelve.py", "statistics.py", "textwrap.py",
)  # fmt: skip

# Folders that are left out: tests, which repeat themselves, and tables or generated text rather than code.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "turtledemo",
    "__pycache__",
}
LARGEST_FILE = 200_000  # bytes


def stdlib() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def training_files() -> Iterator[str]:
    """Yields the text of every training file, in the order of their paths."""
    root = stdlib()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if LEFT_OUT.isdisjoint(parts) and parts[-1] not in HELD_OUT and path.stat().st_size <= LARGEST_FILE:
            yield path.read_text(encoding="utf-8", errors="ignore")


def held_out_file(name: str) -> str:
    """Returns the text of one of `HELD_OUT`. Raises FileNotFoundError for an interpreter without the source of its
    library."""
    return (stdlib() / name).read_text(encoding="utf-8")
