"""Which references a program creates must have one part for each lane.

A reference is created before anything is written to it. Whether one that starts
out the same for all lanes can stay so is known only from what the rest of the
program writes, so this is settled before the program is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.jaxprs.evaluate import variables_read
from batchax.jaxprs.words import Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.named_axes import uses_axis

_CREATES = frozenset({"new_ref", "empty_ref"})


def references_to_batch(axis: Axis, jaxpr: Jaxpr, axes: Sequence[Position]) -> frozenset[Any]:
    """The references created by `jaxpr` that something batched may be written to.

    An equation with a batched operand is taken to make all its results batched,
    and all that it writes, so a reference may be batched without need but never
    left unbatched wrongly.
    """
    created = {
        eqn.outvars[0] for eqn in jaxpr.eqns if eqn.effects and eqn.primitive.name in _CREATES
    }
    if not created:
        return frozenset()
    batched = {v for v, a in zip(jaxpr.invars, axes, strict=True) if a is not None}
    count = -1
    while count != len(batched):  # a loop, because an earlier equation may read what a later writes
        count = len(batched)
        for eqn in jaxpr.eqns:
            if not batched.isdisjoint(variables_read(eqn)) or uses_axis(axis, eqn):
                batched.update(eqn.outvars)
                batched.update(eqn.invars[i] for i in _compat.written_inputs(eqn))
    return frozenset(created & batched)


def create_batched(
    axis: Axis, eqn: Eqn, operands: Sequence[Value], operand_axes: Sequence[Position]
) -> tuple[list[Any], list[Position]]:
    """The reference that `eqn` creates, with a part for each lane."""
    if eqn.primitive.name == "empty_ref":
        params = {**eqn.params, "ty": unmapped_aval(axis.size, 0, eqn.params["ty"])}
        return [eqn.primitive.bind(**params)], [0]
    (x,), (position,) = operands, operand_axes
    if position is None:
        x, position = axis_to_front(axis, x, None), 0
    return [eqn.primitive.bind(x, **eqn.params)], [position]
