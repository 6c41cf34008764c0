"""Sums of the squares of all elements of a value, from the factors that it is made of.

For an outer product, it is the product of two such sums. For a product of matrices, ``x.T @ d``
with a row for each of T positions, it is the sum of ``(x @ x.T) * (d @ d.T)`` ("ghost norm"). That
takes T² (n + m) multiplications in place of T n m, and T² numbers in place of n m. For rows that
are scattered into a table, as in the gradient of an embedding, only these rows are squared.

References:
  I. Goodfellow, Efficient per-example gradient computations, 2015, arXiv:1510.01799. X. Li et al.,
  Large language models can be strong differentially private learners, ICLR 2022, arXiv:2110.05679.
  Z. Bu et al., Differentially private optimization on large model at small cost, ICML 2023,
  arXiv:2210.00038 (the form with fewer operations, for each layer).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.contractions.operations import cut
from batchax.contractions.products import (
    Factor,
    Group,
    Label,
    Operand,
    Product,
    aligned,
    groups_of,
)
from batchax.jaxprs.types import Value

_ELEMENT = 16  # multiplications in the time in which an element is written and read again
_MOST_FORMS = 32
_MOST_ARRAYS = 5


class _Form(NamedTuple):
    """Describes a way to compute a number, and its estimated cost in multiplications."""

    cost: float
    value: Callable[[], Any]


def sum_of_squares(x: Operand, dtype: np.dtype[Any]) -> jax.Array | None:
    """Computes the sum of squares of all elements; None if factors do not make it cheaper."""
    terms = x.products
    if not any(_is_outer(t) or t.matrices for t in terms):
        return None
    # The square of a sum is the sum of inner products of all pairs of terms. Pieces without a
    # common element contribute nothing.
    pairs = [p for p in itertools.combinations(terms, 2) if not p[0].is_apart(p[1])]
    if len(terms) + len(pairs) > max(_MOST_FORMS, len(terms)):
        return None
    forms = [_squares(t, dtype) for t in terms]
    forms += [_inner_product(*pair, dtype, 2) for pair in pairs]
    possible = [form for form in forms if form is not None]
    if len(possible) < len(forms) or sum(form.cost for form in possible) >= sum(map(_cost, terms)):
        return None
    total = functools.reduce(operator.add, (form.value() for form in possible))
    # The terms of a norm of products may cancel, to a little less than zero.
    return total if all(map(_is_apart, terms)) and not pairs else jnp.maximum(total, 0)


def _cost(x: Product) -> float:
    """Estimates the cost of building the array and squaring its elements."""
    elements = math.prod(x.shape)
    multiplied = math.prod(n.size for n in x.in_factors.union(x.labels)) if x.matrices else 0
    return 3 * _ELEMENT * elements + (0 if x.one_hot else multiplied)


def _is_outer(x: Product) -> bool:
    large = [g for g in groups_of(x.factors) if math.prod(n.size for n in g.labels) > 1]
    return len(large) > 1


def _is_apart(x: Product) -> bool:
    """Returns whether its elements are products of arrays without a common label."""
    labels = [n for group in groups_of(x.factors) for n in group.labels]
    return x.matrices is None and len(labels) == len(set(labels)) and set(x.labels) == set(labels)


def _squares(x: Product, dtype: np.dtype[Any]) -> _Form | None:
    if x.one_hot:
        return _scattered_squares(x, dtype)
    if not _is_apart(x):
        return _inner_product(x, x, dtype) if x.matrices else None
    groups = groups_of(x.factors)
    of_all = _of_outer if _is_outer(x) else _of_one
    return _Form(
        _ELEMENT * sum(math.prod(n.size for n in group.labels) for group in groups),
        lambda: of_all([_multiplied(x.factors, group, dtype) for group in groups]),
    )


def _multiplied(
    factors: Sequence[Factor], group: Group, dtype: np.dtype[Any] | None = None
) -> jax.Array:
    each = [aligned(factors[k], group.labels) for k in group.numbers]
    value = functools.reduce(jnp.multiply, each)
    return value if dtype is None else lax.convert_element_type(value, dtype)


def _of_one(parts: list[Value]) -> jax.Array:
    return jnp.sum(jnp.square(functools.reduce(jnp.multiply, parts)))


def _of_outer(parts: list[Value]) -> jax.Array:
    """Computes the sum of squares of an outer product."""
    # Each part is scaled by its largest magnitude: its square alone may overflow or underflow where
    # that of the product does not. Infinity times zero is NaN in the product, so the result is,
    # too.
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


def _scattered_squares(x: Product, dtype: np.dtype[Any]) -> _Form | None:
    """Computes squares of rows scattered into a table: rows at one position are added first."""
    parts = groups_of(x.factors)
    index = tuple(dict.fromkeys(n for f in x.one_hot for n in f.labels[:-1]))
    own = tuple(n for n in x.labels if all(n is not f.labels[-1] for f in x.one_hot))
    if not set(index).isdisjoint(own) or any(
        group.labels and set(group.labels) != {*index, *own} for group in parts
    ):
        return None
    rows, width = (math.prod(n.size for n in names) for names in (index, own))

    def value() -> jax.Array:
        each = (Factor(_multiplied(x.factors, g, dtype), g.labels) for g in parts)
        added = functools.reduce(jnp.multiply, (aligned(f, (*index, *own)) for f in each))
        added = jnp.broadcast_to(added, [n.size for n in (*index, *own)]).reshape(rows, width)
        place, size = _place(x.one_hot, index)
        place = place.reshape(rows)
        if rows == 1:
            return jnp.sum(jnp.square(jnp.where(place[0] < size, added, 0)))
        # Each row is added to the first row with the same index, in an array as small as the rows.
        first = jnp.argmax(place[:, None] == place, axis=1)
        first = jnp.where(place < size, first, rows)
        return jnp.sum(jnp.square(jnp.zeros_like(added).at[first].add(added, mode="drop")))

    return _Form(2 * _ELEMENT * rows * width + rows * rows, value)


def _place(one_hot: Sequence[Factor], labels: tuple[Any, ...]) -> tuple[Any, int]:
    """Numbers each position in a table, and returns the first number past its end."""
    sizes = [f.labels[-1].size for f in one_hot]
    each = [aligned(f._replace(labels=f.labels[:-1]), labels) for f in one_hot]
    out = functools.reduce(jnp.logical_or, (i >= n for i, n in zip(each, sizes, strict=True)))
    number = functools.reduce(lambda a, b: a * b[1] + b[0], zip(each, sizes, strict=True), 0)
    number = jnp.where(out, math.prod(sizes), number)
    return jnp.broadcast_to(number, [n.size for n in labels]), math.prod(sizes)


def _inner_product(x: Product, y: Product, dtype: np.dtype[Any], times: int = 1) -> _Form | None:
    """Computes the sum of products of the elements of two, times a number."""
    both = _common(x, y)
    other = both and _alongside(*both)
    if both is None or other is None:
        return None
    x = both[0]
    each = [_arrays_of(p, dtype) for p in (x, other)]
    arrays = _without_one_hot([f for factors, _ in each for f in factors], dtype)
    if arrays is None or not 0 < len(arrays) <= _MOST_ARRAYS:
        return None
    repeated = {*x.labels, *other.labels} - x.in_factors - other.in_factors
    cost, order = _cheapest(tuple(frozenset(f.labels) for f in arrays))

    def value() -> jax.Array:
        numbers = [n for _, own in each for n in own]
        sign = -1 if x.negative != other.negative else 1
        number = jnp.asarray(sign * times * math.prod(n.size for n in repeated), dtype)
        return functools.reduce(jnp.multiply, [number, _contracted(arrays, order, dtype), *numbers])

    return _Form(cost, value)


def _common(x: Product, y: Product) -> tuple[Product, Product] | None:
    """Slices two pieces to their common elements."""
    for d in range(len(x.dims)):
        start = max(x.starts[d], y.starts[d])
        stop = min(p.starts[d] + p.shape[d] for p in (x, y))
        parts = [cut((p,), d, start, stop) for p in (x, y)]
        if not all(parts):
            return None
        (x,), (y,) = (part for part in parts if part)
    return x, y


def _alongside(x: Product, y: Product) -> Product | None:
    """Relabels `y` with the labels of `x` by dimension, and fresh ones for summed labels."""
    pairs: dict[Label, Label] = {}
    for mine, others in zip(x.dims, y.dims, strict=True):
        if [n.size for n in mine] != [n.size for n in others]:
            return None
        pairs |= dict(zip(others, mine, strict=True))
    new = {n: Label(n.size) for n in y.in_factors - pairs.keys()}
    return y.relabelled(pairs | new)


def _arrays_of(x: Product, dtype: np.dtype[Any]) -> tuple[list[Factor], list[Value]]:
    """Splits a product into its arrays, one-hot ones last, and its numbers."""
    groups = groups_of(x.factors)
    values = [_multiplied(x.factors, group) for group in groups]
    arrays = [Factor(v, g.labels) for v, g in zip(values, groups, strict=True) if g.labels]
    numbers = [
        lax.convert_element_type(v, dtype)
        for v, g in zip(values, groups, strict=True)
        if not g.labels
    ]
    return [*arrays, *x.one_hot], numbers


def _without_one_hot(factors: list[Factor], dtype: np.dtype[Any]) -> list[Factor] | None:
    """Replaces one-hot factors by rows read from tables, or by compared indices."""
    while one_hot := [f for f in factors if f.one_hot]:
        first, (*index, place) = one_hot[0], one_hot[0].labels
        others = [f for f in factors if f is not first and place in f.labels]
        if len(others) != 1:
            return None
        (other,) = others
        # The inner product of two one-hot factors is 1 where their indices agree.
        if other.one_hot:
            if len(one_hot) > 2 or other.labels[-1] is not place:
                return None
            labels = (*index, *(n for n in other.labels[:-1] if n not in index))
            each = [aligned(f._replace(labels=f.labels[:-1]), labels) for f in (first, other)]
            value = ((each[0] == each[1]) & (each[0] < place.size)).astype(dtype)
        else:
            d = other.labels.index(place)
            labels = (*other.labels[:d], *index, *other.labels[d + 1 :])
            if len(labels) != len(set(labels)):
                return None
            value = jnp.take(other.value, first.value, d, mode="fill", fill_value=0)
        kept = [f for f in factors if f is not first and f is not other]
        factors = [*kept, Factor(value, labels)]
    return factors


_Order = Sequence[tuple[int, int]]
"""Which two arrays are contracted, one pair after another: their product is the last array."""


def _cheapest(arrays: tuple[frozenset[Any], ...]) -> tuple[float, _Order]:
    """Finds the cheapest order to contract arrays with these labels, and its cost."""
    if len(arrays) < 2:
        return 0.0, ()
    best: tuple[float, _Order] = math.inf, ()
    # All orders are tried: there are at most `_MOST_ARRAYS` arrays.
    for i, j in itertools.combinations(range(len(arrays)), 2):
        others = tuple(a for k, a in enumerate(arrays) if k not in (i, j))
        both = arrays[i] | arrays[j]
        left = both & frozenset().union(*others)
        cost, order = _cheapest((*others, left))
        cost += math.prod(n.size for n in both) + _ELEMENT * math.prod(n.size for n in left)
        if cost < best[0]:
            best = cost, ((i, j), *order)
    return best


def _contracted(arrays: Sequence[Factor], order: _Order, dtype: np.dtype[Any]) -> jax.Array:
    """Sums the product of arrays over all labels."""
    arrays = list(arrays)
    for i, j in order:
        x, y = arrays[i], arrays[j]
        others = [f for k, f in enumerate(arrays) if k not in (i, j)]
        left = {n for f in others for n in f.labels}
        labels = tuple(n for n in dict.fromkeys((*x.labels, *y.labels)) if n in left)
        arrays = [*others, Factor(_einsum([x, y], labels, dtype), labels)]
    return _einsum(arrays, (), dtype) if arrays[0].labels else arrays[0].value


def _einsum(arrays: Sequence[Factor], labels: tuple[Any, ...], dtype: np.dtype[Any]) -> jax.Array:
    numbers = {n: k for k, n in enumerate(dict.fromkeys(n for f in arrays for n in f.labels))}
    common = jnp.result_type(*(f.value for f in arrays))
    given = ((f.value.astype(common), [numbers[n] for n in f.labels]) for f in arrays)
    return jnp.einsum(
        *itertools.chain(*given),
        [numbers[n] for n in labels],
        precision=lax.Precision.HIGHEST,  # errors do not cancel where terms do
        preferred_element_type=dtype,
    )
