"""Symbolic sizes of rows, and functions of JAX that must not take them for numbers."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.core
import numpy as np


class RowScope(jax.export.SymbolicScope):
    """The scope of the sizes of the rows of one call.

    Attributes:
      lengths: what the rows may be like, for whoever answers a question about these sizes.
    """

    def __init__(self, lengths: Any) -> None:
        super().__init__()
        self.lengths = lengths


def row_symbols(names: Sequence[str], lengths: Any) -> tuple[Any, ...]:
    """Symbolic sizes of rows, in a scope of their own."""
    if not names:
        return ()
    return tuple(jax.export.symbolic_shape(", ".join(names), scope=RowScope(lengths)))


def is_row_size(x: Any) -> bool:
    """Whether `x` is an expression of sizes that `row_symbols` made."""
    return type(x) is SIZE and type(x.scope) is RowScope


SIZE: Any = type(jax.export.symbolic_shape("n")[0])


def answers_for_row_sizes(*names: str) -> Callable[[Any], Any]:
    """Decorator: what methods of these names, such as ``__eq__``, do where rows' sizes are asked.

    It is called with the method's name, what JAX does, the frame of the caller, and the
    operands. JAX's sizes say False where they cannot tell whether they are equal, and there is no
    public way to make them refuse. Sizes of other scopes are left as they are.
    """

    def decorate(answer: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            # Without a `__bool__` an object is true.
            setattr(SIZE, name, _answered(name, getattr(SIZE, name, bool), answer))
        return answer

    return decorate


def _answered(name: str, original: Any, answer: Callable[..., Any]) -> Any:
    if original is bool:
        original = lambda size: True

    @functools.wraps(original)
    def method(self: Any, *others: Any) -> Any:
        if type(self.scope) is not RowScope:
            return original(self, *others)
        return answer(name, original, sys._getframe(1), self, *others)

    return method


def stands_in_for(module: str, name: str) -> Callable[[Any], Any]:
    """Decorator: what a function within JAX does while rows are staged (`standing_in`).

    For those that read a size as a number where they need not, and cannot be told otherwise. It is
    called with that function first, and does what that does for all but sizes of rows.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        try:
            within = importlib.import_module(module)
            original = getattr(within, name)
        except (ModuleNotFoundError, AttributeError):  # a JAX that has moved it refuses as ever
            return replacement
        ours = functools.wraps(original)(functools.partial(replacement, original))
        _stand_ins.append((within, name, original, ours))
        return replacement

    return decorate


_stand_ins: list[tuple[Any, str, Any, Any]] = []  # where, its name, JAX's, ours; made by imports

_standing_in = 0

_stand_ins_lock = threading.Lock()


@contextmanager
def standing_in() -> Iterator[None]:
    """While it lasts JAX's functions are those of `stands_in_for`, and afterwards its own again.

    Other threads that call them meanwhile get what JAX does: they have no sizes of rows.
    """
    global _standing_in
    with _stand_ins_lock:
        _standing_in += 1
        if _standing_in == 1:
            for within, name, _, ours in _stand_ins:
                setattr(within, name, ours)
    try:
        yield
    finally:
        with _stand_ins_lock:
            _standing_in -= 1
            if _standing_in == 0:
                for within, name, original, _ in _stand_ins:
                    setattr(within, name, original)


def symbols(dim: Any) -> frozenset[str]:
    """The names in a symbolic size; ``_get_vars`` has no public spelling."""
    return frozenset(dim._get_vars())


def evaluate_size(dim: Any, values: dict[str, Any]) -> Any:
    """A symbolic size where its names have `values`, which may be arrays or traced.

    JAX does this only for itself, when it lowers an exported program, and computes in the
    integers that are its default.
    """
    values = {k: v.astype(int) if hasattr(v, "astype") else v for k, v in values.items()}
    if any(isinstance(value, jax.core.Tracer) for value in values.values()):
        return dim._evaluate(values)
    # A maximum of sizes is computed by JAX; the remainder by an empty row's is left undefined.
    with jax.ensure_compile_time_eval(), np.errstate(divide="ignore"):
        size = dim._evaluate(values)
    return np.asarray(size) if isinstance(size, jax.Array) else size
