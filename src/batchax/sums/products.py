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

from batchax.jaxprs.words import Value


@dataclass(frozen=True, eq=False)
class Label:
    """The name of a dimension: two are the same if they are one object."""

    size: int


class Factor(NamedTuple):
    """An array of one example, and the label of each of its dimensions.

    Attributes:
      value: the array; of a one-hot factor the indices at which it is 1 along its last label,
        which is not a dimension of `value`. It is 0 everywhere if the index is out of range.
      labels: the label of each dimension.
      one_hot: whether it is one-hot.
    """

    value: Value
    labels: tuple[Any, ...]
    one_hot: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """A value or a piece of one, each element of which is a product of elements of factors.

    Or it is a sum of such products. Of the terms whose sum a value is, each element is in some.

    Attributes:
      factors: what is multiplied.
      dims: of each dimension of the value, the labels that it consists of, the one that changes
        slowest first; none for one of size 1. Along one that no factor has elements are the same.
      starts: where in the value it begins, in each dimension.
      negative: whether it is that with the other sign.
      precision: what the user said of the product of matrices, if it is one.
      matrices: the variable that is this sum, if the product is summed over labels, or scattered.
    """

    factors: tuple[Factor, ...]
    dims: tuple[tuple[Label, ...], ...]
    starts: tuple[int, ...]
    negative: bool = False
    precision: Any = None
    matrices: Any = None

    @functools.cached_property
    def labels(self) -> tuple[Label, ...]:
        """Those of all its dimensions."""
        return tuple(n for own in self.dims for n in own)

    @functools.cached_property
    def in_factors(self) -> frozenset[Label]:
        """The labels that a factor has."""
        return frozenset(n for f in self.factors for n in f.labels)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece that it is."""
        return tuple(math.prod(n.size for n in own) for own in self.dims)

    @property
    def one_hot(self) -> list[Factor]:
        """The factors that are one-hot: where rows are scattered."""
        return [f for f in self.factors if f.one_hot]

    @property
    def is_zero(self) -> bool:
        """Whether it is zero for all that it could be."""
        return all(_is_zero(f.value) for f in self.factors)

    def is_apart(self, other: Product) -> bool:
        """Whether it is a piece that has no element in common with another piece."""
        places = zip(self.starts, self.shape, other.starts, other.shape, strict=True)
        return any(a + n <= b or b + m <= a for a, n, b, m in places)

    def repeats(self, d: int) -> bool:
        """Whether along a dimension all elements are the same."""
        return self.in_factors.isdisjoint(self.dims[d])

    def relabelled(self, labels: Mapping[Label, Label]) -> Product:
        """The same with other labels."""
        renamed = lambda own: tuple(labels.get(n, n) for n in own)
        factors = tuple(f._replace(labels=renamed(f.labels)) for f in self.factors)
        return replace(self, factors=factors, dims=tuple(map(renamed, self.dims)))


Terms = tuple[Product, ...]
"""Products whose sum a value is."""


def itself(x: Value) -> Product:
    """A value as the only factor of a product."""
    shape = np.shape(x)
    dims = tuple(() if n == 1 else (Label(n),) for n in shape)
    units = [d for d, n in enumerate(shape) if n == 1]
    factor = Factor(lax.squeeze(x, units) if units else x, tuple(n for own in dims for n in own))
    return Product((factor,), dims, (0,) * len(shape))


def aligned(factor: Any, labels: tuple[Any, ...]) -> Any:
    """A factor with its dimensions in the order of `labels`, and of size 1 where it has none."""
    value, own = factor[:2]
    if own == labels:
        return value
    value = lax.transpose(value, [own.index(n) for n in labels if n in own])
    return lax.expand_dims(value, [d for d, n in enumerate(labels) if n not in own])


@dataclass(frozen=True, eq=False)
class Operand:
    """What is known of a value: its products; of what it is the square, or another shape."""

    value: Value
    terms: Terms | None = None
    square_of: Operand | None = None
    reshaped: Operand | None = None

    @functools.cached_property
    def products(self) -> Terms:
        """Its products; itself, if nothing else is known, and if it is a number."""
        if self.terms is None or not (np.shape(self.value) or self.is_zero):
            return (itself(self.value),)
        return self.terms

    @property
    def has_arrays(self) -> bool:
        """Whether it is known to be made of products of several arrays."""
        return any(t.one_hot or len(arrays_of(t)) > 1 for t in self.terms or ())

    @property
    def is_zero(self) -> bool:
        """Whether it is zero for all that it could be."""
        if self.terms is None:
            return _is_zero(self.value)
        return all(t.is_zero for t in self.terms)


def _is_zero(x: Value) -> bool:
    written = isinstance(x, (int, float, np.generic, np.ndarray))
    return written and np.ndim(x) == 0 and not x


class Group(NamedTuple):
    """The numbers of factors that are multiplied by element; the first has all labels."""

    numbers: tuple[int, ...]
    labels: tuple[Any, ...]


def groups_of(factors: Sequence[Factor]) -> list[Group]:
    """The fewest groups of factors that are not one-hot, none of which has all labels of another.

    The last, if there are others, is of numbers, which have no labels.
    """
    by_labels: dict[frozenset[Any], list[int]] = {}
    for k, factor in enumerate(factors):
        if not factor.one_hot:
            by_labels.setdefault(frozenset(factor.labels), []).append(k)
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
    """The groups of its factors that are no numbers."""
    return [group for group in groups_of(x.factors) if group.labels]
