"""Lanes that are sharded over devices, each of which runs its own, some at a time.

Lanes may be on several devices already. XLA distributes the operations of one program over them,
and mostly it leaves lanes where they are. But the predicate of a loop is reduced over all lanes in
each step (jax#20968), and a library call may gather all of them on each device (jax#20683). So such
a function runs as with ``mesh=`` that mesh, without the option, if nothing but the communication
differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import BatchaxError, UnsupportedError
from batchax.execution.call import CONSTANT, AllAtOnce, Call, Outputs, Pass, Strategy
from batchax.execution.chunked import Chunking, InChunks, check_no_references, kept_in_chunks
from batchax.execution.devices.placing import placed, puts_traced
from batchax.execution.devices.processes import of_several_processes
from batchax.execution.devices.shards import (
    Shards,
    check_callbacks,
    check_shared,
    find_shards,
    on_shards,
    sharding_of,
    with_shared_in_parts,
)
from batchax.execution.memory import Auto
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs
from batchax.jaxprs.bodies import Anywhere, control_flow
from batchax.jaxprs.primitive_facts import facts_of, has_entry
from batchax.jaxprs.types import Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Position, Positions
from batchax.kernel.differing import differing, differing_through, differs_of
from batchax.kernel.interpreter import checks_nans_here, in_jit
from batchax.kernel.named_axes import mesh_around
from batchax.rules.masking import hazards


def shard_lanes(shards: Shards | None) -> Pass:
    """Returns the pass that moves lanes to the devices of the mesh that the user passed."""

    def change(call: Call) -> Call:
        if shards is None or not isinstance(
            call.strategy, AllAtOnce
        ):  # rows go there by themselves
            return call
        paths = [m.path for m in call.mapped]
        values = placed(shards, paths, call.values, call.positions)
        return replace(call.with_values(values), strategy=OnDevices(shards))

    return change


def chunk_lanes(chunking: Chunking | None, where_types_say: bool = True) -> Pass:
    """Returns the pass that runs lanes in chunks, or all at once for None.

    `where_types_say`: devices run the lanes that sharded arguments place there.
    """

    def change(call: Call) -> Call:
        if isinstance(call.strategy, OnDevices):
            return replace(call, strategy=replace(call.strategy, chunking=chunking))
        if not isinstance(call.strategy, AllAtOnce):
            return call
        apart = call.axis.divergence is not None and call.axis.divergence.explicit
        if where_types_say and (chunking is not None or apart):
            call = call.with_program()
            shards = find_shards(call.axis, call.values, call.positions, call.staged.jaxpr)
            if shards is not None:
                strategy = OnDevices(shards, chunking)
                applies = strategy.of_each.applies_to(call.axis.size)
                return replace(call, strategy=strategy) if applies else call
        if chunking is None or not chunking.applies_to(call.axis.size):
            return call
        return replace(call, strategy=InChunks(chunking))

    return change


@dataclass(frozen=True)
class OnDevices(Strategy):
    """Runs the lanes of each device on that device, `chunking` at a time."""

    # For traced arguments whose devices XLA decides, the function is traced once, for the lanes of
    # one device: types may differ there, where mesh axes are manual. Otherwise it is traced here as
    # well, for its constants.
    shards: Shards
    chunking: Chunking | None = None  # None: all lanes of a device at a time

    @property
    def of_each(self) -> Chunking:
        return self.chunking or Chunking(self.shards.each, keep=True)

    @property
    def cache(self) -> Cache | None:  # a choice of chunk size is noted for each call
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

    def run(self, call: Call) -> tuple[list[Value], _Said]:
        passed = list(map(_kind, call.values[: call.constants]))

        def one_shard(*values: Value) -> tuple[list[Value], list[Position], _Said]:
            own, said = _of_one_device(call.with_values(values), passed)
            check_callbacks(self.shards, own.staged.jaxpr)
            return *self._chunks_of_one().runner(own, self.shards).outputs(), said

        # Inside of a program of the user's it is compiled with that.
        compiled = call.computes or not in_jit()
        try:
            return on_shards(self.shards, one_shard, call.values, call.positions, compiled)
        except (NotImplementedError, ValueError) as error:
            # JAX's error may be due to a constant that a shard cannot be given.
            if not isinstance(error, BatchaxError):  # of JAX: is it of what the function holds?
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
    """Traces the call again for the lanes of one device, inside ``shard_map``.

    `passed` are types of the constants that were passed as arguments.
    """
    count = call.constants
    here = replace(call, program=None).with_program()
    staged, consts = here.staged, here.staged.consts
    # If the function closes over other values each time it is traced, it keeps those of this trace.
    same = list(map(_kind, consts)) == list(passed)
    if count and same:
        staged = _compat.close(staged.jaxpr, here.values[:count])
    else:
        check_no_references(consts)
        check_shared([], consts)
        staged = with_shared_in_parts(staged)
    said = _Said(None if call.program else here.outputs, same or not count)
    axis = replace(here.axis, spmd_name=None, mesh_axis=None)
    own = replace(
        here, axis=axis, mapped=here.mapped[count:], constants=0, program=(staged, here.outputs)
    )
    return own, said


@dataclass(frozen=True)
class _Said:
    """Holds what is known after the function was traced for one device."""

    outputs: FlatOutputs | None  # if it was traced nowhere else
    same: bool  # whether it holds the same constants in each trace


def _kind(x: Value) -> tuple[Hashable, ...]:
    return jax.typeof(x).shape, jax.typeof(x).dtype, jax.typeof(x).weak_type


def infer_mesh_from_arguments(apart: Pass) -> Pass:
    """Returns the pass that uses the mesh of sharded arguments if that avoids communication.

    `apart` sets the divergence policy of the lanes of one device.
    """

    def change(call: Call) -> Call:
        # Cheap checks come first: every call runs them.
        if not (isinstance(call.strategy, AllAtOnce) and any(map(_is_spread, call.mapped))):
            return call
        if checks_nans_here() or not _are_placed(call):
            return call
        call = call.with_program()
        if not (_spares_exchanges(call) and _is_of_each_lane(call)):
            return call
        shards = find_shards(call.axis, call.values, call.positions, call.staged.jaxpr)
        if shards is None or not _fit(call.staged.consts, [None] * len(call.staged.consts), shards):
            return call
        strategy = OnDevices(shards)
        try:
            strategy.prepared(call)
        except UnsupportedError:
            return call
        return replace(apart(call), strategy=strategy)

    return change


def _is_spread(m: Mapped) -> bool:
    sharding = sharding_of(m.value)
    if m.axis is None or not isinstance(sharding, NamedSharding):
        return False
    spec = sharding.spec
    return m.axis < len(spec) and spec[m.axis] is not None and sharding.mesh.size > 1


def _are_placed(call: Call) -> bool:
    """Returns whether the placement of all arguments is known, and fits shards."""
    inside = in_jit()
    if (not inside and call.given_traced) or AxisType.Manual in mesh_around().axis_types:
        return False
    if not inside and isinstance(call.axis.size, int):
        sharding = sharding_of(next(filter(_is_spread, call.mapped)).value)
        if isinstance(sharding, NamedSharding) and of_several_processes(sharding.mesh):
            return False
    shards = find_shards(call.axis, call.values, call.positions, _NOTHING)
    if shards is None or call.axis.spmd_name is not None:
        # Inside `jit` only types of Explicit mesh axes show the placement.
        return False
    if inside and not all(_is_typed(shards.mesh, name) for name in shards.names):
        return False
    return _fit(call.values, call.positions, shards) and all(type(m) is Mapped for m in call.mapped)


_NOTHING: Any = jax.make_jaxpr(lambda: ())().jaxpr


def _is_typed(mesh: Mesh | AbstractMesh, name: Hashable) -> bool:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[name] == AxisType.Explicit


def _fit(values: Values, positions: Positions, shards: Shards) -> bool:
    """Returns whether values are placed as shards need, or not committed to a device."""
    return all(_fits(x, a, shards) for x, a in zip(values, positions, strict=True))


def _fits(x: Value, position: Position, shards: Shards) -> bool:
    if not isinstance(x, jax.Array):
        return not _compat.is_reference(x)
    sharding = sharding_of(x)
    if not isinstance(
        sharding, NamedSharding
    ):  # on the default device, not one that the user chose
        return not isinstance(x, Tracer) and len(x.devices()) == 1 and not x.committed
    if sharding.mesh.empty:
        return True
    entries = [e for d, e in enumerate(sharding.spec) if d != position]
    # Lanes must be sharded over exactly these mesh axes, or over none.
    says = position is not None and position < len(sharding.spec)
    own = sharding.spec[position] if says else None
    names = own if isinstance(own, tuple) else (own,)
    plain = isinstance(x, Tracer) or sharding.memory_kind in (None, _usual_memory(x))
    return (
        not any(e is not None for e in entries)
        and names in ((None,), shards.names)
        and sharding.mesh == shards.mesh
        and plain
    )


def _usual_memory(x: jax.Array) -> str:
    return next(iter(x.devices())).default_memory().kind


def _spares_exchanges(call: Call) -> bool:
    """Returns whether XLA would make devices communicate lanes in this program."""
    jaxpr = call.staged.jaxpr
    env = dict(zip(jaxpr.invars, (a is not None for a in call.positions), strict=True))
    for eqn, of_equation in differing_through(jaxpr, env):
        differs = any(differs_of(env, eqn.invars))
        # Loops that lanes leave at different steps run until the last lane on all devices, and
        # operations that XLA does not partition gather their operands.
        if of_equation.parts or (differs and _exchanged.in_equation(eqn)):
            return True
        if differs and control_flow(eqn.primitive).branches and _loops.in_equation(eqn):
            return True
    return False


def _is_of_each_lane(call: Call) -> bool:
    """Returns whether lanes are independent, all outputs are batched, and nothing has effects."""
    program = call.staged
    jaxpr = program.jaxpr
    alone = not (program.effects or _seen_from_outside.in_program(jaxpr))
    given = tuple(a is not None for a in call.positions)
    return (
        alone
        and not hazards(jaxpr).collective
        and all(differing(jaxpr, given).results)
        and isinstance(call.axis.size, int)
    )


_loops = Anywhere(lambda eqn: bool(control_flow(eqn.primitive).test))

# As XLA partitions programs for several devices (JAX 0.10.2 and 0.12, CPUs). Sorts, products,
# gathers and scatters, convolutions and linear algebra leave lanes where they are.
_EXCHANGED = frozenset(
    "fft igamma igamma_grad_a igammac random_gamma random_gamma_grad regularized_incomplete_beta "
    "rng_bit_generator top_k".split()
)


def _is_exchanged(eqn: Eqn) -> bool:
    if eqn.primitive.name == "random_bits":
        return "rbg" in str(eqn.invars[0].aval.dtype)
    return eqn.primitive.name in _EXCHANGED


_exchanged = Anywhere(_is_exchanged)

_WITH_DEVICES = frozenset(
    "custom_vmap_call custom_batched_call shard_map sharding_constraint reshard mesh_cast "
    "pure_callback ffi_call".split()
)

_seen_from_outside = Anywhere(
    lambda eqn: (
        eqn.primitive.name in _WITH_DEVICES
        or facts_of(eqn.primitive).looks
        or not has_entry(eqn.primitive)
    )
)
"""Whether a program asks where, or with which others, a lane is, or may do so for all we know."""
