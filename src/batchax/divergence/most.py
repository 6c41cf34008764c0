"""What it costs at most where lanes may part ways: in a loop, or in loops and branches inside it.

That is known before anything is batched; to find out more takes as long as batching it does.
"""

from __future__ import annotations

from jax.extend.core.primitives import cond_p, while_p

from batchax.divergence.price import STEPS_INSIDE, Price
from batchax.divergence.widths import launch_time
from batchax.jaxprs.inside import Anywhere, programs_inside
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.divergence import AnyLoop
from batchax.kernel.written_out import LOOPS, written_out
from batchax.memo import kept_with
from batchax.programs.cost import STEPS, Cost, cost_of_equation, cost_of_program
from batchax.programs.shapes import bytes_of
from batchax.programs.weights import TOGETHER

_BEGUN = 2  # operations more in a loop that is cut: in its predicate, and in one more segment


def dearest_step(loop: AnyLoop) -> float:
    """Nanoseconds that a step of the dearest loop, or the dearest branch, takes for a lane."""
    return _dearest_of(loop.primitive, _programs(loop))


def price_of_loops(loop: AnyLoop) -> Price:
    """The price of a step of each ``while``, `loop` among them, as `nest_of` may cut them."""
    cost = _loops_of(loop.primitive, _programs(loop))
    return Price(launch_time(cost.launches), TOGETHER.time(cost))


def _programs(loop: AnyLoop) -> list[Jaxpr]:
    return [p.jaxpr for p in loop.params.values() if isinstance(p, ClosedJaxpr)]


def _dearest_of(primitive: object, programs: list[Jaxpr]) -> float:
    dearest = max(map(_dearest, programs), default=0.0)
    if primitive is while_p or primitive is cond_p:
        costs = (cost_of_program(p, steps=STEPS) + _kept(p) for p in programs)
        dearest = max(dearest, *map(TOGETHER.time, costs))
    return dearest


@kept_with("what a step of the dearest loop in programs costs")
def _dearest(jaxpr: Jaxpr) -> float:
    each = (_dearest_of(eqn.primitive, _inside(eqn)) for eqn in jaxpr.eqns)
    return max(each, default=0.0)


def _loops_of(primitive: object, programs: list[Jaxpr]) -> Cost:
    if primitive is cond_p:  # not cut
        return Cost()
    if primitive is while_p:
        return sum((_once(p) + _kept(p) for p in programs), Cost(launches=_BEGUN))
    return sum(map(_loops, programs), Cost())


@kept_with("what a step of each loop in programs costs")
def _loops(jaxpr: Jaxpr) -> Cost:
    return sum((_loops_of(eqn.primitive, _inside(eqn)) for eqn in jaxpr.eqns), Cost())


@kept_with("what programs cost in which each loop takes a step")
def _once(jaxpr: Jaxpr) -> Cost:
    return sum(map(_once_of, jaxpr.eqns), Cost())


def _once_of(eqn: Eqn) -> Cost:
    if not holds_while.in_equation(eqn):
        return cost_of_equation(eqn, steps=STEPS_INSIDE)
    # A loop that is not cut takes more steps; but then nothing is gained by it.
    return sum((_once(p) + _kept(p) for p in _inside(eqn)), Cost(launches=_BEGUN))


def _kept(jaxpr: Jaxpr) -> Cost:
    """What it costs at most that lanes which are done keep what they have."""
    return Cost(bytes=3 * bytes_of(v.aval for v in jaxpr.outvars))


def _inside(eqn: Eqn) -> list[Jaxpr]:
    """The programs of an equation; of a bounded loop the one that it stands for."""
    operations = written_out(eqn)
    return programs_inside(eqn) if operations is None else [operations.jaxpr]


holds_while = Anywhere(lambda eqn: eqn.primitive is while_p or eqn.primitive.name in LOOPS)
"""Whether a program holds a loop that lanes may leave one by one."""
