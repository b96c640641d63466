"""A forked process that kills itself right before its n-th step towards the disk."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = ("write", "flush", "fsync")  # of files; every other step that changes something has an audit event of its own
READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


def killed_at(n: int, work: Callable[[], Any], folder: Path) -> bool:
    """Runs `work` in a process of its own that is killed at its n-th step under `folder`. Whether it came that far."""
    pid = os.fork()
    if pid == 0:
        _run(n, work, str(folder))
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the process failed before it was killed: see stderr"
    return False


def _run(n: int, work: Callable[[], Any], folder: str) -> None:
    left = n

    def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple) -> None:
        is_open = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = is_open or (event.startswith(("os.", "shutil.")) and event not in READS)
        if changes and any(isinstance(arg, (str, os.PathLike)) and os.fspath(arg).startswith(folder) for arg in args):
            step()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__name__ in WRITES:
            step()

    sys.addaudithook(audit)
    sys.setprofile(profile)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
