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
from itertools import chain, compress
from typing import Any

from jax.core import Tracer
from jax.extend.core.primitives import jit_p

from batchax import _compat
from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.evaluate import bind_equation, evaluate, plan, variables_in
from batchax.jaxprs.own_primitives import is_own, shown
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn, Jaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position
from batchax.kernel.fallback import run_without_rule
from batchax.kernel.in_order import Placed, evaluate_in_order, in_order
from batchax.kernel.looking import found, in_jit, looks_here, unseen
from batchax.kernel.named_axes import has_rules, may_use_name
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


@dataclass(eq=False)
class ProgramRun:
    """A run through a program, for rules that look ahead in it.

    Attributes:
      jaxpr: the program.
      read: which of its results the caller reads; None for all.
      found: what the rule of a primitive found out of the program.
      kept: what a rule leaves for an equation that comes later, by that equation's id.
    """

    jaxpr: Jaxpr
    read: Sequence[bool] | None = None
    found: dict[Any, Any] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)

    def reads(self, eqn: Eqn) -> tuple[bool, ...]:
        """Which results of an equation this run reads."""
        if "read" not in self.found:
            outvars = self.jaxpr.outvars
            outs = variables_in(outvars if self.read is None else compress(outvars, self.read))
            inputs = [step.inputs for step in plan(self.jaxpr.eqns, outs)]
            self.found["read"] = {*outs, *variables_in(chain.from_iterable(inputs))}
        return tuple(v in self.found["read"] for v in eqn.outvars)


Place = tuple[ProgramRun, Eqn]
"""Where a rule that looks ahead is: the run through a program, and the equation."""


def interpret(
    axis: Axis,
    jaxpr: Jaxpr,
    consts: Sequence[Value],
    args: Sequence[Value],
    axes: Sequence[Position],
    read: Sequence[bool] | None = None,
) -> tuple[list[Any], list[Position]]:
    """Runs the per-example program `jaxpr` for all lanes of `axis`.

    Args:
      axis: the axis being mapped.
      jaxpr: a jaxpr over examples; `consts` are its constants, unbatched.
      args: the operands; one whose entry in `axes` is an int carries the batch
        axis at that position, one whose entry is None is the same in each lane.
      read: which outputs the caller reads, for rules that depend on it; None for all.

    Returns:
      The outputs and the position of the batch axis in each, None for an
      output that does not depend on the batch.
    """
    effectful = [eqn for eqn in jaxpr.eqns if eqn.effects]  # most programs have none
    one_for_each_lane = references_to_batch(axis, jaxpr, axes) if effectful else frozenset()
    whole = ProgramRun(jaxpr, read)
    run = batch_looked_at if looks_here() else batch_equation

    def run_equation(eqn: Eqn, operands: list[Placed]) -> Iterable[Placed]:
        values, positions = [x for x, _ in operands], [a for _, a in operands]
        for_each_lane = not one_for_each_lane.isdisjoint(eqn.outvars)
        outs = run(axis, eqn, values, positions, for_each_lane, whole)
        return zip(*outs, strict=True)

    placed = [(x, None) for x in consts], list(zip(args, axes, strict=True))
    with recording.run(jaxpr):
        recording.runs(axis)
        if effectful and in_order(jaxpr):
            outputs = evaluate_in_order(axis, jaxpr, *placed, run_equation)
        else:
            number = lambda literal: (literal.val, None)
            outputs = evaluate(jaxpr, *placed, run_equation, number)
    return [value for value, _ in outputs], [position for _, position in outputs]


def batch_equation(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    creates_batched: bool = False,
    whole: ProgramRun | None = None,
) -> tuple[Sequence[Any], Sequence[Position]]:
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
    how = shared, creates_batched, whole
    if recording.is_on():
        with recording.equation(axis, eqn, operand_axes, shared) as record:
            outs, out_axes = _batch(axis, eqn, operands, operand_axes, *how)
            record.out_axes = tuple(out_axes)
    else:
        outs, out_axes = _batch(axis, eqn, operands, operand_axes, *how)
    return (as_lanes(axis, outs, out_axes) if checked else outs), out_axes


def batch_looked_at(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    creates_batched: bool = False,
    whole: ProgramRun | None = None,
) -> tuple[Sequence[Any], Sequence[Position]]:
    """As `batch_equation`, where JAX looks for NaN, or infinity, in what is computed.

    JAX is to find what it finds in one example: in the results of an equation, but not in what
    masked lanes make on the way to them.

    Raises:
      FloatingPointError: there is one in the results, as JAX says it, with the user's line.
    """
    primitive, facts = eqn.primitive, facts_of(eqn.primitive)
    run = functools.partial(batch_equation, axis, eqn, creates_batched=creates_batched)
    if creates_batched or any(map(_compat.is_reference, operands)):
        return run(operands, operand_axes, whole=whole)
    hidden = lambda: unseen(lambda *xs: run(list(xs), operand_axes), operands, shown(primitive))
    calls_back = _compat.observed(eqn.effects)
    body = program_called(eqn) if facts.body else None
    try:
        if facts.nests or is_own(primitive):
            return hidden()
        if in_jit():
            return run(operands, operand_axes, whole=whole)
        if body is not None and primitive is not jit_p:
            if calls_back:
                return hidden()
            # JAX computes it operation by operation.
            outs = interpret(axis, body.jaxpr, body.consts, operands, operand_axes)
            return hidden() if any(isinstance(x, Tracer) for x in operands) else outs
        try:
            return run(operands, operand_axes, whole=whole)
        except (FloatingPointError, _compat.FoundNaN):
            if has_rules(eqn) or calls_back:
                raise  # it was in what the function does; or may not be done twice
        try:
            return hidden()
        except FloatingPointError:
            if body is not None:  # JAX would say which operation in it, and so it is looked for
                interpret(axis, body.jaxpr, body.consts, operands, operand_axes)
            raise
    except (FloatingPointError, _compat.FoundNaN) as error:
        if isinstance(error, _compat.FoundNaN):
            error = found(error, shown(primitive))
        if not hasattr(error, "__notes__"):
            error.add_note(f"in {_compat.user_line(eqn.source_info, running=True)}")
        raise error from None


def _fits(eqn: Eqn, operands: Sequence[Value]) -> bool:
    """Whether the types of operands inside ``shard_map`` let an equation be emitted as it is."""
    casts = eqn.primitive.name == "pvary"  # JAX refuses to cast a value that varies already
    return not (casts or holds_programs(eqn)) or varies_as_staged(eqn, operands)


def _batch(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    shared: bool,
    creates_batched: bool,
    whole: ProgramRun | None,
) -> tuple[Sequence[Any], Sequence[Position]]:
    primitive = eqn.primitive
    if shared:
        return bind_equation(eqn, operands), [None] * len(eqn.outvars)
    if creates_batched:
        return create_batched(axis, eqn, operands, operand_axes)
    registered = find(primitive)
    if registered is None:
        return run_without_rule(axis, eqn, operands, operand_axes)
    if registered.is_users:
        types = [v.aval for v in eqn.outvars]
        return run_rule(axis, primitive, registered.rule, operands, operand_axes, eqn.params, types)
    more = {"place": (whole, eqn)} if registered.looks_ahead and whole is not None else {}
    out, out_axes = registered.rule(axis, operands, operand_axes, **eqn.params, **more)
    if primitive.multiple_results:
        return out, list(map(_number, out_axes))
    return [out], [_number(out_axes)]


def _number(position: Position) -> Position:
    """A position as Python's int, which JAX asks for.

    Rules compute it from parameters, of which users may have made NumPy's integers.
    """
    return position if position is None or type(position) is int else int(position)
