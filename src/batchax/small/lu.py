"""The LU factorisation with partial pivoting, a step for each column."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value


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
        a, pivots = state
        column = lax.dynamic_index_in_dim(a, j, 1, keepdims=False)
        pivot = lax.argmax(jnp.where(rows >= j, _size(column), -1), 0, "int32")
        row = a[0]
        for i in range(1, m):  # takes less time than a gather
            row = jnp.where(pivot == i, a[i], row)

        def swapped(x: Any, row: Any, rows: Any) -> Any:
            other = lax.dynamic_index_in_dim(x, j, 0)
            return jnp.where(rows == j, row, jnp.where(rows == pivot, other, x))

        head = lax.dynamic_index_in_dim(row, j, 0, keepdims=False)
        column = swapped(column, head, rows)
        factors = jnp.where(head == 0, column, column / head)[:, None]
        here = rows[:, None]
        a = swapped(a, row, here)
        left = jnp.where(columns == j, factors, a - factors * row)
        a = jnp.where((here > j) & (columns >= j), left, a)
        return a, lax.dynamic_update_index_in_dim(pivots, pivot, j, 0)

    a, pivots = lax.fori_loop(0, steps, step, (a, jnp.zeros((steps, lanes), "int32")))
    order = jnp.broadcast_to(rows, (m, lanes))
    for j in reversed(range(steps)):  # where what ends in a row was before
        order = jnp.where(order == j, pivots[j], jnp.where(order == pivots[j], j, order))
    return [a, pivots, order]


def _size(x: Value) -> Any:
    return jnp.abs(jnp.real(x)) + jnp.abs(jnp.imag(x)) if jnp.iscomplexobj(x) else jnp.abs(x)
