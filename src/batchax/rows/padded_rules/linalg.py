"""Linear algebra: a padded matrix has two blocks, the row's own and an identity.

Factors of such a matrix have the row's own factors and an identity as blocks, and solutions have
the row's own and zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.calls import OF_FUNCTIONS, Moving, arrays, run_inside, staged
from batchax.rows.sizes import is_symbolic
from batchax.rules.linalg import RANKS


def _beside_identity(op: Operation, x: Row) -> jax.Array:
    """The array of matrices, with an identity in place of padding."""
    mask = op.sizes.mask(x.shape, op.sizes.padded_axes(x.shape))
    value = jnp.asarray(x.value)
    eye = np.eye(*value.shape[-2:], dtype=value.dtype)
    return value if mask is None else jnp.where(mask, value, eye)


def _outputs(op: Operation, outs: Values) -> list[Any]:
    avals = [v.aval for v in op.eqn.outvars]
    return [op.cut(x, aval.shape) for x, aval in zip(outs, avals, strict=True)]


def _has_ragged_core(x: Row, rank: int) -> bool:
    return any(map(is_symbolic, x.shape[len(x.shape) - rank :]))


def _check_square(op: Operation, x: Row) -> None:
    if x.shape[-1] != x.shape[-2]:
        raise op.reject(
            f"its matrix has the shape ({x.shape[-2]}, {x.shape[-1]}), and for one that is ragged "
            "and not square padding is not exact."
        )


@padded_rule(*RANKS)
def _of_one_size(op: Operation, *rows: Row, **params: Any) -> list[Value]:
    """A decomposition of matrices that have one size, in rows of any."""
    harmless = []
    for x, rank in zip(rows, RANKS[op.eqn.primitive.name], strict=True):
        if _has_ragged_core(x, rank):
            raise op.reject(
                f"its matrix has the shape ({', '.join(map(str, x.shape[-2:]))}), and what it "
                "computes depends on all of that, in an order that padding would disturb."
            )
        harmless.append(_beside_identity(op, x) if rank == 2 else op.filled(x, 0))
    outs = op.bind(*harmless)
    return _outputs(op, outs if op.eqn.primitive.multiple_results else [outs])


@padded_rule("cholesky")
def _cholesky(op: Operation, x: Row, **params: Any) -> list[Value]:
    return _outputs(op, [op.bind(_beside_identity(op, x))])


@padded_rule("lu")
def _lu(op: Operation, x: Row, **params: Any) -> list[Value]:
    # A column of the row's own part is zero in the padding, so that its pivot is never taken from
    # there.
    if _has_ragged_core(x, 2):
        _check_square(op, x)
    return _outputs(op, op.bind(_beside_identity(op, x)))


def _det(op: Operation, x: Row) -> list[Value] | None:
    if not _has_ragged_core(x, 2):
        return None
    return _outputs(op, [jnp.linalg.det(_beside_identity(op, x))])


OF_FUNCTIONS["_det"] = _det


@padded_rule("lu_pivots_to_permutation")
def _permutation(op: Operation, pivots: Row, **params: Any) -> jax.Array:
    mask = op.sizes.mask(pivots.shape, op.sizes.padded_axes(pivots.shape))
    value = jnp.asarray(pivots.value)
    if mask is not None:  # rows of padding stay where they are
        own = lax.broadcasted_iota(value.dtype, value.shape, value.ndim - 1)
        value = lax.select(mask, value, own)
    return op.bind(value)


@padded_rule("triangular_solve")
def _triangular_solve(op: Operation, a: Row, b: Row, **params: Any) -> list[Any]:
    return _outputs(op, [op.bind(_beside_identity(op, a), op.filled(b, 0))])


@padded_rule("custom_linear_solve")
def _custom_linear_solve(
    op: Operation, *rows: Row, const_lengths: Any, jaxprs: Any, **params: Any
) -> list[Value]:
    # Operands are the constants of each program, one program after another, and then `b`.
    start = sum(const_lengths)
    b_avals = [v.aval for v in op.eqn.invars[start:]]
    b = arrays(rows[start:], b_avals)
    programs, constants, first = [], [], 0
    for body, count in zip(jaxprs, const_lengths, strict=True):
        own, first = Moving(rows[first : first + count]), first + count
        if body is None:
            programs.append(None)
            constants.append([])
            continue

        def run(*values: Value, own: Moving = own, body: ClosedJaxpr = body) -> list[Any]:
            count = len(own.places)
            given = [Row(x, aval.shape) for x, aval in zip(values[count:], b_avals, strict=True)]
            outs = run_inside(op.sizes, body, [*own.filled_in(values[:count]), *given])
            return arrays(outs, body.out_avals)

        program, values = staged(run, [*own.values, *b])
        programs.append(program)
        constants.append(values[: len(values) - len(b)])
    return lax.linear_solve_p.bind(
        *(x for values in constants for x in values),
        *b,
        const_lengths=type(const_lengths)(*map(len, constants)),
        jaxprs=type(jaxprs)(*programs),
    )
