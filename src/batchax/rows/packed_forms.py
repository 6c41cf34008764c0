"""Equations of packed rows that run in another form.

``x[1:]``, ``x[:-1]`` and their difference have the size ``n - 1``. Such rows stay where rows of the
size ``n`` are, and the last elements of each belong to none: so a slice is a shift of all elements.
An index into a row is one into all elements, after what is before the row.

Rows that are ragged along several axes have one in their place, with all elements of a row: what
acts on each element alone does not ask how many axes these lie along. What tells the axes apart (a
transpose, a sum along one of them) runs padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, Eqn, Value
from batchax.kernel.axis import Position
from batchax.rows.index import RowIndex, take_clipped
from batchax.rows.padded import Operation, Row
from batchax.rows.padded_rules.positions import (
    CLIP,
    FILL_OR_DROP,
    IN_BOUNDS,
    WRITES,
    as_index,
    dropped_in_reverse,
)
from batchax.rows.sizes import (
    Dim,
    Lengths,
    Shape,
    SizeOfRow,
    Sizes,
    has_symbols,
    is_symbolic,
    ragged_axes,
    ragged_axis,
)

Shorter = tuple[str, int]
"""A size of rows, less so many elements, and never negative."""


def shorter(dim: Dim, bounds: Mapping[str, int]) -> Shorter | None:
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
    """The sizes of packed arrays, as those of one long row."""

    of_row: Mapping[str, int] = field(default_factory=dict)  # the bound of each size, in one row
    # By size, the row of each element.
    row_of: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    count: int = 0  # how many rows there are

    def _shorter(self, dim: Dim) -> Shorter | None:
        """Of which size it is less, and by how much; None if it is one of these."""
        # A size may be another one in all rows at hand, as ``min(9, n)`` is: it is as long as that.
        named = not is_symbolic(dim) or str(dim).isidentifier()
        return None if named else shorter(dim, self.of_row)

    def bound(self, dim: Dim) -> int:
        of = self._shorter(dim)
        return super().bound(dim) if of is None else self.bounds[of[0]]

    def is_exact(self, dim: Dim) -> bool:
        of = self._shorter(dim)
        return (of is None or not of[1]) and super().is_exact(dim)

    def belongs(self, dim: Dim) -> jax.Array:
        """Which elements belong to a row of this size: so many more of the same row follow."""
        of = self._shorter(dim)
        if of is None:
            return super().belongs(dim)
        row = self.row_of[of[0]]()
        numpy = np if isinstance(row, np.ndarray) else jnp
        less = min(of[1], row.shape[0])
        after = numpy.concatenate([row[less:], numpy.full(less, self.count, row.dtype)])
        return jnp.asarray((row == after) & (row < self.count))


@dataclass(frozen=True)
class Packed:
    """A value of all rows."""

    value: Value  # an array
    shape: tuple[Dim, ...]  # the shape that the value has for one row
    # Where `value` has an axis for the rows. None if it has no such axis: because rows do not
    # differ in it, or because they follow one another along the ragged axis of `shape`.
    axis: Position = None


Index = Mapping[str, RowIndex]
"""Where rows are, by the name of each size that they have."""


def index_of(index: Index, dim: Dim) -> RowIndex:
    """Where rows of the size `dim` are, or those that they are part of."""
    named = shorter(dim, {name: own.bound for name, own in index.items()})
    assert named is not None
    return index[named[0]]


Move = Callable[[Index, Operation, Sequence[Packed]], jax.Array]
"""``move(index, operation, values)``: the array of the result, from those of operands, packed."""


def packed_move(eqn: Eqn, bounds: Mapping[str, int]) -> Move | None:
    """How an equation that reads or writes along packed rows runs; None of other equations."""
    find = _MOVES.get(eqn.primitive.name)
    return None if find is None else find(eqn, bounds)


def offset_in_row(eqn: Eqn, bounds: Mapping[str, int]) -> int | None:
    """Where a part of packed rows begins in each, along the first axis; None for others."""
    if packed_move(eqn, bounds) is None:
        return None
    if eqn.primitive.name == "slice":
        return eqn.params["start_indices"][0]
    starts = _starts(eqn.invars[1]) if eqn.primitive.name == "gather" else None
    if starts is None:
        return None
    return dict(zip(eqn.params["dimension_numbers"].start_index_map, starts, strict=True)).get(0, 0)


def _starts(v: core.Var | core.Literal) -> list[int] | None:
    """An index that is known, by `layouts.flatten`: so far from the first element."""
    if isinstance(v, core.Literal) and np.ndim(v.val) == 1:
        return [int(i) for i in np.asarray(v.val)]
    return None


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

    def move(index: Index, op: Operation, values: Sequence[Packed]) -> jax.Array:
        x = shift(values[0].value, at, -start)
        first = [0 if axis == at else starts.get(axis, 0) for axis in range(len(shape))]
        limits = [x.shape[at] if axis == at else last[axis] + 1 for axis in range(len(shape))]
        x = lax.slice(x, first, limits, strides)
        x = lax.squeeze(x, removed) if removed else x
        return op.cut(x, op.out_shape)

    return move


def shift(x: Value, axis: int, by: int) -> jax.Array:
    """Each element so many places further, or nearer to the front; zeros where none comes."""
    if not by:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys have no zero
        return jnp.roll(x, by, axis)
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


def _added(at: int, start: int, index: Index, op: Operation, values: Sequence[Packed]) -> jax.Array:
    x, _, updates = values
    update = op.masked(Row(updates.value, updates.shape), 0)
    return x.value + shift(update, at, start)


def _read(index: Index, op: Operation, values: Sequence[Packed]) -> jax.Array:
    x, indices = values
    (at,), mode = ragged_axes(x.shape), op.eqn.params["mode"]
    capacity = index_of(index, x.shape[at]).capacity
    target, inside = _targets(index, x, indices)
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


def _write(index: Index, op: Operation, values: Sequence[Packed]) -> jax.Array:
    x, indices, updates = values
    target, inside = _targets(index, x, indices)
    if op.eqn.params["mode"] == CLIP:
        inside = jnp.ones_like(inside)
    belongs = op.sizes.mask(indices.shape, op.sizes.padded_axes(indices.shape))
    written = inside if belongs is None else inside & belongs[..., 0]
    # Each to another place out of bounds, as the indices may be declared unique.
    (at,) = ragged_axes(x.shape)
    beyond = np.int32(index_of(index, x.shape[at]).capacity)
    nowhere = beyond + lax.iota(np.int32, written.size).reshape(written.shape)
    target = lax.expand_dims(jnp.where(written, target, nowhere), (target.ndim,))
    return op.bind(x.value, target, updates.value, mode=FILL_OR_DROP, indices_are_sorted=False)


def _targets(index: Index, x: Packed, indices: Packed) -> tuple[Any, Any]:
    """Where in all packed elements the indices of elements are, moved inside, and which were."""
    (dim,), (along,) = (x.shape[k] for k in ragged_axes(x.shape)), ragged_axes(indices.shape)
    of = shorter(dim, {name: each.bound for name, each in index.items()})
    assert of is not None  # or the rows would not be packed
    name, less = of
    own, row = index[name], index_of(index, indices.shape[along]).rows
    place = as_index(lax.squeeze(indices.value, (len(indices.shape) - 1,)))
    each = lambda x: lax.broadcast_in_dim(
        take_clipped(jnp.asarray(x), row, 0, indices_are_sorted=True).astype(place.dtype),
        place.shape,
        (along,),
    )
    start, last = each(own.starts), each(own.lengths) - place.dtype.type(less + 1)
    zero = place.dtype.type(0)
    inside = (place >= zero) & (place <= last)
    return (start + jnp.clip(place, zero, jnp.maximum(last, zero))).astype(np.int32), inside


_MOVES: dict[str, Callable[[Eqn, Mapping[str, int]], Move | None]] = {
    "slice": _slice_of,
    "gather": _gather_of,
    **dict.fromkeys(WRITES, _scatter_of),
}


Names = tuple[str, ...]
"""The sizes of rows along each of several ragged axes, by name."""


@dataclass(frozen=True)
class _Typed:
    """A variable of a merged equation."""

    aval: Aval


def has_several(eqn: Eqn) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    return any(len(ragged_axes(getattr(v.aval, "shape", ()))) > 1 for v in atoms)


def groups_in(eqn: Eqn) -> set[Names | None]:
    shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
    return {names_of(shape) for shape in shapes if len(ragged_axes(shape)) > 1}


def can_hold(room: Container[Names], shape: Shape) -> bool:
    """Whether values of that shape are packed: with sizes of the row.

    Those of several axes are so if arguments are (`room`): for others no bound of their elements is
    known, or they exist only between two steps.
    """
    names = names_of(shape)
    return names is not None and (len(names) < 2 or names in room)


def names_of(shape: Shape) -> Names | None:
    """The sizes along ragged axes; None where one is computed, such as ``n - 1``."""
    names = tuple(str(shape[at]) for at in ragged_axes(shape))
    return names if all(map(str.isidentifier, names)) else None


def merged_shape(shape: Shape) -> tuple[Any, ...]:
    """A shape with one axis in place of its ragged ones, where the first of them is."""
    at, names = ragged_axes(shape), names_of(shape)
    if len(at) < 2 or names is None:
        return tuple(shape)
    kept = [dim for dim in shape if not is_symbolic(dim)]
    kept.insert(at[0], merged_size(names))
    return tuple(kept)


_sizes = Cache("sizes of rows along several axes together", most=64)


def merged_size(names: Names) -> SizeOfRow:
    own = Lengths({"_".join(("of", *names)): np.arange(2)}, False)
    made = lambda: _compat.row_symbols(SizeOfRow, list(own.values), own)[0]
    return _sizes.get(names, made)


def merge(eqn: Eqn) -> tuple[Names, Eqn] | None:
    """The sizes along several ragged axes, and the equation of values that have one in their place.

    None if the equation tells the axes apart.
    """
    shapes = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    ragged = {names_of(shape) for shape in shapes if ragged_axes(shape)}
    names = next(iter(ragged))
    if len(ragged) != 1 or names is None or len(eqn.outvars) != 1:
        return None
    params, name = eqn.params, eqn.primitive.name
    invars: list[Any] = [
        _Typed(_with_shape(v.aval, merged_shape(v.aval.shape))) for v in eqn.invars
    ]
    if name in _PARAMS:
        changed = _PARAMS[name](eqn, invars)
        if changed is None:
            return None
        params = {**params, **changed}
    elif not facts_of(eqn.primitive).elementwise or not _as_wide(eqn, invars):
        return None
    out = eqn.outvars[0].aval
    outvars: list[Any] = [_Typed(_with_shape(out, merged_shape(out.shape)))]
    return names, eqn.replace(invars=invars, outvars=outvars, params=params)


def _with_shape(aval: Aval, shape: tuple[Dim, ...]) -> Aval:
    return aval if shape == tuple(aval.shape) else aval.update(shape=shape, sharding=None)


def _as_wide(eqn: Eqn, invars: list[Any]) -> bool:
    """Whether operands without ragged axes, which JAX repeats, have one element along each."""
    ragged = ragged_axes(eqn.outvars[0].aval.shape)
    for i, v in enumerate(eqn.invars):
        shape = v.aval.shape
        if not shape or ragged_axes(shape):
            continue
        if any(shape[at] != 1 for at in ragged):
            return False
        kept = tuple(dim for k, dim in enumerate(shape) if k not in ragged[1:])
        invars[i] = _Typed(_with_shape(v.aval, kept))
    return True


def _places(shape: Shape) -> dict[int, int]:
    """Where each axis of a shape is in the merged one; those that are merged where that axis is."""
    at = ragged_axes(shape)
    if len(at) < 2:
        return {i: i for i in range(len(shape))}
    return {i: at[0] if i in at else i - sum(k < i for k in at[1:]) for i in range(len(shape))}


def _reduced(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of a reduction over all ragged axes or none."""
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    if set(ragged_axes(shape)) & set(axes) not in (set(), set(ragged_axes(shape))):
        return None
    places = _places(shape)
    return {"axes": tuple(sorted({places[axis] for axis in axes}))}


def _broadcast(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of rows along other axes, or of what each row has one of along these."""
    (x, *others), shape = (v.aval.shape for v in eqn.invars), eqn.params["shape"]
    dims, to, places = eqn.params["broadcast_dimensions"], ragged_axes(shape), _places(shape)
    if others or not to:
        return None
    ragged = ragged_axes(x)
    if ragged and [dims[k] for k in ragged] != to:
        return None
    if any(dims[k] in to and x[k] != 1 for k in range(len(x)) if k not in ragged):
        return None
    own = _places(x)
    kept = [k for k in range(len(x)) if k in ragged[:1] or dims[k] not in to]
    dims_kept = (invars[0].aval.shape[own[k]] if is_symbolic(x[k]) else x[k] for k in kept)
    invars[0] = _Typed(_with_shape(eqn.invars[0].aval, tuple(dims_kept)))
    return {
        "shape": merged_shape(shape),
        "broadcast_dimensions": tuple(places[dims[k]] for k in kept),
        "sharding": None,
    }


def _product(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of rows with what all share, along other axes."""
    (contracted, batch), shapes = (
        eqn.params["dimension_numbers"],
        [v.aval.shape for v in eqn.invars],
    )
    if all(map(ragged_axes, shapes)) or any(map(len, batch)):
        return None
    if any(set(ragged_axes(s)) & set(axes) for s, axes in zip(shapes, contracted, strict=True)):
        return None
    moved = tuple(
        tuple(_places(s)[axis] for axis in axes) for s, axes in zip(shapes, contracted, strict=True)
    )
    return {"dimension_numbers": (moved, batch), "out_sharding": None}


_PARAMS: dict[str, Callable[[Eqn, list[Any]], dict[str, Any] | None]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"),
        _reduced,
    ),
    "broadcast_in_dim": _broadcast,
    "dot_general": _product,
}
"""What is other in the parameters of merged equations; None for what tells axes apart."""
