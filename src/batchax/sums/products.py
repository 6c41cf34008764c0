"""Values of one example as products of smaller ones, each dimension of which has a label.

Element (i, j) of ``outer(a, b) * s`` is ``a[i] * b[j] * s``: a product of three factors, labelled
(i), (j) and (). So is one of a product of matrices, with a label in two factors that the value has
not, and over which the products are summed. Here is how operations pass that on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from batchax.jaxprs.words import Eqn, Value

_MOST_TERMS = 16  # what is added up more often is summed as it is

# Float16 overflows where another order of the products does not.
_DTYPES = ("bfloat16", "float32", "float64")

_new_label = itertools.count().__next__


class Factor(NamedTuple):
    """An array of one example, and the label of each of its dimensions."""

    value: Value
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Product:
    """A value, each element of which is a product of elements of factors, or a sum of such.

    Attributes:
      factors: what is multiplied.
      labels: of the dimensions of the value; None for one of size 1, and for one
        along which all elements are the same.
      negative: whether it is that with the other sign.
      precision: what the user said of the product of matrices, if it is one.
      matrices: the equation which that is, and its result, if the product is summed over labels.
    """

    factors: tuple[Factor, ...]
    labels: tuple[int | None, ...]
    negative: bool = False
    precision: Any = None
    matrices: tuple[Eqn, Value] | None = None

    def relabelled(self, labels: Mapping[int, int]) -> Product:
        """The same with other labels."""
        factors = tuple(Factor(x, tuple(labels.get(n, n) for n in own)) for x, own in self.factors)
        return replace(
            self,
            factors=factors,
            labels=tuple(None if n is None else labels.get(n, n) for n in self.labels),
        )


Terms = tuple[Product, ...]
"""Products whose sum a value is."""


def itself(x: Value) -> Product:
    """A value as the only factor of a product."""
    shape = np.shape(x)
    labels = tuple(None if n == 1 else _new_label() for n in shape)
    units = [d for d, n in enumerate(shape) if n == 1]
    factor = Factor(lax.squeeze(x, units) if units else x, _given(labels))
    return Product((factor,), labels)


def _given(labels: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(n for n in labels if n is not None)


def sizes_of(factors: Iterable[Factor]) -> dict[int, int]:
    """The size that each label stands for."""
    return {n: size for x, own in factors for n, size in zip(own, np.shape(x), strict=True)}


def aligned(factor: tuple[Value, tuple[int, ...]], labels: tuple[int, ...]) -> Any:
    """A factor with its dimensions in the order of `labels`, and of size 1 where it has none."""
    value, own = factor
    if own == labels:
        return value
    value = lax.transpose(value, [own.index(n) for n in labels if n in own])
    return lax.expand_dims(value, [d for d, n in enumerate(labels) if n not in own])


class Operand(NamedTuple):
    """What is known of a value: its products; of what it is the square, or another shape."""

    value: Value
    terms: Terms | None = None
    square_of: Any = None
    reshaped: Any = None

    @property
    def products(self) -> Terms:
        """Its products; itself, if nothing else is known, and if it is a number."""
        if self.terms is None or not np.shape(self.value):
            return (itself(self.value),)
        return self.terms


def terms_of(eqn: Eqn, operands: Sequence[Operand], out: Value) -> Terms | None:
    """The products whose sum the result of an equation is; None if nothing is known of that."""
    pass_on = OPERATIONS.get(eqn.primitive.name)
    dtypes = {jax.typeof(x.value).dtype.name for x in operands} | {jax.typeof(out).dtype.name}
    if pass_on is None or not dtypes.issubset(_DTYPES):
        return None
    terms = pass_on(eqn, *operands)
    return terms if terms is not None and len(terms) <= _MOST_TERMS else None


def _of_each(change: Callable[..., Product | None]) -> Callable[..., Terms | None]:
    """What is done to each product of the only operand."""

    def pass_on(eqn: Eqn, x: Operand) -> Terms | None:
        terms = [change(eqn, term, np.shape(x.value)) for term in x.products]
        return None if None in terms else tuple(t for t in terms if t is not None)

    return pass_on


def _negative(eqn: Eqn, x: Product, shape: Any) -> Product:
    return replace(x, negative=not x.negative)


def _same(eqn: Eqn, x: Product, shape: Any) -> Product:
    return x


def _wider(eqn: Eqn, x: Product, shape: Any) -> Product | None:
    new, old = np.dtype(eqn.params["new_dtype"]), eqn.invars[0].aval.dtype
    return x if new.itemsize >= old.itemsize else None


def _transposed(eqn: Eqn, x: Product, shape: Any) -> Product:
    return replace(x, labels=tuple(x.labels[d] for d in eqn.params["permutation"]))


def _reshaped(eqn: Eqn, x: Product, shape: Any) -> Product | None:
    """In another shape with the same dimensions, but for those of size 1."""
    new = eqn.outvars[0].aval.shape
    if [n for n in shape if n != 1] != [n for n in new if n != 1]:
        return None
    others = iter([label for label, n in zip(x.labels, shape, strict=True) if n != 1])
    return replace(x, labels=tuple(None if n == 1 else next(others) for n in new))


def _broadcast(eqn: Eqn, x: Product, shape: Any) -> Product:
    new, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = dict(zip(dims, x.labels, strict=True))
    return replace(x, labels=tuple(kept.get(d) for d in range(len(new))))


def _multiplied(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    return _products(x.products, y.products)


def _products(xs: Terms, ys: Terms) -> Terms | None:
    terms = [_both(x, y) for x in xs for y in ys]
    return None if None in terms else tuple(t for t in terms if t is not None)


def _both(x: Product, y: Product) -> Product | None:
    if x.matrices is not None and y.matrices is not None:
        return None
    y = y.relabelled({n: _new_label() for _, own in y.factors for n in own})
    if not (x.labels and y.labels):  # one is a number
        labels = x.labels or y.labels
    else:
        pairs = list(zip(x.labels, y.labels, strict=True))
        y = y.relabelled({n: m for m, n in pairs if m is not None and n is not None})
        labels = tuple(n if m is None else m for m, n in pairs)
    return Product(
        (*x.factors, *y.factors),
        labels,
        x.negative != y.negative,
        x.precision if x.matrices else y.precision,
        x.matrices or y.matrices,
    )


def _divided(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    """By what has fewer dimensions."""
    (by,) = y.products if len(y.products) == 1 else (None,)
    if by is None or len(by.factors) != 1 or by.matrices or len(sizes_of(by.factors)) >= _ndim(x):
        return None
    value, labels = by.factors[0]
    one = Product((Factor(1 / value, labels),), by.labels, by.negative)
    return _products(x.products, (one,))


def _ndim(x: Operand) -> int:
    return max(1, np.ndim(x.value))


def _added(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    shape = eqn.outvars[0].aval.shape
    minus = eqn.primitive.name == "sub"
    others = tuple(replace(t, negative=t.negative != minus) for t in y.products)
    terms = (*x.products, *others)
    return tuple(replace(t, labels=t.labels or (None,) * len(shape)) for t in terms)


def _contracted(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    precision, result = eqn.params["precision"], eqn.outvars[0].aval
    plain = precision is None or isinstance(precision, (tuple, lax.Precision))
    wide = result.dtype.itemsize >= max(jax.typeof(v.value).dtype.itemsize for v in (x, y))
    if not (plain and wide) or eqn.params.get("out_sharding") is not None:
        return None
    lhs, rhs = itself(x.value), itself(y.value)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    paired = zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True)
    left, right = lhs.labels, rhs.labels
    renamed = {right[r]: left[m] for m, r in paired}
    rhs = rhs.relabelled(
        {old: new for old, new in renamed.items() if old is not None and new is not None}
    )
    free = lambda labels, *dims: [
        n for d, n in enumerate(labels) if d not in itertools.chain(*dims)
    ]
    labels = (
        *(left[d] for d in lhs_batch),
        *free(lhs.labels, lhs_contract, lhs_batch),
        *free(rhs.labels, rhs_contract, rhs_batch),
    )
    summed = math.prod(np.shape(x.value)[d] for d in lhs_contract) > 1
    matrices = (eqn, None) if summed else None
    return (Product((*lhs.factors, *rhs.factors), labels, False, precision, matrices),)


OPERATIONS: dict[str, Callable[..., Terms | None]] = {
    "mul": _multiplied,
    "div": _divided,
    "dot_general": _contracted,
    "neg": _of_each(_negative),
    "copy": _of_each(_same),
    "copy_p": _of_each(_same),
    "convert_element_type": _of_each(_wider),
    "transpose": _of_each(_transposed),
    "broadcast_in_dim": _of_each(_broadcast),
    **dict.fromkeys(("add", "sub", "add_any"), _added),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _of_each(_reshaped)),
}
"""How operations pass products on, by the names of their primitives."""


class Group(NamedTuple):
    """The numbers of factors that are multiplied by element; the first has all labels."""

    numbers: tuple[int, ...]
    labels: tuple[int, ...]


def groups_of(factors: Sequence[Factor | tuple[Any, tuple[int, ...]]]) -> list[Group]:
    """The fewest groups of factors, none of which has all labels of another.

    The last, if there are others, is of numbers, which have no labels.
    """
    by_labels: dict[frozenset[int], list[int]] = {}
    for k, (_, labels) in enumerate(factors):
        by_labels.setdefault(frozenset(labels), []).append(k)
    largest = [own for own in by_labels if own and not any(own < other for other in by_labels)]
    numbers = {own: list(by_labels[own]) for own in largest}
    for own, ks in by_labels.items():
        if own and own not in numbers:
            fitting = [other for other in largest if own < other]
            numbers[min(fitting, key=len)] += ks
    groups = [Group(tuple(ks), tuple(factors[ks[0]][1])) for ks in numbers.values()]
    scalars = by_labels.get(frozenset())
    return [*groups, Group(tuple(scalars), ())] if scalars else groups
