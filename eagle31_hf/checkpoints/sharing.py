"""Folders that several processes use: those that change one take turns, those that read it see no half of a change."""

import functools
import inspect
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils import logging

from .files import SIDE_FILES, SUBFOLDERS
from .knobs import KNOBS_FILE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.get_logger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])
LOCK = ".eagle31.lock"  # it exists while a process changes the folder; if that is killed, until the next one is done
_held = threading.local()  # of this thread: the `folders` whose lock it holds, by device and inode
READ_FILES = ("config.json", KNOBS_FILE, *SIDE_FILES)  # besides weights and their indices
ATTEMPTS = 5  # at reading: one conversion in place changes the files twice, at its commit and with the final layout


@contextmanager
def folder_lock(folder: Path, required: bool = True) -> Iterator[None]:
    """A lock on a folder, which processes, and threads of one process, hold in turn.

    The system releases it when its owner dies. A thread that holds it and asks again, in a function it calls, goes on
    at once. Raises OSError where the lock cannot be had: the lock file cannot be opened or is a link, or the file
    system has no locks. With `required=False` the block then runs without a lock, after a warning.

    The owner removes the lock file before it releases the lock. A process that waited then gets the lock of the removed
    file, which nobody else looks for; it notices that the path names another file, or none, and tries again.
    """
    status, held = os.stat(folder), vars(_held).setdefault("folders", set())
    identity = (status.st_dev, status.st_ino)
    if identity in held:
        yield
        return
    path = folder / LOCK
    with ExitStack() as stack:
        try:
            while not stack.enter_context(_locked(path)):
                stack.close()
        except OSError as error:
            if required:
                raise
            logger.warning("%s Going on without a lock.", error)
        else:
            held.add(identity)
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(held.discard, identity)
        yield


def try_lock(descriptor: int) -> bool:
    """Locks an open file or folder, without waiting. Returns False where another process holds its lock.

    Raises OSError where the system or the file system has no locks. The lock ends with the last copy of the descriptor.
    """
    if fcntl is None:
        raise OSError("this system has no flock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Waits for the lock of the file at `path`, made if need be, and holds it. Yields whether others still find that
    file there."""
    remedy = "Name a destination: a new folder needs no lock."
    if fcntl is None:
        raise OSError(f"{path.parent}: cannot be locked, because this system has no flock. {remedy}")
    try:
        # for writing: NFS locks no other exclusively
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        found = f"{path}: cannot be opened to lock the folder ({error.strerror})"
        raise type(error)(f"{found}; expected a file of your own or none. {remedy}") from None
    try:
        try:
            if not try_lock(descriptor):
                logger.warning("%s: another process is changing this folder; waiting for it to finish.", path.parent)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            found = f"{path}: its file system does not lock files ({error.strerror}), so others could interfere"
            raise OSError(f"{found}. {remedy}") from None
        yield _is_in_place(descriptor, path)
    finally:
        with suppress(OSError):  # closing is not enough: a child forked meanwhile has the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_in_place(descriptor: int, path: Path) -> bool:
    """Returns True where the path still names the descriptor's file. Opens it anew: network file systems may remember
    old names."""
    try:
        other = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.fstat(other))
    finally:
        os.close(other)


Stamps = dict[str, tuple[int, ...]]


def stamps(source: str | os.PathLike | None, subfolder: str | None = None) -> Stamps:
    """Returns path -> device, inode, modification time and size of each file of a drafter's folder.

    It is empty for a Hub repository and for None.
    """
    found: Stamps = {}
    for sub in SUBFOLDERS if source is not None else ():
        folder = Path(source, subfolder or "", sub)
        for path in folder.glob("*") if os.path.isdir(folder) else ():
            if path.name in READ_FILES or path.name.endswith((".safetensors", ".bin", ".index.json")):
                with suppress(OSError):  # a broken or circular link, or gone this moment
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):  # not a folder or a device under such a name
                        found[str(path)] = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    return found


class FolderChangedError(OSError):
    """Raised where a folder has changed while it was read."""


@contextmanager
def unchanged(before: Stamps, source: str | os.PathLike | None, subfolder: str | None = None) -> Iterator[None]:
    """A context for reading a folder, whose stamps were `before`.

    Raises FolderChangedError at its end, whatever was raised in it, where the folder has changed meanwhile.
    """
    failure = None
    try:
        yield
    except Exception as error:  # if the folder changed meanwhile, it says nothing about its content
        failure = error
    now = stamps(source, subfolder)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        found = f"{changed[0]}: was changed while it was read"
        expected = "it to stay as it is. Nothing was written; run it again"
        raise FolderChangedError(f"{found}; expected {expected}.") from failure
    if failure is not None:
        raise failure


def reads_one_state(argument: str) -> Callable[[Function], Function]:
    """Decorates a function that reads the folder given as its argument of that name.

    The function is called again where the folder has changed meanwhile, so that it returns, or fails, for one state of
    the folder. Raises OSError where the folder changes again and again.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def read(*args: Any, **kwargs: Any) -> Any:
            source, failure = signature.bind(*args, **kwargs).arguments.get(argument), None
            place = source, kwargs.get("subfolder")
            for _ in range(ATTEMPTS):
                try:
                    with unchanged(stamps(*place), *place):
                        return function(*args, **kwargs)
                except FolderChangedError as error:
                    failure = error.__cause__
            found = f"{source}: was changed while it was read, {ATTEMPTS} times in a row"
            raise OSError(f"{found}; expected it to settle.") from failure

        return read  # type: ignore[return-value]

    return decorate
