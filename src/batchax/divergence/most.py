"""What it costs at most where lanes may part ways: in a loop, or in loops and branches inside it.

That is known before anything is batched; to find out more takes as long as batching it does. Where
less is told here than `Step`, or `price_inside` of what `nest_of` cuts, tell later, lanes would
stay together and nobody would know.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax.divergence.branch_as_while import TODO
from batchax.divergence.price import (
    STEPS_INSIDE,
    Price,
    dearest_block,
    dearest_of,
    price_of_copying,
    price_of_cost,
    price_of_keeping,
    price_of_moving,
    total,
)
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.inside import Anywhere, programs_inside
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.divergence import AnyLoop
from batchax.kernel.written_out import LOOPS, written_out
from batchax.memo import kept_with
from batchax.programs.cost import STEPS, Cost, cost_of_equation, cost_of_program
from batchax.programs.dear_branches import may_be_dear
from batchax.programs.inner import integers_in
from batchax.programs.one_function import fits_for_lanes
from batchax.programs.shapes import bytes_of
from batchax.programs.weights import TOGETHER

WITH_DERIVATIVE = 4
"""How many times as long a step takes together with the step back over it, at least."""

_NOTHING = Price(0.0, 0.0)
_BEGUN = 2  # operations more in a loop: in its predicate, and in its step or the last segment of it


def dearest_step(loop: AnyLoop) -> float:
    """Nanoseconds that a step of the dearest loop, or the dearest branch, takes for a lane."""
    programs = _programs(loop)
    dearest = _dearest_of(loop.primitive, programs)
    if loop.primitive.name in LOOPS:
        dearest = max(dearest, WITH_DERIVATIVE * sum(map(_time, programs)))
    return dearest


def may_be_one_function(loop: AnyLoop) -> bool:
    """Whether neighbours may run a loop in one function, or one inside it."""
    programs = _programs(loop)
    return _all_fit(loop.primitive, programs) or any(map(_cheap.in_program, programs))


def price_of_loops(loop: AnyLoop) -> Price:
    """The price of a step of each loop inside, as `nest_of` may cut them."""
    return total(list(map(_loops, _programs(loop))))


def price_of_branches(loop: AnyLoop) -> Price:
    """The price of the dearest branch in it, for lanes that run it together."""
    return dearest_of([_NOTHING, *map(_branches, _programs(loop))])


@kept_with("what the dearest branch in programs costs")
def _branches(jaxpr: Jaxpr) -> Price:
    inside = [(eqn, program) for eqn in jaxpr.eqns for program in _inside(eqn)]
    costs = (cost_of_program(p, steps=STEPS) for eqn, p in inside if eqn.primitive is cond_p)
    return dearest_of([_NOTHING, *map(price_of_cost, costs), *(_branches(p) for _, p in inside)])


def _programs(loop: AnyLoop) -> list[Jaxpr]:
    return [p.jaxpr for p in loop.params.values() if isinstance(p, ClosedJaxpr)]


def _dearest_of(primitive: object, programs: list[Jaxpr]) -> float:
    dearest = max(map(_dearest, programs), default=0.0)
    if primitive is while_p or primitive is cond_p:
        times = list(map(_time, programs))
        # A step is asked for, too; of branches a lane takes one.
        dearest = max(dearest, sum(times) if primitive is while_p else max(times))
    if getattr(primitive, "name", None) in LOOPS:
        dearest *= WITH_DERIVATIVE
    return dearest


def _time(jaxpr: Jaxpr) -> float:
    return TOGETHER.time(cost_of_program(jaxpr, steps=STEPS) + _kept(jaxpr))


@kept_with("what a step of the dearest loop in programs costs")
def _dearest(jaxpr: Jaxpr) -> float:
    each = (_dearest_of(eqn.primitive, _inside(eqn)) for eqn in jaxpr.eqns)
    return max(each, default=0.0)


def _kept(jaxpr: Jaxpr) -> Cost:
    """What it costs at most that lanes which are done keep what they have."""
    return Cost(bytes=3 * bytes_of(v.aval for v in jaxpr.outvars))


@kept_with("what a step of each loop in programs costs")
def _loops(jaxpr: Jaxpr) -> Price:
    return total([_loops_of(eqn) for eqn in jaxpr.eqns if may_wait.in_equation(eqn)])


def _loops_of(eqn: Eqn) -> Price:
    if eqn.primitive is while_p or eqn.primitive is scan_p:
        return _step(eqn)
    if eqn.primitive is cond_p:  # of which no loops are cut out
        return total([_block(jaxpr) for jaxpr in _inside(eqn) if may_be_dear(jaxpr)])
    return total(list(map(_loops, _inside(eqn))))


def _block(branch: Jaxpr) -> Price:
    """The price of a block of lanes that take a branch, whatever they have of their own."""
    work = price_of_cost(cost_of_program(branch, steps=STEPS_INSIDE) + Cost(launches=1))
    read, written = ([v.aval for v in some] for some in (branch.invars, branch.outvars))
    return dearest_block(work, price_of_moving([*read, *written], [*written, TODO]))


def _step(loop: Eqn) -> Price:
    """The price of a step: of the whole body, or of what it is cut into."""
    kept = [v.aval for v in loop.outvars]
    price = total([price_of_cost(Cost(launches=_BEGUN)), price_of_keeping(kept)])
    if loop.primitive is scan_p:  # as a `while` it takes its entries, and puts them
        (body,) = bodies_of(loop)
        taken = [v.aval for v in body.jaxpr.invars[body.same + body.carried :]]
        put = [v.aval for v in body.jaxpr.outvars[body.carried :]]
        entries = Cost(
            bytes=2 * bytes_of([*taken, *put]),
            places=len(taken) + 2 * len(put),
            launches=len(taken) + len(put),
        )
        price = total([price, price_of_cost(entries)])
    return total([price, *map(_once, programs_inside(loop))])


@kept_with("what programs cost in which each loop takes a step")
def _once(jaxpr: Jaxpr) -> Price:
    integers = integers_in(jaxpr)
    return total([_once_of(eqn, integers) for eqn in jaxpr.eqns])


def _once_of(eqn: Eqn, integers: dict[object, int]) -> Price:
    whole = price_of_cost(cost_of_equation(eqn, integers, steps=STEPS_INSIDE))
    if not may_wait.in_equation(eqn):
        return whole
    if eqn.primitive is cond_p:  # the others, what asks who takes a dear one, and a block of that
        asked = price_of_cost(Cost(bytes=8, launches=2))
        return dearest_of([whole, total([whole, asked, _loops_of(eqn)])])
    if eqn.primitive is while_p or eqn.primitive is scan_p:
        # Cut out, it has a segment before it, in which what it updates in place is copied.
        kept = [v.aval for v in eqn.outvars]
        segment = price_of_cost(Cost(launches=1)), price_of_copying(kept)
        return dearest_of([whole, total([_step(eqn), *segment])])
    return dearest_of([whole, total(list(map(_once, _inside(eqn))))])


def _inside(eqn: Eqn) -> list[Jaxpr]:
    """The programs of an equation; of a bounded loop the one that it stands for."""
    operations = written_out(eqn)
    return programs_inside(eqn) if operations is None else [operations.jaxpr]


def _may_wait_at(eqn: Eqn) -> bool:
    if eqn.primitive is cond_p:
        return any(may_be_dear(branch.jaxpr) for branch in eqn.params["branches"])
    return eqn.primitive is while_p or eqn.primitive.name in LOOPS


may_wait = Anywhere(_may_wait_at)
"""Whether a program holds a loop that lanes may leave one by one, or a dear branch."""


def _all_fit(primitive: Any, programs: list[Jaxpr]) -> bool:
    """Whether that is a loop whose programs neighbours may run in one function."""
    loop = primitive is while_p or primitive.name in LOOPS
    return loop and all(map(fits_for_lanes, programs))


_cheap = Anywhere(lambda eqn: _all_fit(eqn.primitive, _inside(eqn)))
