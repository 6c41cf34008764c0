"""Lanes that a mask picks: which of them each chunk takes, how they are read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.slices import entry_of, part_of, put_entry
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import batch_function, staged_once, while_loop
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.masking import is_best_packed, packed

_CHUNKS = 16  # chunks that all lanes should make at least; for that, chunks are made narrower,
_FEWEST = 16  # but no narrower than this


def count_active(
    active: Value, dtype: jax.typing.DTypeLike = np.int32, *, one_function: bool = False
) -> Value:
    """Counts active lanes. `one_function`: inside a single XLA kernel."""
    size = active.shape[0]
    if (one_function and size % 4 == 0) or is_best_packed(active):
        ones = lax.population_count(packed(active))
    elif one_function or jax.default_backend() != "cpu" or size >= 1 << 24:  # as a float counts to
        ones = active
    else:  # on a CPU a sum is several operations, each to be compiled, and a dot is one
        ones = lax.convert_element_type(active, np.float32)
        return lax.convert_element_type(lax.dot(ones, ones), dtype)
    count = lax.reduce_sum(lax.convert_element_type(ones, np.int32), tuple(range(ones.ndim)))
    return lax.convert_element_type(count, dtype)


def fitting_width(most: int, size: int, least: int = _FEWEST) -> int:
    """Returns the width of a chunk: `most`, or less if `size` lanes make few chunks."""
    # The last chunk is seldom full and costs as much as a full one, which weighs more the fewer
    # chunks there are.
    width = most
    while width > least and width * _CHUNKS > size:
        width //= 2
    return max(1, min(width, size))


class GatheredLanes(NamedTuple):
    # Their indices. The first lane stands in for missing ones: its values are safe, as it runs
    # anyway.
    lanes: Any
    counts: Any  # for each, whether it is not a stand-in
    places: Any  # indices to write to; out of bounds for stand-ins, which are dropped
    alone: Any = None  # the index of the only lane; None if the chunk has slots for several


def in_order(active: Value, room: int) -> tuple[Any, Any]:
    """Returns the indices of `active` lanes in order, and their number.

    For integers, which estimate run time, the longest come first. The result has `room` entries
    more than there are lanes.
    """
    if active.dtype != bool:
        return _longest_first(active, room)
    # The extra entries keep the last chunk's slice in bounds: XLA moves back a dynamic slice that
    # reaches over the end.
    # On a CPU a scatter of single numbers takes longer than a loop over them. On most other
    # devices nothing is slower than such a loop.
    ways = {"cpu": _by_loop(room), "default": _by_scatter(room)}
    run = lambda active: lax.platform_dependent(active, **ways)
    order, count = staged_once(("lanes that a mask picks", room), run, active)
    return order, count


def _by_loop(room: int) -> Callable[..., Any]:
    def run(active: Value) -> tuple[Any, Any]:
        def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            i, order, count = state
            # Written for every lane: one that is not active is written over by the next.
            order = put_entry(order, i, count)
            count = lax.add(count, lax.convert_element_type(entry_of(active, i), np.int32))
            return lax.add(i, np.int32(1)), order, count

        (first,) = _compat.varying_alike([np.int32(0)], like=[active])
        goes_on = lambda state: lax.lt(state[0], np.int32(active.size))
        return while_loop(goes_on, step, (first, *_nothing(active, room)))[1:]

    return run


def _by_scatter(room: int) -> Callable[..., Any]:
    def run(active: Value) -> tuple[Any, Any]:
        order, _ = _nothing(active, room)
        rank = lax.cumsum(lax.convert_element_type(active, np.int32))
        lanes = lax.iota(np.int32, active.size)
        outside = lanes + np.int32(order.size)  # all different: `put` declares its indices unique
        places = lax.select(active, rank - np.int32(1), outside)
        return put(order, lanes, places, 0), rank[-1]

    return run


def _longest_first(lengths: Value, room: int) -> tuple[Any, Any]:
    order, count = _nothing(lengths, room)
    count += lax.convert_element_type(lax.reduce_sum(lax.sign(lengths), (0,)), np.int32)

    def some() -> Value:
        lanes = lax.broadcasted_iota(np.int32, lengths.shape, 0)
        (lanes,) = _compat.varying_alike([lanes], like=[lengths])
        _, lanes = lax.sort([lax.neg(lengths), lanes], num_keys=1)
        return lax.dynamic_update_slice(order, lanes, [np.int32(0)])

    return lax.cond(count > 0, some, lambda: order), count


def _nothing(active: Value, room: int) -> tuple[Any, Any]:
    nothing = [lax.full((active.size + room,), 0, np.int32), lax.full((), 0, np.int32)]
    order, count = _compat.varying_alike(nothing, like=[active])
    return order, count


def of_chunk(order: Value | None, count: Value | None, start: Value, width: int) -> GatheredLanes:
    """Returns the lanes of the chunk that begins with entry `start` of `order`.

    Without an order and a count, the chunk is the lane at `start`, which is active.
    """
    entries = start + lax.iota(np.int32, width)
    if order is None or count is None:
        return GatheredLanes(entries, lax.eq(entries, entries), entries, start)
    counts = lax.lt(entries, lax.broadcast(count, (width,)))
    lanes = part_of(order, start, 0, width)
    if width == 1:  # a chunk runs only if a lane is left
        return GatheredLanes(lanes, counts, lanes, lanes[0])
    # Entries after the last active lane are stand-ins.
    first = lax.broadcast(lanes[0], (width,))
    outside = entries + np.int32(order.size)  # all different: `put` declares its indices unique
    return GatheredLanes(
        lax.select(counts, lanes, first), counts, lax.select(counts, lanes, outside)
    )


def take(x: Value, lanes: GatheredLanes, axis: int, or_zero: bool = False) -> Value:
    """Gathers entries of `x` along `axis`; with `or_zero`, stand-ins are zero."""
    if lanes.alone is not None:  # a slice compiles sooner than a gather
        return part_of(x, lanes.alone, axis, 1)
    taken = taken_at(x, lanes.lanes, axis)
    if not or_zero:
        return taken
    return or_zero_of(taken, lanes.counts, axis)


def or_zero_of(x: Value, mask: Value, axis: int) -> Value:
    return lax.select(lax.broadcast_in_dim(mask, x.shape, (axis,)), x, lax.full_like(x, 0))


def taken_at(x: Value, places: Value, axis: int) -> Value:
    window = tuple(1 if d == axis else n for d, n in enumerate(x.shape))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(x.ndim) if d != axis),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
    )
    indices = lax.reshape(places, (*places.shape, 1))
    # Indices are known to be valid, so XLA need not clamp them.
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return _compat.unconsumed(lax.gather(x, indices, numbers, window, mode=mode))


def put(x: Value, values: Value, places: Value, axis: int) -> Value:
    """Writes `values` at distinct places along `axis`, and drops those out of bounds."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(d for d in range(x.ndim) if d != axis),
        inserted_window_dims=(axis,),
        scatter_dims_to_operand_dims=(axis,),
    )
    return put_p.bind(x, lax.reshape(places, (places.size, 1)), values, numbers=numbers)


def _put(x: Value, indices: Value, values: Value, *, numbers: lax.ScatterDimensionNumbers) -> Value:
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, indices, values, numbers, unique_indices=True, mode=mode)


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Position]:
    (out,), (at,) = batch_function(axis, lambda *xs: [_put(*xs, **params)], args, axes)
    return out, at


# A scatter that drops what is out of bounds on purpose. In a scatter of JAX's ``checkify`` would
# report that as an error of the user.
put_p = own_primitive(
    "put",
    called="lanes put in their places",
    operations=_put,
    types=lambda x, indices, values, *, numbers: x,
    rule=_batched,
    several=False,
)
