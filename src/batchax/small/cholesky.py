"""The Cholesky factorisation, row after row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.words import Value
from batchax.small.loops import put, repeat, row
from batchax.small.scaled import scaled


def cholesky(a: Value) -> list[Any]:
    """The lower triangular factors of matrices of which the lower triangles are given.

    Each element is what is left of that of the matrix once the products of those in front of it are
    taken off (Golub and Van Loan 2013, "Matrix Computations", 4.2.5), in the order in which the
    unblocked routine of LAPACK does so. Where a pivot is not positive the whole matrix is NaN, as
    JAX has it.

    Args:
      a: ``[n, n, lanes]``, real or complex.
    """
    n, _, lanes = a.shape

    def element(i: Any, j: Any, factor: Any) -> Any:
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
