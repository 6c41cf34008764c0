"""A function of one row run for the rows of each bucket by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.arguments import Mapped
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import Described, FlatOutputs, OutputArray, place
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.rows.arguments import all_known, find_sizes
from batchax.rows.buckets import Buckets, bucket
from batchax.rows.groups import Placed, in_front, run_in_groups
from batchax.rows.outputs import place_ragged
from batchax.rows.ragged import Ragged

RunRows = Callable[[Axis, Described, list[Mapped]], tuple[list[Any], FlatOutputs]]


def check_buckets(buckets: Any) -> None:
    """Refuses, when `vmap` is called, what no call could use as `buckets`."""
    if buckets is None or isinstance(buckets, Buckets):
        return
    if not is_position(buckets):
        raise ArgumentTypeError(
            "buckets must be a positive int, the result of batchax.bucket(...), or None; got "
            f"{buckets!r} of type {type(buckets).__name__}."
        )
    if buckets < 1:
        raise AxisError(f"buckets must be a positive int, got {buckets}.")


def by_bucket(axis: Axis, mapped: list[Mapped], buckets: int | Buckets) -> bool:
    """Whether rows are put into buckets by what their lengths are; if not, while they run.

    Raises:
      UnsupportedError: the buckets are given, and lengths are traced; or the axis has a name.
    """
    known = all_known(mapped)
    if not known and isinstance(buckets, Buckets):
        raise UnsupportedError(
            "buckets was given, but the lengths of rows are traced here, and these buckets are for "
            "lengths that are known: call vmap outside of jit, or close over the Ragged so that "
            "its lengths are known; or give the number of buckets, buckets="
            f"{max(1, len(buckets.sizes))}, for which rows are looked at while they run."
        )
    if axis.name is not None:
        raise UnsupportedError(
            f"buckets was given, and axis_name {axis.name!r}, whose lanes are all rows, but those "
            "of one bucket run at a time. Leave one of them out; to reduce over all rows use "
            "out_axes=batchax.Reduce(...)."
        )
    return known


def run_in_buckets(
    axis: Axis,
    one_row: Described,
    mapped: list[Mapped],
    buckets: int | Buckets,
    run_rows: RunRows,
) -> tuple[list[Any], FlatOutputs]:
    """The outputs of a function of one row, run for the rows of each bucket by itself.

    Args:
      axis: the axis being mapped, whose lanes are rows.
      one_row: the function, which returns arrays and what describes them.
      mapped: its arguments, some of which are `Ragged`. Buckets are for the lengths of that with
        the most elements, and of those that have the same; others are as long in each bucket
        as their longest row there.
      buckets: which rows run together, or how many groups of them there may be.
      run_rows: what `vmap` does with the rows of one bucket.

    Raises:
      AxisError: the buckets are for other lengths.
    """
    sizes_of, sizes = find_sizes(mapped)
    leading = max(sizes, key=lambda size: int(np.asarray(size.batch.lengths).sum()))
    buckets = buckets if isinstance(buckets, Buckets) else bucket(leading.batch, int(buckets))
    if not np.array_equal(buckets.lengths, np.asarray(leading.batch.lengths)):
        path = next(m.path for m, size in zip(mapped, sizes_of, strict=True) if size is leading)
        raise AxisError(
            f"buckets were made for other lengths than those of {path}, which is {leading.batch}. "
            "Make them for these lengths: batchax.bucket(x)."
        )
    recording.fact("buckets", buckets=buckets)
    if not axis.size:
        return run_rows(axis, one_row, mapped)

    def one_row_in_bucket(*values: Any) -> tuple[list[Any], _InBucket]:
        arrays, outputs = one_row(*values)
        described = list(map(in_front, outputs.described))
        return arrays, _InBucket(described, outputs.rebuild, outputs, list(map(jnp.ndim, arrays)))

    def run_group(g: int, group: Axis, part: list[Mapped]) -> tuple[list[Placed], _InBucket]:
        bounded = [
            replace(m, value=m.value.with_max_length(buckets.sizes[g])) if size is leading else m
            for m, size in zip(part, sizes_of, strict=True)
        ]
        outs, outputs = run_rows(group, one_row_in_bucket, bounded)
        assert isinstance(outputs, _InBucket)
        return [
            (x, 0 if isinstance(x, Ragged) or np.ndim(x) > ndim else None)
            for x, ndim in zip(outs, outputs.ndims, strict=True)
        ], outputs

    # In turn, for the case that the function calls a library (`rules/in_turn.py`): whether it does
    # is known only once the first bucket has run. Buckets are few, so it costs little.
    outs, in_bucket = run_in_groups(axis, mapped, buckets.rows, run_group, in_turn=True)
    outputs = in_bucket.asked
    described = outputs.described
    return [
        _placed_output(axis, output, *out) for output, out in zip(described, outs, strict=True)
    ], outputs


@dataclass(frozen=True)
class _InBucket(FlatOutputs):
    """The outputs of the rows of a bucket.

    Attributes:
      asked: where they are to be for all rows.
      ndims: how many axes each has for one row.
    """

    asked: FlatOutputs
    ndims: list[int]


def _placed_output(axis: Axis, output: OutputArray, x: Any, position: int | None) -> Any:
    if not isinstance(x, Ragged):
        return place(axis, output, x, position)
    (n,) = jax.export.symbolic_shape("n")
    shape = list(x.data.shape)
    shape[x.axis] = n
    place_ragged(output, shape)
    return x
