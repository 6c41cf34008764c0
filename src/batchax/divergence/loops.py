"""Whether, and how, the lanes of a loop run in windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.divergence.varying import with_varying_values
from batchax.divergence.window import Plan, Tally, run_in_windows
from batchax.engine.axis import Axis, AxisPosition, match_axis
from batchax.engine.divergence import Loop
from batchax.engine.inner import remembered
from batchax.engine.interpreter import interpret
from batchax.engine.named_axes import uses_name
from batchax.execution.names import index_as_input
from batchax.rules.hazards import hazards
from batchax.rules.masking import run_masked, select_lanes


def run_loop(axis: Axis, loop: Loop, plan: Plan) -> tuple[list[Any], list[Tally]]:
    """The last carry of all lanes, and what was counted for each window of the plan."""
    n_carry = len(loop.carry)
    loop = with_varying_values(_with_index(axis, _with_one_predicate(axis, loop)))
    axis = replace(axis, name=None, divergence=axis.divergence.inside())
    consts = [*loop.test_consts, *loop.body_consts]
    positions = (*loop.test_at, *loop.body_at)
    n_test = len(loop.test_consts)
    test, body = loop.test, loop.body

    def build() -> Any:
        # No values of this call: what is built is kept for others.
        step = functools.partial(_step, axis, test, body, n_test, positions)

        def run(consts: Sequence[Any], carry: list[Any]) -> Any:
            live = _test(
                axis, test, [*consts[:n_test], *carry], [*positions[:n_test], *[0] * len(carry)]
            )
            outs, tallies = run_in_windows(plan, step, consts, positions, live, carry)
            types = body.out_avals
            outs = [
                _compat.weakly(x) if t.weak_type else x for x, t in zip(outs, types, strict=True)
            ]
            return outs, tallies

        return jax.jit(run)

    run = remembered(body, (axis, test, positions, plan), build)
    outs, tallies = run(consts, list(loop.carry))
    return outs[len(outs) - n_carry :], tallies


def _with_one_predicate(axis: Axis, loop: Loop) -> Loop:
    """A loop whose predicate is one number for each lane, not an array of them.

    It is an array where lanes are themselves batches, of an inner vmap: each of its elements
    ends a part of the carry.
    """
    if not loop.test.out_avals[0].shape:
        return loop
    n_test, n_body = len(loop.test_consts), len(loop.body_consts)

    def goes_on(live: Any, *_: Any) -> list[Any]:
        return [live.any()]

    def once(*operands: Any) -> list[Any]:
        test_consts, operands = operands[:n_test], operands[n_test:]
        body_consts, (live, *carry) = operands[:n_body], operands[n_body:]
        new = eval_jaxpr(loop.body.jaxpr, loop.body.consts, *body_consts, *carry)
        carry = [select_lanes(live, 0, x, old) for x, old in zip(new, carry, strict=True)]
        (more,) = eval_jaxpr(loop.test.jaxpr, loop.test.consts, *test_consts, *carry)
        return [live & more, *carry]

    def build() -> Any:
        types = [*loop.test.out_avals, *loop.body.out_avals]
        consts = [*loop.test.in_avals[:n_test], *loop.body.in_avals[:n_body]]
        return _compat.stage(goes_on, types), _compat.stage(once, [*consts, *types])

    test, body = remembered(loop.body, ("one predicate", loop.test), build)
    operands = [*loop.test_consts, *loop.carry]
    live = _test(axis, loop.test, operands, [*loop.test_at, *[0] * len(loop.carry)])
    consts, consts_at = [*loop.test_consts, *loop.body_consts], [*loop.test_at, *loop.body_at]
    return Loop(test, body, (), (), consts, consts_at, [live, *loop.carry])


def _with_index(axis: Axis, loop: Loop) -> Loop:
    """A loop that is told the index of the lane, if it asks for it: windows do not have it."""
    programs = loop.test, loop.body
    eqns = [eqn for program in programs for eqn in program.jaxpr.eqns]
    if axis.name is None or not any(uses_name(eqn, axis.name) for eqn in eqns):
        return loop
    lanes = lax.iota(np.int32, axis.size)
    test, body = (
        remembered(p, (axis, "index_as_input"), functools.partial(index_as_input, axis, p))
        for p in programs
    )
    return replace(
        loop,
        test=test,
        body=body,
        test_consts=[lanes, *loop.test_consts],
        test_at=[0, *loop.test_at],
        body_consts=[lanes, *loop.body_consts],
        body_at=[0, *loop.body_at],
    )


def _step(
    axis: Axis,
    test: Any,
    body: Any,
    n_test: int,
    positions: Sequence[AxisPosition],
    width: int,
    consts: Sequence[Any],
    live: Any,
    carry: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """One step of the lanes that are live; the others keep what they hold."""
    window = replace(axis, size=width)
    front = [0] * len(carry)
    inputs = [*consts[n_test:], *carry]
    inputs_at = [*positions[n_test:], *front]
    protected = range(len(inputs)) if hazards(body.jaxpr).endless else ()
    written = _compat.written_inputs(body.jaxpr)

    def run(operands: Any, operands_at: Any) -> Any:
        return interpret(window, body.jaxpr, body.consts, operands, operands_at)

    new, at = run_masked(live, run, inputs, inputs_at, protected, written)
    new = [match_axis(window, x, a, 0) for x, a in zip(new, at, strict=True)]
    carry = [select_lanes(live, 0, x, old) for x, old in zip(new, carry, strict=True)]
    tested = [*consts[:n_test], *carry]
    return live & _test(window, test, tested, [*positions[:n_test], *front]), carry


def _test(axis: Axis, test: Any, operands: Any, positions: Any) -> Any:
    (live,), (at,) = interpret(axis, test.jaxpr, test.consts, operands, positions)
    return match_axis(axis, live, at, 0)
