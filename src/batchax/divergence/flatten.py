"""Loops that hold loops which lanes leave one by one, run as a `FlatLoop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.divergence.costs import HOST, can_move, may_wait, why_together
from batchax.divergence.flat import FlatLoop
from batchax.divergence.loops import VARIES_LESS, Waiting, as_weak_as, bind, with_index
from batchax.divergence.nest import nest_of, prices_of_step
from batchax.divergence.opening import scan_as_while, while_of_scan
from batchax.divergence.policy import SHOWN, Loop, Masked, NestedLoop
from batchax.execution.names import index_as_input
from batchax.jaxprs.bodies import control_flow, is_seen
from batchax.jaxprs.types import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import AnyLoop, Axis, PlacedOutputs, Position, Positions, WhileLoop
from batchax.kernel.differing import (
    LOOPS,
    differing_in_steps,
    differing_in_while,
)
from batchax.kernel.inner import closed_over, remembered, stage_function
from batchax.kernel.named_axes import any_uses_axis
from batchax.rules.loops import match_carry, split_operands

_Form = tuple[WhileLoop, Positions, Callable[[], ClosedJaxpr]]
"""A loop as a ``while`` of one example; where what it carries has the batch axis; and what makes a
program, of all its operands, that runs it as it was. What it carries ends with its results."""


def run_flat(axis: Axis, loop: AnyLoop, least: float) -> PlacedOutputs | None:
    """The results of a loop for all lanes, which advance independently.

    None if no loop in it parts lanes, if something needs lanes together, or if it would not pay.

    Args:
      axis: the axis of the lanes.
      loop: the loop.
      least: nanoseconds that a step of the loops inside must take for all lanes.
    """
    params, is_scan = loop.params, loop.primitive is scan_p
    body = params[control_flow(loop.primitive).step]
    if not may_wait.in_program(body):  # most do not: the checks below run for few
        return None
    if loop.primitive.name in LOOPS or not can_move(axis, loop.args):
        return None
    given = tuple(a is not None for a in loop.axes)
    if is_scan:
        step = body.jaxpr, *_compat.scan_counts(params), given
    else:
        count = params["body_nconsts"], len(body.out_avals)
        step = body.jaxpr, *count, given[params["cond_nconsts"] :]
    if not differing_in_steps(*step).parts:
        return None
    prices = prices_of_step(*step, axis.size)
    if not prices.pays(axis.size) or prices.inside.of(axis.size) < least:
        recording.note(why="the loops inside cost too little next to what is around them")
        return None
    why = _together([p for p in params.values() if isinstance(p, ClosedJaxpr)])
    if why:
        recording.note(why=why)
        return None
    form = (_scan if is_scan else _while)(axis, loop)
    if form is None:
        return None
    whole, carry_at, make_together = form
    first = whole.carry
    whole = replace(whole, carry=match_carry(axis, first, carry_at, [0] * len(first)))
    together = remembered(whole.body, ("together", axis), make_together)
    if any_uses_axis(axis, whole.test, whole.body):
        together = _with_index(axis, together, len(whole.test_consts))
        whole = with_index(axis, whole)
    differs = tuple(a is not None for a in (*whole.body_at, *carry_at))
    inside = replace(axis, name=None, divergence=axis.divergence.inside())
    nest = nest_of(inside, whole.test, whole.body, differs)
    if not nest.parts:
        recording.note(why="copies of what the loops inside use would cost too much")
        return None
    tested = tuple(a is not None for a in whole.test_at)
    apart = differing_in_while(whole.test.jaxpr, whole.body.jaxpr, tested, differs).results
    results = range(len(first) - len(body.out_avals), len(first))
    own = [k for k in results if apart[k]]
    consts, consts_at = [*whole.test_consts, *whole.body_consts], (*whole.test_at, *whole.body_at)
    waiting = Waiting(inside, together, [*consts, *first], (*consts_at, *carry_at))
    if waiting.varies_less(own):
        recording.note(why=VARIES_LESS)
        return None
    length = params.get("length")
    of_whole = Loop(axis.size, whole.test, whole.body, differs)
    plan = axis.divergence.decide(NestedLoop(of_whole, nest, length))
    if isinstance(plan, Masked):
        recording.note(why=plan.reason)
        return None
    n_test = len(whole.test_consts)
    flat = FlatLoop(inside, whole.test, whole.body, n_test, consts_at, plan, nest, length, together)
    recording.note(divergence=SHOWN[type(plan)], widths=plan.widths)
    outs = bind(flat, _compat.varying_alike([*consts, *whole.carry]))
    at: list[Position] = [0] * len(outs)
    shared = [k for k in results if not apart[k]]
    for k, x, a in zip(shared, *waiting.results(shared), strict=True):
        outs[k], at[k] = x, a
    outs = [as_weak_as(aval, outs[k]) for aval, k in zip(body.out_avals, results, strict=True)]
    return outs, [at[k] for k in results]


def _scan(axis: Axis, loop: AnyLoop) -> _Form | None:
    params = loop.params
    n_consts, n_carry = _compat.scan_counts(params)
    if params["length"] < 2:
        return None
    test, body = while_of_scan(axis, params)
    consts, carry = scan_as_while(axis, params, loop.args)
    consts_at, carry_at, xs_at = split_operands(loop.axes, n_consts, n_carry)
    added = len(carry) - n_carry - 1
    count = len(consts)

    def together() -> ClosedJaxpr:
        def run(*operands: Value) -> list[Any]:
            consts, (_, *carry) = operands[:count], operands[count:]
            operands = (*consts[:n_consts], *carry[:n_carry], *consts[n_consts:])
            return [np.int32(params["length"]), *scan_p.bind(*operands, **params)]

        return stage_function(axis, run, body.in_avals)

    whole = WhileLoop(test, body, (), (), consts, (*consts_at, *xs_at), carry)
    return whole, (None, *carry_at, *[None] * added), together


def _while(axis: Axis, loop: AnyLoop) -> _Form | None:
    params = loop.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test_consts, body_consts, carry = split_operands(loop.args, n_test, n_body)
    test_at, body_at, carry_at = split_operands(loop.axes, n_test, n_body)
    if test.out_avals[0].shape:
        return None

    def together() -> ClosedJaxpr:
        run = lambda *operands: while_p.bind(*operands, **params)
        return stage_function(axis, run, [*test.in_avals[:n_test], *body.in_avals])

    return (
        WhileLoop(test, body, test_consts, test_at, body_consts, body_at, carry),
        carry_at,
        together,
    )


def _together(programs: Sequence[ClosedJaxpr]) -> str:
    """Why lanes must take each step of a loop together; empty if they need not."""
    why = why_together(programs)
    if why:
        return why
    for program in programs:
        if is_seen(program):
            return HOST
        if _compat.makes_references(program.effects) or _compat.written_inputs(program.jaxpr):
            return "a step writes to a reference"
        if any(map(closed_over, program.jaxpr.eqns)):
            return "a derivative rule in it closes over values"
    return ""


def _with_index(axis: Axis, together: ClosedJaxpr, n_test: int) -> ClosedJaxpr:
    """`together` of the operands of a loop that is given the index of the lane twice."""
    given = index_as_input(axis, together)
    index, *types = given.in_avals
    run = lambda *xs: eval_jaxpr(given.jaxpr, given.consts, *xs[: 1 + n_test], *xs[2 + n_test :])
    return _compat.stage(run, [index, *types[:n_test], index, *types[n_test:]])
