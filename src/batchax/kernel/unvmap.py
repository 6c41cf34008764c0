"""Loops of Equinox, and with them of diffrax and optimistix, as loops of one example.

Their predicate asks, by a primitive that looks through the batch axis, whether any lane goes
on, and their body masks the lanes that do not. Where lanes may part ways each is asked for
itself, which is what such a loop means for one example. Not so in loops with checkpoints, for
derivatives in reverse: what they count they count for all lanes together, and check that.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.inside import Anywhere, with_inside
from batchax.jaxprs.primitive_facts import enter, facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.memo import Memo, kept_with

_OF_ONE_LANE = {
    "unvmap_any": jnp.any,
    "unvmap_all": jnp.all,
    "unvmap_max": jnp.max,
    "nonbatchable": lambda x, **_: x,  # checks that lanes stay together
}
enter(
    """
    alias: nonbatchable
    looks: unvmap_any unvmap_all unvmap_max
    """
)

looks_at_lanes = Anywhere(lambda eqn: facts_of(eqn.primitive).looks)
"""Whether a program looks at all lanes: what those hold that are elsewhere may mislead it."""


def asked_of_each_lane(test: ClosedJaxpr, body: ClosedJaxpr) -> ClosedJaxpr:
    """The predicate of a loop, without looking at other lanes; as it is if they stay together."""
    if not any(eqn.primitive.name in _OF_ONE_LANE for eqn in test.jaxpr.eqns):
        return test
    if _stays_together(body.jaxpr):
        return test
    jaxpr, consts = test.jaxpr, test.consts

    def run_equation(eqn: Eqn, operands: list[Value]) -> Any:
        of_one_lane = _OF_ONE_LANE.get(eqn.primitive.name)
        return [of_one_lane(*operands)] if of_one_lane else bind_equation(eqn, operands)

    def run(*args: Any) -> list[Any]:
        return evaluate(jaxpr, consts, args, run_equation)

    return _asked.get(_compat.trace_context(), lambda: _compat.stage(run, test.in_avals), test)


_asked = Memo("predicates asked of each lane", most=256)


@kept_with("whether lanes stay together in a loop")
def _stays_together(jaxpr: Jaxpr) -> bool:
    """Whether a program checks that lanes stay together; loops in it check for themselves."""
    eqns = with_inside(jaxpr.eqns, lambda eqn: eqn.primitive is not while_p)
    return any(eqn.primitive.name == "nonbatchable" for eqn in eqns)
