"""What outlives a call, and is shared by all threads.

Whatever else is mutable belongs to one call, or to one thread (a context variable).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Lasting:
    """Results by key, of which those that were not asked for longest are forgotten first.

    No lock is held while something is built, which may run the user's code. Two threads that
    ask for the same at once may both build it, and get the same one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()  # comparing keys may run code that comes here again

    def get(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """What `build` returns, built only if there is nothing for `key` yet."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        built = build()
        with self._lock:
            found = self._known.setdefault(key, built)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
            return found
