"""The sum of the squares of a product whose factors have no label in common.

That of ``outer(a, b)`` is the sum of squares of `a` times that of `b`: Goodfellow, "Efficient
per-example gradient computations", arXiv:1510.01799, 2015.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.sums.products import Group, Product, aligned, groups_of, sizes_of


def sum_of_squares(x: Product) -> Any:
    """The sum of the squares of all elements; None if that is not a product of such sums."""
    sizes, groups = sizes_of(x.factors), groups_of(x.factors)
    labels = [n for group in groups for n in group.labels]
    apart = len(labels) == len(set(labels)) and set(x.labels) == set(labels)
    large = [g for g in groups if math.prod(sizes[n] for n in g.labels) > 1]
    if x.matrices is not None or not apart or len(large) < 2:
        return None
    return _of_outer([multiplied(x.factors, group) for group in groups])


def multiplied(factors: Any, group: Group) -> Any:
    """The product of the factors of a group, with its labels."""
    each = [aligned(factors[k], group.labels) for k in group.numbers]
    return functools.reduce(jnp.multiply, each)


def _of_outer(parts: list[Value]) -> Any:
    """The sum of squares of the outer product of `parts`.

    Squares are of parts over the largest number of each, as the square of a part alone may be too
    large or too small for a float where those of products are not. And where the product has
    infinity times zero, a NaN, so has the result.
    """
    magnitudes = list(map(jnp.abs, parts))
    most = list(map(jnp.max, magnitudes))
    scale = [
        lax.stop_gradient(lax.select(lax.is_finite(m) & (m > 0), m, lax.full_like(m, 1)))
        for m in most
    ]
    sums = [jnp.sum(jnp.square(x / m)) for x, m in zip(parts, scale, strict=True)]
    largest = functools.reduce(jnp.multiply, scale)
    total = largest * functools.reduce(jnp.multiply, sums) * largest  # in this order
    has_zero = [jnp.min(x) == 0 for x in magnitudes]
    nothing = [
        (most[i] == np.inf) & has_zero[j] for i, j in itertools.permutations(range(len(parts)), 2)
    ]
    undefined = functools.reduce(jnp.logical_or, nothing)
    return lax.select(undefined, lax.full_like(total, np.nan), total)
