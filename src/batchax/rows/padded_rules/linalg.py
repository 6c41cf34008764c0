"""Linear algebra: a padded matrix has two blocks, the row's own and an identity or a diagonal.

Factors of such a matrix have the row's own factors and an identity as blocks, and solutions have
the row's own and zeros. For eigenvalues and singular values the numbers on the diagonal
are above all that the matrix has, and no two are equal. So eigenvalues in ascending order have
those of the row in front, singular values in descending order have them behind as many as there are
on the diagonal, no vector mixes the two, and derivatives, which divide by differences, are finite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.rows.index import moved
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


def _beside_large(op: Operation, x: Row) -> tuple[Any, Any]:
    """The array of matrices with a diagonal in place of padding, and how many numbers that has."""
    if any(map(is_symbolic, x.shape[:-2])):
        raise op.reject(
            "how large its matrices are and how many there are differs from row to row."
        )
    value = jnp.asarray(op.filled(x, 0))
    shape: Any = x.shape
    rows, columns = shape[-2:]
    return _diagonal_added(value, op.sizes.size(rows), op.sizes.size(columns), rows == columns)


@functools.partial(jax.jit, static_argnums=3)  # to be one program outside of `jit`, too
def _diagonal_added(
    value: jax.Array, own_rows: Value, own_columns: Value, square: bool
) -> tuple[Any, Any]:
    rows, columns = value.shape[-2:]
    size = jnp.abs(lax.stop_gradient(value))
    most = jnp.maximum(*(size.sum(axis).max(-1, initial=0) for axis in (-1, -2)))[..., None, None]
    most = 1.5 * jnp.where(most > 0, most, 1)
    at, along = np.arange(rows)[:, None] - own_rows, np.arange(columns) - own_columns
    there = (at == along) & (at >= 0)
    apart = most * (1 + np.arange(rows)[:, None] / rows).astype(most.dtype)
    value = jnp.where(there, apart.astype(value.dtype), value)
    if not square:
        # Singular values of padding must not be zero either. These are as small as rounding.
        missing = (at >= 0) & (np.arange(rows)[:, None] < own_columns) & (along < 0)
        missing |= (along >= 0) & (np.arange(columns) < own_rows) & (at < 0)
        small = np.cos(np.arange(rows * columns) ** 2).reshape(rows, columns).astype(most.dtype)
        small = small * np.finfo(most.dtype).eps * most
        value = jnp.where(missing, small.astype(value.dtype), value)
    count = jnp.minimum(rows - jnp.asarray(own_rows), columns - jnp.asarray(own_columns))
    return value, count.astype(np.int32)


@padded_rule("eigh")
def _eigh(
    op: Operation, x: Row, *, subset_by_index: tuple[int, int] | None, **params: Any
) -> list[Value]:
    if not _has_ragged_core(x, 2):
        return _of_one_size(op, x)
    _check_square(op, x)
    if subset_by_index is not None:
        raise op.reject("it computes some of the eigenvalues. Compute all, and slice them.")
    return _outputs(op, op.bind(_beside_large(op, x)[0], sort_eigenvalues=True))


@padded_rule("svd")
def _svd(
    op: Operation,
    x: Row,
    *,
    full_matrices: bool,
    compute_uv: bool,
    subset_by_index: tuple[int, int] | None,
    **params: Any,
) -> list[Value]:
    if not _has_ragged_core(x, 2):
        return _of_one_size(op, x)
    if subset_by_index is not None:
        raise op.reject("it computes some of the singular values. Compute all, and slice them.")
    if compute_uv and full_matrices and x.shape[-1] != x.shape[-2]:
        raise op.reject(
            f"its matrix has the shape ({x.shape[-2]}, {x.shape[-1]}), and full_matrices asks for "
            "vectors besides those of its singular values, which are any that are orthogonal. "
            "Pass full_matrices=False."
        )
    value, count = _beside_large(op, x)
    outs = op.bind(value)
    bounds = [op.sizes.bounds_of(v.aval.shape) for v in op.eqn.outvars]
    axes = (-1, -1, -2)[: len(outs)]
    if not (is_symbolic(x.shape[-1]) and is_symbolic(x.shape[-2])):
        count = None  # there is no diagonal
    behind = [
        _behind(y, axis % y.ndim, count, bound[axis])
        for y, axis, bound in zip(outs, axes, bounds, strict=True)
    ]
    cropped = [lax.slice(y, [0] * y.ndim, bound) for y, bound in zip(behind, bounds, strict=True)]
    return _outputs(op, cropped)


def _behind(x: Value, axis: int, count: Value, room: int) -> jax.Array:
    """What is behind the first `count` along an axis."""
    if count is None:
        return x
    whole = x.shape[axis]
    source = np.arange(room, dtype=np.int32) + count
    target = np.arange(whole, dtype=np.int32) - count
    return moved(x, axis, jnp.where(source < whole, source, -1), target)
