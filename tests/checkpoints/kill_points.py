"""Forked processes that are killed right before their n-th step towards the disk, or disturbed at a look at files; and
what such a kill would leave behind."""

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = (
    "write",
    "flush",
    "fsync",
    "sendfile",
)  # of files; every other step that changes something has an audit event of its own
IN_A_ROW = 2  # writes that count as steps, of those one after the other: what a file has in its middle is all the same
READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")
LOOKS = ("stat", "get_slice")  # at files and at tensors of a file, besides opening them


def left_behind(work: Callable[[], Any], folder: Path, copies: Path) -> list[Path]:
    """Runs `work` in a process, and copies `folder` as it is right before each of its steps there, which is what a kill
    at that moment would leave. Returns the copies, in order."""

    def copy(number: int) -> None:
        shutil.copytree(folder, copies / f"{number:04}" / folder.name, symlinks=True)

    pid = os.fork()
    if pid == 0:
        _watch(copy, _changes(str(folder)), WRITES)
        _end(work, lambda: 0)
    assert not was_killed(pid)
    return [copy / folder.name for copy in sorted(copies.iterdir())]


def start(work: Callable[[], Any], folder: Path, n: int = 0, delay: float = 0.0) -> int:
    """Starts a process that runs `work` after `delay` seconds, and returns its id.

    It is killed at its n-th step under `folder`, with `n` 0 at none.
    """
    pid = os.fork()
    if pid == 0:
        time.sleep(delay)
        _run(n, work, str(folder))
    return pid


def was_killed(pid: int) -> bool:
    """Waits for a process of `start`. Returns True where it was killed; if it was not, it has to have ended well."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the process failed before it was killed: see stderr"
    return False


def disturbed_at(n: int, work: Callable[[], Any], folder: Path, disturbance: Callable[[], Any]) -> bool:
    """Runs `work` in a process, and `disturbance` right before its n-th look at files.

    Returns True where it came that far.
    """
    pid = os.fork()
    if pid == 0:
        came_that_far = False

        def disturb(number: int) -> None:
            nonlocal came_that_far
            if number == n:
                came_that_far = True
                disturbance()

        _watch(disturb, lambda event, args: event == "open" and _is_under(str(folder), args), LOOKS)
        _end(work, lambda: 1 + came_that_far)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (1, 2), "the process failed: see stderr"
    return code == 2


def _run(n: int, work: Callable[[], Any], folder: str) -> None:
    if n:
        _watch(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == n else None, _changes(folder), WRITES)
    _end(work, lambda: 0)


def _changes(folder: str) -> Callable[[str, tuple], bool]:
    """Returns whether an audit event is a step towards the disk below the folder."""

    def changes(event: str, args: tuple) -> bool:
        is_open = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(is_open or (event.startswith(("os.", "shutil.")) and event not in READS)) and _is_under(
            folder, args
        )

    return changes


def _watch(act: Callable[[int], Any], is_step: Callable[[str, tuple], bool], calls: tuple[str, ...]) -> None:
    """Calls `act` with the number of each step of this process, from 1 on, right before it: an event for which
    `is_step` holds, or one of `calls`. What `act` itself does is no step."""
    number, writes, is_acting = 0, 0, False

    def step(name: str) -> None:
        nonlocal number, writes, is_acting
        writes = writes + 1 if name == "write" else 0
        if writes <= IN_A_ROW:
            number, is_acting = number + 1, True
            act(number)
            is_acting = False

    def profile(frame: Any, event: str, arg: Any) -> None:
        if not is_acting and event == "c_call" and arg.__name__ in calls:
            step(arg.__name__)

    sys.addaudithook(lambda event, args: step(event) if not is_acting and is_step(event, args) else None)
    sys.setprofile(profile)


def _is_under(folder: str, args: tuple) -> bool:
    return any(isinstance(arg, (str, os.PathLike)) and os.fspath(arg).startswith(folder) for arg in args)


def _end(work: Callable[[], Any], code: Callable[[], int]) -> None:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(100)
    os._exit(code())
