"""Lanes dealt out to devices, each of which runs those that it has, some at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from batchax import _compat
from batchax.errors import BatchaxError
from batchax.execution.call import CONSTANT, AllAtOnce, Call, Outputs, Pass, Way
from batchax.execution.chunked import Chunking, InChunks, check_no_references, kept_in_chunks
from batchax.execution.devices.placing import placed, puts_traced
from batchax.execution.devices.processes import of_several_processes
from batchax.execution.devices.shards import Shards, on_shards
from batchax.execution.devices.telling import check_shared, find_shards
from batchax.execution.memory import Auto
from batchax.frontend.outputs import FlatOutputs
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Position
from batchax.kernel.looking import in_jit
from batchax.memo import Memo


def dealt_out(shards: Shards | None) -> Pass:
    """The pass for lanes that the user wants on the devices of a mesh: it puts them there."""

    def change(call: Call) -> Call:
        if shards is None or not isinstance(call.way, AllAtOnce):  # rows go there by themselves
            return call
        paths = [m.path for m in call.mapped]
        values = placed(shards, paths, call.values, call.positions)
        return replace(call.with_values(values), way=OnDevices(shards))

    return change


def in_parts(chunking: Chunking | None, where_types_say: bool = True) -> Pass:
    """The pass for lanes of which a few run at a time.

    Args:
      chunking: how many; None for all of them, or all that a device has.
      where_types_say: whether each device runs the lanes that arguments say it has, if lanes do not
        all run at once.
    """

    def change(call: Call) -> Call:
        if isinstance(call.way, OnDevices):
            return replace(call, way=replace(call.way, chunking=chunking))
        if not isinstance(call.way, AllAtOnce):
            return call
        apart = call.axis.divergence is not None and call.axis.divergence.explicit
        if where_types_say and (chunking is not None or apart):
            call = call.with_program()
            shards = find_shards(call.axis, call.values, call.positions, call.staged.jaxpr)
            if shards is not None:
                way = OnDevices(shards, chunking)
                applies = way.of_each.applies_to(call.axis.size)
                return replace(call, way=way) if applies else call
        if chunking is None or not chunking.applies_to(call.axis.size):
            return call
        return replace(call, way=InChunks(chunking))

    return change


@dataclass(frozen=True)
class OnDevices(Way):
    """Each device runs its lanes.

    Where arguments are traced, and the compiler will say where they are, the function is staged
    once, for the lanes of one device: types may be others there, where axes of the mesh are manual.
    Otherwise it is staged here, too, for what it closes over.

    Attributes:
      shards: what lanes are dealt out to.
      chunking: how many lanes a device runs at a time; None for all that it has.
    """

    shards: Shards
    chunking: Chunking | None = None

    @property
    def of_each(self) -> Chunking:
        """How a device runs its lanes."""
        return self.chunking or Chunking(self.shards.each, keep=True)

    @property
    def memo(self) -> Memo | None:  # a choice of chunk size is noted for each call
        return None if isinstance(self.of_each.batch_size, Auto) else kept_in_chunks

    def needs_program(self, call: Call) -> bool:
        return not call.given_traced or puts_traced(self.shards.mesh)

    def note(self, call: Call) -> None:
        super().note(call)
        jaxpr = call.staged.jaxpr
        own = zip(jaxpr.invars, call.positions, strict=True)
        shared = [*jaxpr.constvars, *(v for v, a in own if a is None)]
        recording.fact("shards", shards=self.shards, shared=shared)

    def prepared(self, call: Call) -> Call:
        consts = () if call.program is None else call.staged.consts
        check_no_references((*consts, *call.values))
        check_shared(call.shared, consts)
        return call

    def passes_constants(self, call: Call) -> bool:
        return not call.traced or puts_traced(self.shards.mesh)

    def put(self, constants: Sequence[Any]) -> Sequence[Any]:
        none: list[Position] = [None] * len(constants)
        return placed(self.shards, [CONSTANT] * len(none), constants, none)

    def run(self, call: Call) -> tuple[list[Any], _Said]:
        passed = list(map(_kind, call.values[: call.constants]))

        def one_shard(*values: Any) -> tuple[list[Any], list[Position], _Said]:
            own, said = _of_one_device(call.with_values(values), passed)
            return *self._chunks_of_one().runner(own, self.shards).outputs(), said

        # Inside of a program of the user's it is compiled with that.
        compiled = call.computes or not in_jit()
        try:
            return on_shards(self.shards, one_shard, call.values, call.positions, compiled)
        except (NotImplementedError, ValueError) as error:
            if not isinstance(error, BatchaxError):  # of JAX's: is it of what the function holds?
                check_shared([], call.staged.consts)
            raise

    def _chunks_of_one(self) -> Chunking:
        how = self.of_each
        if not isinstance(how.batch_size, Auto):
            return how
        together = of_several_processes(self.shards.mesh)
        return replace(how, batch_size=replace(how.batch_size, together=together))

    def may_keep(self, said: Any) -> bool:
        return said.same

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        return arrays, said.outputs or call.outputs


def _of_one_device(call: Call, passed: Sequence[Any]) -> tuple[Call, _Said]:
    """Inside: a call for the lanes of one device, which has its values, staged again.

    passed: the kinds of the values that stand for what the function closes over. Where it closes
      over others each time, it is left what it has.
    """
    count = call.constants
    here = replace(call, program=None).with_program()
    staged, consts = here.staged, here.staged.consts
    same = list(map(_kind, consts)) == list(passed)
    if count and same:
        staged = _compat.close(staged.jaxpr, here.values[:count])
    else:
        check_no_references(consts)
        check_shared([], consts)
    said = _Said(None if call.program else here.outputs, same or not count)
    axis = replace(here.axis, spmd_name=None, mesh_axis=None)
    own = replace(
        here, axis=axis, mapped=here.mapped[count:], constants=0, program=(staged, here.outputs)
    )
    return own, said


@dataclass(frozen=True)
class _Said:
    """What is known once the function was staged for one device.

    Attributes:
      outputs: what describes its outputs, if it was staged nowhere else.
      same: whether it holds the same values each time that it is staged.
    """

    outputs: FlatOutputs | None
    same: bool


def _kind(x: Value) -> Any:
    """The type of an array, wherever it is."""
    return jax.typeof(x).shape, jax.typeof(x).dtype, jax.typeof(x).weak_type
