"""Batches a call with a user's batching rule.

A gradient of each lane with respect to an unbatched operand is the derivative of a rule that gets
that operand for each lane. The rule then repeats for each lane what it would do once: it factors a
matrix as often as there are lanes. Instead it runs on a batch of one lane, with the matrix as an
unbatched operand, and its operations are batched by their own rules, which keep unbatched work
unbatched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.analysis.cost import LAUNCH, STEPS, VECTORIZED, cost_of_program
from batchax.custom_rules.call import (
    BatchedFlat,
    DerivativeStep,
    Flags,
    MappedStep,
    after,
    custom_call_p,
    effects_had,
    jvp,
    merged,
    per_example,
    positions,
    result_types,
    to_front,
    transpose,
    without_primals,
)
from batchax.custom_rules.rule import UserRule
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Positions, RuleOutputs
from batchax.kernel.inner import batch_function, stage_function
from batchax.kernel.own_primitive import Flat, own_primitive

# Of the cost of the other way, and a launch less: a smaller gain is within the error of the price.
# The benchmark `rules` times it.
WORTH = 0.8

_inside: ContextVar[bool] = ContextVar("batchax_of_one_lane", default=False)


@contextmanager
def of_one_lane() -> Iterator[None]:
    """Marks a rule that runs for one lane: calling its own function must not do so again."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def one_lane(
    axis: Axis, rule: UserRule, jaxpr: ClosedJaxpr, flags: Flags, needed: Flags
) -> Flat | None:
    """Returns the rule as a function of one example, if that shares expensive work.

    `flags` are the batched operands, and `needed` those that would have to be for the rule to
    compute all lanes.
    """

    def shares(program: ClosedJaxpr) -> bool:
        # `once` is the cost where shared work is done once, `each` that of the rule on all lanes.
        costs = (cost_of_program(program, differs=f, steps=STEPS) for f in (flags, needed))
        once, each = map(VECTORIZED.time, costs)
        return once < WORTH * each and axis.size * (each - once) > LAUNCH

    # A rule that takes the name of the axis may use all lanes of it.
    if flags == needed or _inside.get() or rule.asks or not shares(jaxpr):
        return None
    alone, count = replace(axis, size=1), len(rule.closed)

    def run(*xs: Value) -> list[Any]:
        # The rule sees a batch of one lane.
        given = [lax.expand_dims(x, (0,)) if f else x for x, f in zip(xs, flags, strict=True)]
        outs, out_flags = rule.run(alone, flags[count:], given[:count], given[count:])
        return [lax.squeeze(x, (0,)) if f else x for x, f in zip(outs, out_flags, strict=True)]

    try:
        with of_one_lane():
            program = stage_function(axis, run, jaxpr.in_avals)
    except Exception:  # the rule serves batches of other sizes: it is run on all lanes
        return None
    # Effects would occur while the rule is traced.
    if program.effects or not shares(program):
        return None
    return lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    jaxpr: ClosedJaxpr,
    steps: tuple[DerivativeStep, ...],
    rule: UserRule,
) -> RuleOutputs:
    flags = [a is not None for a in axes]
    named = axis.name is not None and axis.name in _compat.named_axes(jaxpr.effects)
    # Nothing is batched, and no collective is over the axis: the call stays as it is.
    if not (named or any(flags)):
        outs = custom_call_p.bind(*args, jaxpr=jaxpr, steps=steps, rule=rule)
        return outs, [None] * len(outs)
    count = len(rule.closed)
    values = _before(steps, flags, "values_before")
    needed = _before(steps, flags, "flags_before")
    # A rule for packed rows only does not apply to arrays, which are batched without a rule.
    ruled = rule.rule is not None or rule.for_rows is None
    if ruled and any(values[count:]) and not any(needed[:count]):
        recording.note(service="user", rule=rule.shown)
        return _by_rule(axis, rule, jaxpr, steps, args, axes)
    if steps and not any(values) and not named:
        # Many directions of derivatives, of a function that is called for one example still.
        directions = MappedStep(replace(axis, name=None), tuple(flags))
        front = map(functools.partial(to_front, axis), args, axes)
        outs = custom_call_p.bind(*front, jaxpr=jaxpr, steps=(*steps, directions), rule=rule)
        return outs, [0] * len(outs)
    # The rule knows nothing of batches of what the function closes over.
    return batch_function(axis, per_example(jaxpr, steps), args, axes)


def _before(steps: Sequence[DerivativeStep], flags: Flags, which: str) -> Flags:
    return functools.reduce(lambda f, step: getattr(step, which)(f), reversed(steps), flags)


def _by_rule(
    axis: Axis,
    rule: UserRule,
    jaxpr: ClosedJaxpr,
    steps: tuple[DerivativeStep, ...],
    args: Values,
    axes: Positions,
) -> RuleOutputs:
    """Applies derivative `steps` to what the rule computes."""
    flags = [a is not None for a in axes]
    values = _before(steps, flags, "values_before")
    needed = _before(steps, flags, "flags_before")
    # With these steps, the rule runs after its function has run.
    with effects_had(bool(without_primals(steps))):
        alone = one_lane(axis, rule, jaxpr, values, needed)
        if alone is not None:
            with of_one_lane():
                return batch_function(axis, after(steps, alone), args, axes)
        function = _derivatives(axis, rule, steps, flags)
        return positions(*function(*map(functools.partial(to_front, axis), args, axes)))


def _derivatives(
    axis: Axis, rule: UserRule, given: Sequence[DerivativeStep], flags: Flags
) -> BatchedFlat:
    """Applies the `given` steps to the rule, for operands that `flags` marks as batched."""
    steps = merged(given)
    every = [flags]  # of the operands before each step
    # From the last step to the first: what must be batched before each of them.
    for step in reversed(steps):
        every.append(step.flags_before(every[-1]))
    first, *later = reversed(every)
    count = len(rule.closed)

    def function(*xs: Value) -> tuple[list[Any], Flags]:
        return rule.run(axis, first[count:], xs[:count], xs[count:])

    for step, of_operands in zip(steps, later, strict=True):
        function = step.batched(axis, function, of_operands)
    return function


own_primitive(
    custom_call_p,
    called="function with a batching rule",
    operations=lambda *operands, jaxpr, steps, rule: per_example(jaxpr, steps)(*operands),
    types=lambda *avals, jaxpr, steps, rule: result_types(jaxpr, steps),
    programs=("jaxpr",),
    facts="endless costly",  # what a rule will do is not known
    rule=_batched,
    jvp=jvp,
    transpose=transpose,
)
