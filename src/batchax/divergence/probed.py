"""Nested loops that all lanes run, masked, until running one after another takes less.

A lane alone takes no more steps than it needs, but a step of all lanes, masked, takes less than
each by itself. Which is faster depends on how unequal the counts of steps are, and that is known
when the loop runs. So all lanes begin, masked, and each counts what its own steps cost. After each
step of the outer loop the sum is compared with what waiting for the slowest lane has cost. Once
lanes alone would have taken less, those that are left run one after another, in a single kernel.

The bound: lanes leave with a loss of at most the steps so far, and where counts are equal all
steps are masked, as under ``jax.vmap``. It assumes that the steps to come are like those so far.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax import _compat
from batchax.analysis.cost import ALONE, cost_of_program
from batchax.divergence.costs import may_wait
from batchax.divergence.policy import PROBED, PROBED_GAIN
from batchax.divergence.varying import alike
from batchax.divergence.windows import anyone
from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Params, Tree, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import remembered, stage_function, while_loop
from batchax.rules.loops import MaskedBody, predicate


def masked_until_unequal(
    axis: Axis,
    test: ClosedJaxpr,
    body: ClosedJaxpr,
    positions: Positions,
    n_test: int,
    slowdown: float,
    consts: Values,
    carry: Values,
) -> list[Value]:
    """What all lanes carry when they are done, or when one after another takes less.

    Args:
      axis: the axis of the lanes.
      test, body, positions, n_test: as of a `DivergentLoop`.
      slowdown: how long lanes take one after another over all, masked, if counts are equal.
      consts, carry: the operands.
    """
    counting = remembered(body, ("counting", axis), lambda: _counting(axis, body))
    masked = MaskedBody.of(axis, test, counting, tuple(positions[n_test:]))
    around = lax.full((axis.size,), _price(body), np.float32)
    at = [*positions[:n_test], *[0] * len(carry)]
    tested = lambda carry: predicate(axis, test, [*consts[:n_test], *carry], at)

    def once(state: Tree) -> Tree:
        active, carry, own, slowest, steps = state
        *carry, spent = masked.step(active, consts[n_test:], [*carry, around])
        spent = lax.select(active, spent, lax.full_like(spent, 0))
        own = lax.add(own, lax.reduce_sum(spent, (0,)))
        slowest = lax.add(slowest, lax.reduce_max(spent, (0,)))
        active = lax.bitwise_and(active, tested(carry))
        return active, carry, own, slowest, lax.add(steps, np.int32(1))

    def goes_on(state: Tree) -> Value:
        active, _, own, slowest, steps = state
        alone = lax.mul(own, np.float32(slowdown / axis.size))
        waits = lax.ge(alone, lax.mul(slowest, np.float32(PROBED_GAIN)))
        waits = lax.bitwise_or(waits, lax.lt(steps, np.int32(PROBED)))
        return lax.bitwise_and(anyone(active), waits)

    zero = np.float32(0)
    state = alike((tested(carry), list(carry), zero, zero, np.int32(0)), [*consts, *carry])
    return while_loop(goes_on, once, state)[1]


def _price(body: ClosedJaxpr) -> np.float32:
    """Nanoseconds that a lane alone takes for a step, without the loops inside."""
    return np.float32(ALONE.time(cost_of_program(body, steps=0)))


def _counting(axis: Axis, body: ClosedJaxpr) -> ClosedJaxpr:
    """`body` with one more number, to which what the steps of loops inside cost is added."""

    def run(*operands: Value) -> list[Value]:
        *given, spent = operands
        return _run(body, given, spent)

    return stage_function(axis, run, [*body.in_avals, jax.typeof(np.float32(0))])


def _run(program: ClosedJaxpr, operands: Values, spent: Value) -> list[Value]:
    """The results of a program, and `spent` with what the steps of its loops cost."""

    def equation(eqn: Eqn, operands: list[Value]) -> Values:
        nonlocal spent
        is_call = facts_of(eqn.primitive).is_plain_call
        if not (is_call or eqn.primitive in _LOOPS) or not may_wait.in_equation(eqn):
            return bind_equation(eqn, operands)
        if is_call:
            *outs, spent = _run(program_called(eqn), operands, spent)
        else:
            *outs, spent = _LOOPS[eqn.primitive](eqn.params, operands, spent)
        return outs

    outs = evaluate(program.jaxpr, program.consts, operands, equation)
    return [*outs, spent]


def _while(params: Params, operands: Values, spent: Value) -> list[Value]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    tested, given = operands[:n_test], operands[n_test : n_test + n_body]
    step = np.float32(_price(body) + _price(test))

    def goes_on(state: Tree) -> Value:
        (more,) = evaluate(test.jaxpr, test.consts, [*tested, *state[:-1]], bind_equation)
        return more

    def once(state: Tree) -> list[Value]:
        *carry, spent = state
        return _run(body, [*given, *carry], lax.add(spent, step))

    return while_loop(goes_on, once, [*operands[n_test + n_body :], spent])


def _scan(params: Params, operands: Values, spent: Value) -> list[Value]:
    n_consts, n_carry = _compat.scan_counts(params)
    consts, first = operands[:n_consts], operands[n_consts : n_consts + n_carry]

    def step(carry: Values, parts: Values) -> tuple[list[Value], list[Value]]:
        *carry, spent = carry
        *outs, spent = _run(params["jaxpr"], [*consts, *carry, *parts], spent)
        return [*outs[:n_carry], spent], outs[n_carry:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    parts = list(operands[n_consts + n_carry :])
    (*carry, spent), stacked = lax.scan(step, [*first, spent], parts, **how)
    return [*carry, *stacked, spent]


def _cond(params: Params, operands: Values, spent: Value) -> list[Value]:
    index, *given = operands
    branch = lambda program: lambda spent, *given: _run(program, given, spent)
    return lax.switch(index, [branch(p) for p in params["branches"]], spent, *given)


_LOOPS = {while_p: _while, scan_p: _scan, cond_p: _cond}
