"""Systems of equations with triangular matrices, by substitution."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value


def triangular_solve(
    a: Value,
    b: Value,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> list[Any]:
    """What `jax.lax.linalg.triangular_solve` returns, for the matrices of each lane.

    Each unknown is taken off all equations as soon as it is known (Golub and Van Loan 2013, "Matrix
    Computations", 3.1.3).

    Args:
      a: ``[n, n, lanes]``.
      b: ``[n, columns, lanes]``, or ``[rows, n, lanes]`` where the matrix is on the right.
    """
    n = a.shape[0]
    if conjugate_a:
        a = jnp.conj(a)
    # x op(a) = b is op(a)^T x^T = b^T.
    across = transpose_a == left_side  # whether equations are columns of `a`
    if not left_side:
        b = b.swapaxes(0, 1)
    forward = lower != across
    rows = lax.broadcasted_iota("int32", (n, 1, 1), 0)

    # As the library has it: a division for each lane and equation, and none in the loop.
    by = 1 / jnp.stack([a[i, i] for i in range(n)])

    def step(k: Any, x: Any) -> Any:
        j = k if forward else n - 1 - k
        column = lax.dynamic_index_in_dim(a, j, 0 if across else 1, keepdims=False)
        solved = lax.dynamic_index_in_dim(x, j, 0, keepdims=False)
        if not unit_diagonal:
            solved = solved * lax.dynamic_index_in_dim(by, j, 0, keepdims=False)
        rest = rows > j if forward else rows < j
        left = x - column[:, None] * solved
        return jnp.where(rest, left, jnp.where(rows == j, solved, x))

    x = lax.fori_loop(0, n, step, b)
    return [x if left_side else x.swapaxes(0, 1)]
