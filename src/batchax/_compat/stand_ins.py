"""Functions of JAX that get along without the size of a row as a number, while rows are staged.

They take sizes for numbers where they need not, and nothing that is passed to them can tell them
otherwise. So another function stands in for each, from when a function of one row is staged until
that is done, and only for the thread that does it. Other threads find JAX's own function where it
is, and whoever has got hold of what is there in the meantime calls JAX's.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

STAND_IN_PLACES = {
    "associative_scan": ("jax.lax", "associative_scan"),
    "associative_scan of cumprod": ("jax._src.lax.control_flow.loops", "associative_scan"),
    "convolution": ("jax._src.numpy.lax_numpy", "_conv"),
    "convolution of scipy": ("jax._src.scipy.signal", "_convolve_nd"),
    "derivative of a reduction": ("jax._src.lax.lax", "_reduce_jvp"),
    "fourier transform": ("jax._src.numpy.fft", "_fft_core"),
    "indices": ("jax._src.numpy.indexing", "_parse_indices"),
    "interp": ("jax.numpy", "interp"),
    "linspace": ("jax.numpy", "linspace"),
    "loop of fori_loop": ("jax._src.lax.control_flow.loops", "while_loop"),
    "number": ("jax._src.core", "concrete_or_error"),
    **{
        name: ("jax.numpy", name)
        for name in (
            "argpartition array_split bartlett blackman cov diagflat hamming hanning iterable "
            "kaiser partition place poly polyder polydiv polyfit polyint polymul polyval resize "
            "roots setxor1d"
        ).split()
    },
    "cov of corrcoef": ("jax._src.numpy.lax_numpy", "cov"),
    "matrix_rank": ("jax.numpy.linalg", "matrix_rank"),
    "eigh_tridiagonal": ("jax.scipy.linalg", "eigh_tridiagonal"),
    "csd": ("jax.scipy.signal", "csd"),
    "csd of welch": ("jax._src.scipy.signal", "csd"),
    "permutation": ("jax.random", "permutation"),
    "rfftfreq": ("jax.numpy.fft", "rfftfreq"),
    "searchsorted": ("jax.numpy", "searchsorted"),
    "psum": ("jax._src.lax.parallel", "_psum"),
    "shuffle": ("jax._src.random.core", "_shuffle"),
    "steps of geomspace and logspace": ("jax._src.numpy.array_creation", "linspace"),
    "vander": ("jax.numpy", "vander"),
    **{
        f"matrix of a size, {name}": ("jax.scipy.linalg", name)
        for name in ("dft", "helmert", "hilbert", "invhilbert", "invpascal", "pascal")
    },
}
"""The module that looks a function up, and its name there."""


def stands_in_for(*functions: str) -> Callable[[Any], Any]:
    """Decorator: what functions of `STAND_IN_PLACES` do while rows are staged (`standing_in`).

    It is called with that function first, and does what that does for all but sizes of rows.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            within, name = STAND_IN_PLACES[function]
            try:
                module = importlib.import_module(within)
                original = getattr(module, name)
            except (ModuleNotFoundError, AttributeError):  # a JAX that has moved it refuses as ever
                continue
            _stand_ins.append(_StandIn(module, name, original, replacement))
        return replacement

    return decorate


class _StandIn:
    """A function in the place of another, for the threads that stage rows.

    Code of a module finds a name in its `__dict__`, where there is one function for all threads: it
    calls the original for those that stage no rows. Everybody else asks the module, whose class
    knows the name while rows are staged (this is its descriptor), and answers each thread.
    """

    def __init__(self, module: ModuleType, name: str, original: Any, replacement: Any) -> None:
        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return (here if _staging.get() else original)(*args, **kwargs)

        here = functools.partial(replacement, original)
        self.module, self.name, self.original, self.ours = module, name, original, ours

    def __get__(self, module: Any, kind: Any = None) -> Any:
        there = vars(self.module)[self.name]
        return self.original if there is self.ours and not _staging.get() else there

    def __set__(self, module: Any, value: Any) -> None:
        vars(self.module)[self.name] = value

    def put(self) -> None:
        vars(self.module)[self.name] = self.ours

    def take_away(self) -> None:
        if vars(self.module)[self.name] is self.ours:  # or somebody has replaced it meanwhile
            vars(self.module)[self.name] = self.original


_stand_ins: list[_StandIn] = []  # made by imports

_staging: ContextVar[bool] = ContextVar("staging", default=False)

_calls = 0
_kinds: dict[ModuleType, type] = {}  # the classes of modules before

_lock = threading.Lock()


def looked_up_before(names: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of a function of JAX's own for which another stands in, and where that is."""
    for name, value in names.items():
        for stand_in in _stand_ins:
            if value is stand_in.original and "_src" not in stand_in.module.__name__:
                return name, f"{stand_in.module.__name__}.{stand_in.name}"
    return None


def looked_up_now(function: Any) -> Any:
    """A function that was passed, or what stands in for it while rows are staged."""
    if _staging.get():
        for stand_in in _stand_ins:
            if function is stand_in.original:
                return stand_in.ours
    return function


@contextmanager
def standing_in() -> Iterator[None]:
    """While it lasts JAX's functions are those of `stands_in_for`, for this thread."""
    global _calls
    with _lock:
        _calls += 1
        if _calls == 1:
            _put_all()
    before = _staging.set(True)
    try:
        yield
    finally:
        _staging.reset(before)
        with _lock:
            _calls -= 1
            if _calls == 0:
                _take_all_away()


def _put_all() -> None:
    for module in {stand_in.module for stand_in in _stand_ins}:
        kind = _kinds[module] = type(module)
        names = {s.name: s for s in _stand_ins if s.module is module}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **names})
    for stand_in in _stand_ins:
        stand_in.put()


def _take_all_away() -> None:
    for stand_in in _stand_ins:
        stand_in.take_away()
    for module, kind in _kinds.items():
        module.__class__ = kind
    _kinds.clear()
