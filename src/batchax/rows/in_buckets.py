"""A function of one row run for the rows of each bucket by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.errors import AxisError, UnsupportedError
from batchax.execution.call import Call, Outputs, execute
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs, OutputArray, place
from batchax.frontend.rows import GroupsOfRows
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.rows.arguments import SizesOf, all_known, find_sizes
from batchax.rows.buckets import Buckets, bucket
from batchax.rows.checks import as_tuple, elements_of
from batchax.rows.groups import Placed, in_front, run_in_groups
from batchax.rows.outputs import place_ragged
from batchax.rows.ragged import Ragged


def by_bucket(axis: Axis, mapped: Sequence[Mapped], buckets: int | GroupsOfRows) -> bool:
    """Whether rows are put into buckets by what their lengths are; if not, while they run.

    Raises:
      UnsupportedError: the buckets are given, and lengths are traced; or the axis has a name.
    """
    lengths_known = all_known(mapped)
    if not lengths_known and isinstance(buckets, Buckets):
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
    return lengths_known


def run_in_buckets(call: Call, buckets: int | GroupsOfRows) -> Outputs:
    """The outputs of a function of one row, run for the rows of each bucket by itself.

    Args:
      call: of the function, in the way that rows of a bucket run. Buckets are for the lengths of
        that `Ragged` with the most elements, and of those that have the same; others are as long
        in each bucket as their longest row there.
      buckets: which rows run together, or how many groups of them there may be.

    Raises:
      AxisError: the buckets are for other lengths.
    """
    axis, mapped = call.axis, call.mapped
    sizes_of, _ = find_sizes(mapped)
    rows = [(m, own) for m, own in zip(mapped, sizes_of, strict=True) if own]
    x, leading = max(rows, key=lambda each: _count_elements(each[0].value))
    if isinstance(buckets, int):
        buckets = bucket(x.value, buckets)
    assert isinstance(buckets, Buckets)
    if not buckets.are_of(x.value):
        raise AxisError(
            f"buckets were made for other lengths than those of {x.path}, which is {x.value}. "
            "Make them for these lengths: batchax.bucket(x)."
        )
    recording.fact("buckets", buckets=buckets)
    if not axis.size:
        return execute(call)

    def one_row_in_bucket(*values: Any) -> tuple[list[Any], _InBucket]:
        arrays, outputs = call.function(*values)
        described = list(map(in_front, outputs.described))
        ndims = list(map(jnp.ndim, arrays))
        return arrays, _InBucket(described, outputs.rebuild, outputs.objects, outputs, ndims)

    def run_group(g: int, group: Axis, part: list[Mapped]) -> tuple[list[Placed], _InBucket]:
        bounds = dict(zip([s.name for s in leading], as_tuple(buckets.sizes[g]), strict=True))
        bounded = [
            replace(m, value=_bounded(m.value, own, bounds)) if own else m
            for m, own in zip(part, sizes_of, strict=True)
        ]
        own = replace(call, axis=group, function=one_row_in_bucket, mapped=bounded)
        outs, outputs = execute(own)
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


def _count_elements(x: Ragged) -> int:
    return int(np.asarray(elements_of(x.lengths)).sum())


def _bounded(x: Ragged, own: SizesOf, bounds: Mapping[str, int]) -> Ragged:
    """Rows of these sizes with the bounds that sizes have in a bucket."""
    most = [bounds.get(s.name, n) for s, n in zip(own, x.each_bound, strict=True)]
    return Ragged(x.data, x.each_length, tuple(most), axis=x.axes)


@dataclass(frozen=True)
class _InBucket(FlatOutputs):
    """The outputs of the rows of a bucket.

    Attributes:
      asked: where they are to be for all rows.
      ndims: how many axes each has for one row.
    """

    asked: FlatOutputs
    ndims: list[int]


def _placed_output(axis: Axis, output: OutputArray, x: Value, position: int | None) -> Any:
    if not isinstance(x, Ragged):
        return place(axis, output, x, position)
    (n,) = jax.export.symbolic_shape("n")
    place_ragged(output, x.shape_of_row([n] * len(x.axes)))
    return x
