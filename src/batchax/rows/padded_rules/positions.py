"""Operations that move whole parts of a row: their places follow from the row's own size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import moved, padded, steps, window
from batchax.rows.sizes import is_symbolic


@padded_rule("slice")
def _slice(op: Operation, x: Row, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    out = x.value
    whole = True
    for axis, (own, dim) in enumerate(zip(x.shape, op.out_shape, strict=True)):
        start, stride = start_indices[axis], 1 if strides is None else strides[axis]
        if own == dim:  # all of it: a shorter slice has another size
            continue
        out = window(op, jnp.asarray(out), axis, op.sizes.value(start), own, dim, stride)
        whole = whole and not is_symbolic(own) and not is_symbolic(dim)
    return op.result(out, x.fill) if whole else op.cut(out, op.out_shape)


@padded_rule("rev")
def _rev(op: Operation, x: Row, *, dimensions: Any) -> Any:
    ragged = [axis for axis in dimensions if not op.sizes.is_exact(x.shape[axis])]
    out = jnp.asarray(x.value)
    if len(ragged) < len(dimensions):
        out = lax.rev(out, tuple(axis for axis in dimensions if axis not in ragged))
    for axis in ragged:
        size = op.sizes.size(x.shape[axis])
        places = steps(out.shape[axis], size - 1, -1, size)
        out = moved(out, axis, places, places)
    return op.result(out, x.fill if not ragged else None)


@padded_rule("concatenate")
def _concatenate(op: Operation, *rows: Row, dimension: int) -> Any:
    joined = join(op, rows, dimension)
    fill = rows[0].fill
    same = all(row.fill is not None and row.fill == fill for row in rows)
    return op.result(joined, fill if same and not is_symbolic(op.out_shape[dimension]) else None)


def join(op: Operation, rows: Sequence[Row], axis: int) -> Any:
    """Rows one after another along `axis`."""
    arrays = [jnp.asarray(row.value) for row in rows]
    buffer = lax.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]
    dims = [row.shape[axis] for row in rows]
    bound = op.sizes.bound(op.out_shape[axis])
    if all(map(op.sizes.is_exact, dims[:-1])) and buffer.shape[axis] == bound:
        return buffer  # padding is at the end already
    counts = [x.shape[axis] for x in arrays]
    sizes = [op.sizes.size(dim) for dim in dims]
    ends = list(itertools.accumulate(sizes))
    at = jnp.arange(bound, dtype=np.int32)
    source, target = at, []
    for count, size, end in zip(counts, sizes, ends, strict=True):
        source = source + jnp.where(at >= end, count - size, 0)
        own = jnp.arange(count, dtype=np.int32)
        target.append(jnp.where(own < size, own + (end - size), -1))
    return moved(buffer, axis, jnp.where(at < ends[-1], source, -1), jnp.concatenate(target))


@padded_rule("tile")
def _tile(op: Operation, x: Row, *, reps: Any) -> Any:
    value = jnp.asarray(x.value)
    for axis, (count, dim) in enumerate(zip(reps, x.shape, strict=True)):
        bound = op.sizes.bound(op.out_shape[axis])
        if op.sizes.is_exact(dim):
            value = lax.tile(value, _only(value, axis, op.sizes.bound(count)))
        elif is_symbolic(count):
            size = jnp.maximum(op.sizes.size(dim), 1)
            value = jnp.take(value, jnp.arange(bound, dtype=np.int32) % size, axis, mode="clip")
        elif count != 1:
            shape = [*op.out_shape[:axis], *x.shape[axis:]]
            value = join(op, [Row(value, tuple(shape))] * count, axis)
    return op.cut(value, op.out_shape)


def _only(x: Value, axis: int, count: int) -> tuple[int, ...]:
    return tuple(count if i == axis else 1 for i in range(x.ndim))


@padded_rule("split")
def _split(op: Operation, x: Row, *, sizes: Any, axis: int) -> list[Any]:
    outs, start = [], 0
    for i, dim in enumerate(sizes):
        own = x.shape[axis]
        out = window(op, jnp.asarray(x.value), axis, op.sizes.value(start), own, dim)
        outs.append(op.cut(out, op.eqn.outvars[i].aval.shape))
        start = start + dim
    return outs


@padded_rule("pad")
def _pad(op: Operation, x: Row, value: Row, *, padding_config: Any) -> Any:
    fill = value.value
    array = op.filled(x, fill) if value.known else op.masked(x, fill)
    bounds = op.sizes.bounds_of(op.out_shape)
    out = padded(op, jnp.asarray(array), fill, padding_config, x.shape, bounds)
    return op.cut(out, op.out_shape)
