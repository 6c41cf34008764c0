"""The LU factorisation with partial pivoting, a step for each column."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value
from batchax.small.planes import conjugate, parts, squares, times, whole
from batchax.small.scaling import power_of_two


def lu(a: Value) -> list[Any]:
    """Both factors of matrices in one array, the row each step swaps with, and the permutation.

    Elimination by outer products (Golub and Van Loan 2013, "Matrix Computations", 3.4.1). As in
    LAPACK a pivot is the first of the largest in its column, by the sum of the moduli of both parts
    where numbers are complex; a column of zeros stays.

    Args:
      a: ``[rows, columns, lanes]``, real or complex.
    """
    m, n, lanes = a.shape
    steps = min(m, n)
    rows = lax.broadcasted_iota("int32", (m, 1), 0)
    columns = lax.broadcasted_iota("int32", (1, n, 1), 1)

    def step(j: Any, state: Any) -> Any:
        planes, pivots = state
        column = [lax.dynamic_index_in_dim(x, j, 1, keepdims=False) for x in planes]
        pivot = lax.argmax(jnp.where(rows >= j, _size(column), -1), 0, "int32")
        row = [x[0] for x in planes]
        for i in range(1, m):  # takes less time than a gather
            row = [jnp.where(pivot == i, x[i], y) for x, y in zip(planes, row, strict=True)]

        def swapped(x: Any, row: Any, rows: Any) -> Any:
            other = lax.dynamic_index_in_dim(x, j, 0)
            return jnp.where(rows == j, row, jnp.where(rows == pivot, other, x))

        head = [lax.dynamic_index_in_dim(x, j, 0, keepdims=False) for x in row]
        column = [swapped(x, y, rows) for x, y in zip(column, head, strict=True)]
        factors = [x[:, None] for x in _quotients(column, head)]
        here = rows[:, None]
        new = []
        for x, y, f, away in zip(planes, row, factors, times(factors, row), strict=True):
            x = swapped(x, y, here)
            left = jnp.where(columns == j, f, x - away)
            new.append(jnp.where((here > j) & (columns >= j), left, x))
        return new, lax.dynamic_update_index_in_dim(pivots, pivot, j, 0)

    start = parts(a), jnp.zeros((steps, lanes), "int32")
    planes, pivots = lax.fori_loop(0, steps, step, start)
    order = jnp.broadcast_to(rows, (m, lanes))
    for j in reversed(range(steps)):  # where what ends in a row was before
        order = jnp.where(order == j, pivots[j], jnp.where(order == pivots[j], j, order))
    return [whole(planes), pivots, order]


def _size(planes: Sequence[Value]) -> Any:
    return functools.reduce(jnp.add, map(jnp.abs, planes))


def _quotients(column: Sequence[Value], head: Sequence[Value]) -> list[Any]:
    """The elements over that in front of them, or as they are where that is 0.

    Of complex numbers in parts, which are vectorised where quotients are not. The divisor is
    brought near 1 before it is squared.
    """
    idle = functools.reduce(jnp.logical_and, [x == 0 for x in head])
    if len(head) == 1:
        return [jnp.where(idle, column[0], column[0] / head[0])]
    size = functools.reduce(jnp.maximum, map(jnp.abs, head))
    info = jnp.finfo(size.dtype)
    by = jnp.where(size < jnp.inf, jnp.clip(power_of_two(size), info.tiny, 1 / info.tiny), 1)
    near = [x / by for x in head]
    inverse = [x / squares(near) for x in conjugate(near)]
    quotients = [x / by for x in times(column, inverse)]
    return [jnp.where(idle, x, y) for x, y in zip(column, quotients, strict=True)]
