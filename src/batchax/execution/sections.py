"""Parts of a staged program: what must run for all lanes before the rest can.

A program whose lanes never meet is one section. A collective over the mapped axis
needs a value of every lane, so it cuts the program: what comes before runs chunk by
chunk, then the collective, then what comes after.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import plan, variables_in, variables_read
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.captured import closed_over
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import uses_axis
from batchax.rules.batched_transpose import reached

Env = dict[Any, tuple[Any, Position]]
"""Variables whose values for all lanes are known, and where their batch axes are."""


@dataclass(frozen=True)
class Section:
    """Equations of a program with their inputs and outputs.

    It has the attributes of a jaxpr, closed and not, that an interpreter reads.
    """

    eqns: Sequence[Eqn]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    constvars: Sequence[Any] = ()
    consts: Sequence[Value] = ()

    @property
    def jaxpr(self) -> Section:
        """Itself: sections are closed."""
        return self

    def replace(self, **changes: Any) -> Section:
        """A section with other equations or outputs."""
        return replace(self, **changes)


def section_for(
    eqns: Sequence[Eqn], outvars: Sequence[Any], given: Collection[Any], effects: bool = True
) -> Section:
    """The section that computes `outvars` from variables that are `given`.

    It has every one of `eqns` with effects, unless `effects` is false.
    """

    def reads(eqn: Eqn) -> list[Any]:
        return [v for v in variables(eqn) if v not in given]

    results = set(variables_in(outvars))
    steps = plan(eqns, results.difference(given), lambda eqn: effects and eqn.effects, reads)
    taken = [step.eqn for step in steps]
    used = results.union(*map(variables, taken))
    return Section(taken, [v for v in given if v in used], list(outvars))


def run_shared(axis: Axis, eqns: Sequence[Eqn], env: Env) -> list[Any]:
    """Runs, once, the equations that do not depend on the batch; returns the others."""
    shared, rest, defined = [], [], set()

    def is_shared(v: Any) -> bool:
        return v in defined or (v in env and env[v][1] is None)

    for eqn in eqns:
        if all(map(is_shared, variables(eqn))) and not uses_axis(axis, eqn):
            shared.append(eqn)
            defined.update(eqn.outvars)
        else:
            rest.append(eqn)
    run_whole(axis, shared, env)
    return rest


def run_whole(axis: Axis, eqns: Sequence[Eqn], env: Env) -> None:
    """Runs equations for all lanes at once, and adds what they compute to `env`."""
    if not eqns:
        return
    outvars = [v for eqn in eqns for v in eqn.outvars]
    section = section_for(eqns, outvars, env)
    values = [env[v] for v in section.invars]
    outs, axes = interpret(axis, section, (), [x for x, _ in values], [a for _, a in values])
    env.update(zip(outvars, zip(outs, axes, strict=True), strict=True))


def find_cuts(
    axis: Axis, eqns: Sequence[Eqn], loops: Collection[int]
) -> tuple[list[Any], set[Any], list[Any]]:
    """The collectives over `axis` that come first, what waits for them, and what does not.

    `loops` has the ids of loops that need all lanes, too.

    Returns:
      Those collectives and loops; the variables that cannot be computed before they have
      run; and the equations that can be run before them.
    """
    cuts, blocked, free = [], set(), []
    for eqn in eqns:
        if not blocked.isdisjoint(variables(eqn)):
            blocked.update(eqn.outvars)
        elif id(eqn) in loops or uses_axis(axis, eqn):
            cuts.append(eqn)
            blocked.update(eqn.outvars)
        else:
            free.append(eqn)
    return cuts, blocked, free


def parting_loops(eqns: Sequence[Eqn], env: Env, most: int) -> set[int]:
    """The ids of the ``while`` loops among `eqns` whose lanes end at different steps.

    Args:
      eqns: equations that depend on the batch.
      env: what is known.
      most: how many bytes a lane of a loop may hold.
    """

    def differs(v: Any) -> bool:
        return not isinstance(v, Literal) and (v not in env or env[v][1] is not None)

    parting = set()
    for eqn in eqns:
        if eqn.primitive is not while_p or _compat.ordered_by_lane(eqn.effects):
            continue
        if bytes_per_lane(v for v in eqn.invars if differs(v)) > most:
            continue
        test, body = bodies_of(eqn)
        marks = list(map(differs, eqn.invars))
        same = [marks[i] for i in body.operands[: body.same]]
        carry = [marks[i] for i in body.carry_operands]
        while True:  # until a step makes no more of the carry differ between lanes
            new = reached(body.jaxpr, [*same, *carry])
            if not any(n and not c for n, c in zip(new, carry, strict=True)):
                break
            carry = [n or c for n, c in zip(new, carry, strict=True)]
        if any(reached(test.jaxpr, [*(marks[i] for i in test.operands[: test.same]), *carry])):
            parting.add(id(eqn))
    return parting


def crossing(eqns: Sequence[Eqn], free: Sequence[Eqn], cuts: Sequence[Eqn]) -> list[Any]:
    """The variables computed by `free` equations that are needed after the `cuts`."""
    computed = {v for eqn in free for v in eqn.outvars}
    before = {id(eqn) for eqn in (*free, *cuts)}
    later = dict.fromkeys(v for eqn in eqns if id(eqn) not in before for v in variables(eqn))
    return [v for v in later if v in computed]


def variables(eqn: Eqn) -> list[Any]:
    """The variables that an equation reads, now or in a derivative rule that closes over them."""
    return variables_read(eqn) + closed_over(eqn)


def bytes_per_lane(vs: Iterable[Any]) -> int:
    """What the values of some variables take for one lane."""
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in vs)
