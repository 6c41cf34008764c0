"""Tridiagonal systems, by elimination with pivots, a row after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Aval, Value
from batchax.small.pays import pays_back


def tridiagonal_solve(dl: Value, d: Value, du: Value, b: Value, **_: Any) -> list[Any]:
    """What `jax.lax.linalg.tridiagonal_solve` returns, for the systems of each lane.

    A row is exchanged with the next one where that has the larger element in the column, as in
    LAPACK's `gtsv` (Golub and Van Loan 2013, "Matrix Computations", 4.3.4). Where a pivot is 0 all
    of the solution is NaN, as JAX has it.

    Args:
      dl, d, du: below, on and above the diagonal, ``[n, lanes]``, real.
      b: ``[n, columns, lanes]``.
    """
    n = d.shape[0]
    row = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
    put = lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i, 0)

    def forward(i: Any, carry: Any) -> Any:
        """Row `i` without what is below the diagonal; the one above it is finished."""
        finished, here, above, right, fails = carry
        below, next_here, next_right = row(dl, i), row(d, i), row(b, i)
        next_above = jnp.where(i == n - 1, 0, row(du, i))  # the last one is not read
        swap = jnp.abs(below) > jnp.abs(here)
        pick = lambda x, y: (jnp.where(swap, x, y), jnp.where(swap, y, x))
        pivot, away = pick(below, here)
        factor = away / pivot
        (first, left), (second, rest) = pick(next_here, above), pick(next_above, 0)
        done, open_ = pick(next_right, right)
        values = pivot, first, second, done
        finished = [put(x, y, i - 1) for x, y in zip(finished, values, strict=True)]
        fails = fails | (pivot == 0)
        left, rest, open_ = left - factor * first, rest - factor * second, open_ - factor * done
        return finished, left, rest, open_, fails

    blank = [*(jnp.zeros_like(d) for _ in range(3)), jnp.zeros_like(b)]
    start = blank, d[0], du[0], b[0], jnp.zeros(d[0].shape, bool)
    finished, here, _, right, fails = lax.fori_loop(1, n, forward, start)
    last = right / here

    def back(k: Any, carry: Any) -> Any:
        solution, x, y = carry
        i = n - 2 - k
        pivot, first, second, right = (row(z, i) for z in finished)
        new = (right - first * x - second * y) / pivot
        return put(solution, new, i), new, x

    start = put(jnp.zeros_like(b), last, n - 1), last, jnp.zeros_like(last)
    solution = lax.fori_loop(0, n - 1, back, start)[0]
    return [jnp.where(fails | (here == 0), jnp.nan, solution)]


def serves(lane: Sequence[Aval], params: Any) -> bool:
    """Whether it is for systems of numbers of single precision with one right side.

    In double precision, with more right sides and for complex numbers the library takes less time,
    or little more.
    """
    (n, columns), singular = lane[3].shape, params.get("perturb_singular", False)
    return lane[3].dtype == jnp.float32 and columns == 1 and 6 <= n <= 64 and not singular


def pays(lane: Sequence[Aval], lanes: int, params: Any, in_loop: bool) -> bool:
    """Whether so many systems gain what compiling takes longer, on a CPU."""
    return pays_back(0.008 * lane[3].shape[0], 0.3, lanes, in_loop)
