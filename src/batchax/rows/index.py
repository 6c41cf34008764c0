"""Where the elements of each row are, and rows between packed and padded arrays.

Packed, the elements of all rows follow one another along an axis; padded, each row has an array of
the same size. Both ways are gathers, each the transpose of the other, by a rule: JAX
would transpose a gather to a scatter, a hundred times slower on a CPU.

A row that is ragged along several axes is so many *pieces* along the last of them, one after
another. To what is here they are rows: padded, all rows have as many, and some of them are empty.

On a CPU a loop of small steps finds the places of rows in a third of the time of sums, and XLA
compiles it as one function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax import _compat
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.execution.slices import entry_of, part_of, put_entry, put_part
from batchax.jaxprs.types import Aval, Tree, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_function, repeat
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.rules.masking import is_inexact

Ints: TypeAlias = np.ndarray | jax.Array
"""Integers, of NumPy where they are known while a program is staged."""

WINDOW = 16
"""So many elements a loop over rows reads or writes at once. It goes in order: where a window
reaches into the next row, that one writes over it. Programs: speeds along tracks."""


def row_places(lengths: Value, capacity: int, bound: int, starts: Value | None = None) -> list[Any]:
    """Where each row begins, how many elements it has, and the row and the place of each element.

    Rows follow one another in an array of `capacity` elements, and end where it ends; those that
    are longer than `bound` are cut off. Places are those in another array, where rows begin at
    `starts`; None is for padded rows that follow one another. Elements of no row have row B, and a
    place beyond the last.
    """
    operands = [_compat.on_mesh_in_scope(x) for x in (lengths, starts) if x is not None]
    return row_places_p.bind(*_compat.varying_alike(operands), capacity=capacity, bound=bound)


def _row_places(lengths: Value, *elsewhere: Value, capacity: int, bound: int) -> list[Any]:
    clipped = jnp.clip(lengths, 0, min(bound, capacity))
    ends = jnp.minimum(jnp.cumsum(clipped, dtype=np.int32), capacity)
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends])[:-1]
    ended = jnp.zeros(capacity, np.int32).at[ends].add(np.int32(1), mode="drop")
    rows = jnp.cumsum(ended, dtype=np.int32)
    padded = np.arange(len(lengths), dtype=np.int32) * np.int32(bound)
    there = elsewhere[0] if elsewhere else padded
    further = jnp.concatenate([there - starts, jnp.full(1, _BEYOND, np.int32)])
    return [starts, ends - starts, rows, np.arange(capacity, dtype=np.int32) + further[rows]]


def _row_places_on_cpu(lengths: Value, *starts: Value, capacity: int, bound: int) -> list[Any]:
    count = lengths.shape[0]
    if not count or capacity < WINDOW:
        return _row_places(lengths, *starts, capacity=capacity, bound=bound)
    zero, one, window = np.int32(0), np.int32(1), np.int32(WINDOW)
    room, last = np.int32(capacity), np.int32(count - 1)
    within, most = np.arange(WINDOW, dtype=np.int32), np.int32(min(bound, capacity))
    wide = lambda x: lax.broadcast(x, (WINDOW,))

    def measure(row: Value, state: Tree) -> Tree:
        begin, begins, sizes = state
        size = lax.clamp(zero, entry_of(lengths, row), lax.min(most, lax.sub(room, begin)))
        return lax.add(begin, size), put_entry(begins, begin, row), put_entry(sizes, size, row)

    _, begins, sizes = repeat(count, measure, (zero, lengths, lengths))

    def fill(_: Value, state: Tree) -> Tree:
        """A few elements of a row; what is written of the next one is written over later."""
        row, place, element, arrays = state
        in_row = lax.le(row, last)
        size = entry_of(sizes, lax.min(row, last))
        # At the end of the arrays the window reaches back, to elements that stay as they are.
        to = lax.min(element, lax.sub(room, window))
        back = lax.sub(element, to)
        there = lax.mul(row, np.int32(bound)) if not starts else _start_elsewhere(starts[0], row)
        ahead = lax.add(there, lax.sub(place, back))
        new, stay = (wide(row), lax.add(wide(ahead), within)), lax.ge(within, wide(back))
        arrays = tuple(
            put_part(x, lax.select(stay, part, part_of(x, to, 0, WINDOW)), to)
            for x, part in zip(arrays, new, strict=True)
        )
        rest = lax.sub(size, place)
        leaves = lax.bitwise_and(in_row, lax.le(rest, window))
        element = lax.add(element, lax.select(leaves, rest, window))
        place = lax.select(leaves, zero, lax.add(place, window))
        row = lax.select(leaves, lax.add(row, one), row)
        return row, place, element, arrays

    # A separate loop, which XLA removes where these arrays are not used. XLA makes a function
    # for each array that it fills with a number.
    elements = lax.full((capacity,), 0, np.int32)
    state = zero, zero, zero, (elements, elements)
    *_, arrays = repeat(count + capacity // WINDOW + 1, fill, state)
    return [begins, sizes, *arrays]


def _start_elsewhere(starts: Value, row: Value) -> jax.Array:
    """Where a row begins in another array; beyond the last row, beyond that array."""
    last = np.int32(starts.shape[0] - 1)
    return lax.select(lax.le(row, last), entry_of(starts, lax.min(row, last)), np.int32(_BEYOND))


_BEYOND = 1 << 30


def _types(lengths: Aval, *starts: Aval, capacity: int, bound: int) -> list[Any]:
    shapes = lengths.shape, lengths.shape, (capacity,), (capacity,)
    return [lengths.update(shape=shape, dtype=np.dtype(np.int32)) for shape in shapes]


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Positions]:
    return batch_function(axis, functools.partial(_row_places, **params), args, axes)


row_places_p = own_primitive(
    "row_places",
    called="where rows are",
    operations=_row_places,
    compute=jax.jit(_row_places, static_argnames=("capacity", "bound")),
    on_cpu=_row_places_on_cpu,
    types=_types,
    rule=_batched,
    transpose=NoDerivative("where rows are is transposed, which is not linear."),
)


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Where the rows of a packed array are."""

    starts: Any  # where each row begins, int32 of shape (B,)
    lengths: Any  # how many elements each has, int32 of shape (B,); within the array and the bound
    bound: int  # no row is longer
    capacity: int  # the size of the packed array
    # The number of rows and, of rows that have several ragged axes, the bounds of those before
    # the last: there are so many pieces in each row, and B counts those.
    pieces: tuple[int, ...]
    # Where lengths are traced the row of each element of the packed array, and its place in
    # padded rows that follow one another.
    traced: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, lengths: Value, capacity: int, bound: int) -> RowIndex:
        if not isinstance(lengths, Tracer):  # checked when the Ragged was made
            sizes = np.asarray(lengths).astype(np.int32)
            starts = (np.cumsum(sizes) - sizes).astype(np.int32)
            return cls(starts, sizes, bound, capacity, sizes.shape)
        starts, sizes, rows, places = row_places(lengths.astype(jnp.int32), capacity, bound)
        return cls(starts, sizes, bound, capacity, sizes.shape, (rows, places))

    @classmethod
    def of_axes(cls, lengths: Sequence[Any], capacity: int, bounds: Sequence[int]) -> RowIndex:
        """For rows of these lengths along each ragged axis."""
        *first, last = lengths
        if not first:
            return cls.of(last, capacity, bounds[0])
        numpy = jnp if any(isinstance(x, Tracer) for x in lengths) else np
        ndim = len(bounds)
        along = lambda x, k: numpy.asarray(x).reshape([-1 if i == k else 1 for i in range(ndim)])
        pieces = along(last, 0)
        for k, (length, bound) in enumerate(zip(first, bounds[:-1], strict=True)):
            inside = along(np.arange(bound), k + 1) < along(length, 0)
            pieces = numpy.where(inside, pieces, 0)
        return replace(cls.of(pieces.reshape(-1), capacity, bounds[-1]), pieces=pieces.shape)

    def inside(self) -> RowIndex:
        """This for a program that is staged within another, whose tracers must not be kept here."""
        return replace(self)

    @cached_property
    def exact(self) -> bool:
        """Whether it is known that rows fill the packed array to its end."""
        return self.traced is None and int(self.lengths.sum()) == self.capacity

    @property
    def full(self) -> bool:
        """Whether it is known that each row is as long as it may be, and nothing is behind them."""
        return bool(self.exact and self.lengths.size and (self.lengths == self.bound).all())

    @property
    def starts_of_rows(self) -> Ints:
        """Where each row begins, of however many pieces it is."""
        count = math.prod(self.pieces[1:])
        return self.starts[::count] if count else np.zeros(self.pieces[0], np.int32)

    @property
    def total(self) -> Value:
        return self.starts[-1] + self.lengths[-1] if self.starts.shape[0] else np.int32(0)

    @cached_property
    def rows(self) -> Ints:
        """The row of each element of the packed array; B for those that belong to none."""
        return self._of_ended_rows(np.int32(1)) if self.traced is None else self.traced[0]

    @cached_property
    def places(self) -> Ints:
        """The place within its row of each element of the packed array."""
        if self.traced is not None:
            return self.traced[1] - self.traced[0] * np.int32(self.bound)
        return np.arange(self.capacity, dtype=np.int32) - self._of_ended_rows(self.lengths)

    @cached_property
    def places_in_padded(self) -> Ints:
        """The place of each element in padded rows that follow one another."""
        if self.traced is not None:
            return self.traced[1]
        gaps = self._of_ended_rows(self.bound - self.lengths)
        return np.arange(self.capacity, dtype=np.int32) + gaps

    def _of_ended_rows(self, amounts: Ints | np.int32) -> np.ndarray:
        """For each element of the packed array, the sum of `amounts` of the rows before its own."""
        marks = np.zeros(self.capacity + 1, np.int32)
        np.add.at(marks, np.minimum(self.starts + self.lengths, self.capacity), amounts)
        return np.cumsum(marks[:-1], dtype=np.int32)

    def mask(self) -> jax.Array:
        return _mask(self.lengths, self.bound)


Axes = int | tuple[int, ...]
"""The ragged axis of a row, or its ragged axes, in order, of which packed rows have the first."""


def pad_rows(data: Value, index: RowIndex, axis: Axes, fill_value: Value = 0) -> jax.Array:
    """Packed rows, along `axis` of `data`, as an array of padded rows with the rows in front."""
    axes = _axes(axis)
    pieces = _pad_pieces(data, index, axes[0], fill_value)
    if len(axes) == 1:
        return pieces
    split = pieces.reshape(*index.pieces, *pieces.shape[1:])
    return jnp.moveaxis(split, *_of_pieces(axes))


def _axes(axis: Axes) -> list[int]:
    return [axis] if isinstance(axis, int) else list(axis)


def _of_pieces(axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where an array of pieces has the ragged axes of rows, and where one of padded rows does."""
    count = len(axes)
    return [*range(1, count), count + axes[0]], [axis + 1 for axis in axes]


def _pad_pieces(data: Value, index: RowIndex, axis: int, fill_value: Value) -> jax.Array:
    rows, bound, capacity = index.starts.shape[0], index.bound, data.shape[axis]
    shape = (rows, *data.shape[:axis], bound, *data.shape[axis + 1 :])
    if fill_value is None or jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
        fill_value = 0
    if capacity == 0 or rows == 0 or bound == 0:
        return jnp.full(shape, fill_value, data.dtype)
    if index.full:  # elements stay where they are
        return jnp.moveaxis(data.reshape(*shape[1 : axis + 1], rows, *shape[axis + 1 :]), axis, 0)
    filled = _linear_gather(_pad, _pack, index, data, axis)
    if isinstance(fill_value, (int, float)) and fill_value == 0:
        return filled  # as it is
    mask = lax.broadcast_in_dim(index.mask(), filled.shape, (0, axis + 1))
    return jnp.where(mask, filled, jnp.asarray(fill_value, data.dtype))


def pack_rows(padded: Value, index: RowIndex, axis: Axes) -> jax.Array:
    """Padded rows, with the rows in front, one after another along `axis`; then zeros."""
    axes = _axes(axis)
    if len(axes) > 1:
        in_pieces, in_rows = _of_pieces(axes)
        padded = jnp.moveaxis(padded, in_rows, in_pieces)
        padded = lax.collapse(padded, 0, len(axes))
    if index.full:
        return lax.collapse(jnp.moveaxis(padded, 0, axes[0]), axes[0], axes[0] + 2)
    return _linear_gather(_pack, _pad, index, padded, axes[0])


def _linear_gather(
    forward: Callable[..., Any], transpose: Callable[..., Any], index: RowIndex, x: Value, axis: int
) -> jax.Array:
    residuals = [index.starts, index.lengths, index.places_in_padded]

    def of(gather: Callable[..., jax.Array]) -> Callable[[Values, Values], list[jax.Array]]:
        return lambda arrays, xs: [gather(xs[0], *arrays, axis, index.bound, index.exact)]

    if not is_inexact(x):
        return of(forward)(residuals, [x])[0]
    key = forward.__name__, axis, index.bound, index.exact
    return linear_with_transpose(of(forward), of(transpose), residuals, [x], key)[0]


def _pad(
    data: Value, starts: Value, lengths: Value, places: Value, axis: int, bound: int, exact: bool
) -> jax.Array:
    shape = (*data.shape[:axis], bound, *data.shape[axis + 1 :])
    rows = starts.shape[0]
    if rows == 0 or bound == 0 or data.shape[axis] == 0:
        return jnp.zeros((rows, *shape), data.dtype)
    # Zeros behind the last row: JAX moves a slice that would reach beyond the end.
    data = jnp.concatenate([data, jnp.zeros(shape, data.dtype)], axis)
    window = lambda start: lax.dynamic_slice_in_dim(data, start, bound, axis)
    return _zero_unless(jax.vmap(window)(starts), _mask(lengths, bound), (0, axis + 1))


def _pack(
    padded: Value,
    starts: Value,
    lengths: Value,
    places: Value,
    axis: int,
    bound: int,
    exact: bool,
) -> jax.Array:
    rows, capacity = padded.shape[0], places.shape[0]
    if rows == 0 or bound == 0 or capacity == 0:
        shape = (*padded.shape[1 : axis + 1], capacity, *padded.shape[axis + 2 :])
        return jnp.zeros(shape, padded.dtype)
    together = jnp.moveaxis(padded, axis + 1, 1)
    flat = together.reshape(rows * bound, *together.shape[2:])
    packed = jnp.moveaxis(take_clipped(flat, places, 0), 0, axis)
    if exact:
        return packed
    belongs = jnp.arange(capacity, dtype=jnp.int32) < starts[-1] + lengths[-1]
    return _zero_unless(packed, belongs, (axis,))


def take_clipped(x: Value, places: Value, axis: int, **options: Any) -> jax.Array:
    """The elements of `x` at these places along `axis`; of those out of bounds the nearest.

    The gather itself has places in bounds: ``checkify`` reports the others, though no result
    depends on what is taken there.
    """
    least, most = places.dtype.type(0), places.dtype.type(max(x.shape[axis] - 1, 0))
    at_trace_time = isinstance(places, np.ndarray)
    places = np.clip(places, least, most) if at_trace_time else lax.clamp(least, places, most)
    return jnp.take(x, places, axis=axis, mode="clip", **options)


def moved(
    x: Value,
    axis: int,
    source: Value,
    target: Value | Callable[..., Value],
    *arrays: Value,
    key: Hashable | None = None,
) -> jax.Array:
    """An array that holds ``x[source[i]]`` at place `i` of `axis`; zero where that is negative.

    `target` is the reverse: where each element of `x` goes, negative for nowhere. No two go to one
    place. It may be a function of `arrays`, which only programs of derivatives run; those of equal
    keys compute the same. JAX would transpose a gather to a scatter, which on a CPU takes a hundred
    times as long.
    """
    if not is_inexact(x):
        return _pick(x, axis, source)
    if callable(target):
        find: Callable[..., Value] = target
        ahead = lambda given, xs: [_pick(xs[0], axis, given[0])]
        back = lambda given, cts: [_pick(cts[0], axis, find(*given[1:]))]
        own = None if key is None else ("moved", axis, key)
        return linear_with_transpose(ahead, back, [source, *arrays], [x], own)[0]
    places = source, target
    if all(isinstance(each, np.ndarray) for each in places):  # constants of the program
        of = lambda k: lambda _, xs: [_pick(xs[0], axis, places[k])]
        return linear_with_transpose(of(0), of(1), [], [x])[0]
    of = lambda k: lambda places, xs: [_pick(xs[0], axis, places[k])]
    return linear_with_transpose(of(0), of(1), places, [x], ("moved", axis))[0]


def _pick(x: Value, axis: int, places: Value) -> jax.Array:
    if not x.shape[axis]:  # there is nothing that an index could be clipped to
        return jnp.zeros((*x.shape[:axis], len(places), *x.shape[axis + 1 :]), x.dtype)
    taken = take_clipped(x, places, axis)
    whole = isinstance(places, np.ndarray) and (places >= 0).all()
    if whole or jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys have no zero
        return taken
    return _zero_unless(taken, jnp.asarray(places >= 0), (axis,))


def _mask(lengths: Value, bound: int) -> jax.Array:
    return jnp.asarray(lengths)[:, None] > jnp.arange(bound, dtype=jnp.int32)[None]


def _zero_unless(x: Value, belongs: Value, dims: tuple[int, ...]) -> jax.Array:
    belongs = lax.broadcast_in_dim(belongs, x.shape, dims)
    return lax.select(belongs, x, lax.full_like(x, 0))
