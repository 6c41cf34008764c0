"""Running a program of one example again, with some of its equations done otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from batchax import _compat


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    run_equation: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """What `jaxpr` returns if `run_equation`, of an equation and operands, does each equation.

    What that emits is of the line of the user's that made the equation.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    outer_names = _compat.current_name_stack()

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        with _compat.user_source(eqn.source_info, outer_names), eqn.ctx.manager:
            outs = run_equation(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))
