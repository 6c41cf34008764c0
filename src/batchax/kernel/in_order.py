"""Programs with effects that come in order: in that of the loop over the examples.

Of a callback that is called in order (``ordered=True``) that loop makes all calls of one example
before those of the next. So here lanes run one after another, from the first such callback to the
last. As few equations as possible do: what a later callback does not need of an earlier one is
computed before or after, for all lanes together.

What all lanes have in common is called once; lanes come one after another before it, and again
after it. So they do where they meet, in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import cond_p, while_p

from batchax import _compat
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import Step, bind_equation, plan, variables_in, walk
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn, Jaxpr
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position
from batchax.kernel.differing import OPENED, differing_in, differing_through, differs_of
from batchax.kernel.fallback import one_after_another
from batchax.kernel.named_axes import has_rules, uses_axis

Placed = tuple[Any, Position]
"""A value, and where it carries the batch axis."""


def in_order(jaxpr: Jaxpr) -> bool:
    """Whether a program has effects that come in order."""
    return any(eqn.effects and _compat.in_order(eqn.effects) for eqn in jaxpr.eqns)


def evaluate_in_order(
    axis: Axis,
    jaxpr: Jaxpr,
    consts: Sequence[Placed],
    args: Sequence[Placed],
    run_equation: Callable[[Any, list[Placed]], Iterable[Placed]],
) -> list[Placed]:
    """What `jaxpr` returns, as `evaluate` of `run_equation`, with effects in order."""
    env: dict[Any, Placed] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    steps = [step._replace(dead=()) for step in plan(jaxpr.eqns, jaxpr.outvars)]
    waiting: list[Step] = []
    made: set[Any] = set()

    def read(v: Any) -> Placed:
        return (v.val, None) if isinstance(v, Literal) else env[v]

    def run(steps: Iterable[Step]) -> None:
        walk(steps, env, read, lambda step, operands: run_equation(step.eqn, operands))

    def run_waiting() -> None:
        calls, others = _needed(waiting)
        if len(calls) > 1 or any(_repeats(step.eqn, read(step.inputs[0])) for step in calls):
            inside = set(map(id, calls))
            reads = [jaxpr.outvars, *(s.inputs for s in steps if id(s) not in inside)]
            _run_lanes(axis, calls, env, read, set().union(*map(variables_in, reads)))
        else:
            run(calls)
        run(others)
        waiting.clear()
        made.clear()

    for step in steps:
        waits = not made.isdisjoint(variables_in(step.inputs))
        if not (waits or _compat.in_order(step.eqn.effects)):
            run([step])
        elif waits or _calls_differ(step.eqn, [read(v)[1] is not None for v in step.eqn.invars]):
            if _needs_all(axis, step.eqn):
                run_waiting()
                run([step])
            else:
                waiting.append(step)
                made.update(step.outputs)
        else:  # what it calls is the same for all lanes
            run_waiting()
            run([step])
    run_waiting()
    return list(map(read, jaxpr.outvars))


def _calls_differ(eqn: Eqn, operands: Sequence[bool]) -> bool:
    """Whether lanes make calls of their own in an equation, which makes some in order.

    Not if all that is called with is the same for all, whatever else of the equation differs.

    Args:
      eqn: the equation.
      operands: which of its operands differ between lanes.
    """
    if not any(operands):
        return False
    if eqn.primitive.name not in _LOOKED_INTO or has_rules(eqn):
        return True
    results = differing_in(eqn, tuple(operands)).results
    if eqn.primitive is cond_p and operands[0]:
        return True
    if eqn.primitive is while_p and all(results):  # as where lanes leave it one by one
        return True
    for body in bodies_of(eqn):
        first, last = body.same, body.same + body.carried
        given = [operands[k] for k in body.operands]
        given[first:last] = results[: body.carried]
        env = dict(zip(body.jaxpr.invars, given, strict=True))
        for inside, _ in differing_through(body.jaxpr, env):
            called = _compat.in_order(inside.effects)
            if called and _calls_differ(inside, differs_of(env, inside.invars)):
                return True
    return False


_LOOKED_INTO = OPENED | {"while", "cond"}


def _needs_all(axis: Axis, eqn: Eqn) -> bool:
    """Whether lanes cannot run an equation one after another: they meet, or part a reference."""
    return uses_axis(axis, eqn) or any(hasattr(v.aval, "inner_aval") for v in eqn.invars)


def _repeats(eqn: Eqn, first: Placed) -> bool:
    """Whether an equation runs a program more or less often than once for each lane."""
    together = eqn.primitive is cond_p and first[1] is None
    return facts_of(eqn.primitive).nests and not together


def _needed(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps with effects that come in order, with all that later ones need; and the others."""
    eqns = [step.eqn for step in steps]
    needed = plan(eqns, (), keeps=lambda eqn: _compat.in_order(eqn.effects))
    inside = {id(step.eqn) for step in needed}
    calls = [step for step in steps if id(step.eqn) in inside]
    return calls, [step for step in steps if id(step.eqn) not in inside]


def _run_lanes(
    axis: Axis,
    steps: Sequence[Step],
    env: dict[Any, Placed],
    read: Callable[[Any], Placed],
    needed: set[Any],
) -> None:
    """Runs steps for one lane after another; what they make that is `needed` is left in `env`."""
    # Of calls whose results nobody reads in a scan JAX's reverse mode makes none.
    calls = {v for step in steps if _compat.in_order(step.eqn.effects) for v in step.outputs}
    made = {v for step in steps for v in step.outputs}
    read_here = dict.fromkeys(v for step in steps for v in variables_in(step.inputs))
    inputs = [v for v in read_here if v not in made]
    needed = needed | calls
    outputs = [v for step in steps for v in step.outputs if v in needed]

    def one_lane(*xs: Any) -> list[Any]:
        own = dict(zip(inputs, xs, strict=True))
        value = lambda v: v.val if isinstance(v, Literal) else own[v]
        walk(steps, own, value, lambda step, xs: bind_equation(step.eqn, xs))
        return [own[v] for v in outputs]

    values, positions = [read(v)[0] for v in inputs], [read(v)[1] for v in inputs]
    if recording.is_on():
        at = dict(zip(inputs, positions, strict=True))
        for step in steps[1:]:
            with _recorded(axis, step, at):
                recording.note(service="lanes")
        with _recorded(axis, steps[0], at):
            outs = one_after_another(axis, one_lane, values, positions)
    else:
        outs = one_after_another(axis, one_lane, values, positions)
    env.update(zip(outputs, [(x, 0) for x in outs], strict=True))


def _recorded(axis: Axis, step: Step, at: dict[Any, Position]) -> Any:
    """While notes of an equation are taken whose operands have the batch axis `at` a position."""
    positions = [None if isinstance(v, Literal) else at.get(v, 0) for v in step.inputs]
    return recording.equation(axis, step.eqn, positions, False)
