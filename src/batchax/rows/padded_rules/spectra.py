"""Eigenvalues and singular values: a matrix with padding is the row's own beside a diagonal.

The numbers on that diagonal are above all that the matrix has, and no two are equal. So eigenvalues
in ascending order have those of the row in front, singular values in descending order have them
behind as many as there are on the diagonal, no vector mixes the two, and derivatives, which divide
by differences, are finite. What leaves blocks in their places (Hessenberg and Schur forms, of
LAPACK) has the row's own in front whatever is beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.linalg import (
    check_square,
    has_ragged_core,
    of_one_size,
    outputs,
    own_matrices,
)
from batchax.rows.padded_rules.moving import moved
from batchax.rows.sizes import is_symbolic


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
            "Give full_matrices=False."
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
