"""Bounded loops whose lanes end at different steps, and the sweeps back over them.

Values are those of a ``while`` that lanes leave (`BoundedDivergent`). That has no derivative in
reverse, so derivatives are taken of the same loop run in blocks of lanes: a block is a bounded loop
or a sweep, which has a derivative, inside a chunk loop, which recomputes it for that. How many
steps each lane takes must be known before, so each step of a block is computed once more: where
all lanes take as many, for nothing. So all lanes run first, masked, as they would without any of
this, until few of them are left (`TailCompaction`). Only these go on in windows, which count the
steps that each takes, and their derivatives are those of blocks that begin where all lanes ended.

The sweep back over such a loop goes the other way: first the blocks, to where all lanes ended, and
from there all lanes, with the checkpoints that were recorded on their way. Its last checkpoint says
where that is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.loops import DivergentLoop, as_weak_as, bind, divergent_loop
from batchax.divergence.policy import LoopDecision, Window
from batchax.divergence.ski_rental import SkiRental
from batchax.execution.bounded_batching import batch_bounded_loop, every_step, of_lanes, run_while
from batchax.execution.bounded_derivatives import parts, take
from batchax.execution.bounded_loop import (
    UNUSED,
    LoopSignature,
    Operands,
    SweepSignature,
    as_while,
    no_checkpoints,
)
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.execution.gathered_lanes import count_active
from batchax.execution.slices import entry_of, with_derivative_of
from batchax.jaxprs.primitive_facts import as_decided
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, BoundedLoop, PlacedOutputs, Position, WhileLoop, match_axis
from batchax.kernel.inner import inline_jaxpr, remembered
from batchax.kernel.own_primitive import with_values
from batchax.rules.calls import in_turn
from batchax.rules.masking import is_inexact, select_lanes

_LEFT = 2
"""All lanes run until one in so many is left, or fewer."""

Windows = Callable[[Values], Values]
"""From steps taken, carry and ys of all lanes to what these are in the end."""


@dataclass(frozen=True)
class TailCompaction:
    """How lanes are run that others have left behind."""

    axis: Axis  # the axis being mapped
    width: int  # how many lanes make a block
    patience: float  # how many steps of a lane cost as much as moving it to where it runs
    # Whether all lanes run in blocks from the first step. Derivatives then keep the residuals of
    # one block, and all steps are computed once more for them.
    at_once: bool = False

    def loop(self, loop: BoundedLoop, windows: Windows) -> PlacedOutputs:
        """The results of a loop with a predicate; `windows` runs those that are left."""
        form: LoopSignature = loop.form
        n = form.n_carry + len(form.y_axes)
        if self.at_once and form.kept is None and not form.y_axes:
            outs = [*of_lanes(self.axis, loop).carry, np.zeros(self.axis.size, np.int32)]
            placed: PlacedOutputs = outs, [0] * len(outs)
        else:
            placed = run_while(self.axis, loop, self._many)
        outs, at = placed
        steps = jnp.asarray(outs[-1])
        last = windows([steps, *outs[:n]])
        apart = self._from(loop, outs[:n], last[0] - steps, lax.reduce_max(steps, (0,)))
        values = [
            with_derivative_of(x, y) if is_inexact(x) else x
            for x, y in zip(last[1:], apart, strict=True)
        ]
        return [*values, *outs[n:-1], last[0]], at

    def counted(self, loop: BoundedLoop) -> PlacedOutputs:
        """The results of a loop whose lanes' numbers of steps are known."""
        count = self._count(loop)
        together = self._together(count)
        outs, at = every_step(self.axis, _with_count(loop, lax.min(count, together)))
        outs = self._from(loop, outs[:-1], lax.max(count - together, np.int32(0)), together)
        return [*outs, count], at

    def sweep(self, loop: BoundedLoop) -> PlacedOutputs:
        """The results of a sweep."""
        form: SweepSignature = loop.form
        lanes = of_lanes(self.axis, loop)
        numbers, *kept = lanes.checkpoints
        numbers = jnp.where(numbers == UNUSED, np.int32(0), numbers)
        place = lax.argmax(numbers, 0, np.int32)
        together = entry_of(numbers, place, 0)
        count = self._count(loop)
        first = [lanes.carry[i] for i in form.kept]
        there = [
            lax.select_n(together > 0, x, entry_of(k, place, 0))
            for k, x in zip(kept, first, strict=True)
        ]
        begun = lanes._replace(count=lax.min(count, together))
        there = [
            with_derivative_of(x, y) if is_inexact(x) else x
            for x, y in zip(there, self._followed(loop, begun), strict=True)
        ]
        # Were checkpoints written before these are read, they would be copied.
        there, first = in_turn(there, first)
        rest = lax.max(count - together, np.int32(0))
        blank = no_checkpoints(loop.steps[0], form)
        apart = lanes._replace(count=rest, carry=with_values(lanes.carry, form.kept, there))
        at = form.split(loop.axes)
        carried = [0] * len(lanes.carry), [None] * len(blank), [0] * len(lanes.returning)
        axes = at._replace(count=0, carry=carried[0], checkpoints=carried[1], returning=carried[2])
        apart = replace(loop, args=apart._replace(checkpoints=blank).flat, axes=axes.flat)
        outs = self._in_blocks(apart, together)
        returning = [
            select_lanes(rest > 0, 0, x, old) for x, old in zip(outs, lanes.returning, strict=False)
        ]
        axes = axes._replace(checkpoints=[None, *[1] * len(kept)])
        both = begun._replace(carry=with_values(lanes.carry, form.kept, first), returning=returning)
        loop, n = replace(loop, args=both.flat, axes=axes.flat), form.n_back
        last, at = every_step(self.axis, loop)
        last = [*last[:n], *map(lax.add, last[n:], outs[n:])]
        return self._added_up(loop, last, outs[n:]), at

    def _added_up(self, loop: BoundedLoop, last: Values, ys: Values) -> list[Any]:
        """The results `last` of a sweep to which `ys` were added, or sums that begin with these.

        Nothing is added then where no lane was left. Derivatives are those of `last`: what is
        carried would be kept for them.
        """
        form: SweepSignature = loop.form
        sums = [i for i, a in enumerate(form.y_axes) if a is None]
        if not sums:
            return list(last)
        given, at, n = form.split(loop.args), form.split(loop.axes), form.n_back
        args = given._replace(returning=[*given.returning, *take(ys, sums)])
        axes = at._replace(returning=[*at.returning, *[0] * len(sums)])
        (forward, back), (forward_guarded, guarded) = loop.steps, loop.guarded
        back, guarded = (
            remembered(p, ("sums", form), functools.partial(_with_sums, p, form))
            for p in (back, guarded)
        )
        others = [i for i, a in enumerate(form.y_axes) if a is not None]
        summed = BoundedLoop(
            None,
            [forward, back],
            [forward_guarded, guarded],
            replace(form, n_back=n + len(sums), y_axes=tuple(take(form.y_axes, others))),
            args.flat,
            axes.flat,
        )
        outs, _ = every_step(self.axis, summed)
        done, rest = parts(outs, n + len(sums))
        places = [*range(n), *(n + i for i in (*sums, *others))]
        values = [*done, *map(lax.add, rest, take(ys, others))]
        return list(map(with_derivative_of, with_values(last, places, values), last))

    def _followed(self, loop: BoundedLoop, lanes: Operands) -> list[Any]:
        """What is kept of the carry where a sweep is to end: checkpoints have no derivatives."""
        form: SweepSignature = loop.form
        at, n = form.split(loop.axes), form.n_carry
        at = at._replace(count=0, carry=[0] * n, checkpoints=[], returning=[])
        forward = LoopSignature(0, form.n_consts, n, form.steps, form.x_axes, (), None)
        args = lanes._replace(checkpoints=[], returning=[]).flat
        programs = [loop.steps[0]], [loop.guarded[0]]
        outs, _ = every_step(self.axis, BoundedLoop(None, *programs, forward, args, at.flat))
        return [outs[i] for i in form.kept]

    def _many(self, active: Value, steps: Value) -> Value:
        """Whether lanes are to go on together."""
        count = count_active(active)
        taken = lax.convert_element_type(steps, np.float32)
        wasted = lax.reduce_max(taken, (0,)) * np.float32(len(active)) - jnp.sum(taken)
        waits = SkiRental(self.patience).waits(wasted, count)
        return (count > len(active) // _LEFT) | (waits & (count > 0))

    def _together(self, count: Value) -> Value:
        """How many steps all lanes take together, of these."""
        most = lax.reduce_max(count, (0,))
        ranked = lambda: lax.sort(count)[-1 - len(count) // _LEFT]
        return lax.cond(most > lax.reduce_min(count, (0,)), ranked, lambda: most)

    def _count(self, loop: BoundedLoop) -> Value:
        count, at = loop.form.split(loop.args).count, loop.form.split(loop.axes).count
        count = match_axis(self.axis, count, at, 0)
        return lax.clamp(np.int32(0), count, np.int32(loop.form.steps.most))

    def _from(self, loop: BoundedLoop, outs: Values, rest: Value, start: Value) -> list[Any]:
        """The carry and ys, after as many more steps as `rest` says of each lane."""
        given, at, n = loop.form.split(loop.args), loop.form.split(loop.axes), loop.form.n_carry
        loop = replace(
            loop,
            test=None,
            form=replace(loop.form, n_test=0, kept=None, again=True),
            args=given._replace(count=rest, test=[], carry=outs[:n]).flat,
            axes=at._replace(count=0, test=[], carry=[0] * n).flat,
        )
        apart = self._in_blocks(loop, start)
        carry = [select_lanes(rest > 0, 0, x, old) for x, old in zip(apart, outs[:n], strict=False)]
        later = lax.iota(np.int32, loop.form.steps.most) >= start
        ys = zip(apart[n:-1], outs[n:], loop.form.y_axes, strict=True)
        return [*carry, *(select_lanes(later, s + 1, y, old) for y, old, s in ys)]

    def _in_blocks(self, loop: BoundedLoop, start: Value) -> list[Any]:
        """The results of a counted loop or a sweep that begins at step `start`, and zeros."""
        axes, form, width = loop.axes, loop.form, self.width
        bare = replace(loop, args=(), axes=[None if a is None else 0 for a in axes])
        lanes = replace(self.axis, name=None, divergence=None)

        def of_width(width: int) -> Callable[..., list[Any]]:
            block = replace(lanes, size=width)

            def run(first: Value, counts: Value, start: Value, *xs: Value) -> list[Any]:
                args = form.split(
                    [
                        x if a is None else match_axis(block, x, a, 0)
                        for x, a in zip(xs, axes, strict=True)
                    ]
                )
                at = form.split(bare.axes)
                shifted = [
                    jnp.roll(x, -start, s + (a is not None))
                    for x, s, a in zip(args.xs, form.x_axes, at.xs, strict=True)
                ]
                block_loop = replace(bare, args=args._replace(xs=shifted).flat)
                outs, outs_at = batch_bounded_loop(block, block_loop)
                outs = [match_axis(block, x, a, 0) for x, a in zip(outs, outs_at, strict=True)]
                n = form.n_back if isinstance(form, SweepSignature) else form.n_carry
                ys = [
                    y if s is None else jnp.roll(y, start, s + 1)
                    for y, s in zip(outs[n:], form.y_axes, strict=False)
                ]
                return [*outs[:n], *ys, *outs[n + len(ys) :]]

            return run

        specs = ActiveMask(), WHOLE, *(WHOLE if a is None else Gathered(a) for a in axes)
        results = (Gathered(0),) * form.n_results
        whole = ChunkLoop(ChunkBody(of_width), specs, results, self.axis.size, width)
        count = loop.form.split(loop.args).count
        return chunk_loop(whole, [count, start, *loop.args])


def _with_sums(program: ClosedJaxpr, form: SweepSignature) -> ClosedJaxpr:
    """A program of a step back that is given the sums so far after what it carries back."""
    n, first = form.n_back, form.n_consts + form.n_back
    sums = [n + i for i, a in enumerate(form.y_axes) if a is None]
    types = [a.strip_weak_type() for a in take(program.out_avals, sums)]

    def back(*operands: Value) -> list[Any]:
        before, so_far, x = parts(operands, first, len(sums))
        outs = inline_jaxpr(program, [*before, *x])
        rest = [y for i, y in enumerate(outs) if i >= n and i not in sums]
        return [*outs[:n], *map(lax.add, so_far, take(outs, sums)), *rest]

    return _compat.stage(back, [*program.in_avals[:first], *types, *program.in_avals[first:]])


def _with_count(loop: BoundedLoop, count: Value) -> BoundedLoop:
    """`loop` with another number of steps for each lane, along axis 0."""
    given, at = loop.form.split(loop.args), loop.form.split(loop.axes)
    args, axes = given._replace(count=count), at._replace(count=0)
    return replace(loop, args=args.flat, axes=axes.flat)


@dataclass(frozen=True)
class BoundedDivergent(DivergentLoop):
    """A bounded loop as the ``while`` that it is in each lane."""

    # its predicate, its body, and the body that is differentiated in place of that
    bounded: tuple[ClosedJaxpr | None, ClosedJaxpr, ClosedJaxpr]
    form: LoopSignature  # what its operands are
    # how lanes that are left behind are run where it is differentiated; None: masked
    apart: TailCompaction | None
    is_bounded: ClassVar[bool] = True

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        """As that of any loop. The body of the ``while`` was made of the bounded one."""
        _, body, guarded = self.bounded
        return *super().but_for_body, None if guarded is body else guarded, self.apart

    def differentiated(self, program: ClosedJaxpr, operands: Values) -> list[Any]:
        """The bounded loop, in which lanes begin together."""
        loop = self._bounded_loop(operands)
        if self.apart is None:
            return self._placed(every_step(self._around, loop))
        return self._placed(run_with_tail(replace(self.apart, axis=self._around), loop))

    def masked(self, *operands: jax.Array) -> list[Any]:
        """As `run`, with lanes that are masked until all are done."""
        return self._placed(every_step(self._around, self._bounded_loop(operands)))

    @property
    def _around(self) -> Axis:
        divergence = None if self.apart is None else self.apart.axis.divergence
        return replace(self.axis, divergence=divergence)

    def _bounded_loop(self, operands: Values) -> BoundedLoop:
        form, (test, body, guarded) = self.form, self.bounded
        n_consts = len(self.positions)
        at = [*self.positions, *[0] * (len(operands) - n_consts)]

        def arguments(xs: Sequence[Any]) -> list[Any]:
            count, *tested = xs[: self.n_test]
            _, *given = xs[self.n_test : n_consts]
            _, *carry = xs[n_consts : n_consts + 1 + form.n_carry]
            return [count, *tested, *given[: form.n_consts], *carry, *given[form.n_consts :]]

        return BoundedLoop(test, [body], [guarded], form, arguments(operands), arguments(at))

    def _placed(self, placed: PlacedOutputs) -> list[Any]:
        (*outs, steps), _ = placed
        types = self.body.out_avals
        return [as_weak_as(t, x) for t, x in zip(types, [steps, *outs], strict=True)]


def bounded_divergent(
    axis: Axis,
    loop: BoundedLoop,
    whole: WhileLoop,
    plan: LoopDecision,
    apart: TailCompaction | None,
) -> list[Any]:
    """The carry of the ``while`` that a bounded loop is, of all lanes in the end."""
    divergent, operands = divergent_loop(axis, whole, plan)
    of_while = {f.name: getattr(divergent, f.name) for f in fields(DivergentLoop)}
    programs = loop.test, loop.steps[0], loop.guarded[0]
    return bind(
        BoundedDivergent(**of_while, bounded=programs, form=loop.form, apart=apart), operands
    )


def run_with_tail(apart: TailCompaction, loop: BoundedLoop) -> PlacedOutputs:
    """The results of a bounded loop or a sweep whose lanes begin together, and end apart.

    On a platform that was not decided for, lanes are masked, unless the user asked.
    """
    bare = replace(loop, args=())

    def build() -> tuple[Callable[..., list[Value]], list[Position]]:
        def placed(of: Callable[[BoundedLoop], PlacedOutputs], *args: Value) -> list[Any]:
            outs, positions[:] = of(replace(bare, args=args))  # the same, masked or not
            return outs

        def decided(given: BoundedLoop) -> PlacedOutputs:
            if isinstance(loop.form, SweepSignature):
                return apart.sweep(given)
            if loop.test is None:
                return apart.counted(given)
            return apart.loop(given, _windows(apart, given))

        def masked(given: BoundedLoop) -> PlacedOutputs:
            with recording.paused(apart.axis):
                return every_step(apart.axis, given)

        def run(args: Values) -> list[Any]:
            if apart.at_once:
                return placed(decided, *args)
            runs = functools.partial(placed, decided), functools.partial(placed, masked)
            return as_decided(*runs, args)

        # Compiled as one program, in which what only derivatives need is dropped.
        positions: list[Any] = []
        return jax.jit(run), positions

    key = (apart, loop.test, *loop.guarded, loop.form, tuple(loop.axes), "apart")
    run, positions = remembered(loop.steps[-1], key, build)
    outs = run(list(loop.args))
    return outs, list(positions)


def _windows(apart: TailCompaction, loop: BoundedLoop) -> Callable[..., Any]:
    form = replace(loop.form, kept=None)
    args = [lax.stop_gradient(x) for x in loop.args]
    whole, _ = as_while(apart.axis, args, loop.axes, test=loop.test, body=loop.steps[0], form=form)

    def run(state: Values) -> Values:
        begun = replace(whole, carry=[lax.stop_gradient(x) for x in state])
        plan = Window((apart.width,), apart.patience)
        outs = bind(*divergent_loop(apart.axis, begun, plan))
        return outs[len(outs) - len(state) :]

    return run
