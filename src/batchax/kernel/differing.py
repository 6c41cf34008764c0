"""Which values of a jaxpr differ between lanes, and where in it lanes may wait for others.

The predicate of loops of Equinox, and so of diffrax and optimistix, uses a primitive that looks
through the batch axis: does any lane continue? Their bodies mask the lanes that do not. Where lanes
may diverge the predicate is evaluated for each lane, which is what such a loop means for one
example. Loops with checkpoints are different, for derivatives in reverse mode: their counters are
those of all lanes, and they check that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.bodies import Body, bodies_of, control_flow
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.inside import Anywhere, with_inside
from batchax.jaxprs.own_primitives import operations_of
from batchax.jaxprs.primitive_facts import enter, facts_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.registry import find
from batchax.memo import Memo, kept_with

_OF_ONE_LANE = {
    "unvmap_any": jnp.any,
    "unvmap_all": jnp.all,
    "unvmap_max": jnp.max,
    "nonbatchable": lambda x, **_: x,  # checks that lanes stay together
}
enter(
    """
    alias: nonbatchable nondifferentiable nondifferentiable_backward
    elementwise: select_if_vmap
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
    eqns = with_inside(jaxpr.eqns, lambda eqn: not control_flow(eqn.primitive).test)
    return any(eqn.primitive.name == "nonbatchable" for eqn in eqns)


LOOPS = frozenset({"bounded_loop", "reverse_sweep"})


def expand_bounded_loop(eqn: Eqn) -> ClosedJaxpr | None:
    """The program that an equation stands for, of its operands; None if it is no such loop.

    Nor one that uses the name of an axis: nobody says here how large that is.
    """
    if eqn.primitive.name not in LOOPS or _compat.named_axes(eqn.effects):
        return None
    types = tuple(v.aval for v in eqn.invars)
    key = value_key((eqn.primitive, types, tuple(sorted(eqn.params.items()))))
    return _written.get((key, _compat.trace_context()), lambda: operations_of(eqn))


_written = Memo("bounded loops as operations", most=256)


# Calls that may be replaced by what they call: they say nothing of how that is to be batched, and
# derivatives are taken of the program as it was.
OPENED = frozenset(
    "scan call checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit remat2 "
    "linear_with_transpose".split()
)

Differs = tuple[bool, ...]
"""For each of some values whether lanes have values of their own."""


class Differing(NamedTuple):
    """What is so of the results of a program, or of an equation.

    Attributes:
      results: which of them differ.
      parts: whether lanes leave a loop in it one by one, one that can be cut out: not inside a
        branch, nor in a call that must stay one.
    """

    results: Differs
    parts: bool


def differing(jaxpr: Jaxpr, inputs: Sequence[bool]) -> Differing:
    """That of a program, of which some inputs differ between lanes."""
    # Asked of each loop by all that are around it, and again where these are cut.
    return _differing(jaxpr, tuple(inputs))


@kept_with("what differs between lanes")
def _differing(jaxpr: Jaxpr, inputs: Differs) -> Differing:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    parts = [of_equation.parts for _, of_equation in differing_through(jaxpr, env)]
    return Differing(differs_of(env, jaxpr.outvars), any(parts))


def differing_through(jaxpr: Jaxpr, env: dict[Any, bool]) -> Iterator[tuple[Eqn, Differing]]:
    """That of each equation; `env` says which inputs differ, and then which variables do."""
    for eqn in jaxpr.eqns:
        of_equation = differing_in(eqn, differs_of(env, eqn.invars))
        env.update(zip(eqn.outvars, of_equation.results, strict=True))
        yield eqn, of_equation


def differs_of(env: dict[Any, bool], atoms: Sequence[Any]) -> Differs:
    """Which of some variables differ; numbers and constants of a program do not."""
    return tuple(not isinstance(v, Literal) and env.get(v, False) for v in atoms)


def differing_in(eqn: Eqn, operands: Differs) -> Differing:
    """That of an equation: where nothing else is known all results differ if an operand does."""
    operations = expand_bounded_loop(eqn)
    if operations is not None:
        return differing(operations.jaxpr, operands)
    bodies = bodies_of(eqn)
    if facts_of(eqn.primitive).looks:
        return Differing((False,) * len(eqn.outvars), False)
    if not bodies or not all(body.operands for body in bodies):
        return Differing((any(operands),) * len(eqn.outvars), False)
    flow = control_flow(eqn.primitive)
    if flow.branches:
        taken = [differing(b.jaxpr, [operands[k] for k in b.operands]).results for b in bodies]
        results = tuple(operands[0] or any(each) for each in zip(*taken, strict=True))
        return Differing(results, False)
    if flow.test:
        return _of_while(eqn, bodies, operands)
    (body,) = bodies
    inside = differing_in_steps(body.jaxpr, body.same, body.carried, _given(body, operands))
    results = [any(operands)] * len(eqn.outvars)
    for k, differs in zip(body.results, inside.results, strict=True):
        results[k] = differs
    return Differing(tuple(results), inside.parts and eqn.primitive.name in OPENED)


def _of_while(eqn: Eqn, bodies: Sequence[Body], operands: Differs) -> Differing:
    test, body = bodies
    tested = tuple(operands[k] for k in test.operands[: test.same])
    # As the rule of the loop has it where lanes may diverge.
    asked = asked_of_each_lane(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
    of_loop = differing_in_while(asked.jaxpr, body.jaxpr, tested, _given(body, operands))
    # What asks about all lanes in spite of that has to have all of them at its place.
    return of_loop._replace(parts=of_loop.parts and not looks_at_lanes.in_program(asked))


def differing_in_while(test: Jaxpr, body: Jaxpr, tested: Differs, given: Differs) -> Differing:
    """That of a ``while``.

    Args:
      test, body: its programs.
      tested: which constants of the predicate differ.
      given: which constants of the body do, and what of the first carry.
    """
    carried = len(body.outvars)
    inside = differing_in_steps(body, len(given) - carried, carried, given)
    (ends,) = differing(test, [*tested, *inside.results]).results
    if not ends:
        return inside
    return Differing((True,) * carried, not test.outvars[0].aval.shape)


def _given(body: Body, operands: Differs) -> Differs:
    return tuple(operands[k] for k in body.operands)


def differing_in_steps(jaxpr: Jaxpr, same: int, carried: int, given: Differs) -> Differing:
    """That of the body of a loop, once no step makes one more of its carry differ.

    Args:
      jaxpr: the body.
      same, carried: how many of its inputs are constants, and how many the loop carries; others
        are parts for each step. A call is a body that carries nothing.
      given: which of the inputs differ, before the first step.
    """
    while True:
        inside = differing(jaxpr, given)
        before = given[same : same + carried]
        carry = tuple(a or b for a, b in zip(before, inside.results, strict=False))
        if carry == before:
            return Differing((*carry, *inside.results[carried:]), inside.parts)
        given = (*given[:same], *carry, *given[same + carried :])


def predicate_is_batched(
    axis: Axis,
    test: ClosedJaxpr,
    body: ClosedJaxpr,
    test_at: Sequence[Position],
    body_at: Sequence[Position],
    carry_at: Sequence[Position],
) -> bool:
    """Whether a ``while`` ends at its own step in each lane; if that is not sure, False.

    Args:
      axis: the axis being mapped.
      test, body: its programs.
      test_at, body_at, carry_at: where operands have the batch axis.
    """
    if any(map(has_other_rule.in_program, (test, body))) or any_uses_axis(axis, test, body):
        return False
    given = tuple(a is not None for a in (*body_at, *carry_at))
    carry = differing_in_steps(body.jaxpr, len(body_at), len(carry_at), given).results
    tested = [*(a is not None for a in test_at), *carry]
    return differing(test.jaxpr, tested).results[0]


def _has_other_rule(eqn: Eqn) -> bool:
    entry = find(eqn.primitive)
    return entry is None or entry.is_users or eqn.primitive.name in _RULES_INSIDE


has_other_rule = Anywhere(_has_other_rule)
"""Whether a rule that is not batchax's may make what lanes share of what differs between them."""

_RULES_INSIDE = "custom_vmap_call", "custom_batched_call", "call_hi_primitive"
