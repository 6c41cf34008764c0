"""A program whose equations at the top level name the mapped axis, if lanes meet in them.

In chunks a lane's index is not its place in the chunk, and a collective must see
the lanes of all chunks. So calls that contain either are opened, and the index
becomes an input of the program, which loops and branches receive as any other value
unless they hold a collective: these are run for all lanes, and their bodies opened then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.extend.core.primitives import copy_p, while_p

from batchax import _compat
from batchax.execution.sections import Section
from batchax.jaxprs.bodies import LOOPS_AND_BRANCHES, bind_with, bodies_of
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import body_parameter, facts_of
from batchax.kernel.axis import Axis
from batchax.kernel.inner import remembered
from batchax.kernel.named_axes import as_names, uses_name


def expose_names(axis: Axis, staged: _compat.ClosedJaxpr) -> Section:
    """`staged` with the index of the lane as its first input and calls opened.

    Variables keep their identity: derivative rules may have closed over them.
    """
    lane = _lane_variable()
    index = lane.aval
    eqns, constvars, consts = [], [*staged.jaxpr.constvars], [*staged.consts]
    for eqn in staged.jaxpr.eqns:
        if not is_exposed(axis, eqn):
            eqns.append(eqn)
            continue

        def run(lane: Any, *xs: Any, eqn: Any = eqn) -> list[Any]:
            names = _compat.current_name_stack()
            with _compat.user_source(eqn.source_info, names), eqn.ctx.manager:
                return _distinct(_use(axis, eqn, list(xs), lane), [lane, *xs])

        types = [index, *(v.aval for v in eqn.invars)]
        part = _compat.stage(run, types, _names(axis))
        renamed = dict(zip(part.jaxpr.invars, [lane, *eqn.invars], strict=True))
        renamed |= zip(part.jaxpr.outvars, eqn.outvars, strict=True)
        constvars += part.jaxpr.constvars
        consts += part.consts
        for e in part.jaxpr.eqns:
            read = [v if isinstance(v, Literal) else renamed.get(v, v) for v in e.invars]
            eqns.append(e.replace(invars=read, outvars=[renamed.get(v, v) for v in e.outvars]))
    jaxpr = staged.jaxpr
    return Section(eqns, [lane, *jaxpr.invars], jaxpr.outvars, constvars, consts)


@functools.cache  # made by staging, and no two of these are in one program
def _lane_variable() -> Any:
    return _compat.stage(lambda i: [i], [jax.typeof(np.int32(0))]).jaxpr.invars[0]


def index_as_input(axis: Axis, program: _compat.ClosedJaxpr) -> _compat.ClosedJaxpr:
    """`program`, in which no lanes meet, with the index of the lane as its first input."""

    def run(lane: Any, *xs: Any) -> list[Any]:
        return _evaluate(axis, jaxpr, consts, xs, lane)

    jaxpr, consts = program.jaxpr, program.consts
    types = [jax.typeof(np.int32(0)), *program.in_avals]
    key = axis, "index_as_input"
    return remembered(program, key, lambda: _compat.stage(run, types, _names(axis)))


def is_exposed(axis: Axis, eqn: Any) -> bool:
    """Whether an equation uses the name of the axis, or is a call to be opened for its loops.

    Loops that lanes leave one by one draw lanes from all chunks, if they are at the top level.
    """
    if axis.name is not None and uses_name(eqn, axis.name):
        return True
    return axis.divergence is not None and _is_call_with_loop(eqn)


def _is_call_with_loop(eqn: Any) -> bool:
    if not _is_opened(eqn):
        return False
    jaxpr = _compat.close(eqn.params[body_parameter(eqn)]).jaxpr
    # Loops of JAX's own, as those in `jax.random.poisson`, have few and cheap steps: over the lanes
    # of one chunk at a time they were measured to take half as long as over all lanes.
    if _compat.name_within_jax(jaxpr):
        return False
    return any(e.primitive is while_p or _is_call_with_loop(e) for e in jaxpr.eqns)


def _is_opened(eqn: Any) -> bool:
    """Whether an equation is a call that may be replaced by the operations of its body."""
    facts = facts_of(eqn.primitive)
    return bool(facts.body) and not facts.marked


def _names(axis: Axis) -> list[tuple[Any, Any]]:
    return [] if axis.name is None else [(axis.name, axis.size)]


def _distinct(outs: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """`outs`, copied where one is an input, a constant, or the same as another.

    So each is a variable of its own, which can be renamed to the result that it stands for.
    """
    seen = set(map(id, xs))
    distinct = []
    for x in outs:
        if id(x) in seen or not isinstance(x, Tracer):
            x = copy_p.bind(x)
        seen.add(id(x))
        distinct.append(x)
    return distinct


def _evaluate(
    axis: Axis, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], lane: Any
) -> list[Any]:
    def run_equation(eqn: Any, xs: list[Any]) -> Sequence[Any]:
        return _use(axis, eqn, xs, lane) if is_exposed(axis, eqn) else bind_equation(eqn, xs)

    return evaluate(jaxpr, consts, args, run_equation)


def _use(axis: Axis, eqn: Any, xs: list[Any], lane: Any) -> Sequence[Any]:
    """The results of an equation that `is_exposed`, for the lane with the index `lane`."""
    if _is_index(eqn):
        return [_index(axis, eqn.params["axis_name"], lane)]
    if facts_of(eqn.primitive).cast:
        others = tuple(n for n in eqn.params["axes"] if n != axis.name)
        return bind_equation(eqn, xs, axes=others) if others else xs
    if _is_opened(eqn):
        body = _compat.close(eqn.params[body_parameter(eqn)])
        return _evaluate(axis, body.jaxpr, body.consts, xs, lane)
    if find_meeting(axis, [eqn]) is None:
        programs = [index_as_input(axis, _compat.close(b.program)) for b in bodies_of(eqn)]
        return bind_with(eqn, xs, programs, [lane])
    return bind_equation(eqn, xs)  # at the top level, where all lanes can be had


def find_meeting(axis: Axis, eqns: Iterable[Any]) -> Any:
    """The first equation, inside calls, loops and branches, too, in which lanes meet, or None.

    They do if it needs more of other lanes than to know which one it is.
    """
    for eqn in eqns:
        if not uses_name(eqn, axis.name) or _is_index(eqn) or facts_of(eqn.primitive).cast:
            continue
        if _is_opened(eqn):
            bodies = [_compat.close(eqn.params[body_parameter(eqn)]).jaxpr]
        elif eqn.primitive.name in LOOPS_AND_BRANCHES:
            bodies = [body.jaxpr for body in bodies_of(eqn)]
        else:
            return eqn
        found = find_meeting(axis, (e for body in bodies for e in body.eqns))
        if found is not None:
            return found
    return None


def _is_index(eqn: Any) -> bool:
    return eqn.primitive.name == "axis_index"


def _index(axis: Axis, names: Any, lane: Any) -> Any:
    """The index of a lane over several axes, of which the first counts slowest."""
    index = jnp.int32(0)
    for n in as_names(names):
        mine = lane if n == axis.name else lax.axis_index(n)
        index = index * np.int32(axis.size if n == axis.name else lax.axis_size(n)) + mine
    return index
