"""Batches, and the target's states of them, that are read before they are asked for, while those before them are learnt
from."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor

END = object()  # in place of a batch, where there are no more
States = tuple[Tensor, Tensor]  # of a batch: aux hidden states, and those that enter the target's head


class TrainingBatches:
    """The batches of a training run, an iterator of them for each epoch, read ahead of the steps that learn from
    them."""

    def __init__(self) -> None:
        self._batches: Iterator[Any] | None = None
        self._pool: ThreadPool | None = None  # its one thread reads, and does not keep the program from ending
        self._coming = deque[AsyncResult]()
        self._reads_ahead = True

    def without_moving(self, loader: Any) -> Any:
        """Keeps the batches of a loader that accelerate prepared on the CPU, so that only the batch that is trained on
        is on the device, and notes whether they can be read ahead. Returns the loader."""
        # Where one process reads for all, reading is a collective operation, which must not mix with training's.
        self._reads_ahead = not isinstance(loader, DataLoaderDispatcher)
        if self._reads_ahead:
            loader.device = None
        return loader

    def take(self, batches: Iterator[Any], count: int) -> list[Any]:
        """Returns the next `count` batches of an epoch, fewer at its end; the `count` after them are read while these
        are trained on, but not of a loader in which one process reads for all. Raises what reading one raised."""
        if not self._reads_ahead:
            return list(islice(batches, count))
        found = list[Any]()
        if self._batches is not batches:
            self.close(wait=True)  # the next epoch's batches come from the same loader
            self._batches, self._pool = batches, ThreadPool(1)
            # Read here, not by the thread: with the first batch the sampler draws its order, which must come before
            # other code draws.
            found.append(next(batches, END))
        while len(found) + len(self._coming) < 2 * count:
            self._coming.append(self._pool.apply_async(next, (batches, END)))
        while len(found) < count:
            found.append(self._coming.popleft().get())
        return [batch for batch in found if batch is not END]

    def close(self, wait: bool = False) -> None:
        """Ends the reading, `wait`: once the batch that is being read is there, which is dropped."""
        if self._pool is not None:
            self._pool.terminate()
            if wait:
                self._pool.join()
        self._batches = self._pool = None
        self._coming.clear()


class StatesAhead:
    """The target's states of the batches of one optimizer step, where the target has a device of its own: a thread
    reads those of a batch while the one before it is learnt from, and begins with the first at once.

    `read`: returns the states of a batch, on the target's device.
    """

    def __init__(self, read: Callable[[Any], States], batches: list[Any]):
        self._read, self._left = read, deque(batches)
        self._thread = ThreadPoolExecutor(1)
        self._read_next()

    def take(self, device: torch.device) -> States:
        """Returns the states of the next batch on a device, and has those of the batch after it read; no others are
        held. Raises what reading them raised."""
        states, last_states = self._coming.result()
        # Before the next read: a GPU works in order, and a copy that is asked for later would wait for that read.
        taken = states.to(device), last_states.to(device)
        self._read_next()
        return taken

    def _read_next(self) -> None:
        if self._left:
            self._coming = self._thread.submit(self._read, self._left.popleft())
        else:
            del self._coming
            self._thread.shutdown(wait=False)
