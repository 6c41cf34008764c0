"""Rows of different lengths dealt out to the devices of a mesh.

Every device gets as many rows, and about as many elements: the longest rows are dealt out first,
one to each device, then the next longest in the opposite direction, and so on. No device then has
more elements than another by more than the longest row has. Where rows do not come out even the
shortest is run again, and what it computes is dropped. Which row goes where is found while the
program runs, so one program serves all lengths; every way there and back is a gather, and so is its
transpose.
"""

from __future__ import annotations

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
from batchax.execution.devices.shards import Shards, is_sharded, on_shards, with_whole_axis
from batchax.execution.devices.telling import check_shared
from batchax.frontend.outputs import place
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Position
from batchax.kernel.named_axes import any_uses_axis
from batchax.memo import Memo
from batchax.rows.arguments import RowSize, capacity_of
from batchax.rows.blocks import moved
from batchax.rows.call import RowCall
from batchax.rows.groups import in_front
from batchax.rows.host_calls import refuse_calls
from batchax.rows.index import RowIndex
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
      lengths: of the row of each slot.
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
        there = jnp.where(slots < count, jnp.asarray(packed.starts)[rows] + places, -1)
        real = jnp.take_along_axis(jnp.asarray(dealt.real), taken, 1)
        self._there = there.reshape(-1)
        self._real = jnp.where(real, there, -1).reshape(-1)
        row = jnp.asarray(packed.row_of(capacity))
        slot = jnp.take(dealt.slot, row, mode="clip")
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
    """What a device returned: for a `Ragged` its axis and bound, and the size that it has.

    Attributes:
      batched: whether it differs from row to row.
      axis: along which it is ragged, or None.
      bound: no row is longer.
      size: which size of the arguments its rows have, if it is one of those.
    """

    batched: bool
    axis: int | None = None
    bound: int = 0
    size: int | None = None


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
    weights = sum(jnp.asarray(size.index.lengths) for size in call.sizes)
    dealt = Dealt.of(weights, shards.count)
    devices, slots = dealt.row.shape
    recording.fact("dealt", devices=devices)
    lengths = [dealt.dealt(jnp.asarray(size.index.lengths)) for size in call.sizes]
    rooms = [_room(call, size, devices, slots) for size in call.sizes]
    arguments = list(lengths)
    positions: list[Position] = [0] * len(lengths)
    for m, size in call.arguments:
        x = m.value
        if size is not None:
            k = call.sizes.index(size)
            packed, capacity = size.index_in(x), capacity_of(x)
            elements = _Elements(dealt, packed, capacity, lengths[k], rooms[k])
            x = elements.spread(jnp.moveaxis(x.data, x.axis, 0))
        elif m.axis is not None:
            x = dealt.dealt(jnp.moveaxis(x, m.axis, 0))
        arguments.append(x)
        positions.append(None if m.axis is None and size is None else 0)

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
                matches = (k for k, s in enumerate(local.sizes) if s.batch.lengths is x.lengths)
                noted.append(_Output(True, x.axis, x.max_length, next(matches, None)))
                outs += [jnp.moveaxis(x.data, x.axis, 0)[None], x.lengths[None]]
                axes += [0, 0]
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
        if noted.axis is None:
            x = dealt.collected(x) if noted.batched else x
            results.append(place(call.axis, output, x, 0 if noted.batched else None))
        else:
            results.append(_collected(call, dealt, noted, x, next(of_all)))
    return results


def _room(call: RowCall, size: RowSize, devices: int, slots: int) -> int:
    """How many elements one device may have."""
    room, bound = capacity_of(size.batch), size.bound
    if len(call.sizes) > 1:  # dealt out by their sum, of which one may be all
        return min(slots * bound, room + bound)
    # By no more than the longest row over the mean, with a shortest row that is there twice.
    return min(slots * bound, -(-room // devices) + bound + min(bound, room // call.axis.size))


def _local_call(
    call: RowCall, way: RowsOnDevices, lengths: Sequence[Any], arrays: Sequence[Value], slots: int
) -> RowCall:
    """The call with the rows of one device, which are in front of `arrays`."""
    places = [m.axis if size is None else m.value.axis for m, size in call.arguments]
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


def _collected(call: RowCall, dealt: Dealt, noted: _Output, x: Value, lengths: Any) -> Ragged:
    """A ragged output, from the rows of each device and their lengths."""
    assert noted.axis is not None
    devices, room = x.shape[:2]
    if noted.size is None:
        own = dealt.collected(lengths)
        capacity = min(devices * room, own.shape[0] * noted.bound)
    else:
        batch = call.sizes[noted.size].batch
        own, capacity = batch.lengths, capacity_of(batch)
    packed = RowIndex.of(own, capacity, noted.bound)
    data = _Elements(dealt, packed, capacity, lengths, room).packed(x)
    return Ragged(jnp.moveaxis(data, 0, noted.axis), own, noted.bound, axis=noted.axis)
