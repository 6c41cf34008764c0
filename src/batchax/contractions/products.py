"""Values of one example as products of smaller ones, whose dimensions have labels.

Element (i, j) of ``outer(a, b) * s`` is ``a[i] * b[j] * s``: a product of three factors, labelled
(i), (j) and (). So is one of a product of matrices, with a label in two factors that the value has
not, and over which the products are summed. In ``ravel(outer(a, b))`` the one dimension has both
labels; concatenated with others, the product is a piece, which starts where it starts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from batchax.jaxprs.types import Value


@dataclass(frozen=True, eq=False)
class Label:
    """Names a dimension, by identity."""

    size: int


class Factor(NamedTuple):
    """Holds an array of one example, with a label for each dimension."""

    # A one-hot factor holds the indices at which it is 1 along its last label, which `value` lacks.
    # It is 0 if the index is out of range.
    value: Value
    labels: tuple[Any, ...]
    one_hot: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """Describes a value, or a piece, each element of which is a product of factors' elements.

    It may also be a sum of such products. Each element of a value is in some of its terms.
    """

    factors: tuple[Factor, ...]
    # For each dimension its labels, slowest first; none for size 1. Along labels that no factor
    # has, elements repeat.
    dims: tuple[tuple[Label, ...], ...]
    starts: tuple[int, ...]  # where in the value it begins
    negative: bool = False  # whether the sign is flipped
    precision: Any = None  # of the user's matrix product, if it is one
    matrices: Any = None  # the variable of this sum, if labels are summed or rows scattered

    @functools.cached_property
    def labels(self) -> tuple[Label, ...]:
        return tuple(n for own in self.dims for n in own)

    @functools.cached_property
    def in_factors(self) -> frozenset[Label]:
        return frozenset(n for f in self.factors for n in f.labels)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the piece."""
        return tuple(math.prod(n.size for n in own) for own in self.dims)

    @property
    def one_hot(self) -> list[Factor]:
        return [f for f in self.factors if f.one_hot]

    @property
    def is_zero(self) -> bool:
        """Returns whether all factors are known zeros."""
        return all(_is_zero(f.value) for f in self.factors)

    def is_apart(self, other: Product) -> bool:
        """Returns whether it has no element in common with another piece."""
        places = zip(self.starts, self.shape, other.starts, other.shape, strict=True)
        return any(a + n <= b or b + m <= a for a, n, b, m in places)

    def repeats(self, d: int) -> bool:
        """Returns whether all elements along a dimension are the same."""
        return self.in_factors.isdisjoint(self.dims[d])

    def relabelled(self, labels: Mapping[Label, Label]) -> Product:
        renamed = lambda own: tuple(labels.get(n, n) for n in own)
        factors = tuple(f._replace(labels=renamed(f.labels)) for f in self.factors)
        return replace(self, factors=factors, dims=tuple(map(renamed, self.dims)))


Terms = tuple[Product, ...]
"""Products whose sum a value is."""


def itself(x: Value) -> Product:
    shape = np.shape(x)
    dims = tuple(() if n == 1 else (Label(n),) for n in shape)
    units = [d for d, n in enumerate(shape) if n == 1]
    factor = Factor(lax.squeeze(x, units) if units else x, tuple(n for own in dims for n in own))
    return Product((factor,), dims, (0,) * len(shape))


def aligned(factor: Any, labels: tuple[Any, ...]) -> Value:
    """Transposes a factor to the order of `labels`, with size 1 for those it lacks."""
    value, own = factor[:2]
    if own == labels:
        return value
    value = lax.transpose(value, [own.index(n) for n in labels if n in own])
    return lax.expand_dims(value, [d for d, n in enumerate(labels) if n not in own])


@dataclass(frozen=True, eq=False)
class Operand:
    """Holds a value with its products, and what it is the square or reshape of."""

    value: Value
    terms: Terms | None = None
    square_of: Operand | None = None
    reshaped: Operand | None = None

    @functools.cached_property
    def products(self) -> Terms:
        """Returns the products; the value itself if none are known, or if it is a number."""
        if self.terms is None or not (np.shape(self.value) or self.is_zero):
            return (itself(self.value),)
        return self.terms

    @property
    def has_arrays(self) -> bool:
        """Returns whether it is known to be a product of several arrays."""
        return any(t.one_hot or len(arrays_of(t)) > 1 for t in self.terms or ())

    @property
    def is_zero(self) -> bool:
        """Returns whether it is known to be zero."""
        if self.terms is None:
            return _is_zero(self.value)
        return all(t.is_zero for t in self.terms)


def _is_zero(x: Value) -> bool:
    written = isinstance(x, (int, float, np.generic, np.ndarray))
    return written and np.ndim(x) == 0 and not x


class Group(NamedTuple):
    """Lists factors that are multiplied elementwise; the first has all labels."""

    numbers: tuple[int, ...]
    labels: tuple[Any, ...]


def groups_of(factors: Sequence[Factor]) -> list[Group]:
    """Groups factors that are not one-hot, so that no group has all labels of another.

    The last group, if any, holds numbers.
    """
    by_labels: dict[frozenset[Any], list[int]] = {}
    for k, factor in enumerate(factors):
        if not factor.one_hot:
            by_labels.setdefault(frozenset(factor.labels), []).append(k)
    # A factor joins the smallest maximal group that has all of its labels.
    largest = [own for own in by_labels if own and not any(own < other for other in by_labels)]
    numbers = {own: list(by_labels[own]) for own in largest}
    for own, ks in by_labels.items():
        if own and own not in numbers:
            fitting = [other for other in largest if own < other]
            numbers[min(fitting, key=len)] += ks
    groups = [Group(tuple(ks), factors[ks[0]].labels) for ks in numbers.values()]
    scalars = by_labels.get(frozenset())
    return [*groups, Group(tuple(scalars), ())] if scalars else groups


def arrays_of(x: Product) -> list[Group]:
    return [group for group in groups_of(x.factors) if group.labels]
