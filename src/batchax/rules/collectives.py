"""Collectives over a named axis: those that reduce, and those that move values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    axis_to_front,
    broadcast_axis,
    move_axis,
    shift_dims,
)
from batchax.kernel.interpreter import one_after_another
from batchax.kernel.named_axes import as_names
from batchax.kernel.registry import register_rule


def take(x: Value, lanes: np.ndarray, position: int) -> jax.Array:
    """Takes the constant entries `lanes` along axis `position`."""
    if lanes.ndim == 1 and np.array_equal(lanes, np.arange(x.shape[position])):
        return x
    return jnp.take(x, lanes, axis=position, mode="clip")


def times(x: Value, count: int | np.ndarray) -> jax.Array:
    """Multiplies `x` by `count` in its dtype, as a sum of that many copies."""
    dtype = jnp.result_type(x)
    if jax.typeof(x).weak_type and isinstance(count, int):
        return lax.mul(x, dtype.type(count).item())
    # Converted as an array: in a small integer dtype a count may wrap around, as adding up would.
    return lax.mul(x, jnp.asarray(count).astype(dtype))


class Groups:
    """Describes groups of lanes that a collective keeps separate (``axis_index_groups``)."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.lanes = tuple(map(tuple, groups))
        self.sizes = [len(group) for group in self.lanes]
        self.equal = len(set(self.sizes)) == 1
        self._in_order = np.array([lane for group in self.lanes for lane in group], np.int32)
        self._back = np.argsort(self._in_order).astype(np.int32)
        # For each lane its group, and its position in the group.
        self.of_lane = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)[self._back]
        self.place_of_lane = np.concatenate([np.arange(n) for n in self.sizes])[self._back]

    def split(self, x: Value, position: int) -> jax.Array:
        """Splits the lanes at `position` into two axes: group, and position in the group."""
        x = take(x, self._in_order, position)
        shape = list(x.shape)
        shape[position : position + 1] = [len(self.lanes), self.sizes[0]]
        return lax.reshape(x, shape)

    def merge(self, x: Value, position: int) -> jax.Array:
        shape = list(x.shape)
        shape[position : position + 2] = [len(self._back)]
        return take(lax.reshape(x, shape), self._back, position)


def split_names(
    axis: Axis, names: Sequence[Hashable]
) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Splits names around that of `axis`: those that count lanes slower, and faster."""
    names = tuple(names)
    at = names.index(axis.name)
    return names[:at], names[at + 1 :]


def axis_size(names: Sequence[Hashable]) -> int:
    """Returns the number of lanes over outer axes; 1 for none."""
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
    """Runs a collective over this axis and others that does not split into one for each."""
    # Gather the lanes of the other axes, run `rule` on all lanes as one axis, and keep the part of
    # this lane.
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


REDUCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    # primitives: (the same over dimensions of an array, whether equal values add up)
    "psum psum_invariant unreduced_psum": (lax.reduce_sum, True),
    "pmax unreduced_pmax": (lax.reduce_max, False),
    "pmin unreduced_pmin": (lax.reduce_min, False),
}


enter(
    """
    : axis_index pmax pmin psum psum_invariant unreduced_pmax unreduced_pmin unreduced_psum
    """
)
CASTS = enter(
    """
    cast alias: pvary reduced_vary_cast
    cast: preduced vary_unreduced_cast
    """,
    names="axes",
)


def _reducing_collective(
    primitive: _compat.Primitive, reduce: Callable[..., Any], adds_up: bool
) -> None:
    @register_rule(primitive)
    def rule(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
        (x,), (position,) = args, positions
        dims = tuple(a for a in params["axes"] if isinstance(a, int))
        names = tuple(a for a in params["axes"] if not isinstance(a, int))
        if axis.name not in names:
            if position is None or not dims:
                return primitive.bind(x, **params), position
            dims = shift_dims(dims, position)
            out = primitive.bind(x, **{**params, "axes": (*dims, *names)})
            return out, position - sum(d < position for d in dims)

        groups = params.get("axis_index_groups")
        others = tuple(name for name in names if name != axis.name)
        if groups is not None and others:
            return over_all_lanes(axis, x, position, names, rule, params, "axes")
        if groups is not None:
            return _reduce_groups(x, position, Groups(groups), reduce, adds_up)
        if position is not None:
            # A reduction splits: first over this axis here, then over the others.
            x = reduce(x, (*shift_dims(dims, position), position))
        else:
            x = reduce(x, dims) if dims else x
            x = times(x, axis.size) if adds_up else x
        return (primitive.bind(x, **{**params, "axes": others}) if others else x), None


def _reduce_groups(
    x: Value, position: Position, groups: Groups, reduce: Callable[..., Any], adds_up: bool
) -> tuple[Any, Position]:
    if position is None and groups.equal:
        return (times(x, groups.sizes[0]) if adds_up else x), None
    if position is None:
        if not adds_up:
            return x, None
        # Groups of different sizes: the sum of equal values depends on the lane.
        sizes = np.array(groups.sizes)[groups.of_lane].reshape(-1, *(1,) * np.ndim(x))
        return times(lax.expand_dims(x, (0,)), sizes), 0
    if groups.equal:
        by_group = reduce(groups.split(x, position), (position + 1,))
    else:
        parts = [reduce(take(x, np.array(g), position), (position,)) for g in groups.lanes]
        by_group = jnp.stack(parts, position)
    return take(by_group, groups.of_lane, position), position


def _cast(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(
        axis: Axis, args: Values, positions: Positions, /, *, axes: Sequence[Any], **params: Any
    ) -> RuleOutputs:
        (x,), (position,) = args, positions
        # JAX raises an error for a cast to an axis that the value varies over already.
        already = _compat.varying_axes(jax.typeof(x)) if primitive.name == "pvary" else ()
        others = tuple(name for name in axes if name != axis.name and name not in already)
        return (primitive.bind(x, axes=others, **params) if others else x), position


for _names, (_reduce, _adds_up) in REDUCTIONS.items():
    for _name in _names.split():
        if (_primitive := _compat.find_primitive(_name)) is not None:
            _reducing_collective(_primitive, _reduce, _adds_up)

for _name in CASTS:
    if (_primitive := _compat.find_primitive(_name)) is not None:
        _cast(_primitive)


@register_rule(lax.axis_index_p)
def _axis_index(
    axis: Axis, args: Values, positions: Positions, /, *, axis_name: Hashable
) -> RuleOutputs:
    if axis.name in as_names(axis_name):
        sharding = None if axis.mesh_axis is None else PartitionSpec(axis.mesh_axis)
        return lax.broadcasted_iota(np.int32, (axis.size,), 0, out_sharding=sharding), 0
    return lax.axis_index_p.bind(axis_name=axis_name), None


enter(
    """
    : all_gather all_gather_invariant all_gather_reduced all_to_all precv psend ragged_all_to_all
      reduce_scatter unreduced_reduce_scatter
    """
)
enter(": pbroadcast pbroadcast_dynamic ppermute", names="axis_name")


def _gathering(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
        (x,), (position,) = args, positions
        names, dim = as_names(params["axis_name"]), params["all_gather_dimension"]
        tiled = params["tiled"]
        if axis.name not in names:
            if position is None:
                return primitive.bind(x, **params), None
            if position <= dim:
                dim += 1
            elif not tiled:
                position += 1
            return primitive.bind(x, **{**params, "all_gather_dimension": dim}), position

        before, after = split_names(axis, names)
        groups = params.get("axis_index_groups")
        if groups is not None and (before or after):
            return over_all_lanes(axis, x, position, names, rule, params, "axis_name")
        if groups is not None and position is not None:
            return _gather_groups(x, position, Groups(groups), dim, tiled)
        if position is not None:
            # The lanes become dimension `dim` of the result, which all lanes share.
            out = move_axis(x, position, dim)
        else:
            size = params["axis_size"] if groups is not None else axis.size
            out = broadcast_axis(Axis(size), x, dim)
        # Gather over the faster axes first, so that dimensions are ordered from slow to fast.
        for others, place in ((after, dim + 1), (before, dim)):
            if others:
                changed = dict(axis_name=others, all_gather_dimension=place, tiled=False)
                out = primitive.bind(out, **{**params, **changed, "axis_size": axis_size(others)})
        gathered = 1 + bool(before) + bool(after) + tiled
        return _folded(out, dim, gathered), None


def _gather_groups(
    x: Value, position: int, groups: Groups, dim: int, tiled: bool
) -> tuple[Any, Position]:
    """Gathers for each lane the values of its group."""
    members = np.array(groups.lanes, np.int32)[groups.of_lane]
    out = jnp.moveaxis(take(x, members, position), (position, position + 1), (0, dim + 1))
    return _folded(out, dim + 1, 1 + tiled), 0


def _scattering(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
        (x,), (position,) = args, positions
        names, dim = as_names(params["axis_name"]), params["scatter_dimension"]
        tiled = params["tiled"]
        if axis.name not in names:
            if position is not None and position <= dim:
                params["scatter_dimension"] = dim + 1
            elif position is not None and not tiled:
                position -= 1
            return primitive.bind(x, **params), position

        before, after = split_names(axis, names)
        groups = params.get("axis_index_groups")
        if groups is not None and (before or after):
            return over_all_lanes(axis, x, position, names, rule, params, "axis_name")
        if groups is not None:
            return _scatter_groups(x, position, Groups(groups), dim, tiled)
        x = times(x, axis.size) if position is None else lax.reduce_sum(x, (position,))
        if not (before or after):
            return (_unfolded(x, dim, (axis.size,)) if tiled else x), dim
        # The dimension splits by receivers over slower axes, this axis, and faster axes. This axis
        # becomes the batch axis, and the others remain in the collective.
        sizes = (axis_size(before), axis.size, axis_size(after))
        x = move_axis(_unfolded(x, dim, sizes, rest=tiled), dim + 1, 0)
        x = _folded(x, dim + 1, 2 + tiled)
        changed = dict(axis_name=before + after, scatter_dimension=dim + 1)
        return primitive.bind(x, **{**params, **changed, "axis_size": sizes[0] * sizes[2]}), 0


def _scatter_groups(
    x: Value, position: Position, groups: Groups, dim: int, tiled: bool
) -> tuple[Any, Position]:
    """Scatters to each lane its part of the sum over its group."""
    size = groups.sizes[0]
    if position is None:
        x = times(x, size)
    else:
        x = lax.reduce_sum(groups.split(move_axis(x, position, 0), 0), (1,))
        dim += 1
    x = _unfolded(x, dim, (size,)) if tiled else x
    if position is None:
        return take(move_axis(x, dim, 0), groups.place_of_lane, 0), 0
    return groups.merge(move_axis(x, dim, 1), 0), 0


for _names, _make in (
    ("all_gather all_gather_invariant all_gather_reduced", _gathering),
    ("reduce_scatter unreduced_reduce_scatter", _scattering),
):
    for _name in _names.split():
        if (_primitive := _compat.find_primitive(_name)) is not None:
            _make(_primitive)


@register_rule(lax.all_to_all_p)
def _all_to_all(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
    (x,), (position,) = args, positions
    names = as_names(params["axis_name"])
    split, concat = params["split_axis"], params["concat_axis"]
    if axis.name not in names:
        if position is not None:
            params["split_axis"] = split + (position <= split)
            params["concat_axis"] = concat + (position <= concat)
        return lax.all_to_all_p.bind(x, **params), position

    before, after = split_names(axis, names)
    groups = params["axis_index_groups"]
    if groups is not None and (before or after):
        return over_all_lanes(axis, x, position, names, _all_to_all, params, "axis_name")
    if position is None:
        x, position = broadcast_axis(axis, x, split), split
    if groups is None:
        return _exchange(x, position, split, concat, before, axis.size, after)
    groups = Groups(groups)
    x = groups.split(x, position)
    # The groups are one more axis, which takes no part in the exchange within each.
    x = move_axis(x, position, 0)
    out, place = _exchange(x, position + 1, split + 1, concat + 1, (), groups.sizes[0], ())
    return groups.merge(move_axis(out, place, 1), 0), 0


def _exchange(
    x: Value,
    position: int,
    split: int,
    concat: int,
    before: Sequence[Hashable],
    size: int,
    after: Sequence[Hashable],
) -> tuple[Any, int]:
    """Sends each lane its part from every lane, over this axis and those around it.

    Dimension `split` counts receivers, those over the axes `before` slowest, then those over this
    axis, then `after`, and within each what it receives.
    """
    # Receivers over this axis become the batch axis. The old batch axis counts senders, and joins
    # dimension `concat`.
    sizes = [axis_size(before)] * bool(before) + [size] + [axis_size(after)] * bool(after)
    first = split + (position <= split)
    own = first + bool(before)
    x = _unfolded(x, first, sizes)
    senders = position + len(sizes) * (position > first)
    for others, dim in ((before, first), (after, own + 1)):
        if others:  # part j goes to lane j of these, and the part from lane j takes its place
            x = lax.all_to_all(x, others, dim, dim, tiled=True)
    receivers = range(first, first + len(sizes))
    joining = [*receivers[: own - first], senders, *receivers[own - first + 1 :]]
    order = [dim for dim in range(x.ndim) if dim not in (senders, *receivers)]
    order[concat:concat] = joining
    # The batch axis goes where least has to be moved: where the senders were, if both dimensions
    # are the same, and else where the receivers are.
    out_axis = position if split == concat else split
    at = out_axis + len(joining) * (out_axis > concat)
    order.insert(at, own)
    if order != list(range(x.ndim)):
        x = lax.transpose(x, order)
    return _folded(x, concat + (out_axis <= concat), len(joining) + 1), out_axis


@register_rule(lax.ppermute_p)
def _ppermute(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
    (x,), (position,) = args, positions
    names = as_names(params["axis_name"])
    if axis.name not in names:
        return lax.ppermute_p.bind(x, **params), position
    if len(names) > 1:
        return over_all_lanes(axis, x, position, names, _ppermute, params, "axis_name")
    # For each lane the one that sends to it, -1 for none.
    sources = np.full(axis.size, -1, np.int32)
    for source, destination in params["perm"]:
        sources[destination % axis.size] = source % axis.size
    used = sources[sources >= 0]
    if len(set(used.tolist())) != len(params["perm"]):
        raise AxisError(
            f"ppermute over axis {axis.name!r}: each lane may send once and receive once, but "
            f"perm is {params['perm']}."
        )
    receives = sources >= 0
    if position is None:
        if receives.all():
            return x, None
        position, out = 0, broadcast_axis(axis, x, 0)
    else:
        out = take(x, np.maximum(sources, 0), position)
    if not receives.all():  # lanes that nothing is sent to receive zeros
        mask = lax.broadcast_in_dim(receives, out.shape, (position,))
        out = lax.select(mask, out, jnp.zeros_like(out))
    return out, position


@register_rule("pbroadcast")
def _from_source(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
    """Broadcasts the value of one lane."""
    (x,), (position,) = args, positions
    names, source = as_names(params["axis_name"]), params["source"]
    if axis.name not in names:
        return lax.pbroadcast(x, names, source), position
    if len(names) > 1:
        return over_all_lanes(axis, x, position, names, _from_source, params, "axis_name")
    if position is None:
        return x, None
    return lax.index_in_dim(x, source, position, keepdims=False), None


@register_rule("pbroadcast_dynamic")
def _from_dynamic_source(
    axis: Axis, args: Values, positions: Positions, /, *, axis_name: Hashable
) -> RuleOutputs:
    """Broadcasts the value of the lane whose index is an operand."""
    (x, source), (position, source_position) = args, positions
    names = as_names(axis_name)
    if axis.name not in names and source_position is None:
        return lax.pbroadcast(x, names, source), position
    if axis.name not in names:
        one_lane = lambda *xs: [lax.pbroadcast(xs[0], names, xs[1])]
        return one_after_another(axis, one_lane, args, positions)[0], 0
    if len(names) > 1:
        raise UnsupportedError(
            f"pbroadcast over the axes {names} at once, from a source that is computed: "
            "broadcast over one axis at a time."
        )
    if position is None:
        return x, None
    if source_position is None:
        return lax.dynamic_index_in_dim(x, source, position, keepdims=False), None
    return jnp.take(x, source, axis=position, mode="clip"), position


@register_rule(lax.ragged_all_to_all_p)
def _ragged_all_to_all(
    axis: Axis, args: Values, positions: Positions, /, **params: Any
) -> RuleOutputs:
    names, groups = as_names(params["axis_name"]), params["axis_index_groups"]
    args = [axis_to_front(axis, x, a) for x, a in zip(args, positions, strict=True)]
    operand, output, *places = args
    if axis.name not in names:
        # The lanes of a device become one sender and one receiver: their rows follow one another,
        # and for each receiving device there are the parts that each lane sends to it.
        lanes = lax.iota(places[0].dtype, axis.size)[:, None]
        places[0] += lanes * operand.shape[1]
        places[2] += (lanes * output.shape[1]).astype(places[2].dtype)
        places = [_folded(x.T, 0, 2) for x in places]
        out = lax.ragged_all_to_all_p.bind(
            _folded(operand, 0, 2), _folded(output, 0, 2), *places, **params
        )
        return lax.reshape(out, output.shape), 0
    if len(names) > 1 or groups is not None:
        raise UnsupportedError(
            f"ragged_all_to_all over axis {axis.name!r} together with other axes, or in groups: "
            "exchange over one whole axis at a time."
        )
    return _take_ragged(operand, output, *places[:3]), 0


def _take_ragged(
    operand: Value, output: Value, starts: Value, sizes: Value, targets: Value
) -> jax.Array:
    """Replaces each row of `output` by the row that a lane sends to it, if one does.

    `starts`, `sizes`, and `targets` hold for each sender its parts by receiver.
    """
    lanes, rows = operand.shape[:2]
    if lanes * rows == 0:
        return output
    # Each may have another type; -1 and the number of all rows must fit into that of all.
    dtype = np.dtype(f"i{max(4, *(x.dtype.itemsize for x in (starts, sizes, targets)))}")
    by_receiver = lambda x: jnp.swapaxes(x.astype(dtype).reshape(lanes, lanes, -1, 1), 0, 1)
    starts, sizes, targets = map(by_receiver, (starts, sizes, targets))
    # For each receiver, sender, and row of the output: the row's offset in the sent part.
    within = lax.broadcasted_iota(dtype, (1, 1, 1, output.shape[1]), 3) - targets
    senders = lax.broadcasted_iota(dtype, (1, lanes, 1, 1), 1)
    sent = (within >= 0) & (within < sizes)
    # At most one sender is expected for a row; -1 marks none.
    source = jnp.where(sent, senders * rows + starts + within, -1).max((1, 2))
    taken = _folded(operand, 0, 2)[jnp.maximum(source, 0)]
    received = lax.broadcast_in_dim(source >= 0, output.shape, (0, 1))
    return lax.select(received, taken, output)


@register_rule("psend")
@register_rule("precv")
def _one_sided(axis: Axis, args: Values, positions: Positions, /, **params: Any) -> RuleOutputs:
    raise UnsupportedError(
        "psend and precv of batched values: the token does not say how many lanes were sent. Use "
        "jax.lax.ppermute, which sends and receives in one."
    )


def _folded(x: Value, dim: int, count: int) -> jax.Array:
    """Merges the `count` dimensions from `dim` on into one."""
    if count == 1:
        return x
    shape = list(x.shape)
    shape[dim : dim + count] = [int(np.prod(shape[dim : dim + count]))]
    return lax.reshape(x, shape)


def _unfolded(x: Value, dim: int, sizes: Sequence[int], rest: bool = True) -> jax.Array:
    """Splits dimension `dim` into `sizes`, and what is left over."""
    shape = list(x.shape)
    left = [shape[dim] // max(int(np.prod(sizes)), 1)] if rest else []
    shape[dim : dim + 1] = [*sizes, *left]
    return lax.reshape(x, shape)
