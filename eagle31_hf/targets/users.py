"""The contexts that use each of the modules whose forwards are replaced meanwhile, of all threads."""

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


class Users:
    """Counts the contexts that use each object. Who reads or changes what is replaced does so under `lock`. `forget`:
    called in a process that was forked, for what else is of the parent's contexts."""

    def __init__(self, forget: Callable[[], object] = lambda: None):
        self._forget = forget
        self.begin_anew()
        if hasattr(os, "register_at_fork"):  # Windows has none, and does not fork
            os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        """Begins with no context. In a process that was forked none of its parent goes on, nor does anyone hold the
        lock."""
        self.lock = threading.RLock()
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._forget()

    def enter(self, used: Any) -> bool:
        """Adds a context. Returns whether it is the only one."""
        self._counts[used] = self._counts.get(used, 0) + 1
        return self._counts[used] == 1

    def leave(self, used: Any) -> bool:
        """Takes a context away, which may have begun before a fork. Returns whether none is left."""
        self._counts[used] = max(0, self._counts.get(used, 0) - 1)
        return self._counts[used] == 0
