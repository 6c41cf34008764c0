"""A program with its equations changed, and those of all programs inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Eqn

Inside = Callable[[], dict[str, Any]]
"""The parameters of an equation, with the programs in them rewritten."""


def rewritten(program: Any, change: Callable[[Eqn, Inside], Any]) -> Any:
    """`program` with each equation changed.

    Args:
      program: with its constants or without.
      change: what makes an equation, or a list of them, of one and of what its parameters are once
        programs inside are rewritten. Nothing is, if it does not ask for them.
    """

    def inside(value: Any) -> Any:
        if isinstance(value, _compat.JAXPR_TYPES):
            return rewritten(value, change)
        if isinstance(value, tuple):
            parts = list(map(inside, value))
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    jaxpr = getattr(program, "jaxpr", program)
    eqns = []
    for eqn in jaxpr.eqns:
        params = eqn.params
        changed = change(eqn, lambda params=params: {k: inside(v) for k, v in params.items()})
        eqns += changed if isinstance(changed, list) else [changed]
    jaxpr = jaxpr.replace(eqns=eqns)
    return _compat.close(jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else jaxpr
