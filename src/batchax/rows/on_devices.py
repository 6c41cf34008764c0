"""Rows of different lengths dealt out to the devices of a mesh.

Every device gets as many rows, and about as many elements: the longest rows are dealt out first,
one to each device, then the next longest in the opposite direction, and so on. No device then has
more elements than another by more than the longest row has. Where rows do not come out even the
shortest is run again, and what it computes is dropped. Which row goes where is found while the
program runs, so one program serves all lengths; every way there and back is a gather, and so is its
transpose.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, Way, execute
from batchax.execution.devices.placing import put_traced, puts_traced
from batchax.execution.devices.shards import (
    Shards,
    check_shared,
    is_sharded,
    on_shards,
    with_whole_axis,
)
from batchax.frontend.outputs import place
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Position
from batchax.kernel.named_axes import any_uses_axis
from batchax.memo import Memo
from batchax.rows.arguments import SizesOf, capacity_of, index_in
from batchax.rows.blocks import moved
from batchax.rows.call import RowCall
from batchax.rows.groups import in_front
from batchax.rows.host_calls import refuse_calls
from batchax.rows.index import RowIndex, take_clipped
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class Dealt:
    """Which row is in which slot: each device has the same number of slots.

    Attributes:
      row: of each slot, shape (devices, slots).
      slot: of each row among those of all devices.
      real: of each slot, whether its row is not there twice.
    """

    row: Any
    slot: Any
    real: np.ndarray

    @classmethod
    def of(cls, weights: Any, devices: int) -> Dealt:
        """Rows of these weights, the heaviest first."""
        count = weights.shape[0]
        slots = -(-count // devices)
        rounds, places = np.divmod(np.arange(devices * slots), devices)
        of_device = np.where(
            rounds % 2, devices - 1 - places, places
        )  # every other round goes back
        slot_of_turn = (of_device * slots + rounds).astype(np.int32)
        turn = np.argsort(slot_of_turn).astype(np.int32).reshape(devices, slots)
        order = jnp.argsort(-weights, stable=True).astype(np.int32)
        rank = jnp.argsort(order).astype(np.int32)
        row = order[np.minimum(turn, count - 1)]
        return cls(row, jnp.asarray(slot_of_turn)[rank], turn < count)

    def dealt(self, x: Value) -> Any:
        """An array with the rows in front as one with devices and slots in front."""
        return moved(x, self.row.reshape(-1), self.slot).reshape(*self.row.shape, *x.shape[1:])

    def collected(self, x: Value) -> Any:
        """What `dealt` was given."""
        back = jnp.where(self.real, self.row, -1).reshape(-1)
        return moved(lax.collapse(x, 0, 2), self.slot, back)


class _Elements:
    """Where the elements of rows are: packed in one array, and in an array for each device.

    Args:
      dealt: which row is in which slot.
      packed: where rows are in an array with room for `capacity` elements.
      capacity: that room.
      lengths: how many elements the row of each slot has.
      room: that of each device's array.
    """

    def __init__(
        self, dealt: Dealt, packed: RowIndex, capacity: int, lengths: Any, room: int
    ) -> None:
        def of_device(lengths: Any) -> tuple[Any, Any, Any]:
            index = RowIndex.of(lengths, room, packed.bound)
            return index.starts, index.row_of(room), index.place_of(room)

        starts, slots, places = jax.vmap(of_device)(jnp.asarray(lengths, np.int32))
        devices, count = dealt.row.shape
        self._shape = devices, room
        taken = jnp.minimum(slots, count - 1)
        rows = jnp.take_along_axis(dealt.row, taken, 1)
        there = jnp.asarray(packed.starts)[rows] + places
        there = jnp.where((slots < count) & (there < capacity), there, -1)
        real = jnp.take_along_axis(jnp.asarray(dealt.real), taken, 1)
        self._there = there.reshape(-1)
        self._real = jnp.where(real, there, -1).reshape(-1)
        row = jnp.asarray(packed.row_of(capacity))
        slot = take_clipped(dealt.slot, row, 0)
        place = slot // count * room + starts.reshape(-1)[slot] + packed.place_of(capacity)
        self._back = jnp.where(row < packed.starts.shape[0], place, -1)

    def spread(self, x: Value) -> Any:
        """Packed rows along axis 0 as those of each device: device, element."""
        return moved(x, self._there, self._back).reshape(*self._shape, *x.shape[1:])

    def packed(self, x: Value) -> Any:
        """What `spread` was given, one row after another."""
        return moved(lax.collapse(x, 0, 2), self._back, self._real)


@dataclass(frozen=True)
class _Output:
    """What a device returned: for a `Ragged` its axes and bounds, and the sizes that it has.

    Attributes:
      batched: whether it differs from row to row.
      axes: along which it is ragged.
      bounds: no row is longer along them.
      sizes: which sizes of the arguments its rows have along them, None if it is none of those.
    """

    batched: bool
    axes: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    sizes: tuple[int | None, ...] = ()


kept_on_devices = Memo("calls outside of jit, of rows on devices", most=64)


@dataclass(frozen=True)
class RowsOnDevices(Way):
    """Rows dealt out to devices, each of which runs those that it has.

    One program serves all batches of arrays of the same size: lengths are arguments of it.

    Attributes:
      shards: the devices: each is a lane.
      of_each: how a device runs its rows.
      stages_again: whether types tell of a mesh, which on a device they do no more: there the
        function is staged again.
    """

    shards: Shards
    of_each: Way
    stages_again: bool

    @property
    def memo(self) -> Memo | None:
        return kept_on_devices

    def note(self, call: Call) -> None:
        pass  # each device will

    def prepared(self, call: Call) -> Call:
        assert isinstance(call, RowCall)
        if any_uses_axis(call.axis, call.staged):
            raise UnsupportedError(
                "mesh was given, and the function has a collective over axis_name "
                f"{call.axis.name!r}, whose lanes are rows of different lengths: a device knows "
                "only its own. Reduce over the batch with out_axes=batchax.Reduce(...), or leave "
                "mesh out."
            )
        if not call.axis.size:
            return replace(call, way=self.of_each)
        check_shared([], call.staged.consts)
        if self.shards.count > 1:
            refuse_calls(call.staged)
        return replace(call, gives_lengths=True)

    def passes_constants(self, call: Call) -> bool:
        return not (call.traced or self.stages_again)

    def run(self, call: Call) -> tuple[list[Any], Any]:
        def run(*values: Any) -> list[Any]:
            given = call.with_values(values)
            assert isinstance(given, RowCall)
            return _run_on_devices(given, self)

        outs = (jax.jit(run) if call.computes else run)(*call.values)
        return jax.tree.flatten(outs)

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        return jax.tree.unflatten(said, arrays), call.outputs


def _run_on_devices(call: RowCall, way: RowsOnDevices) -> list[Any]:
    """The outputs of a call, whose rows are dealt out to devices."""
    shards = way.shards
    shapes = {tuple(s.name for s in own): own for own in call.sizes_of if own}
    weights = sum(_elements_of([jnp.asarray(s.index.lengths) for s in x]) for x in shapes.values())
    dealt = Dealt.of(weights, shards.count)
    devices, slots = dealt.row.shape
    recording.fact("dealt", devices=devices)
    lengths = [dealt.dealt(jnp.asarray(size.index.lengths)) for size in call.sizes]
    length_of = dict(zip(call.bounds, lengths, strict=True))
    arguments = list(lengths)
    positions: list[Position] = [0] * len(lengths)
    for m, own in call.arguments:
        x = m.value
        if own:
            packed, capacity = _packed_in(x, own), capacity_of(x)
            of_slots = _elements_of([length_of[size.name] for size in own])
            room = _room(own, capacity, len(shapes) == 1, (devices, slots, call.axis.size))
            elements = _Elements(dealt, packed, capacity, of_slots, room)
            x = elements.spread(jnp.moveaxis(x.data, x.element_axis, 0))
        elif m.axis is not None:
            x = dealt.dealt(jnp.moveaxis(x, m.axis, 0))
        arguments.append(x)
        positions.append(None if m.axis is None and not own else 0)

    def of_device(*values: Any) -> tuple[list[Any], list[Position], list[_Output]]:
        own = [
            x if a is None else lax.squeeze(x, (0,)) for x, a in zip(values, positions, strict=True)
        ]
        local = _local_call(call, way, own[: len(lengths)], own[len(lengths) :], slots)
        outs: list[Value] = []
        axes: list[Position] = []
        noted = []
        for x, shape in zip(execute(local)[0], call.shapes, strict=True):
            if isinstance(x, Ragged):
                places = {id(size.lengths): k for k, size in enumerate(local.sizes)}
                sizes = tuple(places.get(id(lengths)) for lengths in x.each_length)
                noted.append(_Output(True, x.axes, x.each_bound, sizes))
                outs += [
                    jnp.moveaxis(x.data, x.element_axis, 0)[None],
                    *(n[None] for n in x.each_length),
                ]
                axes += [0] * (1 + len(x.axes))
                continue
            batched = jnp.ndim(x) > len(shape)
            noted.append(_Output(batched))
            outs.append(x[None] if batched else x)
            axes.append(0 if batched else None)
        return outs, axes, noted

    placed = [_put(shards, x, a) for x, a in zip(arguments, positions, strict=True)]
    outs, notes = on_shards(replace(shards, lanes=devices), of_device, placed, positions)
    # Rows go back to where they were from anywhere, which no type of a sharded array allows.
    of_all = iter([with_whole_axis(x, 0) if is_sharded(x, 0) else x for x in outs])
    results = []
    for output, noted in zip(call.described, notes, strict=True):
        x = next(of_all)
        if not noted.axes:
            x = dealt.collected(x) if noted.batched else x
            results.append(place(call.axis, output, x, 0 if noted.batched else None))
        else:
            results.append(_collected(call, dealt, noted, x, [next(of_all) for _ in noted.axes]))
    return results


def _elements_of(lengths: Sequence[Any]) -> Any:
    """How many elements rows of these lengths along each ragged axis have."""
    return functools.reduce(operator.mul, lengths)


def _packed_in(x: Ragged, own: SizesOf) -> RowIndex:
    """Where whole rows of an argument of these sizes are."""
    if len(own) == 1:
        return index_in(x, own)
    elements = _elements_of([s.index.lengths for s in own])
    return RowIndex.of(elements, capacity_of(x), math.prod(s.bound for s in own))


def _room(own: SizesOf, capacity: int, alone: bool, counts: tuple[int, int, int]) -> int:
    """How many elements of an argument one device may have.

    Args:
      own: the sizes of its rows.
      capacity: of the argument.
      alone: whether rows of all arguments are of those sizes.
      counts: how many devices there are, how many slots each has, and how many rows there are.
    """
    devices, slots, rows = counts
    room = own[0].capacity if len(own) == 1 else capacity
    bound = math.prod(size.bound for size in own)
    if not alone:  # dealt out by their sum, of which one may be all
        return min(slots * bound, room + bound)
    # By no more than the longest row over the mean, with a shortest row that is there twice.
    return min(slots * bound, -(-room // devices) + bound + min(bound, room // rows))


def _local_call(
    call: RowCall, way: RowsOnDevices, lengths: Sequence[Any], arrays: Sequence[Value], slots: int
) -> RowCall:
    """The call with the rows of one device, which are in front of `arrays`."""
    places = [m.value.element_axis if own else m.axis for m, own in call.arguments]
    moved = [x if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(arrays, places, strict=True)]
    local = replace(
        call.with_rows(lengths, moved),
        axis=replace(call.axis, size=slots),
        way=way.of_each,
        gives_lengths=False,
    )
    staged = replace(local, program=None).staged if way.stages_again else call.staged
    outputs = replace(call.outputs, described=list(map(in_front, call.described)))
    return replace(local, program=(staged, outputs))


def _put(shards: Shards, x: Value, position: Position) -> Any:
    if isinstance(shards.mesh, AbstractMesh):
        return x
    if isinstance(x, Tracer) and puts_traced(shards.mesh):
        # It may have another axis, inside of ``jax.vmap``, that must not be spread.
        return put_traced(shards, x, position, _compat.value_of(x))
    return jax.device_put(x, NamedSharding(shards.mesh, shards.spec(position)))


def _collected(
    call: RowCall, dealt: Dealt, noted: _Output, x: Value, lengths: Sequence[Any]
) -> Ragged:
    """A ragged output, from the rows of each device and their lengths along each axis."""
    devices, room = x.shape[:2]
    own = [
        dealt.collected(given) if k is None else call.sizes[k].lengths
        for given, k in zip(lengths, noted.sizes, strict=True)
    ]
    bound = math.prod(noted.bounds)
    capacity = min(devices * room, own[0].shape[0] * bound)
    if len(own) == 1:
        if noted.sizes[0] is not None:
            capacity = call.sizes[noted.sizes[0]].capacity
        packed = RowIndex.of(own[0], capacity, bound)
    else:
        clipped = [jnp.clip(n, 0, most) for n, most in zip(own, noted.bounds, strict=True)]
        packed = RowIndex.of(_elements_of(clipped), capacity, bound)
        lengths = [jnp.clip(n, 0, most) for n, most in zip(lengths, noted.bounds, strict=True)]
    data = _Elements(dealt, packed, capacity, _elements_of(lengths), room).packed(x)
    data = jnp.moveaxis(data, 0, noted.axes[0])
    return Ragged(data, own, noted.bounds, axis=noted.axes)
