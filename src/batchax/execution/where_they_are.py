"""Lanes that are on several devices already: each device runs its own, where that spares exchanges.

What one program does for all lanes the compiler spreads over the devices that have them. Mostly
it leaves lanes where they are. But whether a loop goes on is asked of all lanes at each step
(jax#20968), and for what a library computes it may gather all of them on each device (jax#20683).
So such a function runs as with ``mesh=`` that mesh, without being asked, wherever nothing but the
exchanges is another thing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core.primitives import while_p
from jax.sharding import AxisType, NamedSharding

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import AllAtOnce, Call, Pass
from batchax.execution.devices.processes import of_several_processes
from batchax.execution.devices.telling import find_shards, sharding_of
from batchax.execution.on_devices import OnDevices
from batchax.frontend.mapped import Mapped
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import facts_of, has_entry
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel.axis import Position
from batchax.kernel.differing import differing, differing_through, differs_of
from batchax.kernel.looking import in_jit, looks_here
from batchax.kernel.varying import mesh_around
from batchax.rules.hazards import hazards


def where_they_are(apart: Pass) -> Pass:
    """The pass for lanes that arguments say are on the devices of a mesh, if that spares exchanges.

    Args:
      apart: the pass that says what lanes of one device do that part ways.
    """

    def change(call: Call) -> Call:
        if not (isinstance(call.way, AllAtOnce) and any(map(_is_spread, call.mapped))):
            return call
        if looks_here() or not _are_told(call):
            return call
        call = call.with_program()
        if not (_spares_exchanges(call) and _is_of_each_lane(call)):
            return call
        shards = find_shards(call.axis, call.values, call.positions, call.staged.jaxpr)
        if shards is None or not _fit(call.staged.consts, [None] * len(call.staged.consts), shards):
            return call
        way = OnDevices(shards)
        try:
            way.prepared(call)
        except UnsupportedError:
            return call
        return replace(apart(call), way=way)

    return change


def _is_spread(m: Mapped) -> bool:
    """Whether an argument says that its lanes are on several devices. All calls ask this."""
    sharding = sharding_of(m.value)
    if m.axis is None or not isinstance(sharding, NamedSharding):
        return False
    spec = sharding.spec
    return m.axis < len(spec) and spec[m.axis] is not None and sharding.mesh.size > 1


def _are_told(call: Call) -> bool:
    """Whether all is known of where the arguments are, and they are where shards have them."""
    inside = in_jit()
    if (not inside and call.given_traced) or AxisType.Manual in mesh_around().axis_types:
        return False
    if not inside and isinstance(call.axis.size, int):
        spread = next(filter(_is_spread, call.mapped))
        if of_several_processes(sharding_of(spread.value).mesh):
            return False
    shards = find_shards(call.axis, call.values, call.positions, _NOTHING)
    if shards is None or call.axis.spmd_name is not None:
        return False
    if inside and not all(_is_typed(shards.mesh, name) for name in shards.names):
        return False
    return _fit(call.values, call.positions, shards) and all(type(m) is Mapped for m in call.mapped)


_NOTHING: Any = jax.make_jaxpr(lambda: ())().jaxpr


def _is_typed(mesh: Any, name: Any) -> bool:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[name] == AxisType.Explicit


def _fit(values: Sequence[Value], positions: Sequence[Position], shards: Any) -> bool:
    """Whether values are where shards want them, or nowhere in particular."""
    return all(_fits(x, a, shards) for x, a in zip(values, positions, strict=True))


def _fits(x: Value, position: Position, shards: Any) -> bool:
    if not isinstance(x, jax.Array):
        return not _compat.is_reference(x)
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding):  # on one device, because nobody has said where
        return not isinstance(x, Tracer) and len(x.devices()) == 1 and not x.committed
    if sharding.mesh.empty:
        return True
    entries = [e for d, e in enumerate(sharding.spec) if d != position]
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
    """Whether there is something in it for which the compiler would have devices exchange lanes."""
    jaxpr = call.staged.jaxpr
    env = dict(zip(jaxpr.invars, (a is not None for a in call.positions), strict=True))
    for eqn, of_equation in differing_through(jaxpr, env):
        differs = any(differs_of(env, eqn.invars))
        if of_equation.parts or (differs and _exchanged.in_equation(eqn)):
            return True
        if differs and eqn.primitive.name == "cond" and _loops.in_equation(eqn):
            return True
    return False


def _is_of_each_lane(call: Call) -> bool:
    """Whether lanes compute by themselves what they return, and nothing else happens."""
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


_loops = Anywhere(lambda eqn: eqn.primitive is while_p)

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
