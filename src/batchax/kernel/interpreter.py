"""The interpreter: walks a staged program and batches it equation by equation.

Each value carries the position of its batch axis, or None while it does not
depend on the batch. An equation whose operands are all unbatched, and which
does not use the name of the axis, is emitted once as it is; any other goes to
the rule of its primitive. Rules emit ordinary JAX operations into whatever
trace surrounds the call, so every JAX transformation composes from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchax import _compat
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.fallback import run_without_rule
from batchax.kernel.named_axes import may_use_name
from batchax.kernel.reference_axes import create_batched, references_to_batch
from batchax.kernel.registry import find
from batchax.kernel.rule_results import run_rule
from batchax.kernel.varying import (
    as_lanes,
    check_lanes_apart,
    holds_programs,
    varies_as_staged,
    vary_alike,
)

Placed = tuple[Any, AxisPosition]
"""A value, and where it carries the batch axis."""


@dataclass(eq=False)
class ProgramRun:
    """A run through a program, for rules that look ahead in it.

    Attributes:
      jaxpr: the program.
      found: what the rule of a primitive found out of the program.
      kept: what a rule leaves for an equation that comes later, by that equation's id.
    """

    jaxpr: Any
    found: dict[Any, Any] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)


def interpret(
    axis: Axis,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    axes: Sequence[AxisPosition],
) -> tuple[list[Any], list[AxisPosition]]:
    """Runs the per-example program `jaxpr` for all lanes of `axis`.

    Args:
      axis: the axis being mapped.
      jaxpr: a jaxpr over examples; `consts` are its constants, unbatched.
      args: the operands; one whose entry in `axes` is an int carries the batch
        axis at that position, one whose entry is None is the same in each lane.

    Returns:
      The outputs and the position of the batch axis in each, None for an
      output that does not depend on the batch.
    """
    one_for_each_lane = references_to_batch(axis, jaxpr, axes)
    whole = ProgramRun(jaxpr)

    def run_equation(eqn: Any, operands: list[Placed]) -> Iterable[Placed]:
        values, positions = [x for x, _ in operands], [a for _, a in operands]
        for_each_lane = not one_for_each_lane.isdisjoint(eqn.outvars)
        outs = batch_equation(axis, eqn, values, positions, for_each_lane, whole)
        return zip(*outs, strict=True)

    with recording.run(jaxpr):
        outputs = evaluate(
            jaxpr,
            [(x, None) for x in consts],
            list(zip(args, axes, strict=True)),
            run_equation,
            lambda literal: (literal.val, None),
        )
    return [value for value, _ in outputs], [position for _, position in outputs]


def batch_equation(
    axis: Axis,
    eqn: Any,
    operands: list[Any],
    operand_axes: list[AxisPosition],
    creates_batched: bool = False,
    whole: ProgramRun | None = None,
) -> tuple[Sequence[Any], Sequence[AxisPosition]]:
    """Outputs of one equation for all lanes, always as sequences.

    Args:
      axis: the axis being mapped.
      eqn: the equation.
      operands, operand_axes: what it takes, and where that carries the batch axis.
      creates_batched: whether it creates a reference that must have a part for each lane.
      whole: the run through the program that the equation is of, if rules may look ahead in it.
    """
    # What does not depend on the batch is emitted once, for all lanes.
    shared = operand_axes.count(None) == len(operand_axes) and not (
        creates_batched or (axis.name is not None and may_use_name(eqn, axis.name))
    )
    if axis.spmd_name is not None and not shared:
        check_lanes_apart(axis, eqn)
    checked = _compat.checked_axes()
    if checked:
        operands = vary_alike(eqn, operands)
        shared = shared and _fits(eqn, operands)
    batch = create_batched if creates_batched else functools.partial(_batch, shared, whole)
    if recording.is_on():
        with recording.equation(axis, eqn, operand_axes, shared) as record:
            outs, out_axes = batch(axis, eqn, operands, operand_axes)
            record.out_axes = tuple(out_axes)
    else:
        outs, out_axes = batch(axis, eqn, operands, operand_axes)
    return (as_lanes(axis, outs, out_axes) if checked else outs), out_axes


def _fits(eqn: Any, operands: Sequence[Any]) -> bool:
    """Whether the types of operands inside ``shard_map`` let an equation be emitted as it is."""
    casts = eqn.primitive.name == "pvary"  # JAX refuses to cast a value that varies already
    return not (casts or holds_programs(eqn)) or varies_as_staged(eqn, operands)


def _batch(
    shared: bool,
    whole: ProgramRun | None,
    axis: Axis,
    eqn: Any,
    operands: list[Any],
    operand_axes: list[AxisPosition],
) -> tuple[Sequence[Any], Sequence[AxisPosition]]:
    primitive = eqn.primitive
    if shared:
        return bind_equation(eqn, operands), [None] * len(eqn.outvars)
    found = find(primitive)
    if found is None:
        return run_without_rule(axis, eqn, operands, operand_axes)
    if found.is_users:
        types = [v.aval for v in eqn.outvars]
        return run_rule(axis, primitive, found.rule, operands, operand_axes, eqn.params, types)
    more = {"place": (whole, eqn)} if found.looks_ahead and whole is not None else {}
    out, out_axes = found.rule(axis, operands, operand_axes, **eqn.params, **more)
    if primitive.multiple_results:
        return out, out_axes
    return [out], [out_axes]
