"""A program whose equations at the top level name the mapped axis, if lanes meet in them.

In chunks a lane's index is not its place in the chunk, and a collective must see
the lanes of all chunks. So calls that contain either are opened, and the index
becomes an input of the program, which loops and branches receive as any other value
unless they hold a collective: these are run for all lanes, and their bodies opened then.

Host callbacks receive the index, too: those that all lanes have in common are made for the
first of all, and those of lanes that fill up a device not at all (`rules/callbacks.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Var
from jax.extend.core.primitives import copy_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.sections import Section, variables
from batchax.jaxprs.bodies import (
    bind_with,
    bodies_of,
    calls_host,
    calls_in,
    control_flow,
    is_rebuilt,
    program_called,
)
from batchax.jaxprs.evaluate import Rewriter, bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value, Values
from batchax.kernel.axis import Axis
from batchax.kernel.inner import remembered
from batchax.kernel.named_axes import as_names, uses_axis
from batchax.rules.callbacks import bind_if, call_if
from batchax.rules.calls import CALLS
from batchax.rules.collectives import REDUCTIONS


@dataclass(frozen=True)
class HostCalls:
    """Describes the host callbacks of a program whose lanes run in chunks or on devices."""

    batched: AbstractSet[Any] = frozenset()  # variables that may depend on the batch
    devices: tuple[Any, ...] = ()  # mesh axes that shard the lanes; empty without a mesh
    # With devices that may hold repeated lanes: the first lane of this one, and that after its
    # last.
    own: Any = None

    @classmethod
    def of(cls, axis: Axis, jaxpr: Jaxpr, positions: Sequence[Any], **devices: Any) -> HostCalls:
        """Finds the callbacks of `jaxpr`, whose inputs have the batch axis at these positions."""
        batched = {v for v, a in zip(jaxpr.invars, positions, strict=True) if a is not None}
        for eqn in jaxpr.eqns:
            named = uses_axis(axis, eqn)
            # A reduction over the batch is unbatched.
            reduces = named and eqn.primitive.name in _REDUCTIONS
            if not reduces and (named or not batched.isdisjoint(variables(eqn))):
                batched.update(eqn.outvars)
        return cls(batched, **devices)

    def of_each_lane(self, eqn: Eqn) -> bool:
        """Returns whether an equation makes callbacks that may depend on the batch."""
        return _calls(eqn) and not self.batched.isdisjoint(variables(eqn))

    def of_one_device(self, eqn: Eqn) -> bool:
        """Returns whether an equation makes callbacks that one device makes for all."""
        return bool(self.devices) and _calls(eqn) and not self.of_each_lane(eqn)


_REDUCTIONS = frozenset(name for names in REDUCTIONS for name in names.split())


def _calls(eqn: Eqn) -> bool:
    """Returns whether callbacks of an equation take the lane.

    Ordered ones are sequential already.
    """
    return calls_host(eqn) and not _compat.in_order(eqn.effects)


def expose_names(axis: Axis, staged: ClosedJaxpr, calls: HostCalls = HostCalls()) -> Section:
    """Adds the lane index as the first input of `staged`, and inlines calls that use the axis.

    `calls` are the host callbacks in it. Raises UnsupportedError if a callback that devices share
    returns a value.
    """
    lane = _lane_variable()
    index = lane.aval
    # Variables keep their identity, as derivative rules may close over them.
    to = Rewriter(staged)
    for eqn in staged.jaxpr.eqns:
        exposed, of_one = is_exposed(axis, eqn), calls.of_one_device(eqn)
        of_lanes = calls.of_each_lane(eqn) or (exposed and of_one)
        if not (exposed or of_one or of_lanes):
            to.eqns.append(eqn)
            continue

        def run(lane: Value, *xs: Value, eqn: Eqn = eqn, of_lanes: bool = of_lanes) -> list[Value]:
            names = _compat.current_name_stack()
            with _compat.user_source(eqn.source_info, names), eqn.ctx.manager:
                if of_lanes or is_exposed(axis, eqn):
                    caller = _caller(lane, calls.own) if of_lanes else None
                    outs = _use(axis, eqn, list(xs), lane, caller)
                else:
                    outs = _on_one_device(axis, eqn, xs, calls.devices)
                return _distinct(outs, [lane, *xs])

        types = [index, *(v.aval for v in eqn.invars)]
        part = _compat.stage(run, types, _names(axis))
        to.inline(part, [lane, *eqn.invars], eqn.outvars)
    jaxpr, constants = staged.jaxpr, to.constants
    inputs = [lane, *jaxpr.invars]
    return Section(to.eqns, inputs, jaxpr.outvars, list(constants), list(constants.values()))


@functools.cache  # made by staging, and no two of these are in one program
def _lane_variable() -> Var:
    return _compat.stage(lambda i: [i], [jax.typeof(np.int32(0))]).jaxpr.invars[0]


def _on_one_device(axis: Axis, eqn: Eqn, xs: Values, names: tuple[Any, ...]) -> Sequence[Any]:
    """Evaluates an equation whose callbacks only the first device makes."""
    for call in (call for call in calls_in(eqn) if call.outvars):
        raise UnsupportedError(
            f"{_compat.user_line(call.source_info)}: a callback with effects returns an "
            "unbatched value, and lanes are sharded over devices (by mesh or by the "
            "arguments), each of which would call it. Call it before, and pass what it "
            "returns with None in in_axes."
        )
    return bind_if(axis, eqn, xs, lax.eq(lax.axis_index(names), np.int32(0)))


def _caller(lane: Value, own: Value | None) -> Value:
    """Returns the lane index for callbacks, negative for a repeated lane."""
    if own is None:
        return lane
    return lax.select(lax.lt(lane, own[1]), lane, lax.full_like(lane, -1))


def index_as_input(axis: Axis, program: ClosedJaxpr, calls: bool = False) -> ClosedJaxpr:
    """Adds the lane index as the first input of `program`, in which lanes do not synchronize.

    With `calls`, a second index for callbacks follows.
    """

    def run(lane: Value, *xs: Value) -> list[Value]:
        caller, xs = (xs[0], xs[1:]) if calls else (None, xs)
        return _evaluate(axis, jaxpr, consts, xs, lane, caller)

    jaxpr, consts = program.jaxpr, program.consts
    types = [*[jax.typeof(np.int32(0))] * (1 + calls), *program.in_avals]
    key = axis, "index_as_input", calls
    return remembered(program, key, lambda: _compat.stage(run, types, _names(axis)))


def is_exposed(axis: Axis, eqn: Eqn) -> bool:
    """Returns whether an equation uses the axis, or is a call to be inlined for its loops."""
    if uses_axis(axis, eqn):
        return True
    # Loops at the top level that lanes leave one by one draw lanes from all chunks.
    apart = axis.divergence is not None and axis.divergence.explicit
    return apart and _is_call_with_loop(eqn)


def _is_call_with_loop(eqn: Eqn) -> bool:
    if not _is_opened(eqn):
        return False
    jaxpr = program_called(eqn).jaxpr
    # Loops of JAX's own, as those in `jax.random.poisson`, have few and cheap steps: over the lanes
    # of one chunk at a time they were measured to take half as long as over all lanes.
    if _compat.name_within_jax(jaxpr):
        return False
    return any(control_flow(e.primitive).test or _is_call_with_loop(e) for e in jaxpr.eqns)


def _is_opened(eqn: Eqn) -> bool:
    facts = facts_of(eqn.primitive)
    return bool(facts.body) and not facts.marked


def _names(axis: Axis) -> list[tuple[Any, Any]]:
    return [] if axis.name is None else [(axis.name, axis.size)]


def _distinct(outs: Values, xs: Values) -> list[Value]:
    """Copies values that are inputs, constants, or repeated, to distinct variables."""
    # The variables are renamed to the results that they stand for.
    seen = set(map(id, xs))
    distinct = []
    for x in outs:
        if id(x) in seen or not isinstance(x, Tracer):
            x = copy_p.bind(x)
        seen.add(id(x))
        distinct.append(x)
    return distinct


def _evaluate(
    axis: Axis,
    jaxpr: Jaxpr,
    consts: Values,
    args: Values,
    lane: Value,
    caller: Value | None,
) -> list[Value]:
    def run_equation(eqn: Eqn, xs: list[Value]) -> Sequence[Any]:
        used = is_exposed(axis, eqn) or (caller is not None and _calls(eqn))
        return _use(axis, eqn, xs, lane, caller) if used else bind_equation(eqn, xs)

    return evaluate(jaxpr, consts, args, run_equation)


def _use(axis: Axis, eqn: Eqn, xs: list[Value], lane: Value, caller: Value | None) -> Sequence[Any]:
    """Evaluates an equation that uses the axis, for the lane of index `lane`.

    Also one with a host callback, if `caller` is the index to pass to it.
    """
    name, exposed = eqn.primitive.name, is_exposed(axis, eqn)
    if _is_index(eqn):
        return [_index(axis, eqn.params["axis_name"], lane)]
    if facts_of(eqn.primitive).cast:
        others = tuple(n for n in eqn.params["axes"] if n != axis.name)
        return bind_equation(eqn, xs, axes=others) if others else xs
    if _is_opened(eqn) and (exposed or name not in CALLS):
        body = program_called(eqn)
        return _evaluate(axis, body.jaxpr, body.consts, xs, lane, caller)
    if exposed and find_meeting(axis, [eqn]) is not None:
        return bind_equation(eqn, xs)  # at the top level, where all lanes can be had
    if is_rebuilt(eqn.primitive) or name in CALLS:
        more = [lane] if caller is None else [lane, caller]
        bodies = [_compat.close(body.program) for body in bodies_of(eqn)]
        return bind_with(eqn, xs, [index_as_input(axis, b, len(more) > 1) for b in bodies], more)
    return call_if(eqn, xs, np.True_, caller)


def find_meeting(axis: Axis, eqns: Iterable[Eqn]) -> Eqn | None:
    """Finds the first equation in which lanes synchronize, also inside calls, loops, and branches.

    Casts and the index of a lane need no other lanes.
    """
    for eqn in eqns:
        if not uses_axis(axis, eqn) or _is_index(eqn) or facts_of(eqn.primitive).cast:
            continue
        if _is_opened(eqn):
            bodies = [program_called(eqn).jaxpr]
        elif is_rebuilt(eqn.primitive):
            bodies = [body.jaxpr for body in bodies_of(eqn)]
        else:
            return eqn
        meeting = find_meeting(axis, (e for body in bodies for e in body.eqns))
        if meeting is not None:
            return meeting
    return None


def _is_index(eqn: Eqn) -> bool:
    return eqn.primitive.name == "axis_index"


def _index(axis: Axis, names: Hashable | tuple[Hashable, ...], lane: Value) -> Value:
    """Computes the index over several axes, of which the first is the slowest."""
    index = jnp.int32(0)
    for n in as_names(names):
        mine = lane if n == axis.name else lax.axis_index(n)
        index = index * np.int32(axis.size if n == axis.name else lax.axis_size(n)) + mine
    return index
