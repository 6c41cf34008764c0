"""What lanes add up to an output, computed from the factors of all lanes at once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.contractions.products import (
    Factor,
    Group,
    Product,
    Terms,
    aligned,
    arrays_of,
    groups_of,
)
from batchax.frontend import reductions
from batchax.frontend.reductions import Reduction
from batchax.jaxprs.primitive_facts import accumulator
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Position, Positions


class Term(NamedTuple):
    """Describes a product of some factors of an output, before there are values."""

    factors: tuple[Factor, ...]  # the factors, with their numbers as values
    labels: tuple[int | None, ...]  # the dimensions of the product; None for a repeated one
    sizes: tuple[int, ...]  # their sizes
    shape: tuple[int, ...]  # of the product in the output, after a reshape
    starts: tuple[int, ...]  # where that begins
    negative: bool  # whether it is subtracted
    precision: Any  # of the user's matrix product; None if not given
    exact: bool  # whether only lanes are summed over


class Convolution(NamedTuple):
    """Describes an output that is the convolution of the two factors."""

    params: tuple[tuple[str, Any], ...]  # of the equation

    def total(self, lhs: _Labelled, rhs: _Labelled) -> jax.Array:
        """Computes the sum over lanes: these join the features over which it sums."""
        params = dict(self.params)
        lhs_spec, rhs_spec, _ = params["dimension_numbers"]
        if lhs.has_lanes and rhs.has_lanes:
            operands = [lhs.with_lanes_in(lhs_spec[1]), rhs.with_lanes_in(rhs_spec[1])]
        else:
            operands = [x.summed([_LANES] * x.has_lanes).value for x in (lhs, rhs)]
        return lax.conv_general_dilated_p.bind(*_compat.varying_alike(operands), **params)


def is_deferred(term: Product) -> bool:
    """Returns whether one matrix product or scatter sums lanes, without an array for each."""
    groups = arrays_of(term)
    if not term.one_hot:
        # Two arrays: a matrix product over lanes. One array with indices: a scatter.
        return len(groups) == 2
    index = {n for f in term.one_hot for n in f.labels[:-1]}
    labels = {n for group in groups for n in group.labels}
    fits = index <= labels and index.isdisjoint(term.labels)
    return len(groups) <= 1 and fits and term.in_factors.issuperset(term.labels)


def described(terms: Terms) -> tuple[Term, ...]:
    """Describes the terms of an output, with factors numbered consecutively."""
    described, count = [], 0
    for term in terms:
        each = dict.fromkeys(n for f in term.factors for n in f.labels)
        names = {n: k for k, n in enumerate(each)}
        factors = tuple(
            Factor(count + k, tuple(names[n] for n in f.labels), f.one_hot)
            for k, f in enumerate(term.factors)
        )
        count += len(factors)
        described.append(
            Term(
                factors,
                labels=tuple(map(names.get, term.labels)),
                sizes=tuple(n.size for n in term.labels),
                shape=term.shape,
                starts=term.starts,
                negative=term.negative,
                precision=term.precision,
                exact=term.matrices is None,
            )
        )
    return tuple(described)


_LANES = -1
"""The label of the axis of lanes."""


class DeferredContraction(NamedTuple):
    """Holds the sum over lanes of an output as terms, and their factors for all lanes."""

    like: Any  # the type of the output of one example
    lanes: int
    terms: tuple[Term, ...] | Convolution
    factors: Values  # arrays of all lanes
    positions: Positions  # their batch axes

    def total(self, real: Value | None = None) -> jax.Array:
        """Computes the sum over lanes; narrow floats are summed in float32. `real` masks lanes."""
        if isinstance(self.terms, Convolution):
            pairs = zip(self.factors, self.positions, strict=True)
            own = (
                _Labelled.of(x, tuple(range(jnp.ndim(x) - (a is not None))), a) for x, a in pairs
            )
            return self.terms.total(*(x.masked(real) for x in own))
        pieces: dict[_Place, Any] = {}
        for term in sorted(self.terms, key=lambda term: term.starts):
            total = self._added(term, real)
            place = (term.starts, term.shape)
            pieces[place] = pieces[place] + total if place in pieces else total
        return _assembled(pieces, self.like.shape)

    def as_output(self, x: Value) -> jax.Array:
        return lax.convert_element_type(x, self.like.dtype)

    def of_all(self, reduction: Reduction) -> jax.Array:
        """Computes a reduction that sums lanes, over all of them."""
        result = reductions.finished(reduction, self.state(reduction), self.lanes)
        return result if reduction.lane is None else self.as_output(result)

    def state(self, reduction: Reduction, real: Value | None = None) -> jax.Array:
        """Computes the state of a reduction that sums lanes (see `total`)."""
        total = self.total(real)
        return self.as_output(total) if reduction.lane is None else total

    def _added(self, term: Term, real: Value | None) -> jax.Array:
        arrays = [
            _Labelled.of(self.factors[k], labels[:-1] if one_hot else labels, self.positions[k])
            for k, labels, one_hot in term.factors
        ]
        first, *others = [
            _of_group(arrays, group, real).converted(self.like.dtype)
            for group in groups_of(term.factors)
        ]
        numbers = others.pop() if others and not others[-1].own else None
        index = {f.labels[-1]: x for f, x in zip(term.factors, arrays, strict=True) if f.one_hot}
        if index:
            rows = first if numbers is None else first.times(numbers)
            total = _scattered(rows, index, term, self.lanes, real)
        elif not others:
            total = _weighted(first, numbers, self.lanes, real)
        else:
            # Multiply the numbers into the smaller array.
            (second,) = others
            if numbers is not None:
                small = min(first, second, key=lambda x: math.prod(np.shape(x.value)))
                pair = [x.times(numbers) if x is small else x for x in (first, second)]
                first, second = pair
            total = _contracted(first, second, term, self.lanes, real)
        total = lax.reshape(total.placed(term.labels, term.sizes), term.shape)
        return -total if term.negative else total


class _Labelled(NamedTuple):
    """Holds an array with a label for each dimension, lanes included."""

    value: Value
    labels: tuple[int, ...]

    @classmethod
    def of(cls, x: Value, labels: tuple[int, ...], position: Position) -> _Labelled:
        if position is None:
            return cls(x, labels)
        return cls(x, (*labels[:position], _LANES, *labels[position:]))

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(n for n in self.labels if n != _LANES)

    @property
    def has_lanes(self) -> bool:
        """Returns whether it depends on the lane."""
        return _LANES in self.labels

    def times(self, other: _Labelled) -> _Labelled:
        """Multiplies by an array that has no labels but its own, and that of lanes."""
        labels = self.labels if self.has_lanes or not other.has_lanes else (_LANES, *self.labels)
        x, y = _compat.varying_alike([aligned(self, labels), aligned(other, labels)])
        return _Labelled(jnp.multiply(x, y), labels)

    def masked(self, real: Value | None) -> _Labelled:
        if real is None or not self.has_lanes:
            return self
        mask = lax.broadcast_in_dim(real, self.value.shape, (self.labels.index(_LANES),))
        return _Labelled(lax.select(mask, self.value, lax.full_like(self.value, 0)), self.labels)

    def summed(self, labels: Sequence[int]) -> _Labelled:
        if not labels:
            return self
        value = jnp.sum(self.value, [self.labels.index(n) for n in labels])
        return _Labelled(value, tuple(n for n in self.labels if n not in labels))

    def with_lanes_in(self, dim: int) -> jax.Array:
        """Returns the array with lanes as the slow part of a dimension of one example."""
        labels = [*self.own[:dim], _LANES, *self.own[dim:]]
        order = [self.labels.index(n) for n in labels]
        shape = [self.value.shape[d] for d in order]
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
        in_order = order == sorted(order)
        return lax.reshape(self.value, shape, dimensions=None if in_order else order)

    def converted(self, dtype: np.dtype[Any]) -> _Labelled:
        return _Labelled(lax.convert_element_type(self.value, dtype), self.labels)

    def placed(self, labels: tuple[int | None, ...], shape: tuple[int, ...]) -> jax.Array:
        """Transposes to dimensions of these labels, repeated along None."""
        order = [n for n in labels if n is not None]
        value = lax.transpose(self.value, [self.labels.index(n) for n in order])
        dims = [d for d, n in enumerate(labels) if n is not None]
        return lax.broadcast_in_dim(value, shape, dims)


_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of an array begins, and its shape."""


def _assembled(pieces: dict[_Place, Any], shape: tuple[int, ...]) -> jax.Array:
    """Assembles an array from pieces in order, which may overlap."""
    if len(pieces) == 1 and shape in (own for _, own in pieces):
        return next(iter(pieces.values()))
    # Pieces that follow each other along one dimension are concatenated; others are padded and
    # added.
    for d in range(len(shape)):
        if any(own[:d] + own[d + 1 :] != shape[:d] + shape[d + 1 :] for _, own in pieces):
            continue
        ends = itertools.accumulate((own[d] for _, own in pieces), initial=0)
        starts = [tuple(end if k == d else 0 for k in range(len(shape))) for end in ends]
        if starts == [*(start for start, _ in pieces), starts[-1]] and starts[-1][d] == shape[d]:
            return lax.concatenate(_compat.varying_alike(list(pieces.values())), d)
    padded = [
        lax.pad(x, lax.full_like(x, 0, shape=()), edges)
        for x, edges in (
            (x, [(a, n - a - own, 0) for a, own, n in zip(*place, shape, strict=True)])
            for place, x in pieces.items()
        )
    ]
    return functools.reduce(jnp.add, padded)


def _of_group(arrays: Sequence[_Labelled], group: Group, real: Value | None) -> _Labelled:
    each = (arrays[k] for k in group.numbers)
    return functools.reduce(_Labelled.times, each).masked(real)


def _weighted(x: _Labelled, weights: _Labelled | None, lanes: int, real: Value | None) -> _Labelled:
    """Computes the sum over lanes of one array, times a number for each."""
    dtype = x.value.dtype
    if weights is None or not weights.has_lanes:
        ones = jnp.ones((lanes,), dtype) if real is None else lax.convert_element_type(real, dtype)
        weights = _Labelled(ones if weights is None else ones * weights.value, (_LANES,))
    if not x.has_lanes:
        wide = accumulator(dtype)
        return _Labelled(x.value.astype(wide) * jnp.sum(weights.value, dtype=wide), x.labels)
    # A matrix product of a library is many times as fast as XLA's sum on a CPU. On GPUs, XLA itself
    # chooses to multiply and add.
    return _dot(weights, x, [_LANES], [], lax.Precision.HIGHEST)


def _contracted(
    x: _Labelled, y: _Labelled, term: Term, lanes: int, real: Value | None
) -> _Labelled:
    """Computes the sum over lanes of products of two arrays, and over unwanted labels."""
    if x.has_lanes != y.has_lanes:  # what depends on the lane is added up first
        x, y = (_weighted(a, None, lanes, real) if a.has_lanes else a for a in (x, y))
    elif not x.has_lanes:
        x = x.times(_count(x, lanes, real))
    # Sum over labels that only one array has before the product.
    x, y = (
        a.summed([n for n in a.own if n not in (*b.labels, *term.labels)])
        for a, b in ((x, y), (y, x))
    )
    both = [n for n in x.labels if n in y.labels]
    summed = [n for n in both if n not in term.labels]
    paired = [n for n in both if n in term.labels]
    return _dot(x, y, summed, paired, lax.Precision.HIGHEST if term.exact else term.precision)


def _count(x: _Labelled, lanes: int, real: Value | None) -> _Labelled:
    return _Labelled(jnp.asarray(lanes if real is None else jnp.sum(real), x.value.dtype), ())


def _scattered(
    rows: _Labelled, index: dict[int, _Labelled], term: Term, lanes: int, real: Value | None
) -> _Labelled:
    """Adds the rows of all lanes to one table of zeros, at indices for some labels."""
    if not any(x.has_lanes for x in (rows, *index.values())):
        # Rows that lanes share are added at each lane's index.
        rows = rows.times(_count(rows, lanes, real))
    elif not rows.has_lanes:
        dtype = rows.value.dtype
        ones = jnp.ones(lanes, dtype) if real is None else lax.convert_element_type(real, dtype)
        rows = rows.times(_Labelled(ones, (_LANES,)))
    wide = rows.converted(accumulator(rows.value.dtype))
    kept = tuple(n for n in rows.own if n in term.labels)
    added = tuple(n for n in rows.labels if n not in kept)
    updates = aligned(wide, (*added, *kept))
    places = [
        jnp.broadcast_to(aligned(x, added), updates.shape[: len(added)]) for x in index.values()
    ]
    labels = (*index, *kept)
    sizes = dict(zip(term.labels, term.sizes, strict=True))
    table = jnp.zeros([sizes[n] for n in labels], updates.dtype)
    dims = tuple(range(len(index)))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(len(added), updates.ndim)),
        inserted_window_dims=dims,
        scatter_dims_to_operand_dims=dims,
    )
    table, at, updates = _compat.varying_alike([table, jnp.stack(places, -1), updates])
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return _Labelled(lax.scatter_add(table, at, updates, numbers, mode=mode), labels)


def _dot(
    x: _Labelled, y: _Labelled, summed: list[int], paired: list[int], precision: lax.PrecisionLike
) -> _Labelled:
    dtype = jnp.promote_types(x.value.dtype, y.value.dtype)
    lhs, rhs = _compat.varying_alike([a.value.astype(dtype) for a in (x, y)])
    place = lambda a, names: tuple(a.labels.index(n) for n in names)
    value = lax.dot_general(
        lhs,
        rhs,
        ((place(x, summed), place(y, summed)), (place(x, paired), place(y, paired))),
        precision=precision,
        preferred_element_type=accumulator(dtype),
    )
    left = [n for a in (x, y) for n in a.labels if n not in (*summed, *paired)]
    return _Labelled(value, (*paired, *left))
