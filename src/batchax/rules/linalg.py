"""Linear algebra.

Nearly every decomposition takes leading batch dimensions: a table says how
many trailing dimensions each operand has. Small matrices may be decomposed
with lanes last instead (`small_matrices.py`). Solves with one matrix for all lanes
take the lanes as further columns instead of repeating the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import linalg

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, move_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.interpreter import Place
from batchax.kernel.registry import leading_rule, register_looking, register_rule
from batchax.rules.small_matrices import with_lanes_last

enter(
    """
    : lu_pivots_to_permutation
    library: cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr
      qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """
)

RANKS = {
    "cholesky": (2,),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "tridiagonal": (2,),
}


def _decomposition(primitive: _compat.Primitive, ranks: Sequence[int]) -> None:
    @register_looking(primitive)
    def rule(
        axis: Axis, args: Any, axes: Any, /, *, place: Place | None = None, **params: Any
    ) -> tuple[Any, Any]:
        return _each_its_own(primitive, ranks, axis, args, axes, params, place)


def _each_its_own(
    primitive: _compat.Primitive,
    ranks: Sequence[int],
    axis: Axis,
    args: Any,
    axes: Any,
    params: Any,
    place: Place | None = None,
) -> tuple[Any, Any]:
    """The results where lanes have matrices of their own."""
    small = with_lanes_last(primitive, axis, args, axes, params, place)
    return leading_rule(primitive, ranks, axis, args, axes, **params) if small is None else small


for _name, _ranks in RANKS.items():
    _primitive = _compat.find_primitive(_name)
    if _primitive is not None:
        _decomposition(_primitive, _ranks)


@register_rule(linalg.triangular_solve_p)
def _triangular_solve(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
    if axes[0] is not None:
        return _each_its_own(linalg.triangular_solve_p, (2, 2), axis, args, axes, params)
    solve = partial(linalg.triangular_solve_p.bind, args[0], **params)
    return _merged(solve, args[1], axes[1], -1 if params["left_side"] else -2)


@register_rule(linalg.tridiagonal_solve_p)
def _tridiagonal_solve(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
    *diagonals, b = args
    if any(a is not None for a in axes[:-1]):
        return _each_its_own(linalg.tridiagonal_solve_p, (1, 1, 1, 2), axis, args, axes, params)
    return _merged(partial(linalg.tridiagonal_solve_p.bind, *diagonals, **params), b, axes[-1], -1)


def _merged(solve: Callable[[Any], Any], b: Any, position: int, dim: int) -> tuple[Any, int]:
    """`solve(b)` with the lanes as more right-hand sides.

    `dim` is the dimension, counted from the end, over which the right-hand
    sides of one example extend.
    """
    start = b.ndim + dim - 1
    if position not in (start, start + 1):  # next to `dim`, so that a reshape merges the two
        b, position = move_axis(b, position, start), start
    shape = b.shape
    merged = lax.reshape(b, (*shape[:start], shape[start] * shape[start + 1], *shape[start + 2 :]))
    return lax.reshape(solve(merged), shape), position


@register_rule(linalg.cholesky_update_p)
def _cholesky_update(axis: Axis, args: Any, axes: Any, /) -> tuple[Any, Any]:
    # The primitive takes no batch dimensions at all.
    (out,), (position,) = batch_function(axis, _rank_one_update, args, axes)
    return out, position


def _rank_one_update(r: Any, w: Any) -> list[Any]:
    """The upper triangular factor of ``r.T @ r + outer(w, w)``, by Givens rotations."""

    def rotate(w: Any, row_and_index: Any) -> tuple[Any, Any]:
        row, k = row_and_index
        x, y = row[k], w[k]
        none = y == 0
        scale = jnp.where(none, 1, jnp.maximum(abs(x), abs(y)))
        x, y = x / scale, y / scale
        length = jnp.where(none, 1, jnp.sqrt(x * x + y * y))
        c, s = jnp.where(none, 1, x / length), y / length
        return c * w - s * row, c * row + s * w

    return [lax.scan(rotate, w, (r, jnp.arange(w.shape[0])))[1]]
