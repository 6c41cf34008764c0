"""The outputs of a function of one row, for all rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import AxisError
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import AUTO, OutputArray, Reduce
from batchax.rows.arguments import RowSize, SizesOf, capacity_of
from batchax.rows.checks import elements_of
from batchax.rows.index import RowIndex, pack_rows
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import is_symbolic


def place_ragged(output: OutputArray, shape: Sequence[Any]) -> OutputArray:
    """Where an output goes before it is packed.

    Args:
      output: what the function returned, and what `out_axes` says of it.
      shape: its shape for each row, with symbols for what depends on the row.

    Raises:
      AxisError: `out_axes` asks for what a ragged output cannot be.
    """
    ragged = [i for i, dim in enumerate(shape) if is_symbolic(dim)]
    if not ragged:
        return output
    shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if output.spec is AUTO or output.spec == 0:
        return replace(output, spec=0)
    if isinstance(output.spec, Reduce):
        raise AxisError(
            f"out_axes gives {output.spec} for {output.path}, whose shape for each row is "
            f"{shown}: rows of different lengths cannot be reduced over the batch. Reduce over "
            "the row in the function first."
        )
    raise AxisError(
        f"out_axes gives {output.spec} for {output.path}, whose shape for each row is {shown}: a "
        "ragged output has its rows along axis 0. Give 0 or batchax.AUTO."
    )


FoundLengths = tuple[Any, int | None]
"""A size that each row has found, and how many elements all rows have at most, if it is known."""


def as_ragged(
    padded: Any,
    shape: Sequence[Any],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
    sizes_found: Mapping[str, FoundLengths] | None = None,
) -> Ragged:
    """Padded rows as a `Ragged`.

    Args:
      padded: results of a function of one row, the rows in front.
      shape: that of one row.
      sizes: all that rows have.
      arguments: of the function, each with its sizes.
      sizes_found: those that rows have not, and found.
    """
    if isinstance(padded, Ragged):  # of rows of one length together, whose bound is their own
        padded = padded.to_padded()
    sizes_found = sizes_found or {}
    axes = tuple(i for i, dim in enumerate(shape) if is_symbolic(dim))
    dims = [shape[at] for at in axes]
    bounds = [padded.shape[at + 1] for at in axes]
    if len(dims) == 1:
        size = next((size for size in sizes if size.symbol == dims[0]), None)
        if size is not None:
            data = pack_rows(padded, size.index, axes[0], size.capacity)
            return Ragged(data, size.lengths, bounds[0], axis=axes[0])
    lengths = [
        sizes_found[str(dim)][0] if str(dim) in sizes_found else _lengths_of(dim, sizes)
        for dim in dims
    ]
    room = padded.shape[0] * math.prod(bounds)
    elements = elements_of(tuple(lengths))
    if elements is not None:
        room = int(elements.sum())
    elif any(str(dim) in sizes_found for dim in dims):
        most = sizes_found[str(dims[0])][1] if len(dims) == 1 else None
        room = room if most is None else min(room, most)
    else:
        room = min(room, _capacity(dims, bounds, sizes, arguments))
    index = RowIndex.of_axes(lengths, room, bounds)
    return Ragged(pack_rows(padded, index, axes, room), lengths, tuple(bounds), axis=axes)


def _lengths_of(dim: Any, sizes: Sequence[RowSize]) -> Any:
    """The size `dim` of each row."""
    for size in sizes:
        if dim == size.symbol:
            return size.lengths
    used = [size for size in sizes if size.name in _compat.symbols(dim)]
    lengths = {size.name: size.index.lengths for size in used}
    lengths_known = all(isinstance(x, np.ndarray) for x in lengths.values())
    numpy = np if lengths_known else jnp
    row_sizes = numpy.maximum(_compat.evaluate_size(dim, lengths), 0)
    return np.asarray(row_sizes, np.int32) if lengths_known else row_sizes


def _capacity(
    dims: Sequence[Any],
    bounds: Sequence[int],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
) -> int:
    """Room enough for all rows, which have axes of the sizes `dims`."""
    rows = sizes[0].rows
    capacity = rows * math.prod(bounds)
    for m, own in arguments:  # one may have some of these axes, and no more elements
        left = list(map(str, dims))
        if own and all(size.name in left and not left.remove(size.name) for size in own):
            others = [bound for dim, bound in zip(dims, bounds, strict=True) if str(dim) in left]
            capacity = min(capacity, capacity_of(m.value) * math.prod(others))
    names = frozenset().union(*map(_compat.symbols, dims))
    used = [size for size in sizes if size.name in names]
    if len(used) == 1:
        # Often less room is enough: ``a + b * length`` is at least the number of elements for every
        # length, and all lengths together are at most the capacity of rows of that size.
        total = used[0].capacity
        at = np.arange(used[0].bound + 1)
        each = [np.maximum(_compat.evaluate_size(dim, {used[0].name: at}), 0) for dim in dims]
        values = np.prod(each, axis=0)
        slope = int(np.max(-((values[0] - values[1:]) // at[1:]), initial=0))
        capacity = min(capacity, int(rows * values[0] + slope * total))
    return capacity
