"""A rule run on a batch of one lane, as a function of one example that the engine batches.

A gradient of each lane with respect to what all lanes share is the derivative of a rule that is
given that for each lane. The rule then does for each lane what it would do once: it factors a
matrix as often as there are lanes. Run on a batch of one lane it is given the matrix as shared, and
what it does is batched by the engine, which knows throughout what does not depend on the lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from jax import lax
from jax.core import eval_jaxpr

from batchax.jaxprs.words import ClosedJaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.inner import stage_function
from batchax.kernel.own_primitive import Flat
from batchax.programs.cost import LAUNCH, STEPS, TOGETHER, cost_of_program
from batchax.user_rules.call import Flags
from batchax.user_rules.rule import UserRule

# Of the cost of the other way, and a launch less: a smaller gain is within the error of the price.
# The benchmark `rules` times it.
WORTH = 0.8

_inside: ContextVar[bool] = ContextVar("batchax_of_one_lane", default=False)


@contextmanager
def of_one_lane() -> Iterator[None]:
    """While a rule is run so: one that calls its own function would be run so without end."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def one_lane(
    axis: Axis, rule: UserRule, jaxpr: ClosedJaxpr, flags: Flags, needed: Flags
) -> Flat | None:
    """The rule as a function of one example, if that does once what is expensive for each lane.

    Args:
      axis: the axis being mapped.
      rule: the rule.
      jaxpr: the program of its function.
      flags: which operands are batched.
      needed: which would have to be for the rule to compute all lanes.
    """

    def shares(program: ClosedJaxpr) -> bool:
        costs = (cost_of_program(program, differs=f, steps=STEPS) for f in (flags, needed))
        once, each = map(TOGETHER.time, costs)
        return once < WORTH * each and axis.size * (each - once) > LAUNCH

    # A rule that is told the name of the axis may use all lanes of it.
    if flags == needed or _inside.get() or rule.asks or not shares(jaxpr):
        return None
    alone, count = replace(axis, size=1), len(rule.closed)

    def run(*xs: Any) -> list[Any]:
        given = [lax.expand_dims(x, (0,)) if f else x for x, f in zip(xs, flags, strict=True)]
        outs, out_flags = rule.run(alone, flags[count:], given[:count], given[count:])
        return [lax.squeeze(x, (0,)) if f else x for x, f in zip(outs, out_flags, strict=True)]

    try:
        with of_one_lane():
            program = stage_function(axis, run, jaxpr.in_avals)
    except Exception:  # the rule serves batches of other sizes: it is run on all lanes
        return None
    if program.effects or not shares(program):
        return None
    return lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)
