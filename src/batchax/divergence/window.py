"""Loops that lanes leave when they are done.

A loop batched by ``jax.vmap`` runs all lanes until the slowest is done (see JAX #8409).

First all lanes run, as they do where lanes are masked, until a share of them is done. Those
that are left queue for a window of fixed width. When some in it are done, those that wait take
their places (refill). When none waits, those who are left run in a narrower window (compaction),
so that the last slow lanes do not run in a window full of lanes that are done.

A window holds the indices of its lanes: what belongs to a lane is read from, and written to,
the arrays of all lanes by index. That is the same program for all widths, of which only steps are
compiled once more for each.

A processor is given each operation as a function of its own, which takes longer to compile than
most loops of numbers: `Together`, `refill`, `_GoesOn` and `put_back` make such loops, each one
function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.blocks import Blocks, anyone
from batchax.divergence.policy import Window
from batchax.divergence.refill import InWindow, Queue, refill
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.together import Together
from batchax.divergence.varying import alike
from batchax.divergence.window_rows import put_back, rows_of
from batchax.execution.gathered_lanes import count_active
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position
from batchax.kernel.staged import staged_once, while_loop

Tally = tuple[Any, ...]
"""Iterations, and lane-steps of active lanes in two halves of 32 bits, the high one first: in
single precision JAX has no integers of 64 bits. Empty where nothing is counted."""

LaneStep = Callable[[int, Sequence[Any], Any, Sequence[Any], Tally], tuple[Any, list[Any], Tally]]
"""One step of some lanes: (width, consts, active, carry, tally) -> (active, carry, tally)."""


def run_in_windows(
    plan: Window,
    step: LaneStep,
    consts: Sequence[Value],
    positions: Sequence[Position],
    active: Any,
    carry: list[Value],
) -> tuple[list[Any], list[Tally]]:
    """Runs a loop.

    Args:
      plan: how the lanes are run.
      step: one step of some lanes.
      consts: what it is given beside the carry; `positions` says where each has the batch axis.
      active: whether each lane takes a first step.
      carry: the first carry of all lanes, at the front.

    Returns:
      The last carry, and for each window the count of its lane-steps.
    """
    varying = [active, *carry, *consts]
    size, widths = active.shape[0], plan.widths
    tallies, some = [], anyone(active)
    if widths[0] == size:
        widths = widths[1:]
        left = plan.leave_at if plan.share is None else _refilled_at(plan, size)
        left = max(left, widths[0]) if widths else 0
        together = Together(size, left, _waiting(plan), plan.pause)
        state = alike((active, carry, _blank(plan)), varying)
        once = lambda state: step(size, consts, *state)
        (active, carry, tally), some = together.run(some, once, state)
        tallies = [tally]
    queue = Queue.of_all(active)
    for k, (width, narrower) in enumerate(itertools.pairwise([*widths, 0])):
        window = _Window(plan, width, narrower, step, consts, positions)
        # All that a window leaves fit the next one: who is in the last one stays there.
        if k and not narrower:
            carry, lanes, tally = window.run_to_the_end(queue, carry, varying)
        else:
            some = anyone(queue.active) if k else some
            carry, lanes, tally = window.run(queue, some, carry, varying)
        queue = Queue(lanes.index, lanes.active)
        tallies.append(tally)
    return carry, tallies


def until_all_are_done(step: LaneStep, width: int, consts: Sequence[Value], state: Any) -> Any:
    """Steps of `width` lanes, while any of them is active."""

    def once(state: Any) -> Any:
        active, carry, tally = state
        return step(width, consts, active, carry, tally)

    return while_loop(lambda state: lax.reduce_or(state[0], (0,)), once, state)


def _steps(
    step: LaneStep,
    consts: Sequence[Value],
    begins: Any,
    goes_on: _GoesOn,
    waiting: Any,
    state: Any,
) -> Any:
    """Steps of the lanes of a window: one if they `begin`, and more while they `go on`."""

    def once(state: Any) -> Any:
        active, carry, tally, wasted, _ = state
        active, carry, tally = step(goes_on.width, consts, active, carry, tally)
        return active, carry, tally, *goes_on.judged(active, waiting, wasted)

    start = alike((*state, np.float32(0), begins), [begins])
    return while_loop(lambda state: state[-1], once, start)[:3]


@dataclass(frozen=True)
class _GoesOn:
    """Whether the lanes of a window go on together.

    Attributes:
      plan: how they are run.
      width: how many there are.
      left: how many may be active when nobody waits and they leave.
    """

    plan: Window
    width: int
    left: int

    def judged(self, active: Any, waiting: Any, wasted: Any) -> list[Any]:
        """The lane-steps wasted after one more, and whether lanes go on.

        Args:
          active: which of them are active.
          waiting: whether others wait.
          wasted: the lane-steps wasted before.
        """
        return staged_once(self, self._judged, waiting, active, wasted)

    def _judged(self, waiting: Any, active: Any, wasted: Any) -> tuple[Any, Any]:
        blocks = Blocks.of(active)
        if blocks is None:
            count = count_active(active)
            wasted = self._wasted(wasted, self.width, count)
            return wasted, self._of_count(waiting, count, wasted)

        def once(state: Any) -> Any:
            place, count, wasted, _ = state
            new = lax.convert_element_type(blocks.at(place), np.int32)
            new = lax.reduce_sum(new, tuple(range(new.ndim)))
            count, wasted = lax.add(count, new), self._wasted(wasted, blocks.lanes, new)
            place = lax.add(place, blocks.step)
            return place, count, wasted, self._of_count(waiting, count, wasted)

        start = alike((np.int32(0), np.int32(0), wasted, np.True_), [active])
        return while_loop(lambda state: lax.lt(state[0], blocks.end), once, start)[2:]

    def _wasted(self, wasted: Any, lanes: int, active: Any) -> Any:
        """The lane-steps wasted after one more of so many lanes, some of which are active."""
        return lax.add(
            wasted, lax.convert_element_type(lax.sub(np.int32(lanes), active), np.float32)
        )

    def _of_count(self, waiting: Any, count: Any, wasted: Any) -> Any:
        plan, some = self.plan, lax.gt(count, np.int32(0))
        many = some if self.left == 0 else lax.gt(count, np.int32(self.left))
        rule = _waiting(plan)
        waits = np.False_ if rule is None else rule.waits(wasted, self.width)
        bears = lax.bitwise_and(some, waits)
        full = lax.gt(count, np.int32(_refilled_at(plan, self.width)))
        return lax.select(waiting, lax.bitwise_or(full, bears), many)


class _Window:
    """A window of so many lanes, until nobody waits for it and they fit the `narrower` one.

    Attributes:
      plan: how the lanes are run.
      width: how many lanes it holds.
      narrower: the width of the next one; zero if there is none.
      step: one step of some lanes.
      consts, positions: what it is given beside the carry, and where each has the batch axis.
    """

    def __init__(
        self,
        plan: Window,
        width: int,
        narrower: int,
        step: LaneStep,
        consts: Sequence[Value],
        positions: Sequence[Position],
    ) -> None:
        self.plan, self.width, self.narrower, self.step = plan, width, narrower, step
        self.consts, self.positions = consts, positions

    def run(
        self, queue: Queue, waiting: Any, everyone: list[Any], varying: Any
    ) -> tuple[list[Any], InWindow, Tally]:
        """The carries of all lanes, who is left in the window, and the count of lane-steps.

        `waiting` is whether any lane of the queue is active.
        """
        goes_on = _GoesOn(self.plan, self.width, self.narrower)

        def steps(lanes: InWindow, consts: Sequence[Any], state: Any) -> Any:
            return _steps(self.step, consts, lanes.any_active, goes_on, lanes.waiting, state)

        turn = functools.partial(self._turn, queue, steps)
        state = alike(self._empty(everyone, waiting), varying)
        return while_loop(lambda state: state[1].waiting, turn, state)

    def run_to_the_end(
        self, queue: Queue, everyone: list[Any], varying: Any
    ) -> tuple[list[Any], InWindow, Tally]:
        """As `run`, where the window has a place for each lane."""

        def steps(_: InWindow, consts: Sequence[Any], state: Any) -> Any:
            if not self.plan.last_in_kernel:
                return until_all_are_done(self.step, self.width, consts, state)
            active, carry, tally = state
            n_consts = len(consts)

            def run(active: Any, *xs: Any) -> list[Any]:
                state = active, xs[n_consts:], tally
                active, rows, _ = until_all_are_done(self.step, self.width, xs[:n_consts], state)
                return [active, *rows]

            operands = _compat.varying_alike([active, *consts, *carry], like=[active])
            types = list(map(jax.typeof, [active, *operands[1 + n_consts :]]))
            active, *carry = _compat.in_one_function(run, types, operands)
            return active, carry, tally

        return self._turn(queue, steps, alike(self._empty(everyone, np.True_), varying))

    def _empty(self, everyone: list[Any], waiting: Any) -> tuple[list[Any], InWindow, Tally]:
        empty = InWindow.empty(everyone[0].shape[0], self.width)
        return everyone, empty._replace(waiting=waiting), _blank(self.plan)

    def _turn(self, queue: Queue, steps: Callable[..., Any], state: Any) -> Any:
        """Has those who wait take the places of lanes that are done, and runs `steps` of them."""
        everyone, lanes, tally = state
        lanes = refill(queue, lanes)
        last = np.int32(everyone[0].shape[0] - 1)
        here = lax.min(lanes.index, last)  # of places where nobody is, someone
        carry = [rows_of(x, 0, here) for x in everyone]
        consts = [rows_of(x, a, here) for x, a in zip(self.consts, self.positions, strict=True)]
        active, carry, tally = steps(lanes, consts, (lanes.active, carry, tally))
        everyone = put_back(everyone, carry, lanes.index)
        return everyone, lanes._replace(active=active), tally


def _refilled_at(plan: Window, width: int) -> int:
    """How many active lanes a window of that width has at most when it is refilled, or left."""
    return width - max(1, round(width * (plan.share or 0)))


def _waiting(plan: Window) -> SkiRental | None:
    """When idle lanes have waited enough; None: as soon as the user's share of them is done."""
    return SkiRental(plan.patience) if plan.share is None else None


def _blank(plan: Window) -> Tally:
    return (np.uint32(0),) * 3 if plan.counts else ()


def counted(tally: Tally, count: Any) -> Tally:
    """A tally of one more iteration, in which so many lanes are active."""
    if not tally:
        return tally
    iterations, high, low = tally
    total = low + lax.convert_element_type(count, np.uint32)
    return iterations + np.uint32(1), high + lax.convert_element_type(total < low, np.uint32), total
