"""Collectives over the axis being mapped, in a batching rule of the user's.

A rule works on whole batches, with the lanes along axis 0. There a collective means what
it means in the function: of an array with the lanes in front each lane contributes its
entry, and has the result at its own; of what is the same for all lanes each has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from batchax.errors import UnsupportedError
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.inside import programs_inside
from batchax.jaxprs.spoken import line_of, spoken
from batchax.jaxprs.words import Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, match_axis
from batchax.kernel.interpreter import batch_equation
from batchax.kernel.named_axes import uses_name
from batchax.user_rules.call import custom_call_p


def run_with_collectives(
    axis: Axis,
    jaxpr: Jaxpr,
    consts: Sequence[Value],
    args: Sequence[Value],
    batched: Sequence[bool],
) -> list[Any]:
    """Runs the program of a rule whose collectives over `axis` are of its lanes.

    Args:
      axis: the axis being mapped.
      jaxpr: the program of the rule, with its constants `consts`.
      args: its operands; the `batched` ones have the lanes along axis 0.

    Raises:
      UnsupportedError: a collective in a loop or branch of the rule, or one whose result
        for a lane cannot be had for all of them.
    """
    by_lane = {v for v, b in zip(jaxpr.invars, batched, strict=True) if b}

    def run_equation(eqn: Eqn, operands: list[Value]) -> Sequence[Any]:
        dependent = [not isinstance(v, Literal) and v in by_lane for v in eqn.invars]
        if any(dependent):
            by_lane.update(eqn.outvars)
        if not _is_collective(axis, eqn):
            return bind_equation(eqn, operands)
        if eqn.primitive.name == "jit":
            body = eqn.params["jaxpr"]
            return run_with_collectives(axis, body.jaxpr, body.consts, operands, dependent)
        return _of_lanes(axis, eqn, operands, dependent)

    return evaluate(jaxpr, consts, args, run_equation)


def _is_collective(axis: Axis, eqn: Eqn) -> bool:
    # A call with a rule of its own is not batched here.
    return eqn.primitive is not custom_call_p and uses_name(eqn, axis.name)


def _of_lanes(axis: Axis, eqn: Eqn, operands: list[Value], dependent: Sequence[bool]) -> list[Any]:
    """The results of a collective, with the lanes along axis 0 if an operand has them."""
    positions = [
        0 if d and np.shape(x)[:1] == (axis.size,) else None
        for x, d in zip(operands, dependent, strict=True)
    ]
    hint = f"Map a function in the rule: batchax.vmap(..., axis_name={axis.name!r})."
    where = f"{line_of(eqn)}: {spoken(eqn)} over {axis.name!r}"
    if programs_inside(eqn):
        raise UnsupportedError(f"{where} contains a collective over the lanes of a rule. {hint}")
    outs, out_axes = batch_equation(axis, eqn, operands, positions)
    in_front = any(a is not None for a in positions)
    placed = [
        match_axis(axis, x, a, 0) if in_front else x for x, a in zip(outs, out_axes, strict=True)
    ]
    for x, v, a in zip(placed, eqn.outvars, out_axes, strict=True):
        if np.shape(x) != v.aval.shape or (a is not None and not in_front):
            raise UnsupportedError(
                f"{where} has another result for each lane, which in a rule has no place. {hint}"
            )
    return placed
