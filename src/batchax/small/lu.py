"""The LU factorisation with partial pivoting, a step for each column."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.words import Value
from batchax.small.loops import put, repeat, row
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
    columns = np.arange(n, dtype=np.int32)[:, None]

    def step(j: Any, state: Any) -> Any:
        planes, pivots = state
        top = [row(x, j) for x in planes]

        def compare(i: Any, best: Any) -> Any:
            here = [row(x, i) for x in planes]
            new, size = (_size([row(x, j) for x in y]) for y in (here, best[1]))
            # Nothing is more than the first NaN.
            more = (new > size) | (jnp.isnan(new) & ~jnp.isnan(size))
            rows = [jnp.where(more, x, y) for x, y in zip(here, best[1], strict=True)]
            return jnp.where(more, i, best[0]), rows

        pivot, chosen = repeat(j + 1, m, compare, (jnp.broadcast_to(j, (lanes,)), top))
        head = [row(x, j) for x in chosen]

        def eliminate(i: Any, planes: Any) -> Any:
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
    """What `lu` returns, of its first results.

    JAX's own permutation takes longer to compile than all else in the library's call.
    """
    m, _, lanes = factors.shape
    order = jnp.asarray(np.broadcast_to(np.arange(m, dtype=np.int32)[:, None], (m, lanes)))
    for j in reversed(range(len(pivots))):  # where what ends in a row was before each step
        order = jnp.where(order == j, pivots[j], jnp.where(order == pivots[j], j, order))
    return [factors, pivots, order]


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
