"""Functions of JAX that are replaced while rows are staged, as they need no size as a number.

JAX's own functions make an ``int`` of the size of a row, and an ``int`` cannot be symbolic. So each
of these is replaced from when a function of one row is staged until that is done. The replacement
calls JAX's own function in every other thread.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

PRIVATE_PLACES = {
    # `Array.__getitem__` and `.at` have no other function that could be replaced: it is an error
    # there that a symbolic size is neither an int nor an array.
    "indices": "jax._src.numpy.indexing._parse_indices",
    # The derivative of a primitive: a rule that `jax.grad` calls, and users do not.
    "derivative of cumprod": "jax._src.lax.control_flow.loops.associative_scan",
    # A `psum` that the user imported by name would return the size times the number of lanes, and
    # no error. All of `psum` and `pmean` calls this.
    "psum": "jax._src.lax.parallel._psum",
    # Both describe an operation by an object, whose derivative `jnp.digitize`, `jnp.histogram` and
    # others meet, too.
    "searchsorted": "jax._src.numpy.hijax.searchsorted",
    "nonzero": "jax._src.numpy.hijax.nonzero",
}
"""Functions that have no public name, and why the public ones do not serve, in JAX 0.10 to 0.12."""


def patches(*functions: str) -> Callable[[Any], Any]:
    """Replaces functions of JAX while rows are traced (`patched`).

    `functions` are import paths or names in `PRIVATE_PLACES`. The replacement takes the original
    first, and must act like it for everything except sizes of rows.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            within, _, name = PRIVATE_PLACES.get(function, function).rpartition(".")
            try:
                module = importlib.import_module(within)
                original = getattr(module, name)
            except (ModuleNotFoundError, AttributeError):  # a JAX that has moved it raises as ever
                continue
            PATCHES.append(_Patch(module, name, original, replacement))
        return replacement

    return decorate


class _Patch:
    """Replaces a function for the threads that trace rows."""

    def __init__(
        self,
        module: ModuleType,
        name: str,
        original: Callable[..., Any],
        replacement: Callable[..., Any],
    ) -> None:
        @functools.wraps(original)
        # Other threads call the original.
        def ours(*args: Any, **kwargs: Any) -> Any:
            return (here if traces_rows.get() else original)(*args, **kwargs)

        here = functools.partial(replacement, original)
        ours.__module__, ours.__qualname__ = module.__name__, name  # where `pickle` finds it
        self.module, self.name, self.original, self.ours = module, name, original, ours

    def put(self, function: Callable[..., Any], instead_of: Callable[..., Any]) -> None:
        if getattr(self.module, self.name) is instead_of:  # unless other code has replaced it
            setattr(self.module, self.name, function)


PATCHES: list[_Patch] = []  # made by imports

traces_rows: ContextVar[bool] = ContextVar("batchax_traces_rows", default=False)
"""Whether this thread traces rows."""

_calls = 0

_lock = threading.Lock()


def looked_up_before(names: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the name of a patched function that was imported before, and where it is."""
    for name, value in names.items():
        for patch in PATCHES:
            if value is patch.original and "_src" not in patch.module.__name__:
                return name, f"{patch.module.__name__}.{patch.name}"
    return None


def resolve_patched(function: T) -> T | Callable[..., Any]:
    """Returns the replacement of a function that was passed, while rows are traced."""
    for patch in PATCHES:
        if function is patch.original:
            return patch.ours
    return function


@contextmanager
def patched() -> Iterator[None]:
    """Applies `patches` to JAX's functions, for this thread."""
    global _calls
    # Several threads may trace rows: the first one applies, and the last one reverts.
    with _lock:
        _calls += 1
        if _calls == 1:
            for patch in PATCHES:
                patch.put(patch.ours, patch.original)
    before = traces_rows.set(True)
    try:
        yield
    finally:
        traces_rows.reset(before)
        with _lock:
            _calls -= 1
            if _calls == 0:
                for patch in PATCHES:
                    patch.put(patch.original, patch.ours)
