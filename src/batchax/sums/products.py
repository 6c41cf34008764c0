"""Values of one example as products of smaller ones, whose dimensions have labels.

Element (i, j) of ``outer(a, b) * s`` is ``a[i] * b[j] * s``: a product of three factors, labelled
(i), (j) and (). So is one of a product of matrices, with a label in two factors that the value has
not, and over which the products are summed. In ``ravel(outer(a, b))`` the one dimension has both
labels; concatenated with others, the product is a piece, which starts where it starts.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import broadcast_in_dim_p, select_n_p

from batchax.jaxprs.words import Eqn, Value


@dataclass(frozen=True, eq=False)
class Label:
    """The name of a dimension: two are the same if they are one object."""

    size: int


class Factor(NamedTuple):
    """An array of one example, and the label of each of its dimensions."""

    value: Value
    labels: tuple[Label, ...]


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
      matrices: the equation which that is, if the product is summed over labels.
    """

    factors: tuple[Factor, ...]
    dims: tuple[tuple[Label, ...], ...]
    starts: tuple[int, ...]
    negative: bool = False
    precision: Any = None
    matrices: Eqn | None = None

    @functools.cached_property
    def labels(self) -> tuple[Label, ...]:
        """Those of all its dimensions."""
        return tuple(n for own in self.dims for n in own)

    @functools.cached_property
    def in_factors(self) -> frozenset[Label]:
        """The labels that a factor has."""
        return frozenset(n for _, own in self.factors for n in own)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece that it is."""
        return tuple(math.prod(n.size for n in own) for own in self.dims)

    @property
    def is_zero(self) -> bool:
        """Whether it is zero for all that it could be."""
        return all(_is_zero(x) for x, _ in self.factors)

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
        factors = tuple(Factor(x, renamed(own)) for x, own in self.factors)
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


def aligned(factor: tuple[Value, tuple[Any, ...]], labels: tuple[Any, ...]) -> Any:
    """A factor with its dimensions in the order of `labels`, and of size 1 where it has none."""
    value, own = factor
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
        return any(len(arrays_of(t)) > 1 for t in self.terms or ())

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


def groups_of(factors: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Group]:
    """The fewest groups of factors, none of which has all labels of another.

    The last, if there are others, is of numbers, which have no labels.
    """
    by_labels: dict[frozenset[Any], list[int]] = {}
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


def arrays_of(x: Product) -> list[Group]:
    """The groups of its factors that are no numbers."""
    return [group for group in groups_of(x.factors) if group.labels]


_MOST_TERMS = 16  # what is added up more often is summed as it is
_MOST_PIECES = 512

# Float16 overflows where another order of the products does not.
_DTYPES = ("bfloat16", "float32", "float64")


def terms_of(eqn: Eqn, operands: Sequence[Operand], outs: Sequence[Value]) -> list[Terms | None]:
    """Of each result of an equation the products whose sum it is; None: nothing is known."""
    pass_on = OPERATIONS.get(eqn.primitive.name)
    values = [x.value for x in operands[eqn.primitive is select_n_p :]]
    dtypes = {jax.typeof(x).dtype.name for x in (*values, *outs)}
    repeats = eqn.primitive is broadcast_in_dim_p and not np.shape(values[0])
    if pass_on is None or not (repeats or dtypes.issubset(_DTYPES)):
        return [None] * len(outs)
    terms = pass_on(eqn, *operands)
    each = list(terms) if eqn.primitive.multiple_results and terms else [terms] * len(outs)
    return [t if t and _are_few(t) else None for t in each]


def _are_few(terms: Terms) -> bool:
    return len(terms) <= _MOST_TERMS or (
        len(terms) <= _MOST_PIECES and len({t.starts for t in terms}) * _MOST_TERMS >= len(terms)
    )


def _all_or_none(terms: Sequence[Product | None]) -> Terms | None:
    some = tuple(t for t in terms if t is not None)
    return some if len(some) == len(terms) else None


def _of_each(change: Callable[..., Product | None]) -> Callable[..., Terms | None]:
    """What is done to each product of the only operand."""

    def pass_on(eqn: Eqn, x: Operand) -> Terms | None:
        return _all_or_none([change(eqn, term, np.shape(x.value)) for term in x.products])

    return pass_on


def _negative(eqn: Eqn, x: Product, shape: Any) -> Product:
    return replace(x, negative=not x.negative)


def _same(eqn: Eqn, x: Product, shape: Any) -> Product:
    return x


def _wider(eqn: Eqn, x: Product, shape: Any) -> Product | None:
    new, old = np.dtype(eqn.params["new_dtype"]), eqn.invars[0].aval.dtype
    return x if new.itemsize >= old.itemsize else None


def _transposed(eqn: Eqn, x: Product, shape: Any) -> Product:
    order = eqn.params["permutation"]
    return replace(
        x, dims=tuple(x.dims[d] for d in order), starts=tuple(x.starts[d] for d in order)
    )


def _broadcast(eqn: Eqn, x: Product, shape: Any) -> Product:
    new, placed = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    old = {d: k for k, d in enumerate(placed) if shape[k] == new[d]}
    repeated = lambda n: () if n == 1 else (Label(n),)
    dims = tuple(x.dims[old[d]] if d in old else repeated(n) for d, n in enumerate(new))
    starts = tuple(x.starts[old[d]] if d in old else 0 for d in range(len(new)))
    return replace(x, dims=dims, starts=starts)


def _reshaped(eqn: Eqn, x: Product, shape: Any) -> Product | None:
    """In another shape: labels come together in one dimension, or that of one becomes several."""
    new = eqn.outvars[0].aval.shape
    if 0 in shape:
        return None
    if x.shape != shape:  # a piece
        kept = [d for d, n in enumerate(shape) if n != 1]
        if [shape[d] for d in kept] != [n for n in new if n != 1]:
            return None
        each = iter(kept)
        places = [None if n == 1 else next(each) for n in new]
        dims = tuple(() if d is None else x.dims[d] for d in places)
        return replace(x, dims=dims, starts=tuple(0 if d is None else x.starts[d] for d in places))
    split: dict[Label, list[Label]] = {}
    left = list(x.labels[::-1])
    dims = []
    for size in new:
        own = []
        while size > 1 and left:
            label = left.pop()
            if label.size > size and label.size % size == 0:
                parts = [Label(size), Label(label.size // size)]
                _divide(split, label, parts)
                left.append(parts[1])
                label = parts[0]
            if size % label.size:
                return None
            size //= label.size
            own.append(label)
        if size != 1:
            return None
        dims.append(tuple(own))
    factors = tuple(_of_divided(factor, split) for factor in x.factors)
    return replace(x, factors=factors, dims=tuple(dims), starts=(0,) * len(dims))


def _divide(split: dict[Label, list[Label]], label: Label, parts: list[Label]) -> None:
    """Puts down that `label` is now these; it may be a part of another."""
    for whole, own in split.items():
        if own[-1] is label:
            split[whole] = [*own[:-1], *parts]
            return
    split[label] = parts


def _of_divided(factor: Factor, split: dict[Label, list[Label]]) -> Factor:
    if split.keys().isdisjoint(factor.labels):
        return factor
    labels = tuple(m for n in factor.labels for m in split.get(n, [n]))
    return Factor(lax.reshape(factor.value, [n.size for n in labels]), labels)


def _multiplied(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    return _products(*(_as_large(v, v.products, eqn) for v in (x, y)))


def _as_large(x: Operand, terms: Terms, eqn: Eqn) -> Terms:
    """Terms of an operand in the shape of the result, along which one of size 1 is repeated."""
    old, new = np.shape(x.value), eqn.outvars[0].aval.shape
    if old == new:
        return terms
    repeated = [() if n == 1 else (Label(n),) for n in new]
    kept = [len(old) == len(new) and old[d] == n for d, n in enumerate(new)]
    return tuple(
        replace(
            t,
            dims=tuple(t.dims[d] if k else repeated[d] for d, k in enumerate(kept)),
            starts=tuple(t.starts[d] if k else 0 for d, k in enumerate(kept)),
        )
        for t in terms
    )


def _products(xs: Terms, ys: Terms) -> Terms | None:
    pairs = [_both(x, y) for x in xs for y in ys]
    some = tuple(t for terms in pairs for t in terms or ())
    return None if None in pairs or not some else some


def _both(x: Product, y: Product) -> Terms | None:
    """The product of two; none where they are pieces without an element in common."""
    if x.is_apart(y):
        return ()
    if x.matrices is not None and y.matrices is not None:
        return None
    y = y.relabelled({n: Label(n.size) for n in {*x.labels, *x.in_factors}})
    dims, starts = [], []
    for d, (mine, others) in enumerate(zip(x.dims, y.dims, strict=True)):
        begin, start = x.starts[d], y.starts[d]
        end, stop = begin + x.shape[d], start + y.shape[d]
        sizes = [[n.size for n in own] for own in (mine, others)]
        if y.repeats(d) and start <= begin and end <= stop:
            dims.append(mine)
        elif x.repeats(d) and begin <= start and stop <= end:
            dims.append(others)
        elif begin == start and sizes[0] == sizes[1]:
            pairs = list(zip(mine, others, strict=True))
            both = {n: m for m, n in pairs if m in x.in_factors and n in y.in_factors}
            y = y.relabelled(both)
            dims.append(tuple(m if n in both or m in x.in_factors else n for m, n in pairs))
        else:
            return None
        starts.append(max(begin, start))
    product = Product(
        (*x.factors, *y.factors),
        tuple(dims),
        tuple(starts),
        x.negative != y.negative,
        x.precision if x.matrices else y.precision,
        x.matrices or y.matrices,
    )
    return (product,)


def _divided(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    """By what has fewer dimensions."""
    (by,) = y.products if len(y.products) == 1 else (None,)
    fewer = by is not None and len(by.in_factors) < max(1, np.ndim(x.value))
    if by is None or not fewer or len(by.factors) != 1 or by.matrices:
        return None
    value, labels = by.factors[0]
    inverse = replace(by, factors=(Factor(1 / value, labels),))
    return _products(_as_large(x, x.products, eqn), _as_large(y, (inverse,), eqn))


def _added(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    minus = eqn.primitive.name == "sub"
    others = tuple(replace(t, negative=t.negative != minus) for t in y.products)
    return _sum(eqn, (x, x.products), (y, others))


def _sum(eqn: Eqn, *each: tuple[Operand, Terms]) -> Terms:
    """The terms of all, except for operands that are zero."""
    others = [(x, own) for x, own in each if not x.is_zero] or each[:1]
    return tuple(t for x, own in others for t in _as_large(x, own, eqn))


def _contracted(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    precision, result = eqn.params["precision"], eqn.outvars[0].aval
    plain = precision is None or isinstance(precision, (tuple, lax.Precision))
    wide = result.dtype.itemsize >= max(jax.typeof(v.value).dtype.itemsize for v in (x, y))
    if not (plain and wide) or eqn.params.get("out_sharding") is not None:
        return None
    lhs, rhs = itself(x.value), itself(y.value)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    paired = zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True)
    alike = [zip(lhs.dims[a], rhs.dims[b], strict=True) for a, b in paired]
    rhs = rhs.relabelled({n: m for m, n in itertools.chain(*alike)})
    free = lambda dims, *others: [
        own for d, own in enumerate(dims) if d not in itertools.chain(*others)
    ]
    dims = (
        *(lhs.dims[d] for d in lhs_batch),
        *free(lhs.dims, lhs_contract, lhs_batch),
        *free(rhs.dims, rhs_contract, rhs_batch),
    )
    summed = math.prod(np.shape(x.value)[d] for d in lhs_contract) > 1
    matrices = eqn if summed else None
    starts = (0,) * len(dims)
    return (Product((*lhs.factors, *rhs.factors), dims, starts, False, precision, matrices),)


def _concatenated(eqn: Eqn, *operands: Operand) -> Terms:
    d = eqn.params["dimension"]
    sizes = [np.shape(x.value)[d] for x in operands]
    begins = itertools.accumulate(sizes, initial=0)
    return tuple(
        replace(t, starts=(*t.starts[:d], begin + t.starts[d], *t.starts[d + 1 :]))
        for x, begin in zip(operands, begins, strict=False)
        for t in (x if x.has_arrays else Operand(x.value)).products
    )


def _sliced(eqn: Eqn, x: Operand) -> Terms | None:
    params = eqn.params
    if any(n != 1 for n in params["strides"] or ()):
        return None
    terms: Terms | None = x.products
    for d, ends in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)):
        terms = terms and _cut(terms, d, *ends)
    return terms


def _split(eqn: Eqn, x: Operand) -> list[Terms | None]:
    ends = itertools.pairwise(itertools.accumulate(eqn.params["sizes"], initial=0))
    return [_cut(x.products, eqn.params["axis"], *each) for each in ends]


def _cut(terms: Terms, d: int, start: int, limit: int) -> Terms | None:
    """What is of these from `start` to `limit` along a dimension."""
    each = [_cut_one(t, d, start, limit) for t in terms]
    return None if None in each else tuple(t for own in each for t in own or ())


def _cut_one(x: Product, d: int, start: int, limit: int) -> Terms | None:
    begin, end = x.starts[d], x.starts[d] + x.shape[d]
    first, last = max(begin, start), min(end, limit)
    if first >= last and begin < end:
        return ()
    placed = (*x.starts[:d], first - start, *x.starts[d + 1 :])
    if (first, last) == (begin, end):
        return (replace(x, starts=placed),)
    own: tuple[Label, ...] = () if last - first == 1 else (Label(last - first),)
    dims = (*x.dims[:d], own, *x.dims[d + 1 :])
    if x.repeats(d):
        return (replace(x, dims=dims, starts=placed),)
    if len(x.dims[d]) != 1 or not own:
        return None
    (label,) = x.dims[d]
    factors = tuple(
        Factor(
            lax.slice_in_dim(value, first - begin, last - begin, axis=labels.index(label)),
            tuple(own[0] if n is label else n for n in labels),
        )
        if label in labels
        else Factor(value, labels)
        for value, labels in x.factors
    )
    return (replace(x, factors=factors, dims=dims, starts=placed),)


def _selected(eqn: Eqn, which: Operand, *cases: Operand) -> Terms | None:
    """By one boolean for all elements, between two."""
    (by,) = which.products if len(which.products) == 1 else (None,)
    if by is None or by.in_factors or len(by.factors) != 1 or len(cases) != 2:
        return None
    ((chosen, _),) = by.factors
    no, yes = (x.products for x in cases)
    both = [_of_numbers(chosen, *pair) for pair in zip(no, yes, strict=False)]
    if len(no) == len(yes) and None not in both:
        return _all_or_none(both)
    kept: list[tuple[Operand, Terms]] = [
        (x, tuple(_where(chosen, value, t) for t in x.products))
        for x, value in zip(cases, (False, True), strict=True)
    ]
    return _sum(eqn, *kept)


def _of_numbers(chosen: Value, no: Product, yes: Product) -> Product | None:
    """One of two that are the same except for numbers that they are multiplied with."""
    arrays = [[f for f in x.factors if f.labels] for x in (no, yes)]
    same = lambda x, y: x.value is y.value and x.labels == y.labels
    alike = len(arrays[0]) == len(arrays[1]) and all(map(same, *arrays))
    if not alike or (no.dims, no.starts) != (yes.dims, yes.starts) or not arrays[0]:
        return None
    dtype = jax.typeof(arrays[0][0].value).dtype
    numbers = [
        functools.reduce(
            lax.mul,
            [lax.convert_element_type(f.value, dtype) for f in x.factors if not f.labels],
            lax.convert_element_type(-1 if x.negative else 1, dtype),
        )
        for x in (no, yes)
    ]
    number = Factor(lax.select_n(chosen, *numbers), ())
    return replace(no, factors=(*arrays[0], number), negative=False)


def _where(chosen: Value, value: bool, x: Product) -> Product:
    """What is zero unless `chosen` is `value`, whatever the factors are then."""

    def kept(factor: Factor) -> Factor:
        x = jax.numpy.asarray(factor.value)
        cases = [x, lax.full_like(x, 0)]
        return Factor(lax.select_n(chosen, *(cases[::-1] if value else cases)), factor.labels)

    return x if x.is_zero else replace(x, factors=tuple(map(kept, x.factors)))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul": _multiplied,
    "div": _divided,
    "dot_general": _contracted,
    "select_n": _selected,
    "concatenate": _concatenated,
    "slice": _sliced,
    "split": _split,
    "square": lambda eqn, x: x.products if x.is_zero else None,
    "neg": _of_each(_negative),
    "copy": _of_each(_same),
    "copy_p": _of_each(_same),
    "convert_element_type": _of_each(_wider),
    "transpose": _of_each(_transposed),
    "broadcast_in_dim": _of_each(_broadcast),
    **dict.fromkeys(("add", "sub", "add_any"), _added),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _of_each(_reshaped)),
}
"""Of an equation and its operands the products of its result, or those of each; None: unknown."""


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
    parts = [_multiplied_squares(x.factors, group) for group in groups]
    return _of_outer(parts) if _is_outer(x) else _of_one(parts)


def _of_one(parts: list[Value]) -> Any:
    return jnp.sum(jnp.square(functools.reduce(jnp.multiply, parts)))


def _multiplied_squares(factors: Sequence[Factor], group: Group) -> Any:
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
