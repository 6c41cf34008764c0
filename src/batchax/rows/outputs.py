"""The outputs of a function of one row, for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.frontend.outputs import AUTO, OutputArray, Reduce
from batchax.rows.arguments import RowSize, capacity_of
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
      UnsupportedError: it is ragged in more than one axis.
    """
    ragged = [i for i, dim in enumerate(shape) if is_symbolic(dim)]
    if not ragged:
        return output
    shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if len(ragged) > 1:
        raise UnsupportedError(
            f"{output.path} has the shape {shown} for each row, ragged in {len(ragged)} axes; a "
            "Ragged has one. Reduce over one of them in the function, or write it into an array "
            "of a fixed size, such as jnp.zeros((size, size)).at[:n, :n].set(...)."
        )
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


def as_ragged(padded: Any, shape: Sequence[Any], sizes: Sequence[RowSize]) -> Ragged:
    """Padded rows as a `Ragged`."""
    at = next(i for i, dim in enumerate(shape) if is_symbolic(dim))
    dim, bound = shape[at], padded.shape[at + 1]
    for size in sizes:
        if dim == size.symbol:
            lengths, capacity, index = size.batch.lengths, capacity_of(size.batch), size.index
            break
    else:
        lengths, capacity = _lengths_of(dim, bound, sizes)
        index = RowIndex.of(lengths, capacity, bound)
    return Ragged(pack_rows(padded, index, at, capacity), lengths, bound, axis=at)


def _lengths_of(dim: Any, bound: int, sizes: Sequence[RowSize]) -> tuple[Any, int]:
    """The size `dim` of each row, and room enough for all rows."""
    used = [size for size in sizes if size.name in _compat.symbols(dim)]
    lengths = {size.name: size.index.lengths for size in used}
    lengths_known = all(isinstance(x, np.ndarray) for x in lengths.values())
    numpy = np if lengths_known else jnp
    row_sizes = numpy.maximum(_compat.evaluate_size(dim, lengths), 0)
    if lengths_known:
        row_sizes = np.asarray(row_sizes, np.int32)
        return row_sizes, int(row_sizes.sum())
    capacity = len(used[0].batch) * bound
    if len(used) == 1:
        # Often less room is enough: ``a + b * length`` is at least `dim` for every length, and all
        # lengths together are at most the capacity of the argument.
        total = capacity_of(used[0].batch)
        at = np.arange(used[0].bound + 1)
        values = np.maximum(_compat.evaluate_size(dim, {used[0].name: at}), 0)
        slope = int(np.max(-((values[0] - values[1:]) // at[1:]), initial=0))
        capacity = min(capacity, int(len(used[0].batch) * values[0] + slope * total))
    return row_sizes, capacity
