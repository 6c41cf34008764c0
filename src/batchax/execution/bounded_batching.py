"""A bounded loop under vmap: of batchax or of JAX.

Where lanes take different numbers of steps the loop goes on until the last is done, and the
others are masked. What says which lanes are active is part of the loop, so the batched loop is
a bounded loop like any other, with its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax

from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import Form, LoopStep, Values, bounded_loop, bounded_loop_p
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition, match_axis, move_axis
from batchax.kernel.divergence import BoundedLoop, PlacedOutputs
from batchax.kernel.inner import ANYWHERE, batch_inner
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import register_own_rule
from batchax.rules.hazards import hazards
from batchax.rules.loops import predicate, settle
from batchax.rules.mask_plan import MaskPlan, plan_masking
from batchax.rules.masking import is_inexact, run_masked, select_lanes
from batchax.rules.parting import run_parting

enter("endless costly nests: bounded_loop")  # while its steps are not counted


@register_own_rule(bounded_loop_p, may_name_axis=True)
def _batched(
    axis: Axis, args: Any, axes: Any, /, *, test: Any, body: Any, guarded: Any, form: Form
) -> PlacedOutputs:
    return batch_bounded_loop(axis, BoundedLoop(test, body, guarded, form, args, axes))


def batch_bounded_loop(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """The results of a bounded loop for all lanes."""
    test, body, guarded, form = loop.test, loop.body, loop.guarded, loop.form
    count_at, test_at, consts_at, carry_at, xs_at = form.split(loop.axes)
    entries_at = list(map(_entry_axis, xs_at, form.x_axes))
    settled, ys_at, *programs = _settled(axis, body, guarded, consts_at, carry_at, entries_at)
    decided_at, tested = count_at, test
    if test is not None and count_at is None:
        with recording.part("condition"):
            tested, (decided_at,) = batch_inner(axis, test, (*test_at, *settled))
    if decided_at is not None:
        params = {"test": test, "body": body, "guarded": guarded, "form": form}
        equation = bounded_loop_p, loop.args, loop.axes, params
        return run_parting(axis, *equation, loop, _every_step)

    recording.note(divergence="together")
    before, carry, xs = _parts(loop.args, 1 + form.n_test + form.n_consts, form.n_carry)
    carry = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(carry, carry_at, settled, strict=True)
    ]
    y_axes = tuple(s + (a is not None and a <= s) for a, s in zip(ys_at, form.y_axes, strict=True))
    outs = bounded_loop_p.bind(
        *before,
        *carry,
        *xs,
        test=tested,
        body=programs[0],
        guarded=programs[1],
        form=replace(form, x_axes=_steps_axes(xs_at, form.x_axes), y_axes=y_axes),
    )
    placed = [a if a is None else a + (s <= a) for a, s in zip(ys_at, y_axes, strict=True)]
    kept_at = [None if a is None else a + 1 for a in settled if form.record]
    return outs, [*settled, *placed, *kept_at, None]


def _every_step(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """Every step that some lane takes, for all lanes; those that are done are masked."""
    lanes = _Lanes(axis, loop)
    return lanes.run_counted() if loop.test is None else lanes.run_tested()


def _settled(
    axis: Axis, body: Any, guarded: Any, consts_at: Any, carry_at: Any, entries_at: Any
) -> tuple[list[AxisPosition], list[AxisPosition], Any, Any]:
    """Where carry and ys have the batch axis, and both programs batched so."""
    program, settled, ys_at = settle(axis, body, consts_at, carry_at, entries_at)
    if guarded is body:
        return settled, ys_at, program, program
    # One of the two may make a value depend on the lane where the other does not: both get the
    # same axes, those of either.
    while True:
        _, more, kept_ys_at = settle(axis, guarded, consts_at, settled, entries_at)
        if more == settled:
            break
        _, settled, ys_at = settle(axis, body, consts_at, more, entries_at)
    ys_at = [b if a is None else a for a, b in zip(ys_at, kept_ys_at, strict=True)]
    wanted = [ANYWHERE if a is None else a for a in (*settled, *ys_at)]
    inputs = (*consts_at, *settled, *entries_at)
    program, _ = batch_inner(axis, body, inputs, wanted)
    kept, _ = batch_inner(axis, guarded, inputs, wanted)
    return settled, ys_at, program, kept


@dataclass(frozen=True)
class _Lanes:
    """Lanes that take different numbers of steps: those that are done are masked.

    Attributes:
      axis: the axis being mapped.
      loop: the loop of one lane.
    """

    axis: Axis
    loop: BoundedLoop

    @property
    def form(self) -> Form:
        """What the operands of the loop of one lane are."""
        return self.loop.form

    def run_counted(self) -> PlacedOutputs:
        """A loop whose number of steps is known.

        The loop runs over the numbers of the steps, for all lanes at once. Going back, from the
        largest number, lanes that took fewer steps wait until their last one is reached: each
        step is taken together with the same step of the other lanes, as it was going forth.
        """
        if hazards(self.loop.body.jaxpr).collective:
            raise UnsupportedError(
                "a bounded loop that contains a collective over a batch axis, and that lanes leave "
                "at different steps, is differentiated one lane at a time (vmap of grad). Have all "
                "lanes leave at the same step, by a predicate made of collectives, or "
                "differentiate the batched function (grad of vmap)."
            )
        counts, _, consts, carry, xs = self._operands()

        def program(step: Any) -> LoopStep:
            def run(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
                return step(x[0] < consts[0], consts[1:], carry, x[1:])

            return run

        numbers = lax.iota(np.int32, self.form.length)
        found = bounded_loop(
            consts=[counts, *consts],
            carry=carry,
            xs=[numbers, *xs],
            count=lax.reduce_max(counts, (0,)),
            **self._options(program, [0]),
        )
        steps = lax.clamp(np.int32(0), counts, np.int32(self.form.length))
        return self._placed([*found.carry, *found.ys, *found.checkpoints, steps])

    def run_tested(self) -> PlacedOutputs:
        """A loop with a predicate.

        Its carry begins with the lanes that are active, and with the steps each has taken.
        """
        counts, test_consts, consts, carry, xs = self._operands()
        n, test_at = 1 + self.form.n_test, self.form.split(self.loop.axes)[1]

        def active_lanes(consts: Values, carry: Values) -> Any:
            operands, positions = [*consts[1:n], *carry], [*test_at, *[0] * len(carry)]
            return predicate(self.axis, self.loop.test, operands, positions)

        def program(step: Any) -> LoopStep:
            def run(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
                active, steps, *carry = carry
                new, ys = step(active, consts[n:], carry, x)
                steps = steps + lax.convert_element_type(active, np.int32)
                active &= active_lanes(consts, new) & (steps < consts[0])
                return [active, steps, *new], ys

            return run

        consts = [counts, *test_consts, *consts]
        active = active_lanes(consts, carry) & (counts > 0)
        found = bounded_loop(
            consts=consts,
            carry=[active, lax.full_like(active, 0, np.int32), *carry],
            xs=xs,
            test=lambda _, carry: lax.reduce_or(carry[0], (0,)),
            count=np.int32(self.form.length),
            **self._options(program, []),
        )
        _, steps, *carry = found.carry
        return self._placed([*carry, *found.ys, *found.checkpoints[2:], steps])

    def _operands(self) -> tuple[Any, Values, Values, Values, Values]:
        """The operands of a loop over lanes."""
        counts, test_consts, consts, carry, xs = self.form.split(self.loop.args)
        count_at, _, _, carry_at, _ = self.form.split(self.loop.axes)
        carry = [match_axis(self.axis, x, a, 0) for x, a in zip(carry, carry_at, strict=True)]
        if count_at is not None:
            counts = move_axis(counts, count_at, 0)
        return counts, test_consts, consts, carry, xs

    def _options(self, program: Callable[[Any], LoopStep], more: list[int]) -> dict[str, Any]:
        """What is done in each step, and where arrays have the axis of the steps."""
        body, guarded, xs_at = self.loop.body, self.loop.guarded, self.form.split(self.loop.axes)[4]
        plain, safe = self._plan(body, False), self._plan(guarded, True)
        options: dict[str, Any] = {"body": program(self._step(body, plain))}
        if guarded is not body or safe != plain:
            options["guarded"] = program(self._step(guarded, safe))
        return options | {
            "x_axes": (*more, *_steps_axes(xs_at, self.form.x_axes)),
            "y_axes": tuple(a + 1 for a in self.form.y_axes),
            "length": self.form.length,
            "reverse": self.form.reverse,
            "record": self.form.record,
        }

    @property
    def _positions(self) -> list[AxisPosition]:
        _, _, consts_at, carry_at, xs_at = self.form.split(self.loop.axes)
        return [*consts_at, *[0] * len(carry_at), *map(_entry_axis, xs_at, self.form.x_axes)]

    def _plan(self, program: Any, differentiated: bool) -> MaskPlan:
        """What masked lanes need in a step; of one with derivatives, or without."""
        inexact = {i for i, v in enumerate(program.jaxpr.invars) if is_inexact(v.aval)}
        return plan_masking(
            program.jaxpr,
            self._positions,
            inexact if differentiated else (),
            may_take_mask=False,
        )

    def _step(self, program: Any, plan: MaskPlan) -> Callable[..., Any]:
        """A step of the active lanes; the others keep their carry, and return zeros."""

        def run(operands: Values, positions: Sequence[AxisPosition]) -> PlacedOutputs:
            return interpret(self.axis, program.jaxpr, program.consts, operands, positions)

        def step(
            active: Any, consts: Values, carry: Values, x: Values
        ) -> tuple[list[Any], list[Any]]:
            operands = [*consts, *carry, *x]
            outs, at = run_masked(active, run, operands, self._positions, plan, ())
            outs = [match_axis(self.axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
            new, ys = outs[: len(carry)], outs[len(carry) :]
            new = [select_lanes(active, 0, x, old) for x, old in zip(new, carry, strict=True)]
            return new, [select_lanes(active, 0, y, lax.full_like(y, 0)) for y in ys]

        return step

    def _placed(self, outs: list[Any]) -> PlacedOutputs:
        """Results, all of which have the batch axis."""
        first = self.form.n_carry + len(self.form.y_axes)
        kept = len(outs) - first - 1
        return outs, [*[0] * first, *[1] * kept, 0]


def _entry_axis(position: AxisPosition, steps_axis: int) -> AxisPosition:
    """Where an entry of an array has the batch axis, which is at `position` of the array."""
    return position if position is None or position <= steps_axis else position - 1


def _steps_axes(positions: Sequence[AxisPosition], axes: Sequence[int]) -> tuple[int, ...]:
    """Where arrays with a batch axis have the axis of the steps."""
    return tuple(s + (a is not None and a <= s) for a, s in zip(positions, axes, strict=True))


def _parts(items: Sequence[Any], first: int, second: int) -> tuple[Values, Values, Values]:
    items = list(items)
    return items[:first], items[first : first + second], items[first + second :]
