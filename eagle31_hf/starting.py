"""Signals during the start of the program `eagle31`: imports take seconds, and Ctrl-C then prints a line, no traceback.

It is the first module that the package imports.
"""

import os
import signal
import sys
from itertools import pairwise
from types import FrameType
from typing import Any, NoReturn

# Ctrl-C; a job scheduler, or a system that shuts down; a closed terminal (Windows has no SIGHUP).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def is_program() -> bool:
    """Returns True where this process is the program, by its own name or as `python -m eagle31_hf`; False for a program
    that imports the library."""
    return os.path.basename(sys.argv[0]) in ("eagle31", "eagle31.exe") or (
        sys.argv[0] == "-m" and ("-m", "eagle31_hf") in pairwise(sys.orig_argv)
    )


def die(number: int) -> NoReturn:
    """Ends the process by a signal's default action, so that its parent sees the signal.

    A shell reports the status 128 + `number`.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached where the signal is blocked, or does not end a process by default


def on_signals(handler: Any) -> None:
    """Has signals of STOPPING call the handler; signal.SIG_DFL ends the process at once. One that the process was
    started to ignore, as by `nohup`, stays ignored."""
    for number in STOPPING:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the program with one line."""
    os.write(2, b"eagle31: stopped while starting; nothing was done\n")
    die(number)


if is_program():  # until the command itself handles them
    on_signals(_end)
