"""How a call with a batching rule of the user's is batched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition, move_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.registry import register_own_rule
from batchax.user_rules.call import (
    DerivativeStep,
    Flags,
    MappedStep,
    custom_call_p,
    effects_had,
    per_example,
)
from batchax.user_rules.rule import UserRule

enter("endless costly: custom_batched_call")  # what a rule will do is not known


@register_own_rule(custom_call_p, may_name_axis=True)
def _batched(
    axis: Axis,
    args: Sequence[Any],
    axes: Sequence[AxisPosition],
    /,
    *,
    jaxpr: Any,
    steps: tuple[DerivativeStep, ...],
    rule: UserRule,
) -> tuple[Sequence[Any], Sequence[AxisPosition]]:
    flags = [a is not None for a in axes]
    named = axis.name is not None and axis.name in _compat.named_axes(jaxpr.effects)
    if not (named or any(flags)):
        outs = custom_call_p.bind(*args, jaxpr=jaxpr, steps=steps, rule=rule)
        return outs, [None] * len(outs)
    front = [x if a is None else move_axis(x, a, 0) for x, a in zip(args, axes, strict=True)]
    count = len(rule.closed)
    values = _before(steps, flags, "values_before")
    needed = _before(steps, flags, "flags_before")
    if any(values[count:]) and not any(needed[:count]):
        recording.note(service="user", rule=rule.shown)
        outs, out_flags = _by_rule(axis, rule, steps, flags, front)
        return outs, [0 if batched else None for batched in out_flags]
    if steps and not any(values) and not named:
        # Many directions of derivatives, of a function that is called for one example still.
        directions = MappedStep(replace(axis, name=None), tuple(flags))
        outs = custom_call_p.bind(*front, jaxpr=jaxpr, steps=(*steps, directions), rule=rule)
        return outs, [0] * len(outs)
    # The rule knows nothing of batches of what the function closes over.
    return batch_function(axis, per_example(jaxpr, steps), args, axes)


def _before(steps: Sequence[DerivativeStep], flags: Flags, which: str) -> Flags:
    return functools.reduce(lambda f, step: getattr(step, which)(f), reversed(steps), flags)


def _by_rule(
    axis: Axis, rule: UserRule, steps: Sequence[DerivativeStep], flags: Flags, args: Sequence[Any]
) -> tuple[list[Any], Flags]:
    """The derivatives `steps` of what the rule computes."""
    every = [flags]  # of the operands before each step
    for step in reversed(steps):
        every.append(step.flags_before(every[-1]))
    first, *later = reversed(every)
    count = len(rule.closed)

    def function(*xs: Any) -> tuple[list[Any], Flags]:
        with effects_had(bool(steps)):
            return rule.run(axis, first[count:], xs[:count], xs[count:])

    for step, of_operands in zip(steps, later, strict=True):
        function = step.batched(axis, function, of_operands)
    return function(*args)
