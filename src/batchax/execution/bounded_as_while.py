"""A bounded loop as a plain ``while``: `divergence/` knows how lanes leave one of those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.execution.bounded_forms import Form
from batchax.execution.bounded_loop import Values, result_types, zeros
from batchax.execution.entries import entry_of, put_entry
from batchax.jaxprs.words import ClosedJaxpr
from batchax.kernel.axis import Axis, match_axis
from batchax.kernel.divergence import PlacedOutputs, WhileLoop
from batchax.kernel.inner import remembered, written_into


def as_while(
    axis: Axis, args: Values, axes: Sequence[Any], /, *, test: Any, body: Any, form: Form
) -> tuple[WhileLoop, Callable[[Values], PlacedOutputs]]:
    """The ``while`` that a bounded loop is in each lane.

    Its carry is the number of steps taken, the carry of the bounded loop, and the ys so far. No
    checkpoints are recorded.

    Args:
      axis: the axis being mapped.
      args, axes: the operands of the bounded loop, and where each has the batch axis.
      test, body, form: what it does.

    Returns:
      The loop, and a function from its last carry to the results of the bounded loop.
    """
    given, at = form.split(args), form.split(axes)
    programs = remembered(body, (test, form, "while"), lambda: _programs(test, body, form))
    counts = match_axis(axis, given.count, at.count, 0)
    counts = lax.clamp(np.int32(0), counts, np.int32(form.steps.most))
    arrays = [match_axis(axis, x, None, 0) for x in map(zeros, _arrays(test, body, form))]
    going_on, step = programs
    first = [match_axis(axis, x, a, 0) for x, a in zip(given.carry, at.carry, strict=True)]
    loop = WhileLoop(
        test=going_on,
        body=step,
        test_consts=[given.count, *given.test],
        test_at=[at.count, *at.test],
        body_consts=[given.count, *given.consts, *given.xs],
        body_at=[at.count, *at.consts, *at.xs],
        carry=[lax.full_like(counts, 0), *first, *arrays],
    )

    def finish(last: Values) -> PlacedOutputs:
        steps, *outs = last
        return [*outs, steps], [0] * (len(outs) + 1)

    return loop, finish


def _arrays(test: Any, body: Any, form: Form) -> list[Any]:
    """The types of the ys."""
    count = jax.typeof(np.int32(0))
    return result_types(test, body, form, count)[form.n_carry : -1]


def _programs(test: Any, body: Any, form: Form) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The predicate and the step of the ``while``, for one example."""
    n_test, n_consts, n_carry = form.n_test, form.n_consts, form.n_carry
    number = jax.typeof(np.int32(0))
    body_types = list(body.in_avals)
    entries = body_types[n_consts + n_carry :]
    xs = [unmapped_aval(form.steps.most, a, t) for a, t in zip(form.x_axes, entries, strict=True)]
    state = [number, *body_types[n_consts : n_consts + n_carry], *_arrays(test, body, form)]
    test_types = [] if test is None else list(test.in_avals[:n_test])

    def going_on(count: Any, *values: Any) -> list[Any]:
        consts, (n, *rest) = values[:n_test], values[n_test:]
        more = n < lax.min(count, np.int32(form.steps.most))
        if test is None:
            return [more]
        return [more & written_into(test, [*consts, *rest[:n_carry]])[0]]

    def step(count: Any, *values: Any) -> list[Any]:
        consts, values = values[:n_consts], values[n_consts:]
        xs, (n, *rest) = values[: len(entries)], values[len(entries) :]
        carry, ys = rest[:n_carry], rest[n_carry:]
        x = [entry_of(x, n, a) for x, a in zip(xs, form.x_axes, strict=True)]
        outs = written_into(body, [*consts, *carry, *x])
        new, step_ys = outs[:n_carry], outs[n_carry:]
        ys = [put_entry(y, e, n, a) for y, e, a in zip(ys, step_ys, form.y_axes, strict=True)]
        return [n + np.int32(1), *new, *ys]

    return (
        _compat.stage(going_on, [number, *test_types, *state]),
        _compat.stage(step, [number, *body_types[:n_consts], *xs, *state]),
    )
