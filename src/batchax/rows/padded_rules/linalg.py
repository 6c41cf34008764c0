"""Linear algebra: a matrix with padding is the row's own beside an identity.

Factors of such a matrix are those of the row's own beside an identity, and solutions those of
the row's own beside zeros. Eigenvalues and singular values are in `spectra`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.rows.comparisons import agreed
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.custom_derivatives import padded_function
from batchax.rows.padded_rules.inside import Moving, arrays, run_inside, staged
from batchax.rows.sizes import is_symbolic
from batchax.rules.linalg import RANKS


def _eye(op: Operation, x: Row) -> Any:
    """Ones on the diagonal of the last two axes, of the type of `x`."""
    *_, rows, columns = op.sizes.bounds_of(x.shape)
    dtype = jnp.result_type(x.value)
    return lax.broadcast_in_dim(
        jnp.eye(rows, columns, dtype=dtype),
        op.sizes.bounds_of(x.shape),
        (len(x.shape) - 2, len(x.shape) - 1),
    )


def _beside_identity(op: Operation, x: Row) -> Any:
    """The array of matrices, with an identity in place of padding."""
    mask = op.sizes.mask(x.shape, op.sizes.padded_axes(x.shape))
    value = jnp.asarray(x.value)
    return value if mask is None else lax.select(mask, value, _eye(op, x))


def outputs(op: Operation, outs: Sequence[Value]) -> list[Any]:
    """Results through whose padding no derivative passes."""
    avals = [v.aval for v in op.eqn.outvars]
    return [op.cut(x, aval.shape) for x, aval in zip(outs, avals, strict=True)]


def has_ragged_core(x: Row, rank: int) -> bool:
    """Whether the last `rank` axes, which are an operand's own, have a size of rows."""
    return any(map(is_symbolic, x.shape[len(x.shape) - rank :]))


def own_matrices(op: Operation, x: Row) -> Any:
    """Which matrices are a row's own, where there are some that are padding, whole; else None.

    The mask has axes of size one for those of a matrix.
    """
    if len(x.shape) == 2:
        return None
    inside = op.sizes.mask(x.shape, op.sizes.padded_axes(x.shape))
    return None if inside is None else inside.any((-1, -2), keepdims=True)


def check_square(op: Operation, x: Row) -> None:
    """Refuses a ragged matrix that is not square."""
    if x.shape[-1] != x.shape[-2]:
        raise op.refuse(
            f"its matrix has the shape ({x.shape[-2]}, {x.shape[-1]}), and for one that is ragged "
            "and not square padding is not exact."
        )


def _many(name: str, ranks: tuple[int, ...]) -> None:
    """The rule of a decomposition that is exact only where its matrices have one size."""

    @padded_rule(name)
    def rule(op: Operation, *rows: Row, **params: Any) -> Any:
        for x, rank in zip(rows, ranks, strict=True):
            if has_ragged_core(x, rank):
                raise op.refuse(
                    f"its matrix has the shape ({', '.join(map(str, x.shape[-2:]))}), and what it "
                    "computes depends on all of that, in an order that padding would disturb."
                )
        return of_one_size(op, *rows)


def of_one_size(op: Operation, *rows: Row) -> Any:
    """A decomposition of matrices that have one size, in rows of any."""
    ranks = RANKS[op.eqn.primitive.name]
    harmless = [
        _beside_identity(op, x) if rank == 2 else op.filled(x, 0)
        for x, rank in zip(rows, ranks, strict=True)
    ]
    outs = op.bind(*harmless)
    return outputs(op, outs if op.eqn.primitive.multiple_results else [outs])


for _name, _ranks in RANKS.items():
    _many(_name, _ranks)


@padded_rule("cholesky")
def _cholesky(op: Operation, x: Row, **params: Any) -> Any:
    return outputs(op, [op.bind(_beside_identity(op, x))])


@padded_rule("lu")
def _lu(op: Operation, x: Row, **params: Any) -> Any:
    # A column of the row's own part is zero in the padding, so that its pivot is never taken from
    # there.
    if has_ragged_core(x, 2):
        check_square(op, x)
    return outputs(op, op.bind(_beside_identity(op, x)))


@padded_function("_det")
def _det(op: Operation, x: Row) -> Any:
    if not has_ragged_core(x, 2):
        return None
    return outputs(op, [jnp.linalg.det(_beside_identity(op, x))])


@padded_rule("lu_pivots_to_permutation")
def _permutation(op: Operation, pivots: Row, **params: Any) -> Any:
    mask = op.sizes.mask(pivots.shape, op.sizes.padded_axes(pivots.shape))
    value = jnp.asarray(pivots.value)
    if mask is not None:  # rows of padding stay where they are
        own = lax.broadcasted_iota(value.dtype, value.shape, value.ndim - 1)
        value = lax.select(mask, value, own)
    return op.bind(value)


@padded_rule("qr")
def _qr(op: Operation, x: Row, *, full_matrices: bool, **params: Any) -> Any:
    if not has_ragged_core(x, 2):
        return outputs(op, op.bind(_beside_identity(op, x)))
    rows, columns = x.shape[-2:]
    if params.get("pivoting"):
        raise op.refuse("it pivots columns, in an order that padding would disturb.")
    if full_matrices and is_symbolic(columns) and rows != columns:
        raise op.refuse(
            f"its matrix has the shape ({rows}, {columns}), and what is exact with padding is the "
            "reduced decomposition."
        )
    if full_matrices and not agreed(columns, rows):
        # Its derivative is of square matrices alone, and so no padding has to be good for that.
        crop = [op.sizes.bounds_of(v.aval.shape) for v in op.eqn.outvars]
        outs = op.bind(op.filled(x, 0))
        return outputs(op, [lax.slice(y, [0] * y.ndim, b) for y, b in zip(outs, crop, strict=True)])
    return outputs(op, _reduced_qr(op, x))


def _reduced_qr(op: Operation, x: Row) -> list[Any]:
    # More rows, of zeros, change neither the triangular factor nor the rows that the orthogonal
    # factor has for the matrix itself; nor do more columns behind its own. Those have a one each,
    # in rows of their own, so that derivatives, which divide by the diagonal, are finite. Of a wide
    # matrix that is said of its first columns, as many as it has rows; the others follow.
    rows, columns = x.shape[-2:]
    value = jnp.asarray(op.filled(x, 0))
    most, count = value.shape[-2], op.sizes.bound(op.eqn.outvars[1].aval.shape[-2])
    own = op.sizes.size(op.eqn.outvars[1].aval.shape[-2])
    along = np.arange(count)
    tall = agreed(rows, columns)
    first = jnp.where(along < own, value[..., :count], 0)
    after = along - own  # the place of a column behind those of the row
    if not (tall and agreed(most - count, rows - columns)):  # there may not be a row for each
        first = jnp.concatenate([first, jnp.zeros_like(first[..., :1, :].repeat(count, -2))], -2)
        at = np.arange(most + count) - most
        ones = (at[:, None] == along) & (after >= 0)
    else:
        at = np.arange(most) - op.sizes.size(rows)
        ones = (at[:, None] == after) & (after >= 0)
    first = jnp.where(ones, 1, first)
    there = own_matrices(op, x)
    if there is not None:
        none = np.eye(*first.shape[-2:], dtype=first.dtype)
        first = jnp.where(there, first, none)
    q, r = op.bind(first, full_matrices=False)
    q = q[..., :most, :]
    if not tall:
        rest = jnp.matmul(q.mT.conj(), value, precision=lax.Precision.HIGHEST)
        room = [*[(0, 0)] * (r.ndim - 1), (0, value.shape[-1] - count)]
        r = jnp.where(np.arange(value.shape[-1]) < own, jnp.pad(r, room), rest)
    return [q, r]


@padded_rule("geqrf")
def _geqrf(op: Operation, x: Row, **params: Any) -> Any:
    if has_ragged_core(x, 2) and is_symbolic(x.shape[-1]):
        check_square(op, x)
        return outputs(op, op.bind(_beside_identity(op, x)))
    return outputs(op, op.bind(op.filled(x, 0)))


@padded_rule("householder_product")
def _householder_product(op: Operation, x: Row, taus: Row, **params: Any) -> Any:
    return outputs(op, [op.bind(op.filled(x, 0), op.filled(taus, 0))])


@padded_rule("triangular_solve")
def _triangular_solve(op: Operation, a: Row, b: Row, **params: Any) -> Any:
    return outputs(op, [op.bind(_beside_identity(op, a), op.filled(b, 0))])


@padded_rule("tridiagonal_solve")
def _tridiagonal_solve(
    op: Operation, lower: Row, diagonal: Row, upper: Row, b: Row, **params: Any
) -> Any:
    # The last element of `upper` stands beside the last row of the matrix, which does not have it.
    # With padding it would couple that row with the first one of the padding.
    size = diagonal.shape[-1]
    shape = (*upper.shape[:-1], size - 1)
    mask = op.sizes.mask(shape, op.sizes.padded_axes(shape))
    above = jnp.asarray(upper.value)
    if mask is not None and is_symbolic(size):
        missing = above.shape[-1] - mask.shape[-1]
        mask = jnp.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, missing)])
        above = lax.select(mask, above, lax.full_like(above, 0))
    else:
        above = op.filled(upper, 0)
    operands = op.filled(lower, 0), op.filled(diagonal, 1), above, op.filled(b, 0)
    return outputs(op, [op.bind(*operands)])


@padded_rule("custom_linear_solve")
def _custom_linear_solve(
    op: Operation, *rows: Row, const_lengths: Any, jaxprs: Any, **params: Any
) -> Any:
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

        def run(*values: Any, own: Moving = own, body: Any = body) -> list[Any]:
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


@padded_rule("cholesky_update")
def _cholesky_update(op: Operation, r: Row, w: Row) -> Any:
    return outputs(op, [op.bind(_beside_identity(op, r), op.filled(w, 0))])
