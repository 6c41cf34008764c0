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
from batchax.cache import Cache, cached_on
from batchax.jaxprs.bodies import Anywhere, Body, bodies_of, control_flow, with_inside
from batchax.jaxprs.evaluate import Rewriter, bind_equation, evaluate
from batchax.jaxprs.primitive_facts import enter, facts_of, operations_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.registry import find

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
    """Rewrites the predicate of a loop to look at one lane only.

    It stays as it is if the body keeps lanes in lockstep.
    """
    # Equinox reduces predicates over all lanes with `unvmap_any` and the like.
    if not any(eqn.primitive.name in _OF_ONE_LANE for eqn in test.jaxpr.eqns):
        return test
    if _stays_together(body.jaxpr):
        return test
    jaxpr, consts = test.jaxpr, test.consts

    def run_equation(eqn: Eqn, operands: list[Value]) -> Sequence[Value]:
        of_one_lane = _OF_ONE_LANE.get(eqn.primitive.name)
        return [of_one_lane(*operands)] if of_one_lane else bind_equation(eqn, operands)

    def run(*args: Value) -> list[Any]:
        return evaluate(jaxpr, consts, args, run_equation)

    return _predicates.get(_compat.trace_context(), lambda: _compat.stage(run, test.in_avals), test)


def unmasked(body: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites the body of a loop that asks about all lanes not to mask those that are done.

    For one example, Equinox's `select_if_vmap` is its second operand. Where the predicate is that
    of each lane (`asked_of_each_lane`), batchax masks lanes, and a second mask would cost time.
    """
    masks = lambda eqn: eqn.primitive.name == "select_if_vmap"
    if not any(map(masks, body.jaxpr.eqns)):
        return body

    def build() -> ClosedJaxpr:
        to = Rewriter(body)
        for eqn in body.jaxpr.eqns:
            if masks(eqn):
                to.names[eqn.outvars[0]] = to.atom(eqn.invars[1])
            else:
                to.eqns.append(to.own(eqn))
        return to.program()

    return _predicates.get("unmasked", build, body)


_predicates = Cache("loops of each lane", most=256)


@cached_on("whether lanes stay together in a loop")
def _stays_together(jaxpr: Jaxpr) -> bool:
    """Returns whether a program checks that lanes stay in lockstep, loops in it aside."""
    # Loops inside are checked separately, as they have predicates.
    eqns = with_inside(jaxpr.eqns, lambda eqn: not control_flow(eqn.primitive).test)
    return any(eqn.primitive.name == "nonbatchable" for eqn in eqns)


LOOPS = frozenset({"bounded_loop", "reverse_sweep"})


def expand_bounded_loop(eqn: Eqn) -> ClosedJaxpr | None:
    """Returns a bounded loop as the jaxpr of its operations, or None if `eqn` is not one.

    Also None if it uses the name of an axis, whose size is not known here.
    """
    if eqn.primitive.name not in LOOPS or _compat.named_axes(eqn.effects):
        return None
    types = tuple(v.aval for v in eqn.invars)
    # Programs are compared by value: tracing outside of `jit` makes new objects each time.
    key = value_key((eqn.primitive, types, tuple(sorted(eqn.params.items()))))
    return _written.get((key, _compat.trace_context()), lambda: operations_of(eqn))


_written = Cache("bounded loops as operations", most=256)


# Calls that may be replaced by what they call: they say nothing of how that is to be batched, and
# derivatives are taken of the program as it was.
OPENED = frozenset(
    "scan call checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit remat2 "
    "linear_with_transpose".split()
)

Differs = tuple[bool, ...]
"""For each of some values whether it is batched."""


class Differing(NamedTuple):
    """Says which results of a program or equation differ between lanes."""

    results: Differs  # for each result
    # Whether lanes leave a loop inside one by one, and that loop can be cut out: it is not in a
    # branch, or in a call that must stay one.
    parts: bool


def differing(jaxpr: Jaxpr, inputs: Sequence[bool]) -> Differing:
    """Computes which results of a jaxpr differ, from which of its inputs do."""
    # Loops around a loop ask for it, and ask again where it is cut out: hence the cache.
    return _differing(jaxpr, tuple(inputs))


@cached_on("what differs between lanes")
def _differing(jaxpr: Jaxpr, inputs: Differs) -> Differing:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    parts = [of_equation.parts for _, of_equation in differing_through(jaxpr, env)]
    return Differing(differs_of(env, jaxpr.outvars), any(parts))


def differing_through(jaxpr: Jaxpr, env: dict[Any, bool]) -> Iterator[tuple[Eqn, Differing]]:
    """Yields the result for each equation. `env` starts with the inputs and is extended."""
    for eqn in jaxpr.eqns:
        of_equation = differing_in(eqn, differs_of(env, eqn.invars))
        env.update(zip(eqn.outvars, of_equation.results, strict=True))
        yield eqn, of_equation


def differs_of(env: dict[Any, bool], atoms: Sequence[Any]) -> Differs:
    """Looks up which atoms differ; literals and constants do not."""
    return tuple(not isinstance(v, Literal) and env.get(v, False) for v in atoms)


def differing_in(eqn: Eqn, operands: Differs) -> Differing:
    """Computes which results of an equation differ. By default all do if an operand does."""
    if eqn.primitive.name == "sort" and not any(operands[: eqn.params["num_keys"]]):
        return Differing(operands, False)  # the order is shared
    operations = expand_bounded_loop(eqn)
    if operations is not None:
        return differing(operations.jaxpr, operands)
    bodies = bodies_of(eqn)
    # Results that reduce over all lanes are the same for each lane.
    if facts_of(eqn.primitive).looks:
        return Differing((False,) * len(eqn.outvars), False)
    if not bodies or not all(body.operands for body in bodies):
        return Differing((any(operands),) * len(eqn.outvars), False)
    flow = control_flow(eqn.primitive)
    if flow.branches:
        # If the index differs, every result does; otherwise a result does if it does in some
        # branch.
        taken = [differing(b.jaxpr, [operands[k] for k in b.operands]).results for b in bodies]
        results = tuple(operands[0] or any(each) for each in zip(*taken, strict=True))
        return Differing(results, False)
    if flow.test:
        return _of_while(eqn, bodies, operands)
    (body,) = bodies
    if body.count is not None and operands[body.count]:  # lanes stop at different steps
        return Differing((True,) * len(eqn.outvars), False)
    inside = differing_in_steps(body.jaxpr, body.same, body.carried, _given(body, operands))
    results = [any(operands)] * len(eqn.outvars)
    for k, differs in zip(body.results, inside.results, strict=True):
        # Results that are not listed, such as stacked outputs, differ if an operand does.
        results[k] = differs
    return Differing(tuple(results), inside.parts and eqn.primitive.name in OPENED)


def _of_while(eqn: Eqn, bodies: Sequence[Body], operands: Differs) -> Differing:
    test, body = bodies
    tested = tuple(operands[k] for k in test.operands[: test.same])
    # As the rule of the loop has it where lanes may diverge.
    predicate = asked_of_each_lane(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
    of_loop = differing_in_while(predicate.jaxpr, body.jaxpr, tested, _given(body, operands))
    # What asks about all lanes in spite of that has to have all of them at its place.
    return of_loop._replace(parts=of_loop.parts and not looks_at_lanes.in_program(predicate))


def differing_in_while(test: Jaxpr, body: Jaxpr, tested: Differs, given: Differs) -> Differing:
    """Computes which results of a ``while`` differ.

    `tested` is for the constants of the predicate, `given` for those of the body and the first
    carry.
    """
    carried = len(body.outvars)
    inside = differing_in_steps(body, len(given) - carried, carried, given)
    # A predicate that differs makes the whole carry differ, as lanes stop at different steps.
    (ends,) = differing(test, [*tested, *inside.results]).results
    if not ends:
        return inside
    return Differing((True,) * carried, not test.outvars[0].aval.shape)


def _given(body: Body, operands: Differs) -> Differs:
    return tuple(operands[k] for k in body.operands)


def differing_in_steps(jaxpr: Jaxpr, same: int, carried: int, given: Differs) -> Differing:
    """Computes which results of a loop body differ at the fixed point over its steps.

    The inputs are `same` constants, `carried` parts of the carry, and slices of each step. A call
    is a body that carries nothing.
    """
    # Entries only change from False to True, so this ends.
    while True:
        inside = differing(jaxpr, given)
        before = given[same : same + carried]
        carry = tuple(a or b for a, b in zip(before, inside.results, strict=False))
        if carry == before:
            parts = inside.parts and not _stays_together(jaxpr)
            return Differing((*carry, *inside.results[carried:]), parts)
        given = (*given[:same], *carry, *given[same + carried :])


def predicate_is_batched(
    axis: Axis,
    test: ClosedJaxpr,
    body: ClosedJaxpr,
    test_at: Positions,
    body_at: Positions,
    carry_at: Positions,
) -> bool:
    """Returns whether lanes end a ``while`` at different steps; False where that is not known."""
    if not differences_are_exact(axis, test, body):
        return False
    given = tuple(a is not None for a in (*body_at, *carry_at))
    carry = differing_in_steps(body.jaxpr, len(body_at), len(carry_at), given).results
    tested = [*(a is not None for a in test_at), *carry]
    return differing(test.jaxpr, tested).results[0]


def differences_are_exact(axis: Axis, *programs: ClosedJaxpr) -> bool:
    """Returns whether what differs between lanes is what depends on the batch."""
    # A rule of a user, or a collective, may make a shared value from batched ones.
    return not (any(map(has_other_rule.in_program, programs)) or any_uses_axis(axis, *programs))


def _has_other_rule(eqn: Eqn) -> bool:
    entry = find(eqn.primitive)
    return entry is None or entry.is_users or eqn.primitive.name in _RULES_INSIDE


has_other_rule = Anywhere(_has_other_rule)
"""Whether a rule that is not batchax's may make what lanes share of what differs between them."""

_RULES_INSIDE = "custom_vmap_call", "custom_batched_call", "call_hi_primitive"
