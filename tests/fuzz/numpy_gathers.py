"""Gathers, scatters and sorts in NumPy, by the place of every single entry.

An index says where a window begins. XLA moves a window inside that is read and drops one that is
written, unless the mode says otherwise.
"""

import numpy as np
from jax.lax import GatherScatterMode


def gather(x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
    d = dimension_numbers
    small = d.collapsed_slice_dims + d.operand_batching_dims
    batching = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    places, inside = _windows(x.shape, indices, d.start_index_map, batching, slice_sizes, mode)
    out = x[places]
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = _fill(x.dtype) if fill_value is None else fill_value
        out = np.where(inside, out, np.asarray(fill, x.dtype))
    first = indices.ndim - 1
    dropped = {first + k for k in small}  # of size 1, or 0 where there is nothing
    out = out.reshape([n for i, n in enumerate(out.shape) if i not in dropped])
    return np.moveaxis(out, range(first, out.ndim), d.offset_dims)


def scatter(combine):
    """`combine` puts values at places of an array."""

    def run(x, indices, updates, *, dimension_numbers, mode, **_):
        d = dimension_numbers
        first, out = indices.ndim - 1, x.copy()
        updates = np.moveaxis(updates, d.update_window_dims, range(first, updates.ndim))
        sizes = list(updates.shape[first:])
        small = d.inserted_window_dims + d.operand_batching_dims
        for k in sorted(small):
            sizes.insert(k, 1)
        batching = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
        to = d.scatter_dims_to_operand_dims
        places, inside = _windows(x.shape, indices, to, batching, sizes, mode)
        if mode == GatherScatterMode.CLIP:
            inside = True
        kept = np.broadcast_to(inside, (*indices.shape[:-1], *sizes))
        combine(out, tuple(p[kept] for p in places), updates.reshape(kept.shape)[kept])
        return out

    return run


def _windows(shape, indices, index_map, batching, sizes, mode):
    """For each dimension the place of every entry, and whether its window lies inside."""
    alone = (1,) * len(shape)
    batch = indices.shape[:-1]
    most = np.array(shape, int) - np.array(sizes, int)
    starts = np.zeros((*batch, len(shape)), int)
    starts[..., list(index_map)] = indices
    for dimension, where in batching.items():
        along = np.arange(batch[where])
        starts[..., dimension] = along.reshape([-1 if k == where else 1 for k in range(len(batch))])
    inside = ((starts >= 0) & (starts <= most)).all(-1).reshape(batch + alone)
    starts = np.clip(starts, 0, most)
    places = [
        starts[..., k].reshape(batch + alone) + np.arange(size).reshape((-1, *alone[k + 1 :]))
        for k, size in enumerate(sizes)
    ]
    return tuple(np.broadcast_to(p, (*batch, *sizes)) for p in places), inside


def _fill(dtype):
    if dtype.kind in "fc":
        return np.nan
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _put(x, places, values):
    x[places] = values


def sort(*xs, dimension, num_keys, **_):
    order = np.lexsort(xs[:num_keys][::-1], axis=dimension)
    return [np.take_along_axis(x, order, dimension) for x in xs]


TABLE = {
    "gather": gather,
    "sort": sort,
    "scatter": scatter(_put),
    "scatter-add": scatter(np.add.at),
    "scatter-sub": scatter(np.subtract.at),
    "scatter-mul": scatter(np.multiply.at),
    "scatter-min": scatter(np.minimum.at),
    "scatter-max": scatter(np.maximum.at),
}
