"""Calls: the program inside acts on padded rows, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from batchax import _compat
from batchax.jaxprs.bodies import bind_call, program_called
from batchax.jaxprs.words import ClosedJaxpr
from batchax.rows.padded import CannotPad, Operation, Row, padded_rule, run_padded
from batchax.rows.padded_rules.inside import (
    Moving,
    SizedCall,
    arrays,
    as_function,
    run_inside,
)
from batchax.rows.row_rules import in_padding, size_of_rule
from batchax.user_rules.call import per_example
from batchax.user_rules.linear import linear_with_transpose


@padded_rule("composite", fact="is_plain_call")
def _call(op: Operation, *rows: Row, **params: Any) -> Any:
    body = _compat.close(params.get("jaxpr") or params["call_jaxpr"])
    try:
        return run_padded(op.sizes, body.jaxpr, body.consts, rows)
    except CannotPad as error:
        raise error.within(op.eqn) from None


@padded_rule(fact="again")
@padded_rule(fact="marked")
def _kept_call(op: Operation, *rows: Row, **params: Any) -> Any:
    """A call that says something about its program, such as that reverse mode computes it again."""
    operands = Moving(rows)
    op = replace(op, sizes=replace(op.sizes, again=True))
    fun = as_function(op, program_called(op.eqn), operands)
    program = _compat.stage(fun, list(map(jax.typeof, operands.values)))
    return bind_call(op.eqn.primitive, op.eqn.params, program, operands.values)


@padded_rule("remat_opt")
def _remat_opt(op: Operation, *rows: Row, fwd_jaxpr: Any, **params: Any) -> Any:
    # It holds two programs that compute the same, one without residuals. This one returns all that
    # is wanted, residuals included.
    return run_padded(op.sizes, fwd_jaxpr.jaxpr, fwd_jaxpr.consts, rows)


@padded_rule("custom_vmap_call")
def _custom_vmap(op: Operation, *rows: Row, call: Any, **params: Any) -> Any:
    # A batching rule is written for arrays of one size. With rows of many, what counts is the
    # function of one example; where no operand is ragged the call is batched by its rule.
    return run_padded(op.sizes, call.jaxpr, call.consts, rows)


@padded_rule("custom_batched_call")
def _custom_batched(
    op: Operation, *rows: Row, jaxpr: ClosedJaxpr, steps: Any, **params: Any
) -> Any:
    """As `_custom_vmap`, for `batchax.custom_vmap` and its derivatives."""
    name = size_of_rule(op.eqn)
    if name is not None:
        return in_padding(op, rows, name)
    body = _compat.stage(per_example(jaxpr, steps), [v.aval for v in op.eqn.invars])
    return run_padded(op.sizes, body.jaxpr, body.consts, rows)


@padded_rule("linear_with_transpose")
def _linear(
    op: Operation, *rows: Row, forward: Any, transpose: Any, count: int, **params: Any
) -> Any:
    residuals, values = SizedCall.of(op, rows[:count])

    def for_rows(body: Any, shapes: Any) -> Any:
        def run(values: Any, linear: Any) -> list[Any]:
            inner, own = residuals.opened(values)
            given = [Row(x, v.aval.shape) for x, v in zip(linear, shapes, strict=True)]
            outs = run_inside(inner.sizes, body, [*own, *given])
            return arrays(outs, body.out_avals)

        return run

    ahead = for_rows(forward, op.eqn.invars[count:])
    back = for_rows(transpose, op.eqn.outvars)
    linear = arrays(rows[count:], [v.aval for v in op.eqn.invars[count:]])
    return linear_with_transpose(ahead, back, values, linear)


@padded_rule("linear_call")
def _linear_call(
    op: Operation,
    *rows: Row,
    callee: Any,
    transpose_thunk: Any,
    num_callee_consts: int,
    num_res: int,
) -> Any:
    first = num_callee_consts + num_res
    residuals, values = SizedCall.of(op, rows[:first])

    def ahead(values: Any, linear: Any) -> list[Any]:
        inner, own = residuals.opened(values)
        given = [Row(x, v.aval.shape) for x, v in zip(linear, op.eqn.invars[first:], strict=True)]
        outs = run_inside(inner.sizes, callee, [*own, *given])
        return arrays(outs, callee.out_avals)

    def back(values: Any, cotangents: Any) -> list[Any]:
        body = _compat.close(*transpose_thunk())
        inner, own = residuals.opened(values)
        given = [Row(x, v.aval.shape) for x, v in zip(cotangents, op.eqn.outvars, strict=True)]
        outs = run_inside(inner.sizes, body, [*own[num_callee_consts:], *given])
        return arrays(outs, body.out_avals)

    linear = arrays(rows[first:], [v.aval for v in op.eqn.invars[first:]])
    return jax.custom_derivatives.linear_call(ahead, back, values, linear)
