"""The end of a command: its exit status, the line that says what went wrong, and the handling of signals."""

import errno
import logging
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from huggingface_hub.errors import OfflineModeIsEnabled, StrictDataclassError
from safetensors import SafetensorError

from ..checkpoints.sources import HUB_ERRORS, HubError
from ..printable import one_line, printable
from ..starting import die, on_signals

FAILED, BAD_INPUT = 1, 2
LONGEST = 1000  # characters of a line: it may quote a long text
STYLE = re.compile("\x1b\\[[0-9;]*m")  # as transformers' log has it even where nothing shows it
# The kinds of error that a command may end with, of which the first that fits counts. Any other error is a defect of
# this library, and keeps its traceback.
KINDS: tuple[tuple[tuple[type[BaseException], ...], str, int], ...] = (
    ((HubError, OfflineModeIsEnabled, MemoryError, SafetensorError), "failed", FAILED),
    ((ValueError, OSError, StrictDataclassError), "error", BAD_INPUT),
    ((RuntimeError, ImportError, *HUB_ERRORS), "failed", FAILED),
)
# Errors of a file that was named, in plain words, and what to do about them.
FILE_ERRORS = {
    errno.ENOENT: "there is no such file or folder. Check the path.",
    errno.EISDIR: "is a folder; expected a file.",
    errno.ENOTDIR: "is a file, or lies below one; expected a folder.",
    errno.EEXIST: "is there already. Name another, or remove it.",
    errno.EACCES: "this user may not read or write it. Check its permissions.",
    errno.EPERM: "this user may not read or write it. Check its permissions.",
    errno.ENAMETOOLONG: "the name is too long for a file.",
    errno.ELOOP: "is a link that leads back to itself.",
}
# Errors of the machine, in plain words, whatever file was named.
MACHINE_ERRORS = {
    errno.ENOSPC: "the disk is full. Free some space first.",
    errno.EDQUOT: "the disk quota is used up. Free some space first.",
    errno.EROFS: "the file system is read-only. Name a place that can be written.",
    errno.EIO: "the disk failed to read or write.",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n).",
}


class PrintableRecord(logging.LogRecord):
    """A message of any library's log: it may name what stands in a checkpoint, as transformers does of its tensors."""

    def getMessage(self) -> str:  # noqa: N802
        """Returns the message without styles, other control characters spelled out."""
        return printable(STYLE.sub("", super().getMessage()))


class Stopped(KeyboardInterrupt):
    """A signal that asks the program to stop. It is raised wherever the program is then, so that this cleans up."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def explain(error: BaseException, args: Namespace | None) -> tuple[str, int] | None:
    """Returns the line for stderr and the exit status; None for a defect of this library, and for a closed output."""
    if isinstance(error, BrokenPipeError):  # nobody reads stdout or stderr any more, as after `| head`
        return None
    for types, word, status in KINDS:
        if isinstance(error, types):
            text, of_machine = _text(error)
            text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
            word, status = ("failed", FAILED) if of_machine else (word, status)
            left = f" {outlook(args)}" if of_machine and args is not None else ""
            return one_line(f"eagle31: {word}: {text}{left}"), status
    return None


def _text(error: BaseException) -> tuple[str, bool]:
    """Returns an error's message in one line, and True where the machine is at fault rather than the user's input."""
    number = getattr(error, "errno", None)
    known: dict[int | None, str] = {**FILE_ERRORS, **MACHINE_ERRORS}
    if isinstance(error, OSError) and number in known:
        named = error.filename2 or error.filename
        where = os.fsdecode(named) if isinstance(named, str | bytes) else "writing"
        return f"{where}: {known[number]}", number in MACHINE_ERRORS
    cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ is not None else error
    is_full = f"os error {errno.ENOSPC}" in str(error)  # errors of libraries written in Rust have no errno
    return " ".join(str(cause).split()) or type(error).__name__, is_full


def outlook(args: Namespace) -> str:
    """Returns sentences on what a stopped command leaves behind.

    They are `args.left_behind`, which a command or its parser sets, with the arguments by their names in braces.
    """
    left_behind = getattr(args, "left_behind", "Nothing was written.").format(**vars(args))
    sources = [getattr(args, name, None) for name in ("target", "drafter", "source")]
    is_remote = any(source and not os.path.exists(source) for source in sources)
    return left_behind + (" What was downloaded stays in the Hub's cache." if is_remote else "")


def as_program(run: Callable[[], int]) -> int:
    """Runs the command as the program of this process, in which the first signal of STOPPING raises Stopped, and the
    second one ends the process at once.

    Returns its exit status, unless a signal or a closed output ends the process.
    """

    def raise_stopped(number: int, frame: FrameType | None) -> None:
        on_signals(signal.SIG_DFL)
        raise Stopped(number)

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a locale may be unable to encode what a model generates
    logging.setLogRecordFactory(PrintableRecord)
    on_signals(raise_stopped)
    try:
        return _status(run)
    except Stopped as stop:
        flush_outputs()
        die(stop.number)
    except BrokenPipeError:
        flush_outputs()
        die(getattr(signal, "SIGPIPE", signal.SIGTERM))  # as C programs end
    finally:
        on_signals(signal.SIG_DFL)
        flush_outputs()


def _status(run: Callable[[], int]) -> Any:
    try:
        return run()
    except SystemExit as end:  # argparse's, once it has shown its help
        if sys.stdout is not None:
            sys.stdout.flush()
        return end.code


def flush_outputs() -> None:
    """Flushes stdout and stderr. Where that fails they go to the null device, or Python would complain at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # one that was closed has nothing left to say
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
