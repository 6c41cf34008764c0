"""Systems of equations with triangular matrices, by substitution."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from batchax.jaxprs.words import Value
from batchax.small.loops import put, repeat, row


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

    All unknowns that are known are taken off an equation, then it is solved (Golub and Van Loan
    2013, "Matrix Computations", 3.1.1).

    Args:
      a: ``[n, n, lanes]``.
      b: ``[n, columns, lanes]``, or ``[rows, n, lanes]`` where the matrix is on the right.
    """
    n = a.shape[0]
    if conjugate_a:
        a = jnp.conj(a)
    # x op(a) = b is op(a)^T x^T = b^T.
    across = transpose_a == left_side  # whether equations are columns of `a`
    if across:
        a = a.swapaxes(0, 1)
    if not left_side:
        b = b.swapaxes(0, 1)
    in_order = (lambda i: i) if lower != across else (lambda i: n - 1 - i)

    def solved(done: Any, x: Any) -> Any:
        i = in_order(done)
        left = lambda k, rest: rest - row(a, i, in_order(k)) * row(x, in_order(k))
        rest = repeat(0, done, left, row(x, i))
        return put(x, rest if unit_diagonal else rest / row(a, i, i), i)

    x = repeat(0, n, solved, b)
    return [x if left_side else x.swapaxes(0, 1)]
