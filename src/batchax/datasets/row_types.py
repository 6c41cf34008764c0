"""The types of rows, and of batches of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from batchax.datasets.inputs import Input, elements_of_batches
from batchax.rows.building import as_tuple
from batchax.rows.ragged import Ragged


def type_of_row(m: Input) -> Any:
    """The type of a row of an argument, of rows of different lengths the longest."""
    shape = list(m.source.shape)
    del shape[m.axis]
    for axis, size in zip(as_tuple(m.source.axes), m.longest, strict=False):
        shape.insert(axis, size)
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(m.source.dtype))


def type_of_batch(m: Input, batch_size: int) -> Any:
    """The type of so many rows of an argument, for the largest batch of them."""
    source, dtype = m.source, jax.dtypes.canonicalize_dtype(m.source.dtype)
    if source.lengths is not None:
        elements = elements_of_batches(source.lengths, batch_size)
        capacity = max(1, int(elements.max(initial=0)))
        axes = as_tuple(source.axes)
        return ragged_type(capacity, source.shape[1:], dtype, batch_size, m.longest, axes)
    shape = (*source.shape[: m.axis], batch_size, *source.shape[m.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, dtype)


def ragged_type(
    capacity: int,
    rest: tuple[int, ...],
    dtype: Any,
    rows: int,
    longest: tuple[int, ...],
    axes: tuple[int, ...],
) -> Any:
    """The type of rows of different lengths with so much room for elements."""
    shape = (*rest[: axes[0]], capacity, *rest[axes[0] :])
    data, lengths = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((rows,), np.int32)
    made = lambda data, *each: Ragged(data, each, longest, axis=axes)
    return jax.eval_shape(made, data, *[lengths] * len(axes))
