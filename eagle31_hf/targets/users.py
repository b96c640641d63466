"""Forwards that stand in for those of a target's modules while contexts last, and counts of the contexts, of all
threads, that use what is replaced."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class StandIn:
    """The forward that stands in for a module's own."""

    def __init__(self, module: Any):
        self.module = module

    def own(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple:
        """A copy of the module, made meanwhile, runs its own forward."""
        return StandIn, (self.module,)

    __call__ = own


def restore(modules: Iterable[nn.Module], kind: type[StandIn] = StandIn) -> None:
    """Has modules run their own forwards again, where one of a kind stands in for them."""
    for module in modules:
        if isinstance(vars(module).get("forward"), kind):
            del vars(module)["forward"]


class Users:
    """The number of contexts that use each object, which they keep alive. Who counts, or replaces something, holds
    `lock`. A process that was forked begins with no context, since those of its parent do not go on there, and calls
    `forget`. For the life of the process."""

    def __init__(self, forget: Callable[[], object] = lambda: None):
        self._forget = forget
        self.begin_anew()
        if hasattr(os, "register_at_fork"):  # Windows has none, and does not fork
            os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        """Begins with no context, and a lock that nobody holds."""
        self.lock = threading.RLock()
        self._counts = Counter[int]()  # by the object's id: a config has no hash
        self._forget()

    @contextmanager
    def using(self, used: Any, begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
        """A context that uses an object. Of several, of all threads, the first one calls `begin`, and the last one
        `end`."""
        has_entered = False
        try:
            with self.lock:
                is_first = id(used) not in self._counts
                self.enter(used)
                has_entered = True
                if is_first:
                    begin()
            yield
        finally:
            with self.lock:
                if has_entered and self.leave(used):
                    end()

    def enter(self, used: Any) -> None:
        """Adds a context."""
        self._counts[id(used)] += 1

    def leave(self, used: Any) -> bool:
        """Removes a context. Returns whether none is left: also of one that began before a fork and was not counted in
        this process."""
        self._counts[id(used)] -= 1
        if self._counts[id(used)] > 0:
            return False
        del self._counts[id(used)]
        return True
