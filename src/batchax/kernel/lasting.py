"""What outlives a call, and is shared by all threads.

Whatever else is mutable belongs to one call, or to one thread (a context variable).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from batchax import _compat
from batchax.jaxprs.program_key import program_key
from batchax.kernel.axis import Axis
from batchax.kernel.registry import registrations


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


def call_key(axis: Axis, program: _compat.ClosedJaxpr, *rest: Hashable) -> Hashable:
    """Equal for calls of programs that do the same, in the same surroundings, outside of tracing.

    A call outside of `jit` stages its function anew each time. What it takes longer to make of the
    program is remembered under this.

    Args:
      axis: the axis being mapped.
      program: the program of one example.
      rest: what else the call depends on: the types of its arguments, say.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return axis, program_key(program), registrations(), mesh, *rest
