"""Going back over the steps of a bounded loop, from the last one to the first.

What a step contributes to a derivative in reverse depends on the carry before it. The sweep takes
that from the checkpoints that the loop recorded, and computes again what is missing between them
(`checkpoints.py`). It is a primitive, as the loop is, and for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.execution.bounded_forms import SweepForm
from batchax.execution.bounded_loop import (
    LoopStep,
    Values,
    checkpoint_types,
    settle,
    varied,
    zeros,
)
from batchax.execution.checkpoints import Stack, blank_checkpoints
from batchax.execution.entries import entry_of, put_entry
from batchax.execution.watched import Steps
from batchax.kernel.derivatives import with_values
from batchax.kernel.inner import written_into
from batchax.kernel.own_primitive import declare

reverse_sweep_p = declare("reverse_sweep")


def reverse_sweep(
    forth: LoopStep,
    back: LoopStep,
    consts: Values,
    carry: Values,
    checkpoints: Values | None,
    returning: Values,
    xs: Values,
    *,
    kept: Sequence[int] | None = None,
    guarded: tuple[LoopStep | None, LoopStep | None] = (None, None),
    count: Any,
    steps: Steps,
    x_axes: Sequence[int],
    y_axes: Sequence[int | None],
) -> tuple[list[Any], list[Any]]:
    """Goes back over the steps of a bounded loop; may be differentiated and batched.

    Args:
      forth: what one step does, from constants, the carry and entries of all xs to the carry, and
        no ys.
      back: what going back over a step does, to what is carried back; its entries are the carry
        before the step, and those of the xs. It is linear in what is carried back and some xs.
      consts: what is the same at each step.
      carry: the first carry.
      checkpoints: what a loop of at least as many steps recorded; None: nothing was.
      returning: what is carried back, after the last step.
      xs: arrays with an entry for each step.
      kept: the values of the carry that the checkpoints have; None: all. The others must not matter
        to `back`, nor for those that do.
      guarded: programs that are differentiated in place of `forth` and `back`; None: the same.
      count: how many steps there were.
      steps: how many that may be at most.
      x_axes: where each of the `xs` has the axis of the steps.
      y_axes: where each of the ys gets it; None: they are added up.

    Returns:
      What is carried back, before the first step; and the ys.
    """
    programs, _, carry, xs = settle(forth, guarded[0], consts, carry, xs, x_axes, count)
    types = [jax.typeof(x).strip_weak_type() for x in carry]
    more, _, returning, _ = settle(
        back, guarded[1], consts, returning, xs, x_axes, count, first_entries=types
    )
    programs, held = _compat.hoist_constants(*programs, *more)
    sizes = len(held) + len(consts), len(carry), tuple(range(len(carry)) if kept is None else kept)
    form = SweepForm(*sizes, len(returning), steps, tuple(x_axes), tuple(y_axes))
    number = _compat.scalar_like(jax.typeof(count), np.dtype(np.int32))
    types = checkpoint_types(number, types, form)
    if checkpoints is None:
        checkpoints = blank_checkpoints(list(map(zeros, types)))
    checkpoints = [varied(x, [aval]) for x, aval in zip(checkpoints, types, strict=True)]
    outs = reverse_sweep_p.bind(
        *(count, *held, *consts, *carry, *checkpoints, *returning, *xs),
        forth=programs[0],
        back=programs[2],
        guarded=(programs[1], programs[3]),
        form=form,
    )
    return outs[: len(returning)], outs[len(returning) :]


def run(*operands: Any, forth: Any, back: Any, guarded: Any, form: SweepForm) -> list[Any]:
    """The sweep as ordinary operations of JAX."""
    count, _, consts, carry, checkpoints, returning, xs = form.split(operands)
    ys = list(map(zeros, result_types(back, form)[form.n_back :]))
    if form.steps.most == 0:
        return [*returning, *ys]
    one = np.int32(1)
    count = lax.clamp(np.int32(0), count, np.int32(form.steps.most))

    def entries(t: Any) -> list[Any]:
        return [entry_of(x, t, a) for x, a in zip(xs, form.x_axes, strict=True)]

    def whole(kept: Values) -> list[Any]:
        """The carry, with anything for what is not kept."""
        return list(map(_compat.unconsumed, with_values(carry, form.kept, kept)))

    def ahead(stack: Stack, t: Any) -> Stack:
        """With the carry before step `t` on top, or, if that is too far, one on the way."""
        end, place_of, longer = stack.leg(t)

        def step(state: Any) -> Any:
            n, kept, places = state
            new = written_into(forth, [*consts, *whole(kept), *entries(n)])
            new = [_compat.unconsumed(new[i]) for i in form.kept]  # keys are used again
            place = place_of(n + one)
            places = [put_entry(p, x, place, 0) for p, x in zip(places, new, strict=True)]
            return n + one, new, places

        first = stack.last, stack.carry_at(np.int32(0)), stack.places
        *_, places = lax.while_loop(lambda s: s[0] < end, step, first)
        return longer._replace(places=places)

    def turn(state: Any) -> Any:
        t, stack, *rest = state
        stack = ahead(stack, t)
        run = stack.run(t)

        def step(state: Any) -> Any:
            i, returning, ys = state
            form.steps.begin(count - one - (t - i), count)
            x = [*whole(stack.carry_at(i)), *entries(t - i)]
            outs = written_into(back, [*consts, *returning, *x])
            returning, step_ys = outs[: form.n_back], outs[form.n_back :]
            ys = [
                lax.add(y, e) if a is None else put_entry(y, e, t - i, a)
                for y, e, a in zip(ys, step_ys, form.y_axes, strict=True)
            ]
            return i + one, returning, ys

        _, *rest = lax.while_loop(lambda s: s[0] < run, step, (t - t, *rest))
        return t - run, stack._replace(height=stack.height - run), *rest

    stack = Stack.of(checkpoints, [carry[i] for i in form.kept], count)
    first = count - one, stack, returning, ys
    last, *_, returning, ys = lax.while_loop(lambda s: s[0] >= 0, turn, first)
    form.steps.end(count, count, [last])
    return [*returning, *ys]


def result_types(back: Any, form: SweepForm) -> list[Any]:
    """The types of what `run` returns: what is carried back, and the ys."""
    outs = back.out_avals
    ys = [
        aval.strip_weak_type() if a is None else unmapped_aval(form.steps.most, a, aval)
        for a, aval in zip(form.y_axes, outs[form.n_back :], strict=True)
    ]
    return [*(aval.strip_weak_type() for aval in outs[: form.n_back]), *ys]
