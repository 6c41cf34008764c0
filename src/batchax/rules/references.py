"""Mutable references: reading, writing and adding in place.

The batch axis of a reference is one more dimension to index. Where the indices
are unbatched, that dimension is taken whole; where they are batched, it
is indexed by the number of the lane, together with all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, RuleOutputs, match_axis, move_axis
from batchax.kernel.registry import register_rule, vectorized

enter(": addupdate broadcast_to freeze get new_ref swap")


for _name in ("new_ref", "freeze"):
    if (_primitive := _compat.find_primitive(_name)) is not None:
        vectorized(_primitive)


class _Slice(Protocol):
    """Describes a slice in JAX, which starts anywhere."""

    start: Any
    size: int
    stride: int


@dataclass(frozen=True)
class _Index:
    """Holds a dynamic index of an indexer, with the position of its batch axis."""

    value: Value
    axis: Position


BATCH = "batch"
"""The name of the batch axis among the dimensions of what is read or written."""


@register_rule("get")
def _get(axis: Axis, args: Values, axes: Positions, /, *, tree: Tree) -> RuleOutputs:
    indices = _indices(tree, args[1:], axes[1:])
    if indices is None:
        return jax.ref.get(args[0]), axes[0]
    batched, in_batch, in_example = _batched_indices(axis, args[0], axes[0], indices)
    return _as_example(jax.ref.get(args[0], batched), in_batch, in_example)


@register_rule("swap")
def _swap(axis: Axis, args: Values, axes: Positions, /, *, tree: Tree) -> RuleOutputs:
    (ref, value, *_), (position, value_axis, *_) = args, axes
    _check_batched(position)
    indices = _indices(tree, args[2:], axes[2:])
    if indices is None:
        return jax.ref.swap(ref, ..., match_axis(axis, value, value_axis, position)), position
    batched, in_batch, in_example = _batched_indices(axis, ref, position, indices)
    value = _as_found(axis, value, value_axis, in_batch, in_example)
    return _as_example(jax.ref.swap(ref, batched, value), in_batch, in_example)


@register_rule("addupdate")
def _addupdate(axis: Axis, args: Values, axes: Positions, /, *, tree: Tree) -> RuleOutputs:
    (ref, value, *_), (position, value_axis, *_) = args, axes
    _check_batched(position)
    indices = _indices(tree, args[2:], axes[2:])
    if indices is None:
        jax.ref.addupdate(ref, ..., match_axis(axis, value, value_axis, position))
    else:
        batched, in_batch, in_example = _batched_indices(axis, ref, position, indices)
        jax.ref.addupdate(ref, batched, _as_found(axis, value, value_axis, in_batch, in_example))
    return [], []


@register_rule("broadcast_to")
def _broadcast_to(
    axis: Axis, args: Values, axes: Sequence[int], /, *, shape: Sequence[int]
) -> RuleOutputs:
    """Broadcasts indices of a reference to one shape."""
    (x,), (position,) = args, axes
    x = move_axis(x, position, 0)
    dims = range(1 + len(shape) - (x.ndim - 1), 1 + len(shape))
    return lax.broadcast_in_dim(x, (axis.size, *shape), (0, *dims)), 0


def _check_batched(position: Position) -> None:
    if position is None:
        raise AxisError(
            "the function writes a value that depends on the batch, or writes at an index that "
            "does, to a mutable reference that all lanes share, so the lanes would overwrite each "
            "other. Create the reference inside the function, or pass it as an argument with an "
            "axis in in_axes, so that each lane has its part."
        )


def _indices(tree: Tree, values: Values, axes: Positions) -> tuple[Any, ...] | None:
    """Returns the indices of one example, `_Index` for dynamic ones; None for the whole."""
    leaves = [_Index(x, a) for x, a in zip(values, axes, strict=True)]
    transforms = jax.tree.unflatten(tree, leaves)
    if not transforms:
        return None
    if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
        raise UnsupportedError(
            "the function reads or writes a reference through a view of it (ref.at[...], or a "
            "reshaped or reinterpreted reference), which cannot be batched: index the reference "
            "itself, with all indices at once."
        )
    return transforms[0].indices


def _batched_indices(
    axis: Axis, ref: Value, position: Position, indices: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
    """Builds indices into all lanes of `ref`.

    Returns them, and the names of the dimensions that they select, in the order of the result and
    in that of one example.
    """
    rank = max((np.ndim(i.value) - (i.axis is not None) for i in _arrays(indices)), default=0)
    block = [("array", d) for d in range(rank)]
    names: list[Any] = [None if isinstance(i, _Index) else d for d, i in enumerate(indices)]
    in_example = _selected(names, block)
    sizes = list(ref.shape)
    if position is not None:
        names.insert(position, BATCH)
        sizes.pop(position)

    moving = [d for d, i in enumerate(indices) if _start_axis(i) is not None]
    # No index differs between lanes: slice the batch axis as a whole.
    if not moving and all(i.axis is None for i in _arrays(indices)):
        out = [i.value if isinstance(i, _Index) else _with_value(i) for i in indices]
        if position is not None:
            out.insert(position, slice(None))
        return tuple(out), _selected(names, block), in_example

    # One array of indices for each dimension whose index varies: over the lanes,
    # over the index arrays of one example, and along slices that start anywhere.
    block = [BATCH, *block, *moving]
    shape = [axis.size, *_block_shape(indices, rank), *(indices[d].size for d in moving)]
    names = [None if name == BATCH or name in moving else name for name in names]
    out = []
    for d, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        if isinstance(index, _Index):
            lanes = _number(index, size) if rank == 0 else index.value
            out.append(_spread(lanes, index.axis, 1, shape))
        elif d in moving:
            places = np.arange(index.size, dtype=np.int32) * index.stride
            start = jnp.clip(_number(index.start, size), 0, size - 1 - int(places.max(initial=0)))
            starts = _spread(start, index.start.axis, 1, shape)
            along = lax.broadcast_in_dim(places, shape, (block.index(d),))
            out.append(starts + along.astype(starts.dtype))
        else:
            out.append(_with_value(index))
    if position is not None:
        out.insert(position, lax.broadcasted_iota(np.int32, shape, 0))
    return tuple(out), _selected(names, block), in_example


def _arrays(indices: Sequence[_Index | _Slice]) -> list[_Index]:
    return [index for index in indices if isinstance(index, _Index)]


def _block_shape(indices: Sequence[_Index | _Slice], rank: int) -> tuple[int, ...]:
    """Returns the shape of the index arrays of one example, which all have one."""
    shapes = [
        np.shape(i.value) if i.axis is None else np.delete(np.shape(i.value), i.axis)
        for i in _arrays(indices)
    ]
    return tuple(map(int, next((s for s in shapes if len(s) == rank), ())))


def _start_axis(index: _Index | _Slice) -> Position:
    """Returns the batch axis of the start of a slice, if it has one."""
    start = getattr(index, "start", None)
    return start.axis if isinstance(start, _Index) else None


def _with_value(index: Any) -> _Slice:
    """Takes a slice whose start all lanes share."""
    start = index.start.value if isinstance(index.start, _Index) else index.start
    return type(index)(start, index.size, index.stride)


def _number(index: _Index, size: int) -> Value:
    """Normalizes a scalar index as for one example: counted from the end, clamped."""
    i = index.value
    if isinstance(i, (int, np.integer)):
        return i
    return jnp.clip(jnp.where(i < 0, i + size, i), 0, size - 1)


def _spread(x: Value, position: Position, start: int, shape: Sequence[int]) -> jax.Array:
    """Broadcasts indices to the shape of all of them, batch axis first."""
    if position is not None:
        x = move_axis(x, position, 0)
    rank = np.ndim(x) - (position is not None)
    dims = [0] * (position is not None) + list(range(start, start + rank))
    return lax.broadcast_in_dim(x, shape, dims)


def _selected(names: list[Any], block: list[Any]) -> list[Any]:
    """Lists the dimensions that an indexer selects, in NumPy's order.

    `names` holds a name for each sliced dimension, and None for one indexed by an array, whose
    dimensions are `block`.
    """
    arrays = [d for d, name in enumerate(names) if name is None]
    slices = [name for name in names if name is not None]
    if not arrays:
        return slices
    # As in NumPy, the block goes where the first array is, or in front if arrays are not adjacent.
    apart = arrays[-1] - arrays[0] >= len(arrays)
    at = 0 if apart else arrays[0]
    return [*slices[:at], *block, *slices[at:]]


def _as_example(x: Value, in_batch: list[Any], in_example: list[Any]) -> tuple[Any, int]:
    """Transposes values read to the order of one example; returns their batch axis."""
    if [name for name in in_batch if name != BATCH] == in_example:
        return x, in_batch.index(BATCH)
    return lax.transpose(x, [in_batch.index(name) for name in (BATCH, *in_example)]), 0


def _as_found(
    axis: Axis, x: Value, position: Position, in_batch: list[Any], in_example: list[Any]
) -> jax.Array:
    """Transposes values to write to the order in which the indices find them."""
    if position is None:
        x, position = match_axis(axis, x, None, 0), 0
    given = [*in_example[:position], BATCH, *in_example[position:]]
    order = [given.index(name) for name in in_batch]
    return x if order == list(range(x.ndim)) else lax.transpose(x, order)
