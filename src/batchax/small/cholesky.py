"""The Cholesky factorisation, column after column."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value
from batchax.small.scaled import scaled


def cholesky(a: Value) -> list[Any]:
    """The lower triangular factors of matrices of which the lower triangles are given.

    Each column is what is left of that of the matrix once the columns to the left of it are taken
    off (Golub and Van Loan 2013, "Matrix Computations", 4.2.5), as the unblocked routine of LAPACK
    computes it. Where a pivot is not positive the whole matrix is NaN, as JAX has it.

    Args:
      a: ``[n, n, lanes]``, real or complex.
    """
    n = a.shape[0]
    columns: list[Any] = []  # each from the diagonal on
    for j in range(n):
        column = a[j:, j]
        for k, left in enumerate(columns):
            column = column - left[j - k :] * jnp.conj(left[j - k])
        pivot = jnp.real(column[0])
        root = jnp.sqrt(jnp.where(pivot > 0, pivot, jnp.nan))
        below = scaled(column, 1 / root)
        first = lax.broadcasted_iota("int32", column.shape, 0) == 0
        # What is computed of a column is kept: else each later one computes it again.
        columns.append(lax.optimization_barrier(jnp.where(first, root.astype(a.dtype), below)))
    factor = jnp.stack([jnp.pad(x, ((j, 0), (0, 0))) for j, x in enumerate(columns)], 1)
    # A NaN spreads to all later pivots, and so the last one tells of all.
    fails = jnp.isnan(jnp.real(columns[-1][0]))
    return [jnp.where(fails, jnp.nan, factor)]
