"""Lanes as collectives see them: taken by index, in groups, or spread over several axes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, axis_to_front


def take(x: Value, lanes: np.ndarray, position: int) -> Any:
    """The entries `lanes`, an array known in advance, of axis `position`."""
    if lanes.ndim == 1 and np.array_equal(lanes, np.arange(x.shape[position])):
        return x
    return jnp.take(x, lanes, axis=position, mode="clip")


def times(x: Value, count: Any) -> Any:
    """`count` copies of `x` added up, in the dtype and weak type of `x`."""
    dtype = jnp.result_type(x)
    if jax.typeof(x).weak_type and isinstance(count, int):
        return lax.mul(x, dtype.type(count).item())
    # Converted as an array: in a small integer dtype a count may wrap around, as adding up would.
    return lax.mul(x, jnp.asarray(count).astype(dtype))


class Groups:
    """Lanes in groups that a collective keeps apart (``axis_index_groups``)."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.lanes = tuple(map(tuple, groups))
        self.sizes = [len(group) for group in self.lanes]
        self.equal = len(set(self.sizes)) == 1
        self._in_order = np.array([lane for group in self.lanes for lane in group], np.int32)
        self._back = np.argsort(self._in_order).astype(np.int32)
        # Of each lane: its group, and its place within the group.
        self.of_lane = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)[self._back]
        self.place_of_lane = np.concatenate([np.arange(n) for n in self.sizes])[self._back]

    def split(self, x: Value, position: int) -> Any:
        """`x` with its lanes at `position` as two axes: group, and place in the group."""
        x = take(x, self._in_order, position)
        shape = list(x.shape)
        shape[position : position + 1] = [len(self.lanes), self.sizes[0]]
        return lax.reshape(x, shape)

    def merge(self, x: Value, position: int) -> Any:
        """The reverse of `split`."""
        shape = list(x.shape)
        shape[position : position + 2] = [len(self._back)]
        return take(lax.reshape(x, shape), self._back, position)


def split_names(
    axis: Axis, names: Sequence[Hashable]
) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """The names before and after that of `axis`, which count lanes slower and faster."""
    names = tuple(names)
    at = names.index(axis.name)
    return names[:at], names[at + 1 :]


def axis_size(names: Sequence[Hashable]) -> int:
    """Number of lanes over axes outside the one being mapped; 1 over none."""
    return lax.axis_size(tuple(names)) if names else 1


def over_all_lanes(
    axis: Axis,
    x: Value,
    position: Position,
    names: Sequence[Hashable],
    rule: Callable[..., Any],
    params: dict[str, Any],
    name_param: str,
) -> tuple[Any, Position]:
    """A collective over our axis and others that does not come apart into one for each.

    Everything is gathered from the other axes, `rule` runs on the lanes of all
    axes as if they were one, and each keeps its own part of the result.
    """
    before, after = split_names(axis, names)
    x = axis_to_front(axis, x, position)
    example = x.shape[1:]
    if after:
        x = lax.all_gather(x, after, axis=1)
    if before:
        x = lax.all_gather(x, before, axis=0)
    sizes = (axis_size(before), axis.size, axis_size(after))
    total = int(np.prod(sizes))
    every = Axis(total, object())
    x = lax.reshape(x, (total, *example))
    out, out_axis = rule(every, [x], [0], **{**params, name_param: (every.name,)})
    if out_axis is None:
        return out, None
    out = axis_to_front(every, out, out_axis)
    out = lax.reshape(out, (*sizes, *out.shape[1:]))
    mine = lax.axis_index(before) if before else 0
    out = lax.dynamic_index_in_dim(out, mine, 0, keepdims=False)
    mine = lax.axis_index(after) if after else 0
    return lax.dynamic_index_in_dim(out, mine, 1, keepdims=False), 0
