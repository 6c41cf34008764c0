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
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.blocks import Blocks, anyone
from batchax.divergence.refill import InWindow, Queue, refill
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


@dataclass(frozen=True)
class Plan:
    """How the lanes of a loop are run.

    Attributes:
      widths: the widths of the windows, from the widest down. If the first is that of all lanes,
        it is the run of all lanes before the windows, and not refilled.
      threshold: the share of the lanes of a window that must be done before it is refilled;
        None to leave that to `patience`.
      most_left: how many lanes may be left when they leave the run of all lanes, if there is
        no threshold; or a turn of neighbours that are one function, 0: they wait for all.
      patience: how many steps of a lane cost as much as moving it in and out of a window.
      counts: whether lane-steps are counted.
      why: why there is no window but that of all lanes; empty if there is.
      neighbours: whether the lanes of a window are neighbours that stay in it until all of them are
        done, and other neighbours are next: so no lane is moved.
      one_function: whether these are one function of the compiler, which begins no operations.
      last_in_one: whether the steps of the lanes that no others follow are one function.
      pause: how many steps of all lanes are taken at least before those that are left are counted.
    """

    widths: tuple[int, ...]
    threshold: float | None
    most_left: int
    patience: float
    counts: bool
    why: str = ""
    neighbours: bool = False
    one_function: bool = False
    last_in_one: bool = False
    pause: int = 1

    @property
    def of_operations(self) -> Plan:
        """As this, with each operation left to the compiler, as what derives from it must be."""
        return replace(self, last_in_one=False)

    def is_in_one(self, width: int) -> bool:
        """Whether steps of so many lanes may be in one function."""
        return self.one_function or (self.last_in_one and width == self.widths[-1])

    def refilled_at(self, width: int) -> int:
        """How many active lanes a window of that width has at most when it is refilled, or left."""
        return width - max(1, round(width * (self.threshold or 0)))

    def bears(self, wasted: Any, moving: int) -> Any:
        """Whether so many wasted lane-steps cost less than it costs to move so many lanes.

        Nobody knows how many steps are to come. Whoever stays until waiting has cost as much as
        moving does pays at most twice what the best choice would have cost that knew (Karlin,
        Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988).
        """
        if self.threshold is not None:
            return np.False_
        return lax.lt(wasted, np.float32(self.patience) * np.float32(moving))

    @property
    def blank(self) -> Tally:
        return (np.uint32(0),) * 3 if self.counts else ()


def run_in_windows(
    plan: Plan,
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
        left = plan.most_left if plan.threshold is None else plan.refilled_at(size)
        left = max(left, widths[0]) if widths else 0
        patience = plan.patience if plan.threshold is None else None
        together = Together(size, left, patience, plan.pause)
        state = alike((active, carry, plan.blank), varying)
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

    plan: Plan
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
        bears = lax.bitwise_and(some, plan.bears(wasted, self.width))
        full = lax.gt(count, np.int32(plan.refilled_at(self.width)))
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
        plan: Plan,
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
            if not self.plan.last_in_one:
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
        return everyone, empty._replace(waiting=waiting), self.plan.blank

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


def counted(tally: Tally, count: Any) -> Tally:
    """A tally of one more iteration, in which so many lanes are active."""
    if not tally:
        return tally
    iterations, high, low = tally
    total = low + lax.convert_element_type(count, np.uint32)
    return iterations + np.uint32(1), high + lax.convert_element_type(total < low, np.uint32), total
