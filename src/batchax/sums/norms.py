"""The sum of the squares of a product whose factors have no label in common.

That of ``outer(a, b)`` is the sum of squares of `a` times that of `b`: Goodfellow, "Efficient
per-example gradient computations", arXiv:1510.01799, 2015.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.sums.products import Factor, Group, Operand, Product, aligned, groups_of


def sum_of_squares(x: Operand) -> Any:
    """The sum of the squares of all elements; None if it is not made of such sums of factors.

    That of pieces which have no element in common is the sum of theirs.
    """
    terms = x.products
    apart = all(itertools.starmap(Product.is_apart, itertools.combinations(terms, 2)))
    if not (apart and any(map(_is_outer, terms))):
        return None
    each = list(map(_of_product, terms))
    return None if any(s is None for s in each) else functools.reduce(operator.add, each)


def _is_outer(x: Product) -> bool:
    large = [g for g in groups_of(x.factors) if math.prod(n.size for n in g.labels) > 1]
    return len(large) > 1


def _of_product(x: Product) -> Any:
    groups = groups_of(x.factors)
    labels = [n for group in groups for n in group.labels]
    apart = len(labels) == len(set(labels)) and set(x.labels) == set(labels)
    if x.matrices is not None or not apart:
        return None
    parts = [_multiplied(x.factors, group) for group in groups]
    return _of_outer(parts) if _is_outer(x) else _of_one(parts)


def _of_one(parts: list[Value]) -> Any:
    return jnp.sum(jnp.square(functools.reduce(jnp.multiply, parts)))


def _multiplied(factors: Sequence[Factor], group: Group) -> Any:
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
