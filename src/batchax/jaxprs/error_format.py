"""Equations, functions and values as messages tell of them: by what users call them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.jaxprs.bodies import with_inside
from batchax.jaxprs.primitive_facts import shown
from batchax.jaxprs.types import Eqn


def name_of(fun: object) -> str:
    """What messages and bars call a function of the user."""
    name = getattr(fun, "__name__", None)
    return name if isinstance(name, str) else type(fun).__name__


def spoken(eqn: Eqn) -> str:
    """What an equation is called in a sentence."""
    name = shown(eqn.primitive)
    return f"`{_WRITTEN.get(name, name)}`"


def line_of(eqn: Eqn, running: bool = True) -> str:
    """`file:line (function)` of the user's code that made an equation, or what is inside it.

    Where neither is known: of the line that is running now, or "" if not `running`.
    """
    lines = (_compat.user_line(e.source_info) for e in with_inside([eqn]))
    return next(filter(None, lines), "") or _compat.user_line(eqn.source_info, running=running)


def show(value: object) -> str:
    """A value that is not what it should be: an array by its type, not by its elements."""
    text = brief(value)
    return text if _is_array(value) else f"{text} of type {type(value).__name__}"


def brief(value: object) -> str:
    """As `show`, of what may be of the right type."""
    if _is_array(value):
        traced = "a traced array" if isinstance(value, Tracer) else "an array"
        return f"{traced} of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def listed(items: Iterable[Any]) -> str:
    """Things one after another: the first of them, and how many more there are."""
    first, rest = (items := list(map(str, items)))[:_MOST], len(items) - _MOST
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def count(n: int, one: str, several: str | None = None) -> str:
    """Writes a number of things: "1 lane", "1,024 lanes", "2 entries"."""
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def _is_array(value: object) -> TypeGuard[jax.Array | np.ndarray]:
    return isinstance(value, (jax.Array, np.ndarray))


_WRITTEN = {"psum_invariant": "psum", "all_gather_invariant": "all_gather"}
"""What JAX stages inside of ``shard_map``, and what users wrote."""
_LONG = 200
_MOST = 20
