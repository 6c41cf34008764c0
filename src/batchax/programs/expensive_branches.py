"""Which branches are so expensive that lanes may wait before them, until many have come.

That depends on nothing but their programs, so that all who ask get the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batchax.jaxprs.bodies import control_flow
from batchax.jaxprs.evaluate import variables_in, variables_read
from batchax.jaxprs.words import Aval, Eqn, Jaxpr
from batchax.programs.cost import (
    LAUNCH,
    STEPS,
    VECTORIZED,
    Cost,
    Nanoseconds,
    bytes_of,
    cost_of_program,
    costs_of_program,
)
from batchax.programs.thresholds import ANY_MACHINE, TABLE

NARROWEST = 32  # lanes in a block, if there are twice as many
ROW = TABLE[ANY_MACHINE]
"""The thresholds of every device: a jaxpr is cut before any is known."""


def expensive_branches(eqn: Eqn, differs: Sequence[bool]) -> list[int]:
    """Which branches of a ``cond`` are.

    Args:
      eqn: the equation.
      differs: which of its operands differ between lanes.
    """
    branches = control_flow(eqn.primitive).branches
    if not branches or eqn.params.get("branches_platforms"):
        return []
    programs = [program.jaxpr for program in eqn.params[branches]]
    return [i for i, jaxpr in enumerate(programs) if _is_expensive(jaxpr, differs[1:])]


def may_be_expensive(jaxpr: Jaxpr) -> bool:
    """Whether a branch is expensive enough, whatever lanes have of their own."""
    return time_of_block(cost_of_program(jaxpr, steps=STEPS)) >= ROW.min_work


def time_of_block(cost: Cost) -> Nanoseconds:
    """How long a narrow block takes of lanes of which each costs so much."""
    return Nanoseconds(LAUNCH * cost.launches + NARROWEST * VECTORIZED.time(cost))


def _is_expensive(jaxpr: Jaxpr, differs: Sequence[bool]) -> bool:
    cost = cost_of_program(jaxpr, differs=differs, steps=STEPS)
    if time_of_block(cost) < ROW.min_work:
        return False
    work = VECTORIZED.time(cost)
    moving = time_to_move(moved(jaxpr, differs))
    copied = VECTORIZED.time(cost_of_program(jaxpr, differs=(True,) * len(differs), steps=STEPS))
    # Where all lanes would have copies of what they share, a block saves these, too.
    copies = copied >= ROW.min_copy_cost * (work + moving)
    least = ROW.min_gain if copies else ROW.min_gain_of_all
    return work > least * moving and time_begun(jaxpr, differs) >= ROW.min_unfused_share * work


def moved(jaxpr: Jaxpr, differs: Sequence[bool]) -> list[Aval]:
    """What of a lane is moved: what a branch reads, and what it computes."""
    read = {v for eqn in jaxpr.eqns for v in variables_read(eqn)}
    computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    own = (v for v, d in zip(jaxpr.invars, differs, strict=True) if d and v in read)
    made = dict.fromkeys(v for v in variables_in(jaxpr.outvars) if v in computed)
    return [v.aval for v in (*own, *made)]


def time_to_move(arrays: Iterable[Any]) -> Nanoseconds:
    """What it costs to move arrays of a lane to the lanes it runs with, and back."""
    each_way = (Cost(places=3, bytes=2 * bytes_of([a])) for a in arrays)  # read there, written here
    return VECTORIZED.time(2 * sum(each_way, Cost()))


def time_begun(jaxpr: Jaxpr, differs: Sequence[bool]) -> Nanoseconds:
    """How long a lane takes in operations which are not fused with others."""
    return VECTORIZED.time(costs_of_program(jaxpr, differs=differs, steps=STEPS)[1])
