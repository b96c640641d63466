"""Counts of the contexts, of all threads, that use a module whose forward is replaced while they last."""

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


class Users:
    """The number of contexts that use each object. Who counts, or replaces a forward, holds `lock`. A process that was
    forked begins with no context, since those of its parent do not go on there, and calls `forget`. For the life of the
    process."""

    def __init__(self, forget: Callable[[], object] = lambda: None):
        self._forget = forget
        self.begin_anew()
        if hasattr(os, "register_at_fork"):  # Windows has none, and does not fork
            os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        """Begins with no context, and a lock that nobody holds."""
        self.lock = threading.RLock()
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._forget()

    def __contains__(self, used: Any) -> bool:
        """Returns whether any context uses an object."""
        return self._counts.get(used, 0) > 0

    def enter(self, used: Any) -> None:
        """Adds a context."""
        self._counts[used] = self._counts.get(used, 0) + 1

    def leave(self, used: Any) -> bool:
        """Takes a context away; one that began before a fork is not counted. Returns whether none is left."""
        self._counts[used] = max(0, self._counts.get(used, 0) - 1)
        return used not in self
