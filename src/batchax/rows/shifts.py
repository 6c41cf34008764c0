"""Packed rows that are a few elements shorter than others, and reads and writes along packed rows.

``x[1:]``, ``x[:-1]`` and their difference have the size ``n - 1``. Such rows stay where rows of the
size ``n`` are, and the last elements of each belong to none: so a slice is a shift of all elements.
An index into a row is one into all elements, after what is before the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from batchax import _compat
from batchax.jaxprs.words import Eqn, Value
from batchax.rows.index import RowIndex, moved, row_places, take_clipped
from batchax.rows.padded import Operation, Row
from batchax.rows.padded_rules.indexing import (
    CLIP,
    FILL_OR_DROP,
    IN_BOUNDS,
    WRITES,
    as_index,
    dropped_in_reverse,
)
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic, ragged_axes, ragged_axis

Shorter = tuple[str, int]
"""A size of rows, less so many elements, and never negative."""


def shorter(dim: Any, bounds: Mapping[str, int]) -> Shorter | None:
    """The size that `dim` is, and less how many elements; None if it has another form."""
    name = str(dim)
    if name.isidentifier():
        return name, 0
    names = _compat.symbols(dim)
    if len(names) != 1 or not names <= bounds.keys():
        return None
    (of,) = names
    return _shorter(_Dim(dim, name), of, bounds[of])


@dataclass(frozen=True)
class _Dim:
    """A size, which is hashed by what it is called."""

    dim: Any = field(compare=False)
    name: str


@functools.lru_cache(256)
def _shorter(size: _Dim, name: str, bound: int) -> Shorter | None:
    lengths = np.arange(bound + 1)
    values = np.maximum(_compat.evaluate_size(size.dim, {name: lengths}), 0)
    less = int(bound - values[-1])
    return (name, less) if less >= 0 and (values == np.maximum(lengths - less, 0)).all() else None


@dataclass
class PackedSizes(Sizes):
    """The sizes of packed arrays, as those of one long row.

    Attributes:
      of_row: the bound of each size, in one row.
      row_of: by size, the row of each element.
      count: how many rows there are.
    """

    of_row: Mapping[str, int] = field(default_factory=dict)
    row_of: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    count: int = 0

    def _less(self, dim: Any) -> int:
        of = shorter(dim, self.of_row) if is_symbolic(dim) else None
        return 0 if of is None else of[1]

    def bound(self, dim: Any) -> int:
        if not self._less(dim):
            return super().bound(dim)
        of = shorter(dim, self.of_row)
        assert of is not None
        return self.bounds[of[0]]

    def is_exact(self, dim: Any) -> bool:
        return not self._less(dim) and super().is_exact(dim)

    def mask(self, shape: Sequence[Any], axes: Sequence[int]) -> Any:
        short = [axis for axis in axes if self._less(shape[axis])]
        mask = super().mask(shape, [axis for axis in axes if axis not in short])
        for axis in short:
            own = lax.broadcast_in_dim(
                jnp.asarray(self.belongs(shape[axis])), self.bounds_of(shape), (axis,)
            )
            mask = own if mask is None else lax.bitwise_and(mask, own)
        return mask

    def belongs(self, dim: Any) -> Any:
        """Which elements belong to a row of this size: so many more of the same row follow."""
        of = shorter(dim, self.of_row)
        assert of is not None
        row = self.row_of[of[0]]()
        numpy = np if isinstance(row, np.ndarray) else jnp
        less = min(of[1], row.shape[0])
        after = numpy.concatenate([row[less:], numpy.full(less, self.count, row.dtype)])
        return (row == after) & (row < self.count)


def shorten(x: Value, index: RowIndex, less: int, axis: int, lengths: Any, capacity: int) -> Any:
    """Packed rows without the last `less` elements of each, and with nothing between them."""
    room, most = x.shape[axis], max(index.bound - less, 0)
    lengths = lengths.astype(np.int32)
    if not isinstance(index.lengths, np.ndarray):
        starts, _, _, source = row_places(lengths, capacity, most, index.starts)
        source = jnp.where(source < room, source, -1)
        _, _, row, target = row_places(index.lengths, room, index.bound, starts)
        row = jnp.minimum(row, len(lengths) - 1)
        there = target - starts[row] < lengths[row]
        return moved(x, axis, source, jnp.where(there, target, -1))
    row = RowIndex.of(lengths, capacity, most).row_of(capacity)
    gone = np.append(index.lengths - lengths, 0)
    source = np.arange(capacity, dtype=np.int32) + (np.cumsum(gone) - gone)[row].astype(np.int32)
    target = np.full(room, -1, np.int32)
    target[source] = np.arange(capacity, dtype=np.int32)
    return moved(x, axis, source, target)


Move = Callable[[Any, Operation, Sequence[Any]], Any]
"""``move(rows, operation, values)``: the array of the result, from those of operands, packed."""


def packed_move(eqn: Eqn, bounds: Mapping[str, int]) -> Move | None:
    """How an equation that reads or writes along packed rows runs; None of other equations."""
    find = _MOVES.get(eqn.primitive.name)
    return None if find is None else find(eqn, bounds)


def _starts(v: Any) -> list[int] | None:
    """An index that is known, by `layouts.flatten`: so far from the first element."""
    is_vector = isinstance(v, core.Literal) and np.ndim(v.val) == 1
    return [int(i) for i in np.asarray(v.val)] if is_vector else None


def _slice_of(eqn: Eqn, bounds: Mapping[str, int]) -> Move | None:
    """Of a slice that leaves out elements at the ends of rows."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    starts, strides = params["start_indices"], params["strides"] or (1,) * len(shape)
    return _window(eqn, bounds, dict(enumerate(starts)), eqn.outvars[0].aval.shape, (), strides)


def _gather_of(eqn: Eqn, bounds: Mapping[str, int]) -> Move | None:
    dnums, (table, indices) = eqn.params["dimension_numbers"], (v.aval.shape for v in eqn.invars)
    at, starts = ragged_axis(table), _starts(eqn.invars[1])
    if at is None or at not in dnums.start_index_map or dnums.operand_batching_dims:
        return None
    sizes = eqn.params["slice_sizes"]
    if starts is not None:
        given = dict(zip(dnums.start_index_map, starts, strict=True))
        return _window(eqn, bounds, given, sizes, dnums.collapsed_slice_dims, (1,) * len(table))
    each = sizes[at] == 1 if not is_symbolic(sizes[at]) else False
    if dnums.start_index_map != (at,) or at not in dnums.collapsed_slice_dims or not each:
        return None
    return (
        _read if len(indices) > 1 and ragged_axis(indices) not in (None, len(indices) - 1) else None
    )


def _window(
    eqn: Eqn,
    bounds: Mapping[str, int],
    starts: Mapping[int, Any],
    sizes: Sequence[Any],
    removed: Sequence[int],
    strides: Sequence[int],
) -> Move | None:
    """Of a part of each row that begins at the same place."""
    shape = eqn.invars[0].aval.shape
    at = ragged_axis(shape)
    if at is None or not is_symbolic(sizes[at]) or at in removed or strides[at] != 1:
        return None
    own, kept, start = shorter(shape[at], bounds), shorter(sizes[at], bounds), starts.get(at, 0)
    if own is None or kept is None or own[0] != kept[0] or is_symbolic(start):
        return None
    if not 0 <= start <= kept[1] - own[1]:
        return None
    others = [axis for axis in range(len(shape)) if axis != at]
    if any(has_symbols([starts.get(axis, 0), sizes[axis]]) for axis in others):
        return None
    last = {i: starts.get(i, 0) + (sizes[i] - 1) * strides[i] for i in others}
    if any(sizes[i] < 1 or starts.get(i, 0) < 0 or last[i] >= shape[i] for i in others):
        return None

    def move(rows: Any, op: Operation, values: Sequence[Any]) -> Any:
        x = shift(values[0].value, at, -start)
        first = [0 if axis == at else starts.get(axis, 0) for axis in range(len(shape))]
        limits = [x.shape[at] if axis == at else last[axis] + 1 for axis in range(len(shape))]
        x = lax.slice(x, first, limits, strides)
        x = lax.squeeze(x, removed) if removed else x
        return op.cut(x, op.out_shape)

    return move


def shift(x: Value, axis: int, by: int) -> Any:
    """Each element so many places further, or nearer to the front; zeros where none comes."""
    if not by:
        return x
    config = [(0, 0, 0)] * x.ndim
    config[axis] = by, -by, 0
    return lax.pad(x, lax.full((), 0, x.dtype), config)


def _scatter_of(eqn: Eqn, bounds: Mapping[str, int]) -> Move | None:
    dnums, shapes = eqn.params["dimension_numbers"], [v.aval.shape for v in eqn.invars]
    (x, indices, updates), at = shapes, ragged_axis(shapes[0])
    if at is None or dnums.operand_batching_dims or dnums.scatter_dims_to_operand_dims != (at,):
        return None
    starts = _starts(eqn.invars[1])
    if starts is not None:
        own, kept = shorter(x[at], bounds), None
        if eqn.primitive.name == "scatter-add" and not dnums.inserted_window_dims:
            kept = shorter(updates[at], bounds) if is_symbolic(updates[at]) else None
        if own is None or kept is None or own[0] != kept[0]:
            return None
        whole = all(a == b for i, (a, b) in enumerate(zip(x, updates, strict=True)) if i != at)
        (start,) = starts
        return (
            functools.partial(_added, at, start)
            if whole and 0 <= start <= kept[1] - own[1]
            else None
        )
    along = ragged_axis(indices)
    if dnums.inserted_window_dims != (at,) or along in (None, len(indices) - 1):
        return None
    batch = [i for i in range(len(updates)) if i not in dnums.update_window_dims]
    if ragged_axis(updates) not in batch:
        return None
    return None if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] else _write


def _added(at: int, start: int, rows: Any, op: Operation, values: Sequence[Any]) -> Any:
    x, _, updates = values
    update = op.masked(Row(updates.value, updates.shape), 0)
    return x.value + shift(update, at, start)


def _read(rows: Any, op: Operation, values: Sequence[Any]) -> Any:
    x, indices = values
    mode, capacity = op.eqn.params["mode"], rows.of(x.shape[ragged_axis(x.shape)]).capacity
    target, inside = _targets(rows, x, indices)
    if mode == FILL_OR_DROP:
        target = jnp.where(inside, target, np.int32(capacity))
    given = lax.expand_dims(target, (target.ndim,))
    # Indices that were unique or sorted may not be so once they are moved inside.
    plain = {"unique_indices": False, "indices_are_sorted": False}
    out = op.bind(x.value, given, mode=CLIP if mode == IN_BOUNDS else mode, **plain)
    if mode == IN_BOUNDS:
        offsets = op.eqn.params["dimension_numbers"].offset_dims
        out = dropped_in_reverse(out, inside, [i for i in range(out.ndim) if i not in offsets])
    return op.cut(out, op.out_shape)


def _write(rows: Any, op: Operation, values: Sequence[Any]) -> Any:
    x, indices, updates = values
    target, inside = _targets(rows, x, indices)
    if op.eqn.params["mode"] == CLIP:
        inside = jnp.ones_like(inside)
    belongs = op.sizes.mask(indices.shape, op.sizes.padded_axes(indices.shape))
    written = inside if belongs is None else inside & belongs[..., 0]
    # Each to another place out of bounds, as the indices may be declared unique.
    beyond = np.int32(rows.of(x.shape[ragged_axis(x.shape)]).capacity)
    nowhere = beyond + lax.iota(np.int32, written.size).reshape(written.shape)
    target = lax.expand_dims(jnp.where(written, target, nowhere), (target.ndim,))
    return op.bind(x.value, target, updates.value, mode=FILL_OR_DROP, indices_are_sorted=False)


def _targets(rows: Any, x: Any, indices: Any) -> tuple[Any, Any]:
    """Where in all packed elements the indices of elements are, moved inside, and which were."""
    (dim,), (along,) = (x.shape[k] for k in ragged_axes(x.shape)), ragged_axes(indices.shape)
    of = shorter(dim, rows.bounds)
    assert of is not None  # or the rows would not be packed
    name, less = of
    index, row = rows.segments[name].index, rows.of(indices.shape[along]).rows
    place = as_index(lax.squeeze(indices.value, (len(indices.shape) - 1,)))
    each = lambda x: lax.broadcast_in_dim(
        take_clipped(jnp.asarray(x), row, 0, indices_are_sorted=True).astype(place.dtype),
        place.shape,
        (along,),
    )
    start, last = each(index.starts), each(index.lengths) - place.dtype.type(less + 1)
    zero = place.dtype.type(0)
    inside = (place >= zero) & (place <= last)
    return (start + jnp.clip(place, zero, jnp.maximum(last, zero))).astype(np.int32), inside


_MOVES: dict[str, Callable[[Eqn, Mapping[str, int]], Move | None]] = {
    "slice": _slice_of,
    "gather": _gather_of,
    **dict.fromkeys(WRITES, _scatter_of),
}
