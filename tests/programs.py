"""Processes of their own without the seconds of their imports: `eagle31`, forked from a server that has done them, and
functions, forked from the tests' own process."""

import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

ABANDONED = "a pipe that nobody reads"
LONGEST = 120  # seconds a command may take on a machine that does much else


class Program:
    """A command that runs. Its stdout and stderr go to files of these names in `folder`, or stdout to another path or
    ABANDONED."""

    def __init__(
        self, context, folder: Path, arguments: Sequence[str], stdout: str | None, encoding: str, ignored: Sequence[int]
    ):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        where = (str(folder / "stdout") if stdout is None else stdout, str(folder / "stderr"))
        self.process = context.Process(target=be, args=(list(arguments), where, encoding, ignored))
        self.process.start()

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self) -> str:
        path = self.folder / "stderr"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, words: str) -> None:
        """Until stderr has them (or is there, if they are none), or the command has ended."""
        until = time.monotonic() + LONGEST
        while not (words in self.err and (self.folder / "stderr").exists()) and self.process.is_alive():
            assert time.monotonic() < until, f"no {words!r} in: {self.err}"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self) -> int:
        """The exit status; minus the number of the signal that ended it."""
        self.process.join(LONGEST)
        assert self.process.exitcode is not None, f"still running: {self.err}"
        return self.process.exitcode


def heeded() -> None:
    """Heeds the signals that a shell makes commands in the background ignore, and `nohup` any command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def be(arguments: list[str], where: tuple[str, str], encoding: str, ignored: Sequence[int]) -> None:
    """In the new process: what the system and Python do before the program is called."""
    heeded()
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for number, path in enumerate(where, 1):
        os.dup2(opened(path), number)
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv[:] = ["eagle31", *arguments]
    from eagle31_hf.cli import main

    sys.exit(main())


def opened(path: str) -> int:
    if path != ABANDONED:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def forkserver() -> Any:
    """The context of processes that are forked from a server which has imported what commands and trainings do. There
    is one for all tests of a process, and the first use decides what it imports."""
    context = multiprocessing.get_context("forkserver")
    commands = [f"eagle31_hf.cli.{module}" for module in ("run", "talking", "diagnosing", "training")]
    context.set_forkserver_preload([*commands, "transformers.trainer", "eagle31_hf.training.trainer"])
    ensure_running()
    return context


def launched(folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Starts two processes that call a function, as `accelerate launch` does; their errors go to `folder`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        forkserver().Process(target=one_of_two, args=(folder, rank, port, function, arguments)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    return processes


def one_of_two(folder: Path, rank: int, port: int, function: Callable[..., Any], arguments: tuple) -> None:
    os.dup2(os.open(folder / f"errors-{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what the process was forked with, which every training would look through
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(sizes, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    function(*arguments)
    torch.distributed.destroy_process_group()


def in_two_processes(folder: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """Waits for them to have called the function."""
    processes = launched(folder, function, *arguments)
    try:
        for rank, process in enumerate(processes):
            process.join(2 * LONGEST)
            assert process.exitcode == 0, (folder / f"errors-{rank}.txt").read_text()[-4000:]
    finally:
        for process in processes:  # the one waits for the other
            process.kill()


@contextmanager
def programs() -> Iterator:
    """`start(folder, arguments)` in the block; what still runs at its end is killed.

    `ignored`: signals that the command is started to ignore.
    """
    context, started = forkserver(), []

    def start(
        folder: Path,
        arguments: Sequence[object],
        stdout: str | None = None,
        encoding: str = "utf-8",
        ignored: Sequence[int] = (),
    ) -> Program:
        started.append(Program(context, folder, [str(argument) for argument in arguments], stdout, encoding, ignored))
        return started[-1]

    yield start
    for program in started:
        program.process.kill()


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, in a process forked from this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=renew_threads) as pool:
        return pool.submit(function, *arguments).result()


def renew_threads() -> None:
    """Has torch make the pool of threads that a forked process lacks. Were several threads of the process to ask for it
    first, and at the same time, one might find none."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def called(module: str, function: str) -> Any:
    """What the function of a module returns that only this process imports."""
    return getattr(import_module(module), function)()
