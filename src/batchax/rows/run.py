"""Rows of different lengths: the pass for them, and how they run in buckets and on devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, Pass, Strategy, execute
from batchax.execution.chunked import Chunking
from batchax.execution.devices.placing import placed
from batchax.execution.devices.shards import (
    Shards,
    check_callbacks,
    check_shared,
    is_sharded,
    on_shards,
    with_shared_in_parts,
    with_whole_axis,
)
from batchax.frontend.outputs import place
from batchax.frontend.rows import Layout, RowOptions
from batchax.jaxprs.types import Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Position
from batchax.kernel.named_axes import any_uses_axis
from batchax.rows.buckets import Buckets
from batchax.rows.call import (
    RowCall,
    SizesOf,
    capacity_of,
    check_meshes,
    explained,
    index_in,
    reject_effects,
    reject_ordered,
    why_grouped,
)
from batchax.rows.groups import group_by_length, in_front, run_in_buckets
from batchax.rows.index import Ints, RowIndex, moved, take_clipped
from batchax.rows.padded import CannotPad
from batchax.rows.ragged import Ragged
from batchax.rows.regions import InRegions, most_classes
from batchax.rows.sizes import ASKED_FOR_NUMBERS, find_found, needs_number
from batchax.rows.specialize import MOST_LENGTHS, are_few, execute_padded, run_specialized


@dataclass(frozen=True)
class Dealt:
    """Which row is in which slot: each device has the same number of slots."""

    row: Any  # of each slot, shape (devices, slots)
    slot: Any  # of each row among those of all devices
    real: np.ndarray  # of each slot, whether its row is not there twice

    @classmethod
    def of(cls, weights: Value, devices: int) -> Dealt:
        """Rows of these weights, the heaviest first."""
        count = weights.shape[0]
        slots = -(-count // devices)
        rounds, places = np.divmod(np.arange(devices * slots), devices)
        # Every other round goes back.
        of_device = np.where(rounds % 2, devices - 1 - places, places)
        slot_of_turn = (of_device * slots + rounds).astype(np.int32)
        turn = np.argsort(slot_of_turn).astype(np.int32).reshape(devices, slots)
        order = jnp.argsort(-weights, stable=True).astype(np.int32)
        rank = jnp.argsort(order).astype(np.int32)
        row = order[np.minimum(turn, count - 1)]
        return cls(row, jnp.asarray(slot_of_turn)[rank], turn < count)

    def dealt(self, x: Value) -> jax.Array:
        return moved(x, 0, self.row.reshape(-1), self.slot).reshape(*self.row.shape, *x.shape[1:])

    def collected(self, x: Value) -> jax.Array:
        back = jnp.where(self.real, self.row, -1).reshape(-1)
        return moved(lax.collapse(x, 0, 2), 0, self.slot, back)


class _Elements:
    """Where the elements of rows are: packed in one array, and in an array for each device.

    `lengths` are those of the row of each slot. Each device's array has `room` elements.
    """

    def __init__(self, dealt: Dealt, packed: RowIndex, lengths: Value, room: int) -> None:
        def of_device(lengths: Ints) -> tuple[Any, Any, Any]:
            index = RowIndex.of(lengths, room, packed.bound)
            return index.starts, index.rows, index.places

        starts, slots, places = jax.vmap(of_device)(jnp.asarray(lengths, np.int32))
        devices, count = dealt.row.shape
        self._shape = devices, room
        taken = jnp.minimum(slots, count - 1)
        rows = jnp.take_along_axis(dealt.row, taken, 1)
        there = jnp.asarray(packed.starts)[rows] + places
        there = jnp.where((slots < count) & (there < packed.capacity), there, -1)
        real = jnp.take_along_axis(jnp.asarray(dealt.real), taken, 1)
        self._there = there.reshape(-1)
        self._real = jnp.where(real, there, -1).reshape(-1)
        row = jnp.asarray(packed.rows)
        slot = take_clipped(dealt.slot, row, 0)
        place = slot // count * room + starts.reshape(-1)[slot] + packed.places
        self._back = jnp.where(row < packed.starts.shape[0], place, -1)

    def spread(self, x: Value) -> jax.Array:
        return moved(x, 0, self._there, self._back).reshape(*self._shape, *x.shape[1:])

    def packed(self, x: Value) -> jax.Array:
        return moved(lax.collapse(x, 0, 2), 0, self._back, self._real)


@dataclass(frozen=True)
class _Output:
    """What a device returned: for a `Ragged` its axes and bounds, and the sizes that it has."""

    batched: bool  # whether it differs from row to row
    axes: tuple[int, ...] = ()  # along which it is ragged
    bounds: tuple[int, ...] = ()  # no row is longer along them
    # Which sizes of the arguments its rows have along them, None if it is none of those.
    sizes: tuple[int | None, ...] = ()


kept_on_devices = Cache("calls outside of jit, of rows on devices", most=64)


@dataclass(frozen=True)
class RowsOnDevices(Strategy):
    """Rows distributed over devices, each of which runs its own rows.

    One program serves all batches of arrays of the same size: lengths are arguments of it.
    """

    shards: Shards  # the devices: each is a lane
    of_each: Strategy  # how a device runs its rows
    # Whether types tell of a mesh, which on a device they do no more: there the function is
    # staged again.
    stages_again: bool

    @property
    def cache(self) -> Cache | None:
        return kept_on_devices

    def note(self, call: Call) -> None:
        pass  # each device will

    def prepared(self, call: Call) -> Call:
        assert isinstance(call, RowCall)
        if any_uses_axis(call.axis, call.staged):
            raise UnsupportedError(
                f"mesh does not support a collective over axis_name={call.axis.name!r}, whose "
                "lanes are rows of different lengths: a device has only its own rows. Reduce over "
                "the batch with out_axes=batchax.Reduce(...), or remove mesh."
            )
        if not call.axis.size:
            return replace(call, strategy=self.of_each)
        check_shared([], call.staged.consts)
        if self.shards.count > 1:
            reject_effects(call.staged)
        return replace(call, gives_lengths=True)

    def passes_constants(self, call: Call) -> bool:
        return not (call.traced or self.stages_again)

    def run(self, call: Call) -> tuple[list[Any], Any]:
        def run(*values: Value) -> list[Any]:
            given = call.with_values(values)
            assert isinstance(given, RowCall)
            return _run_on_devices(given, self)

        outs = (jax.jit(run) if call.computes else run)(*call.values)
        return jax.tree.flatten(outs)

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        return jax.tree.unflatten(said, arrays), call.outputs


def _run_on_devices(call: RowCall, strategy: RowsOnDevices) -> list[Any]:
    """The outputs of a call whose rows are distributed over devices."""
    shards = strategy.shards
    shapes = {tuple(s.name for s in own): own for own in call.sizes_of if own}
    weights = sum(math.prod([jnp.asarray(s.index.lengths) for s in x]) for x in shapes.values())
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
            of_slots = math.prod([length_of[size.name] for size in own])
            room = _room(own, capacity, len(shapes) == 1, (devices, slots, call.axis.size))
            elements = _Elements(dealt, packed, of_slots, room)
            x = elements.spread(jnp.moveaxis(x.data, x.element_axis, 0))
        elif m.axis is not None:
            x = dealt.dealt(jnp.moveaxis(x, m.axis, 0))
        arguments.append(x)
        positions.append(None if m.axis is None and not own else 0)

    def of_device(*values: Value) -> tuple[list[Any], list[Position], list[_Output]]:
        own = [
            x if a is None else lax.squeeze(x, (0,)) for x, a in zip(values, positions, strict=True)
        ]
        local = _local_call(call, strategy, own[: len(lengths)], own[len(lengths) :], slots)
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

    shards = replace(shards, lanes=devices)
    on_devices = placed(shards, ["rows"] * len(arguments), arguments, positions)
    outs, notes = on_shards(shards, of_device, on_devices, positions)
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


def _packed_in(x: Ragged, own: SizesOf) -> RowIndex:
    """Where whole rows of an argument of these sizes are."""
    if len(own) == 1:
        return index_in(x, own)
    elements = math.prod([s.index.lengths for s in own])
    return RowIndex.of(elements, capacity_of(x), math.prod(s.bound for s in own))


def _room(own: SizesOf, capacity: int, alone: bool, counts: tuple[int, int, int]) -> int:
    """How many elements of an argument, of rows of its `own` sizes, one device may have.

    `alone` is whether rows of all arguments are of those sizes; `counts` are those of devices, of
    slots of each, and of rows.
    """
    devices, slots, rows = counts
    room = own[0].capacity if len(own) == 1 else capacity
    bound = math.prod(size.bound for size in own)
    if not alone:  # they are distributed by their sum, and one may be all of it
        return min(slots * bound, room + bound)
    # By no more than the longest row over the mean, with a shortest row that is there twice.
    return min(slots * bound, -(-room // devices) + bound + min(bound, room // rows))


def _local_call(
    call: RowCall, strategy: RowsOnDevices, lengths: Sequence[Any], arrays: Values, slots: int
) -> RowCall:
    """The call with the rows of one device, which are in front of `arrays`."""
    places = [m.value.element_axis if own else m.axis for m, own in call.arguments]
    moved = [x if a is None else jnp.moveaxis(x, 0, a) for x, a in zip(arrays, places, strict=True)]
    local = replace(
        call.with_rows(lengths, moved),
        axis=replace(call.axis, size=slots),
        strategy=strategy.of_each,
        gives_lengths=False,
    )
    staged = replace(local, program=None).staged if strategy.stages_again else call.staged
    check_callbacks(strategy.shards, staged.jaxpr)
    outputs = replace(call.outputs, described=list(map(in_front, call.described)))
    return replace(local, program=(with_shared_in_parts(staged), outputs))


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
        packed = RowIndex.of(math.prod(clipped), capacity, bound)
        lengths = [jnp.clip(n, 0, most) for n, most in zip(lengths, noted.bounds, strict=True)]
    data = _Elements(dealt, packed, math.prod(lengths), room).packed(x)
    data = jnp.moveaxis(data, 0, noted.axes[0])
    return Ragged(data, own, noted.bounds, axis=noted.axes)


def in_rows(options: RowOptions, shards: Shards | None, chunking: Chunking | None) -> Pass:
    """The pass for calls some of whose arguments are `Ragged`."""

    def change(call: Call) -> Call:
        # Rows are moved about before they are on their devices.
        mapped = [
            replace(m, value=jnp.asarray(m.value)) if isinstance(m.value, np.ndarray) else m
            for m in call.mapped
        ]
        return replace(call, mapped=mapped, strategy=InRows(options, shards, chunking))

    return change


@dataclass(frozen=True)
class InRows(Strategy):
    """Rows run in buckets, by length, on devices, packed, or padded."""

    makes_calls: ClassVar[bool] = True

    options: RowOptions  # the user's
    shards: Shards | None = None  # the devices that rows are distributed over, with mesh=
    # How many rows run at a time where they are arrays; None for all.
    chunking: Chunking | None = None
    is_bucket: bool = False  # whether there are other rows, in other buckets

    @_compat.patched()
    def run(self, call: Call) -> Outputs:
        axis, mapped, buckets = call.axis, call.mapped, self.options.buckets
        if not isinstance(axis.size, int):
            raise UnsupportedError(
                f"the number of rows is {axis.size}, a symbolic size, but where rows are must be "
                "known. Export the function for a known number of rows, whatever their lengths are."
            )
        check_meshes(mapped)
        recording.fact("rows", axis=axis)
        if buckets is not None and axis.name is not None:
            raise UnsupportedError(
                f"buckets does not support axis_name={axis.name!r}: its lanes are all rows, but "
                "the rows of one bucket run at a time. Remove one of them. To reduce over all "
                "rows, use out_axes=batchax.Reduce(...)."
            )
        rows = RowCall.of(call)
        if buckets is not None and rows.lengths_known:  # else rows are put there while they run
            options = replace(self.options, buckets=None)
            return run_in_buckets(rows, replace(self, options=options, is_bucket=True), buckets)
        if isinstance(buckets, Buckets):
            raise UnsupportedError(
                "buckets: the lengths of rows are traced here, and these buckets are for known "
                "lengths. Call vmap outside of jit, or close over the Ragged. Or pass the number, "
                f"buckets={max(1, len(buckets.sizes))}, which works for traced lengths."
            )
        if self.options.layout == Layout.GROUPED:
            if self.shards is not None:
                raise UnsupportedError(
                    'mesh does not support layout="grouped": rows of one length are grouped '
                    "before they are sharded over devices. Remove one of them."
                )
            return group_by_length(rows, self.chunking)
        outs = self._of_any_length(rows, rows.lengths_known and self.shards is None)
        if isinstance(outs, Exception):
            by_answer = self.options.layout == Layout.AUTO and needs_number(outs)
            parted = run_specialized(rows, self.chunking, outs) if by_answer else outs
            if isinstance(parted, Exception):
                return group_by_length(rows, self.chunking, why_grouped(outs))
            return parted
        return outs

    def _of_any_length(self, call: RowCall, lengths_known: bool) -> Outputs | Exception:
        """What a call returns that is staged once for rows of any length.

        An error where that cannot be, but lengths are known: rows of one length may run together.
        """
        try:
            call = call.with_program()
        except Exception as error:
            # The function may need sizes as numbers, for an `if n > 5`: rows of one length have
            # these. If it is wrong, it fails again.
            return self._failed(call, error, lengths_known)
        if self.is_bucket:
            reject_ordered(call.staged)
        strategy: Strategy = AnyLength(self.options, self.chunking, self.is_bucket)
        if self.shards is not None:
            strategy = RowsOnDevices(self.shards, strategy, call.tells_of_mesh)
        try:
            return execute(replace(call, strategy=strategy))
        except (ASKED_FOR_NUMBERS, CannotPad) as error:  # such as in a derivative rule
            return self._failed(call, error, lengths_known)

    def _failed(self, call: RowCall, error: Exception, lengths_known: bool) -> Outputs | Exception:
        """The error for known lengths; else the outputs by a branch for each length, or raises."""
        if lengths_known:
            return error
        if self.options.layout == Layout.AUTO:
            outs = run_specialized(call, self.chunking, error, self.shards)
            if not isinstance(outs, Exception):
                return outs
            error = outs
        raised = explained(call, error, self.shards is not None)
        if isinstance(raised, UnsupportedError) and not are_few(call.sizes):
            several = "" if len(call.sizes) == 1 else ", or, of several sizes, so many together"
            raised.add_note(
                f"Where the Ragged has a max_length of at most {MOST_LENGTHS - 1}{several}, a "
                "program for each length is compiled instead."
            )
        hidden = isinstance(error, CannotPad)
        raise raised from (None if hidden else _compat.without_hidden_frames(error))


@dataclass(frozen=True)
class AnyLength(Strategy):
    """Rows of any length, all in one place: region by region, or all padded."""

    makes_calls: ClassVar[bool] = True

    options: RowOptions  # the user's
    chunking: Chunking | None  # how many padded rows run at a time; None for all
    # Whether these are rows of one of the buckets of the user.
    is_bucket: bool = False

    def run(self, call: Call) -> Outputs:
        assert isinstance(call, RowCall)
        in_chunks = self.chunking is not None and self.chunking.applies_to(call.axis.size)
        classes = None if self.is_bucket else most_classes(call, self.options, in_chunks)
        finds = find_found(call.staged)
        if classes is None and (in_chunks or finds or _compat.calls_back(call.staged.effects)):
            # Regions would not keep the order in which programs call the host, and hand no sizes on
            # that one of them finds.
            return execute_padded(call, self.chunking)
        return execute(replace(call, strategy=InRegions(self.options.layout, classes)))
