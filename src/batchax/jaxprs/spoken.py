"""Equations as messages tell of them: what users call them, and the line that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchax import _compat
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.own_primitives import shown


def spoken(eqn: Any) -> str:
    """What an equation is called in a sentence."""
    return f"`{shown(eqn.primitive)}`"


def line_of(eqn: Any) -> str:
    """`file:line (function)` of the user's code that made an equation, or what is inside it.

    Where neither is known, of the line that is running now.
    """
    lines = (_compat.user_line(source) for source in _sources(eqn))
    return next(filter(None, lines), "") or _compat.user_line(eqn.source_info, running=True)


def _sources(eqn: Any) -> Iterator[Any]:
    yield eqn.source_info
    for body in bodies_of(eqn):
        for inner in body.jaxpr.eqns:
            yield from _sources(inner)
