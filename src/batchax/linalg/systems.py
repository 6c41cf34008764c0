"""Cholesky, LU, and triangular systems of small matrices, lanes last."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.types import Value, Values
from batchax.linalg.elements import (
    conjugate,
    parts,
    power_of_two,
    put,
    repeat,
    row,
    scaled,
    squares,
    times,
    whole,
)


def cholesky(a: Value) -> list[Any]:
    """Returns the lower triangular factors of `a`, ``[n, n, lanes]``, given as lower triangles."""
    # Each element is what is left of that of the matrix once the products of those in front of it
    # are subtracted (Golub and Van Loan 2013, "Matrix Computations", 4.2.5), in the order of the
    # unblocked routine of LAPACK. Where a pivot is not positive the whole matrix is NaN, as JAX has
    # it.
    n, _, lanes = a.shape

    def element(i: Value, j: Value, factor: Value) -> jax.Array:
        left = lambda k, x: x - row(factor, i * n + k) * jnp.conj(row(factor, j * n + k))
        rest = repeat(0, j, left, row(factor, i * n + j))
        pivot = jnp.real(rest)
        root = jnp.sqrt(jnp.where(pivot > 0, pivot, jnp.nan)).astype(a.dtype)
        below = scaled(rest, 1 / jnp.real(row(factor, j * n + j)))
        return put(factor, jnp.where(i == j, root, below), i * n + j)

    of_row = lambda i, factor: repeat(0, i + 1, lambda j, x: element(i, j, x), factor)
    factor = repeat(0, n, of_row, a.reshape(n * n, lanes))
    # A NaN spreads to all later pivots, and so the last one tells of all.
    fails = jnp.isnan(jnp.real(factor[-1]))
    lower = np.tri(n, dtype=bool).reshape(-1, 1)
    factor = jnp.where(fails, jnp.nan, jnp.where(lower, factor, 0))
    return [factor.reshape(a.shape)]


def lu(a: Value) -> list[Any]:
    """Returns both factors in one array, the row each step swaps with, and the permutation."""
    # Elimination by outer products (Golub and Van Loan 2013, "Matrix Computations", 3.4.1). As in
    # LAPACK a pivot is the first of the largest in its column, by the sum of the moduli of both
    # parts where numbers are complex; a column of zeros stays.
    m, n, lanes = a.shape
    steps = min(m, n)
    columns = np.arange(n, dtype=np.int32)[:, None]

    def step(j: Value, state: tuple[Values, Value]) -> tuple[Values, Value]:
        planes, pivots = state
        top = [row(x, j) for x in planes]

        def compare(i: Value, best: tuple[Value, Values]) -> tuple[Value, Values]:
            here = [row(x, i) for x in planes]
            new, size = (_size([row(x, j) for x in y]) for y in (here, best[1]))
            # Nothing is more than the first NaN.
            more = (new > size) | (jnp.isnan(new) & ~jnp.isnan(size))
            rows = [jnp.where(more, x, y) for x, y in zip(here, best[1], strict=True)]
            return jnp.where(more, i, best[0]), rows

        pivot, chosen = repeat(j + 1, m, compare, (jnp.broadcast_to(j, (lanes,)), top))
        head = [row(x, j) for x in chosen]

        def eliminate(i: Value, planes: Values) -> Values:
            here = [jnp.where(pivot == i, x, row(y, i)) for x, y in zip(top, planes, strict=True)]
            factors = _quotients([row(x, j) for x in here], head)
            new = []
            for x, f, away in zip(here, factors, times(factors, chosen), strict=True):
                new.append(jnp.where(columns == j, f, jnp.where(columns > j, x - away, x)))
            return [put(x, y, i) for x, y in zip(planes, new, strict=True)]

        planes = [put(x, y, j) for x, y in zip(planes, chosen, strict=True)]
        return repeat(j + 1, m, eliminate, planes), put(pivots, pivot, j)

    start = parts(a), jnp.zeros((steps, lanes), "int32")
    planes, pivots = repeat(0, steps, step, start)
    return with_permutation(whole(planes), pivots)


def with_permutation(factors: Value, pivots: Value, *_: Value) -> list[Any]:
    """Returns what `lu` returns, from its first results."""
    # JAX's own permutation takes longer to compile than all else in the library's call.
    m, _, lanes = factors.shape
    order = jnp.asarray(np.broadcast_to(np.arange(m, dtype=np.int32)[:, None], (m, lanes)))
    for j in reversed(range(len(pivots))):  # where what ends in a row was before each step
        order = jnp.where(order == j, pivots[j], jnp.where(order == pivots[j], j, order))
    return [factors, pivots, order]


def _size(planes: Values) -> jax.Array:
    return functools.reduce(jnp.add, map(jnp.abs, planes))


def _quotients(column: Values, head: Values) -> list[Any]:
    """Divides elements by the one in front of them, except where that is 0."""
    idle = functools.reduce(jnp.logical_and, [x == 0 for x in head])
    if len(head) == 1:
        return [jnp.where(idle, column[0], column[0] / head[0])]
    # Complex numbers in parts, which are vectorized where quotients are not. The divisor is brought
    # near 1 before it is squared.
    size = functools.reduce(jnp.maximum, map(jnp.abs, head))
    info = jnp.finfo(size.dtype)
    by = jnp.where(size < jnp.inf, jnp.clip(power_of_two(size), info.tiny, 1 / info.tiny), 1)
    near = [x / by for x in head]
    inverse = [x / squares(near) for x in conjugate(near)]
    quotients = [x / by for x in times(column, inverse)]
    return [jnp.where(idle, x, y) for x, y in zip(column, quotients, strict=True)]


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
    """Returns what `jax.lax.linalg.triangular_solve` returns, for the matrices of each lane."""
    # All known unknowns are subtracted from an equation, then it is solved (Golub and Van Loan
    # 2013, "Matrix Computations", 3.1.1).
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

    def solved(done: Value, x: Value) -> jax.Array:
        i = in_order(done)
        left = lambda k, rest: rest - row(a, i, in_order(k)) * row(x, in_order(k))
        rest = repeat(0, done, left, row(x, i))
        return put(x, rest if unit_diagonal else rest / row(a, i, i), i)

    x = repeat(0, n, solved, b)
    return [x if left_side else x.swapaxes(0, 1)]
