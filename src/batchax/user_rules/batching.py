"""How a call with a batching rule of the user's is batched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_function
from batchax.kernel.interpreter import Place
from batchax.kernel.own_primitive import own_primitive
from batchax.user_rules.call import (
    BatchedFlat,
    DerivativeStep,
    Flags,
    MappedStep,
    after,
    custom_call_p,
    effects_had,
    per_example,
    result_types,
    spread,
)
from batchax.user_rules.derivatives import jvp, transpose
from batchax.user_rules.one_lane import of_one_lane, one_lane
from batchax.user_rules.rule import UserRule
from batchax.user_rules.together import (
    Axes,
    Batched,
    Pullbacks,
    Values,
    later_calls,
    positions,
    to_front,
    with_pullback,
    with_pullback_of_one,
)

"""A run through a program, and the equation of it that is batched."""


def _batched(
    axis: Axis,
    args: Sequence[Value],
    axes: Sequence[Position],
    /,
    *,
    jaxpr: ClosedJaxpr,
    steps: tuple[DerivativeStep, ...],
    rule: UserRule,
    place: Place | None = None,
) -> Batched:
    flags = [a is not None for a in axes]
    named = axis.name is not None and axis.name in _compat.named_axes(jaxpr.effects)
    if not (named or any(flags)):
        outs = custom_call_p.bind(*args, jaxpr=jaxpr, steps=steps, rule=rule)
        return outs, [None] * len(outs)
    count = len(rule.closed)
    values = _before(steps, flags, "values_before")
    needed = _before(steps, flags, "flags_before")
    # One for packed rows only has nothing to say of arrays, which are batched as by no rule.
    ruled = rule.rule is not None or rule.for_rows is None
    if ruled and any(values[count:]) and not any(needed[:count]):
        recording.note(service="user", rule=rule.shown)
        return _by_rule(axis, rule, jaxpr, steps, args, axes, place)
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
    args: Sequence[Value],
    axes: Axes,
    place: Place | None,
) -> Batched:
    """The derivatives `steps` of what the rule computes; what a later call needs is kept."""
    kept = {} if place is None else place[0].kept
    if place is not None and id(place[1]) in kept:
        return kept.pop(id(place[1]))(args, axes)
    later = None if place is None else later_calls(*place)
    flags = targets = [a is not None for a in axes]
    if isinstance(later, Pullbacks):
        targets = [f or i in later.moving for i, f in enumerate(flags)]
        if any(_before(steps, targets, "flags_before")[: len(rule.closed)]):
            later, targets = None, flags
    again = steps  # with these the rule is computed after its function was
    if isinstance(later, Values):
        again = steps[:-1]
        steps = (*again, replace(steps[-1], values=True))
    values = _before(steps, flags, "values_before")
    needed = _before(steps, targets, "flags_before")
    pullback = None
    with effects_had(bool(again)):
        alone = one_lane(axis, rule, jaxpr, values, needed)
        if alone is not None:
            function = after(steps, alone)
            with of_one_lane():
                if isinstance(later, Pullbacks):
                    result, pullback = with_pullback_of_one(axis, function, args, axes, later)
                else:
                    result = batch_function(axis, function, args, axes)
        else:
            function = _derivatives(axis, rule, steps, targets)
            front = map(functools.partial(to_front, axis), args, axes)
            front = list(map(functools.partial(spread, axis), front, flags, targets))
            if isinstance(later, Pullbacks):
                result, pullback = with_pullback(axis, function, front, later)
            else:
                result = positions(*function(*front))
    if isinstance(later, Pullbacks):
        assert pullback is not None
        kept.update((id(eqn), functools.partial(pullback, d)) for eqn, d in later.calls)
    if isinstance(later, Values):
        (outs, out_axes), first = result, later.first
        kept[id(later.eqn)] = lambda *_: (outs[first:], out_axes[first:])
        return outs[:first], out_axes[:first]
    return result


def _derivatives(
    axis: Axis, rule: UserRule, steps: Sequence[DerivativeStep], flags: Flags
) -> BatchedFlat:
    """The derivatives `steps` of what the rule computes, of operands that `flags` says batched."""
    every = [flags]  # of the operands before each step
    for step in reversed(steps):
        every.append(step.flags_before(every[-1]))
    first, *later = reversed(every)
    count = len(rule.closed)

    def function(*xs: Any) -> tuple[list[Any], Flags]:
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
    looks_ahead=True,
)
