"""The demo's text: the source of Python's standard library, read from the running interpreter."""

import sysconfig
from pathlib import Path

# Never trained on, by the target or by a drafter; the demo's prompts and every reported acceptance come from these.
HELD_OUT = (
    "calendar.py", "configparser.py", "csv.py", "fractions.py", "ftplib.py", "graphlib.py",
    "heapq.py", "queue.py", "sched.py", "shelve.py", "statistics.py", "textwrap.py",
)  # fmt: skip


def stdlib() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_file(name: str) -> str:
    """Returns the text of one of `HELD_OUT`. Raises FileNotFoundError for an interpreter without the source of its
    library."""
    return (stdlib() / name).read_text(encoding="utf-8")
