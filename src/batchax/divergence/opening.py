"""How the body of a loop is opened, so that all where lanes may wait are loops in it.

A call is replaced by what it calls, and a ``scan`` by a ``while``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, unmapped_aval
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.execution.slices import blank
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import Rewriter, fresh, plan
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Value
from batchax.kernel.axis import Axis
from batchax.kernel.differing import (
    Differs,
    asked_of_each_lane,
    differing_in,
    differs_of,
    expand_bounded_loop,
)
from batchax.kernel.inner import remembered, stage_function
from batchax.rules.loops import split_operands

_COUNT = jax.typeof(np.int32(0))


def _open_scan(axis: Axis, eqn: Eqn, to: Rewriter) -> None:
    """Writes a ``scan`` of one example, an equation, as a ``while``, with equations before it."""
    params = eqn.params
    n_consts, n_carry = _compat.scan_counts(params)
    test, body = while_of_scan(axis, params)
    consts, carry, xs = split_operands(eqn.invars, n_consts, n_carry)
    make = lambda: stage_function(axis, lambda: _arrays(body, n_carry), [])
    blanks = remembered(body, ("arrays of ys", axis), make)
    arrays = to.inline(blanks, [])
    loop = eqn.replace(
        primitive=while_p,
        invars=[*consts, *xs, Literal(np.int32(0), _COUNT), *carry, *arrays],
        outvars=[fresh(_COUNT), *eqn.outvars],
        params={
            "cond_nconsts": 0,
            "cond_jaxpr": test,
            "body_nconsts": n_consts + len(xs),
            "body_jaxpr": body,
        },
    )
    to.eqns.append(loop)


def while_of_scan(axis: Axis, params: dict[str, Any]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Predicate and body of a ``while`` that does what a ``scan`` of one example does.

    It carries how many steps were taken, what the scan carries, and arrays of the ys; the xs are
    its last constants.
    """
    jaxpr, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    n_consts, n_carry = _compat.scan_counts(params)

    def goes_on(step: Value, *_: Value) -> list[Any]:
        return [lax.lt(step, np.int32(length))]

    def build() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        once = _step(axis, jaxpr, n_consts, n_carry, length, reverse)
        state = once.in_avals[len(once.in_avals) - len(once.out_avals) :]
        return stage_function(axis, goes_on, state), once

    return remembered(jaxpr, ("as while", axis, length, reverse, n_consts, n_carry), build)


def _step(
    axis: Axis, program: ClosedJaxpr, n_consts: int, n_carry: int, length: int, reverse: bool
) -> ClosedJaxpr:
    """The body of the ``while``: takes entries of the xs, does what `program` does, puts the ys."""
    within: Any = {"allow_negative_indices": False}

    def place(step: Value) -> Value:
        return np.int32(length - 1) - step if reverse else step

    def take(step: Value, *xs: Value) -> list[Any]:
        at = place(step)
        return [
            lax.squeeze(lax.dynamic_slice(x, _place(x, at), (1, *x.shape[1:]), **within), [0])
            for x in xs
        ]

    def put(step: Value, *values: Value) -> list[Any]:
        at, count = place(step), len(values) // 2
        ys = [
            lax.dynamic_update_slice(y, lax.expand_dims(e, [0]), _place(y, at), **within)
            for y, e in zip(values[:count], values[count:], strict=True)
        ]
        return [step + np.int32(1), *ys]

    jaxpr = program.jaxpr
    consts, carry, entries = split_operands(jaxpr.invars, n_consts, n_carry)
    new, results = jaxpr.outvars[:n_carry], jaxpr.outvars[n_carry:]
    stacked = lambda v: unmapped_aval(length, 0, v.aval)
    step, xs, ys = fresh(_COUNT), *([fresh(stacked(v)) for v in vs] for vs in (entries, results))
    once = Rewriter(program)

    def part(
        fun: Callable[..., Any], operands: Sequence[Any], computes: Sequence[Any] = ()
    ) -> list[Any]:
        staged = stage_function(axis, fun, [v.aval for v in operands])
        return once.inline(staged, operands, computes)

    part(take, [step, *xs], entries)
    once.eqns += jaxpr.eqns
    last = part(put, [step, *ys, *results])
    return once.program([*consts, *xs, step, *carry, *ys], [last[0], *new, *last[1:]])


def _place(x: Value, at: Value) -> list[Any]:
    return [at] + [np.int32(0)] * (x.ndim - 1)


def scan_as_while(
    axis: Axis, params: dict[str, Any], operands: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The constants and the first carry of `while_of_scan`, of one example."""
    n_consts, n_carry = _compat.scan_counts(params)
    _, body = while_of_scan(axis, params)
    consts, carry, xs = split_operands(operands, n_consts, n_carry)
    return [*consts, *xs], [np.int32(0), *carry, *_arrays(body, n_carry)]


def _arrays(body: ClosedJaxpr, n_carry: int) -> list[Any]:
    """The ys, before there are any."""
    ys = body.out_avals[1 + n_carry :]
    return [_compat.varying_as(blank(y, k), y) for k, y in enumerate(ys)]


def opened(axis: Axis, program: ClosedJaxpr, differs: Differs) -> ClosedJaxpr:
    """`program` with each call that holds such a loop replaced by what it calls.

    And with each ``scan`` that holds one replaced by a ``while``.
    """
    to, was = Rewriter(program), program.jaxpr.eqns
    _open(axis, to, differs)
    if len(to.eqns) == len(was) and all(map(operator.is_, to.eqns, was)):
        return program
    return to.program()


def _open(axis: Axis, to: Rewriter, differs: Differs) -> None:
    """Writes the equations of the program that `to` reads, opened; some inputs differ."""
    jaxpr = to.read.jaxpr
    apart = dict(zip(jaxpr.invars, differs, strict=True))
    for step in plan(jaxpr.eqns, jaxpr.outvars):
        eqn = step.eqn
        of_operands = differs_of(apart, eqn.invars)
        of_results = differing_in(eqn, of_operands)
        apart.update(zip(eqn.outvars, of_results.results, strict=True))
        if eqn.primitive is while_p:
            to.eqns.append(_with_predicate_of_each_lane(to.own(eqn)))
        elif not of_results.parts:
            to.eqns.append(to.own(eqn))
        elif eqn.primitive is scan_p:
            _open_scan(axis, to.own(eqn), to)
        else:
            called = expand_bounded_loop(eqn) or _compat.close(bodies_of(eqn)[0].program)
            to.replace(eqn, called, lambda inner, d=of_operands: _open(axis, inner, d))


def _with_predicate_of_each_lane(eqn: Eqn) -> Eqn:
    test = asked_of_each_lane(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
    if test is eqn.params["cond_jaxpr"]:
        return eqn
    return eqn.replace(params={**eqn.params, "cond_jaxpr": test})
