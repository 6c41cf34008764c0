"""A ``scan`` of one example as a ``while``, in which each lane has a count of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import unmapped_aval
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.execution.buffers import blank
from batchax.jaxprs.words import ClosedJaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.inner import remembered, stage_function
from batchax.rules.carried_axes import split_operands


def run_as_while(axis: Axis, params: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a ``scan`` of one example, from a ``while``."""
    consts, first = scan_as_while(axis, params, operands)
    test, body = while_of_scan(axis, params)
    carry = [*consts, *first]
    outs = while_p.bind(
        *carry, cond_nconsts=0, cond_jaxpr=test, body_nconsts=len(consts), body_jaxpr=body
    )
    return list(outs[1:])


def while_of_scan(axis: Axis, params: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Predicate and body of a ``while`` that does what a ``scan`` of one example does.

    It carries how many steps were taken, what the scan carries, and arrays of the ys; the xs are
    its last constants.
    """
    jaxpr, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    n_consts, n_carry = _compat.scan_counts(params)
    consts, carry, xs = split_operands(jaxpr.in_avals, n_consts, n_carry)
    stacked = lambda aval: unmapped_aval(length, 0, aval)
    ys = list(map(stacked, jaxpr.out_avals[n_carry:]))
    count = jax.typeof(np.int32(0))

    def goes_on(step: Any, *_: Any) -> list[Any]:
        return [lax.lt(step, np.int32(length))]

    def once(*values: Any) -> list[Any]:
        own, each, (step, *state) = split_operands(values, n_consts, len(xs))
        at = np.int32(length - 1) - step if reverse else step
        within: Any = {"allow_negative_indices": False}
        x = [
            lax.squeeze(lax.dynamic_slice(x, _place(x, at), (1, *x.shape[1:]), **within), [0])
            for x in each
        ]
        outs = eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *own, *state[:n_carry], *x)
        ys = [
            lax.dynamic_update_slice(y, lax.expand_dims(e, [0]), _place(y, at), **within)
            for y, e in zip(state[n_carry:], outs[n_carry:], strict=True)
        ]
        return [step + np.int32(1), *outs[:n_carry], *ys]

    def build() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        state = [count, *carry, *ys]
        once_types = [*consts, *map(stacked, xs), *state]
        return stage_function(axis, goes_on, state), stage_function(axis, once, once_types)

    return remembered(jaxpr, ("as while", axis, length, reverse, n_consts, n_carry), build)


def _place(x: Any, at: Any) -> list[Any]:
    return [at] + [np.int32(0)] * (x.ndim - 1)


def scan_as_while(axis: Axis, params: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The constants and the first carry of `while_of_scan`, of one example."""
    n_consts, n_carry = _compat.scan_counts(params)
    _, body = while_of_scan(axis, params)
    consts, carry, xs = split_operands(operands, n_consts, n_carry)
    ys = body.out_avals[1 + n_carry :]
    arrays = [_compat.varying_as(blank(y, k), y) for k, y in enumerate(ys)]
    return [*consts, *xs], [np.int32(0), *carry, *arrays]
