"""Batches that are read before they are asked for, while those before them are learnt from."""

from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher

END = object()  # in place of an item, where there are no more


class ReadAhead:
    """Takes items from an iterator, and has a thread read as many more as were taken last. The first item is read in
    the caller's thread: then the sampler draws its order, from the random numbers that the caller's thread draws."""

    def __init__(self, items: Iterator[Any]):
        self.items = items
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._ready.put(next(items, END))
        self._wanted, self._num_coming = Semaphore(0), 1
        self._is_closed = False
        # A thread that waits for data does not keep the program from ending.
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            self._wanted.acquire()
            if self._is_closed:
                return
            try:
                self._ready.put(next(self.items, END))
            except BaseException as error:  # raised where the item is taken
                self._ready.put(_Failure(error))

    def take(self, count: int) -> list[Any]:
        """Returns the next `count` items, fewer where there are no more. Raises what reading one raised."""
        for _ in range(2 * count - self._num_coming):
            self._wanted.release()
        self._num_coming = max(self._num_coming, 2 * count)
        found = list[Any]()
        for _ in range(count):
            item = self._ready.get()
            self._num_coming -= 1
            if isinstance(item, _Failure):
                raise item.error
            if item is not END:
                found.append(item)
        return found

    def close(self, wait: bool = False) -> None:
        """Ends the thread, `wait`: once it has read what it is reading, which is dropped."""
        self._is_closed = True
        self._wanted.release()
        if wait:
            self._thread.join()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class TrainingBatches:
    """The batches of a training run, an iterator of them for each epoch, read ahead of the steps that learn from
    them."""

    def __init__(self) -> None:
        self._ahead: ReadAhead | None = None
        self._reads_ahead = True

    def without_moving(self, loader: Any) -> Any:
        """Returns a loader that accelerate prepared, whose batches are to be taken here. They stay where they are
        loaded, and the Trainer moves each to its device as it is trained on: not all of an optimizer step at once."""
        # Where one process reads for all, reading is a meeting of all, which another thread's must not cross.
        self._reads_ahead = not isinstance(loader, DataLoaderDispatcher)
        if self._reads_ahead:
            loader.device = None
        return loader

    def take(self, batches: Iterator[Any], count: int) -> list[Any]:
        """Returns the next `count` batches of an epoch; the `count` after them are read while these are trained on, but
        not of a loader in which one process reads for all."""
        if not self._reads_ahead:
            return list(islice(batches, count))
        if self._ahead is None or self._ahead.items is not batches:
            self.close(wait=True)  # the next epoch's batches come from the same loader
            self._ahead = ReadAhead(batches)
        return self._ahead.take(count)

    def close(self, wait: bool = False) -> None:
        """Ends what is read ahead; `wait` as in `ReadAhead.close`."""
        if self._ahead is not None:
            self._ahead.close(wait)
            self._ahead = None
