"""Shards that need no target made by several processes."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path

import torch

from .preparation_options import PreparationOptions
from .shard_builder import ShardBuilder
from .skipped import Skipped
from .store import write_shard

WATCH = 1.0  # seconds between looks at whether the process that asks is still there
QUOTA = "/sys/fs/cgroup/cpu.max"  # of a container: microseconds of all cores in a period, and the period
Refusals = list[tuple[int, Skipped]]
_builder: ShardBuilder  # of a process that makes shards, and the folder they go to
_folder: str | Path


def processes(options: PreparationOptions) -> int:
    """Returns how many processes tokenize: as many as are asked for, or as there are cores for this process, in a
    container no more than it is allowed. One where processes cannot be forked."""
    if "fork" not in get_all_start_methods():
        return 1
    if options.processes is not None:
        return options.processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, Path(QUOTA).read_text().split())
    except (OSError, ValueError):  # there is none
        return cores
    return max(1, min(cores, quota // period))


def in_processes(
    builder: ShardBuilder, folder: str | Path, indices: list[int], count: int
) -> Iterator[tuple[int, int]]:
    """Makes and writes shards in `count` processes; yields the examples and tokens of each, in their order. Raises
    RuntimeError where one of the processes is killed.

    They are forked, as those of `datasets`: tokenizers, records and templates need not be sent. None of them touches a
    GPU.
    """
    left = iter(indices)
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (builder, folder, os.getpid()))
    try:
        # no more are asked for than are made: a stop waits for these
        making = deque(pool.submit(_make, index) for index in islice(left, count))
        while making:
            num_rows, num_tokens, refusals = making.popleft().result()
            making.extend(pool.submit(_make, index) for index in islice(left, 1))
            for number, refusal in refusals:
                builder.skips.add(number, refusal)
            yield num_rows, num_tokens
    except BrokenProcessPool:
        raise RuntimeError(
            "a process that tokenizes was killed, for want of memory maybe; shards that are complete are kept. The same"
            " command goes on; --processes 1 needs the least memory."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(builder: ShardBuilder, folder: str | Path, parent: int) -> None:
    """Begins a process that makes shards. It leaves Ctrl-C to the one that asks, and ends with it."""
    global _builder, _folder
    _builder, _folder = builder, folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # a fork has no threads of the parent's pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def _make(index: int) -> tuple[int, int, Refusals]:
    """Makes and writes a shard; returns the numbers of its examples and tokens, and the first few records of each
    reason that gave none."""
    skips = _builder.skips
    skips.forget()
    num_rows, num_tokens = write_shard(_folder, index, *_builder.build(index))
    return num_rows, num_tokens, skips.shown
