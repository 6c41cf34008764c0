"""Linear algebra: a matrix with padding is the row's own beside an identity or a diagonal.

Factors of a matrix beside an identity are those of the row's own beside an identity, and solutions
those of the row's own beside zeros. For eigenvalues and singular values the numbers on the diagonal
are above all that the matrix has, and no two are equal. So eigenvalues in ascending order have
those of the row in front, singular values in descending order have them behind as many as there are
on the diagonal, no vector mixes the two, and derivatives, which divide by differences, are finite.
Hessenberg and Schur forms leave blocks in their places: the row's own is in front.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.rows.index import moved
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.calls import Moving, arrays, padded_function, run_inside, staged
from batchax.rows.sizes import agreed, is_symbolic
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


def _beside_large(op: Operation, x: Row) -> tuple[Any, Any, Any]:
    """The array of matrices with a diagonal in place of padding.

    Returns:
      it; how many numbers the diagonal has; and what none of them is below, and no eigenvalue or
      singular value of the row above, shaped as the array.
    """
    value = jnp.asarray(op.filled(x, 0))
    shape: Any = x.shape
    rows, columns = shape[-2:]
    sizes = op.sizes.size(rows), op.sizes.size(columns)
    return _diagonal_added(value, *sizes, own_matrices(op, x), rows == columns)


@functools.partial(jax.jit, static_argnums=4)  # to be one program outside of `jit`, too
def _diagonal_added(
    value: Any, own_rows: Any, own_columns: Any, own: Any, square: bool
) -> tuple[Any, Any, Any]:
    rows, columns = value.shape[-2:]
    size = jnp.abs(lax.stop_gradient(value))
    most = jnp.maximum(*(size.sum(axis).max(-1) for axis in (-1, -2)))[..., None, None]
    most = 1.5 * jnp.where(most > 0, most, 1)
    at, along = np.arange(rows)[:, None] - own_rows, np.arange(columns) - own_columns
    there = (at == along) & (at >= 0)
    if own is not None:
        there = jnp.where(own, there, np.eye(rows, columns) > 0)
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
    return value, count.astype(np.int32), most


@padded_rule("eigh")
def _eigh(op: Operation, x: Row, *, subset_by_index: Any, **params: Any) -> Any:
    if not has_ragged_core(x, 2):
        return of_one_size(op, x)
    check_square(op, x)
    if subset_by_index is not None:
        raise op.refuse("it computes some of the eigenvalues. Compute all, and slice them.")
    value, _, most = _beside_large(op, x)
    vectors, values = op.bind(value)
    if not params.get("sort_eigenvalues", True):
        order = _own_first(jnp.abs(values), most[..., 0])
        values = jnp.take_along_axis(values, order, -1)
        vectors = jnp.take_along_axis(vectors, order[..., None, :], -1)
    return outputs(op, [vectors, values])


def _own_first(size: Any, most: Any) -> Any:
    """An order in which what is below `most` comes before what is not, and all else stays."""
    return jnp.argsort(lax.stop_gradient(size) >= most * 0.999, axis=-1, stable=True)


@padded_rule("eig")
def _eig(op: Operation, x: Row, **params: Any) -> Any:
    if not has_ragged_core(x, 2):
        return of_one_size(op, x)
    check_square(op, x)
    value, _, most = _beside_large(op, x)
    values, *vectors = op.bind(value)
    order = _own_first(jnp.abs(values), most[..., 0])  # LAPACK has them so, and others may not
    vectors = [jnp.take_along_axis(v, order[..., None, :], -1) for v in vectors]
    return outputs(op, [jnp.take_along_axis(values, order, -1), *vectors])


@padded_rule("svd")
def _svd(
    op: Operation,
    x: Row,
    *,
    full_matrices: bool,
    compute_uv: bool,
    subset_by_index: Any,
    **params: Any,
) -> Any:
    if not has_ragged_core(x, 2):
        return of_one_size(op, x)
    if subset_by_index is not None:
        raise op.refuse("it computes some of the singular values. Compute all, and slice them.")
    if compute_uv and full_matrices and x.shape[-1] != x.shape[-2]:
        raise op.refuse(
            f"its matrix has the shape ({x.shape[-2]}, {x.shape[-1]}), and full_matrices asks for "
            "vectors besides those of its singular values, which are any that are orthogonal. "
            "Pass full_matrices=False."
        )
    value, count, _ = _beside_large(op, x)
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
    return outputs(op, cropped)


def _behind(x: Any, axis: int, count: Any, room: int) -> Any:
    """What is behind the first `count` along an axis."""
    if count is None:
        return x
    whole = x.shape[axis]
    source = np.arange(room, dtype=np.int32) + count
    target = np.arange(whole, dtype=np.int32) - count
    return moved(x, axis, jnp.where(source < whole, source, -1), target)


def _in_place(name: str, ranks: Sequence[int]) -> None:
    @padded_rule(name)
    def rule(op: Operation, *rows: Row, **params: Any) -> Any:
        if not any(has_ragged_core(x, rank) for x, rank in zip(rows, ranks, strict=True)):
            return of_one_size(op, *rows)
        if name in _SQUARE:
            check_square(op, rows[0])
        outs = op.bind(*(op.filled(x, 0) for x in rows))
        return outputs(op, outs if op.eqn.primitive.multiple_results else [outs])


_SQUARE = ("hessenberg", "schur", "tridiagonal")
for _name, _ranks in {**dict.fromkeys(_SQUARE, (2,)), "ormqr": (2, 1, 2)}.items():
    _in_place(_name, _ranks)
