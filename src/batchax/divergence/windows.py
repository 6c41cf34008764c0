"""Loops that lanes leave when they are done, in windows of fixed width.

A loop batched by ``jax.vmap`` runs all lanes until the slowest is done (see JAX #8409). Here all
lanes run first, as they do where lanes are masked, until a share of them is done (`Together`).
Those that are left queue for a window of fixed width. When some in it are done, those that wait
take their slots (`refill`). When none waits, those that are left run in a narrower window, so that
the last slow lanes do not run in a window full of lanes that are done.

A window holds the indices of its lanes: what belongs to a lane is read from, and written to, the
arrays of all lanes by index (`rows_of`, `with_rows`). That is the same program for all widths, of
which only steps are compiled once more for each. A CPU is given each operation as a kernel of its
own, which takes longer to compile than most loops of numbers: `Together`, `refill` and `_GoesOn`
make such loops, each a single kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from batchax.divergence.policy import FewAlone, Window
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.varying import alike
from batchax.execution.gathered_lanes import count_active, put, taken_at
from batchax.execution.slices import entry_of, part_of, put_entry
from batchax.jaxprs.types import Tree, Value, Values
from batchax.kernel.axis import Position, Positions
from batchax.kernel.inner import staged_once, while_loop

_LANES = 32
_MOST = 256  # blocks: more take longer than the sum of all


@dataclass(frozen=True)
class Blocks:
    """The blocks of a mask."""

    mask: Any
    lanes: int  # how many lanes are in a block

    @classmethod
    def of(cls, mask: Value) -> Blocks | None:
        """Of a mask of lanes: two at least, if it has as many; None where it is best left whole."""
        size = mask.shape[0]
        most = min(_LANES, max(1, size // 2))
        lanes = next(n for n in range(most, 0, -1) if size % n == 0)
        whole = jax.default_backend() != "cpu" or size // lanes > _MOST
        return None if whole else cls(mask, lanes)

    @property
    def step(self) -> np.int32:
        """From the place of one to that of the next."""
        return np.int32(self.lanes)

    @property
    def end(self) -> np.int32:
        return np.int32(self.mask.shape[0])

    def at(self, place: Value) -> Value:
        """The block that begins there."""
        return part_of(self.mask, place, 0, self.lanes)


def anyone(active: Value) -> Value:
    return staged_once("anyone", lambda active: [_anyone(active)], active)[0]


def _anyone(active: Value) -> Value:
    blocks = Blocks.of(active)
    if blocks is None:
        return lax.reduce_or(active, (0,))

    def once(state: Tree) -> Tree:
        place, _ = state
        block = blocks.at(place)
        return lax.add(place, blocks.step), lax.reduce_or(block, (0,))

    def goes_on(state: Tree) -> Value:
        place, hit = state
        return lax.bitwise_and(lax.lt(place, blocks.end), lax.bitwise_not(hit))

    return while_loop(goes_on, once, alike((np.int32(0), np.False_), [active]))[1]


def rows_of(x: Value, position: Position, lanes: Value) -> Value:
    """What these lanes have of an array of all lanes; `lanes` may repeat some."""
    if position is None:
        return x
    return taken_at(x, lanes, position)


def with_rows(x: Value, rows: Value, target: Value) -> Value:
    """`x` with `rows` for the lanes `target`; those that are out of bounds are dropped."""
    return put(x, rows, target, 0)


_MORE = 4  # the share of the steps taken that are taken before lanes are counted again


@dataclass(frozen=True)
class Together:
    """When all lanes stop to run at once."""

    size: int  # how many there are
    left: int  # how many may be left when they stop
    # when lanes that are done have waited enough; None: when so many are left
    waiting: SkiRental | None
    # how many steps are taken at least before lanes are counted; 1: they are after each
    pause: int = 1

    def run(self, begins: Value, once: Callable[[Any], Any], state: Tree) -> tuple[Any, Any]:
        """The state after some steps, and whether any lane is left.

        Args:
          begins: whether any lane is active.
          once: a step, from a state to the next.
          state: begins with which lanes are active.
        """

        def step(whole: Tree) -> Tree:
            state, taken, count_after, *_ = whole
            state = once(state)
            return state, *staged_once(self, self._judged, state[0], taken, count_after)

        whole = state, np.int32(0), np.int32(self.pause), begins, begins
        whole = alike(whole, jax.tree.leaves(state))
        state, _, _, left, _ = while_loop(lambda whole: whole[-1], step, whole)
        return state, left

    def _judged(self, active: Value, taken: Value, count_after: Value) -> tuple[Any, ...]:
        """The steps taken, when lanes are counted, whether any are left, whether all go on.

        Args:
          active: which lanes are active after one step more.
          taken: how many steps were taken before.
          count_after: after how many lanes are counted.
        """
        blocks = Blocks.of(active)
        if blocks is None:
            return self._of_count(np.True_, np.True_, count_active(active), taken, count_after)

        # All is in the loop: operations outside would be compiled as separate functions.
        def once(state: Tree) -> Tree:
            place, count, taken, count_after, *_ = state
            new = lax.convert_element_type(blocks.at(place), np.int32)
            count = lax.add(count, lax.reduce_sum(new, (0,)))
            first, place = lax.eq(place, np.int32(0)), lax.add(place, blocks.step)
            last = lax.ge(place, blocks.end)
            return place, count, *self._of_count(first, last, count, taken, count_after)

        def goes_on(state: Tree) -> Value:
            place, count, taken, count_after, *_ = state
            more = lax.bitwise_or(lax.eq(count, np.int32(0)), lax.ge(taken, count_after))
            return lax.bitwise_and(lax.lt(place, blocks.end), more)

        start = np.int32(0), np.int32(0), taken, count_after, np.False_, np.False_
        return while_loop(goes_on, once, alike(start, [active]))[2:]

    def _of_count(
        self, first: Value, last: Value, count: Value, taken: Value, count_after: Value
    ) -> tuple:
        """As `_judged`, from the count of some lanes, which may be the first, and the last."""
        taken = lax.add(taken, lax.convert_element_type(first, np.int32))
        some, many = lax.gt(count, np.int32(0)), lax.gt(count, np.int32(self.left))
        waits = lax.bitwise_or(many, lax.bitwise_and(some, self._bears(count, taken)))
        counts = lax.ge(taken, count_after)
        goes_on = lax.bitwise_and(some, lax.bitwise_or(lax.bitwise_not(counts), waits))
        pause = np.int32(self.pause)
        if self.pause > 1:
            pause = lax.max(pause, lax.div(taken, np.int32(_MORE)))
        pause = lax.select(lax.bitwise_and(counts, last), pause, np.int32(0))
        return taken, lax.add(count_after, pause), some, goes_on

    def _bears(self, count: Value, taken: Value) -> Value:
        """Whether what was lost by waiting costs less than to move those that are left.

        Who is done has waited for half of the steps, on average, if they were done one by one.
        """
        if self.waiting is None:
            return np.False_
        lanes, taken = (lax.convert_element_type(x, np.float32) for x in (count, taken))
        idle = lax.mul(lax.sub(np.float32(self.size), lanes), lax.mul(np.float32(0.5), taken))
        return self.waiting.waits(idle, lanes)


class Queue(NamedTuple):
    """Lanes in the order in which they come."""

    lanes: Any  # their indices; None for all lanes in their order
    active: Any  # which of them are not done: the others never come

    @classmethod
    def of_all(cls, active: Value) -> Queue:
        return cls(None, active)


class InWindow(NamedTuple):
    """Who is in a window."""

    index: Any  # the lane at each place. Where no lane ever was, it is out of bounds, and differs.
    active: Any  # whether the lane is not done
    first: Any  # the place in the queue of the first who waits
    waiting: Any  # whether a lane may wait
    any_active: Any  # whether any lane is active

    @classmethod
    def empty(cls, size: int, width: int) -> InWindow:
        """A window of that width for that many lanes, before anybody has come."""
        index = np.arange(size, size + width, dtype=np.int32)
        return cls(index, np.zeros(width, bool), np.int32(0), np.True_, np.False_)


# A refill assigns the k-th waiting lane to the k-th free slot. Invariants:
# - An active slot keeps its lane. No lane is in two slots, and none that is done comes.
# - Lanes before `first` in the queue have come or are done, so `waiting` is whether one is left.
# - Indices of slots where no lane ever was are out of bounds and differ: gathers clamp them, and
#   scatters drop them, so these slots write nothing (`InWindow.empty`).
#
# On a CPU one loop walks both (`_one_by_one`). Each step of it goes on by a slot, by a lane of the
# queue, or by both. `first` is kept between calls, so all refills of a window take at most `size`
# steps, and each of them `width` more. Scatters would be a kernel for each array, and this is one.
#
# On other devices a loop of numbers takes longer than sums and scatters of all lanes
# (`_at_once`): the rank of a lane is how many wait before it, the rank of a slot how many are free
# before it, and two of one rank belong together. That is stream compaction by prefix sums
# (Blelloch, "Prefix sums and their applications", 1990). A refill takes O(size) work, in a few
# launches.


def refill(queue: Queue, window: InWindow) -> InWindow:
    """The window with those who wait where lanes are done."""
    of_all = queue.lanes is None

    def run(*operands: Value) -> InWindow:
        source = Queue(None, operands[0]) if of_all else Queue(*operands[:2])
        how = _one_by_one if jax.default_backend() == "cpu" else _at_once
        return how(source, InWindow(*operands[len(queue) - of_all :]))

    return InWindow(*staged_once("refill", run, *queue[of_all:], *window))


def _one_by_one(queue: Queue, window: InWindow) -> InWindow:
    """As `refill`: on a CPU that is one function to compile, and takes less time."""
    size, width = np.int32(queue.active.shape[0]), np.int32(window.index.shape[0])

    def once(state: Tree) -> Tree:
        place, (index, active, first, _, any_active) = state
        # What is read and written in one step would be copied in each.
        stays = entry_of(window.active, place)
        refills = lax.bitwise_and(lax.bitwise_not(stays), lax.lt(first, size))
        comes = lax.bitwise_and(refills, entry_of(queue.active, first))
        lane = first if queue.lanes is None else entry_of(queue.lanes, first)
        old = entry_of(window.index, place)
        index = put_entry(index, lax.select(comes, lane, old), place)
        here = lax.bitwise_or(stays, comes)
        active = put_entry(active, here, place)
        first = lax.add(first, lax.convert_element_type(refills, np.int32))
        taken = lax.bitwise_or(comes, lax.bitwise_not(refills))
        place = lax.add(place, lax.convert_element_type(taken, np.int32))
        waiting, any_active = lax.lt(first, size), lax.bitwise_or(any_active, here)
        return place, InWindow(index, active, first, waiting, any_active)

    start = np.int32(0), window._replace(waiting=np.True_, any_active=np.False_)
    start = alike(start, [*window, queue.active])
    return while_loop(lambda state: lax.lt(state[0], width), once, start)[1]


def _at_once(queue: Queue, window: InWindow) -> InWindow:
    """As `refill`: most devices take longer for a loop of numbers than for sums and scatters."""
    size, width = queue.active.shape[0], window.index.shape[0]
    order, places = lax.iota(np.int32, size), lax.iota(np.int32, width)
    waits = queue.active & (order >= window.first)
    rank, free = _rank(waits), _rank(~window.active)
    count = free[-1] + lax.convert_element_type(~window.active[-1], np.int32)
    # Lanes that get no slot are written out of bounds, each to another index.
    place_of = put(places, places, lax.select(window.active, width + places, free), 0)
    place = taken_at(place_of, lax.min(rank, np.int32(width - 1)), 0)
    comes = waits & (rank < count)
    target = lax.select(comes, place, width + order)
    index = put(window.index, order if queue.lanes is None else queue.lanes, target, 0)
    active = put(window.active, comes, target, 0)
    last = lax.reduce_max(lax.select(comes, order + 1, lax.full_like(order, 0)), (0,))
    first = lax.max(window.first, last)
    waiting = lax.reduce_or(waits & ~comes, (0,))
    return InWindow(index, active, first, waiting, lax.reduce_or(active, (0,)))


def _rank(chosen: Value) -> Value:
    """How many are chosen before each."""
    ones = lax.convert_element_type(chosen, np.int32)
    return lax.cumsum(ones) - ones


Tally = tuple[Any, ...]
"""Iterations, and lane-steps of active lanes in two halves of 32 bits, the high one first: in
single precision JAX has no integers of 64 bits. Empty where nothing is counted."""

LaneStep = Callable[[int, Sequence[Any], Any, Sequence[Any], Tally], tuple[Any, list[Any], Tally]]
"""One step of some lanes: (width, consts, active, carry, tally) -> (active, carry, tally)."""


def run_in_windows(
    plan: Window,
    step: LaneStep,
    consts: Values,
    positions: Positions,
    active: Value,
    carry: list[Value],
) -> tuple[list[Any], list[Tally]]:
    """Runs a loop.

    Args:
      plan: how the lanes are run.
      step: one step of some lanes.
      consts: its operands besides the carry; `positions` says where each has the batch axis.
      active: whether each lane takes a first step.
      carry: the first carry of all lanes, at the front.

    Returns:
      The last carry, and for each window the count of its lane-steps.
    """
    # Invariants of what follows:
    # - Each lane is done, waits in the queue, or has one slot. `everyone`, the arrays of all lanes,
    #   hold the last carry of each lane that has no slot; what they hold of the others is stale.
    # - A slot that is not active, because its lane is done or because no lane came, takes each step
    #   masked: its carry does not change.
    # - The queue is walked once. A lane leaves it for a slot, and comes back only for the next,
    #   narrower window, when the queue is what this window leaves.
    # So each lane takes its own steps, in order, whatever the widths are: results do not depend on
    # them.
    #
    # Bounds. With freed slots refilled at once, a window of `w` slots takes at most ``sum(n) / w +
    # max(n)`` steps for lanes of `n` steps each (Graham, "Bounds for certain multiprocessing
    # anomalies", 1966), and masked lanes take ``max(n)`` steps of all. To refill moves lanes, so
    # freed slots wait until that has cost what moving costs: both together cost at most twice the
    # best choice of moments, plus a step (`SkiRental`). Of the run of all lanes the same holds: it
    # ends when few enough lanes are left that a window is cheaper, and waiting has cost its price.
    # The second term of the bound is the slowest lanes, alone in a wide window. The next window is
    # narrower by a factor for them.
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


def until_few_are_left(
    plan: FewAlone, step: LaneStep, consts: Values, active: Value, carry: Values
) -> Tree:
    """Which lanes are active, and what all carry, masked, when no more than a few are."""
    once = lambda state: step(active.shape[0], consts, *state)
    state = alike((active, carry, ()), [active, *carry, *consts])
    together = Together(active.shape[0], plan.leave_at, None, plan.pause)
    ((active, carry, _), _) = together.run(anyone(active), once, state)
    return active, carry


def until_all_are_done(step: LaneStep, width: int, consts: Values, state: Tree) -> Tree:
    """Steps of `width` lanes, while any of them is active."""

    def once(state: Tree) -> Tree:
        active, carry, tally = state
        return step(width, consts, active, carry, tally)

    return while_loop(lambda state: lax.reduce_or(state[0], (0,)), once, state)


def _steps(
    step: LaneStep,
    consts: Values,
    begins: Value,
    goes_on: _GoesOn,
    waiting: Value,
    state: Tree,
) -> Tree:
    """Steps of the lanes of a window: one if they `begin`, and more while they `go on`."""

    def once(state: Tree) -> Tree:
        active, carry, tally, wasted, _ = state
        active, carry, tally = step(goes_on.width, consts, active, carry, tally)
        return active, carry, tally, *goes_on.judged(active, waiting, wasted)

    start = alike((*state, np.float32(0), begins), [begins])
    return while_loop(lambda state: state[-1], once, start)[:3]


@dataclass(frozen=True)
class _GoesOn:
    """Whether the lanes of a window go on together."""

    plan: Window  # how they are run
    width: int  # how many there are
    left: int  # how many may be active when none waits and they leave

    def judged(self, active: Value, waiting: Value, wasted: Value) -> list[Any]:
        """The lane-steps wasted after one more, and whether lanes go on.

        Args:
          active: which of them are active.
          waiting: whether others wait.
          wasted: the lane-steps wasted before.
        """
        return staged_once(self, self._judged, waiting, active, wasted)

    def _judged(self, waiting: Value, active: Value, wasted: Value) -> tuple[Any, Any]:
        blocks = Blocks.of(active)
        if blocks is None:
            count = count_active(active)
            wasted = self._wasted(wasted, self.width, count)
            return wasted, self._of_count(waiting, count, wasted)

        def once(state: Tree) -> Tree:
            place, count, wasted, _ = state
            new = lax.convert_element_type(blocks.at(place), np.int32)
            new = lax.reduce_sum(new, (0,))
            count, wasted = lax.add(count, new), self._wasted(wasted, blocks.lanes, new)
            place = lax.add(place, blocks.step)
            return place, count, wasted, self._of_count(waiting, count, wasted)

        start = alike((np.int32(0), np.int32(0), wasted, np.True_), [active])
        return while_loop(lambda state: lax.lt(state[0], blocks.end), once, start)[2:]

    def _wasted(self, wasted: Value, lanes: int, active: Value) -> Value:
        """The lane-steps wasted after one more of so many lanes, some of which are active."""
        return lax.add(
            wasted, lax.convert_element_type(lax.sub(np.int32(lanes), active), np.float32)
        )

    def _of_count(self, waiting: Value, count: Value, wasted: Value) -> Value:
        plan, some = self.plan, lax.gt(count, np.int32(0))
        many = some if self.left == 0 else lax.gt(count, np.int32(self.left))
        rule = _waiting(plan)
        waits = np.False_ if rule is None else rule.waits(wasted, self.width)
        bears = lax.bitwise_and(some, waits)
        full = lax.gt(count, np.int32(_refilled_at(plan, self.width)))
        return lax.select(waiting, lax.bitwise_or(full, bears), many)


class _Window:
    """A window of so many lanes, until none waits for it and they fit the `narrower` one.

    Attributes:
      plan: how the lanes are run.
      width: how many lanes it holds.
      narrower: the width of the next one; zero if there is none.
      step: one step of some lanes.
      consts, positions: its operands besides the carry, and where each has the batch axis.
    """

    def __init__(
        self,
        plan: Window,
        width: int,
        narrower: int,
        step: LaneStep,
        consts: Values,
        positions: Positions,
    ) -> None:
        self.plan, self.width, self.narrower, self.step = plan, width, narrower, step
        self.consts, self.positions = consts, positions

    def run(
        self, queue: Queue, waiting: Value, everyone: list[Any], varying: Values
    ) -> tuple[list[Any], InWindow, Tally]:
        """The carries of all lanes, who is left in the window, and the count of lane-steps.

        `waiting` is whether any lane of the queue is active.
        """
        goes_on = _GoesOn(self.plan, self.width, self.narrower)

        def steps(lanes: InWindow, consts: Sequence[Any], state: Tree) -> Tree:
            return _steps(self.step, consts, lanes.any_active, goes_on, lanes.waiting, state)

        turn = functools.partial(self._turn, queue, steps)
        state = alike(self._empty(everyone, waiting), varying)
        return while_loop(lambda state: state[1].waiting, turn, state)

    def run_to_the_end(
        self, queue: Queue, everyone: list[Any], varying: Values
    ) -> tuple[list[Any], InWindow, Tally]:
        """As `run`, where the window has a place for each lane."""

        def steps(_: InWindow, consts: Sequence[Any], state: Tree) -> Tree:
            return until_all_are_done(self.step, self.width, consts, state)

        return self._turn(queue, steps, alike(self._empty(everyone, np.True_), varying))

    def _empty(self, everyone: list[Any], waiting: Value) -> tuple[list[Any], InWindow, Tally]:
        empty = InWindow.empty(everyone[0].shape[0], self.width)
        return everyone, empty._replace(waiting=waiting), _blank(self.plan)

    def _turn(self, queue: Queue, steps: Callable[..., Any], state: Tree) -> Tree:
        """Has those who wait take the places of lanes that are done, and runs `steps` of them."""
        everyone, lanes, tally = state
        lanes = refill(queue, lanes)
        last = np.int32(everyone[0].shape[0] - 1)
        here = lax.min(lanes.index, last)  # an empty slot reads some lane
        carry = [rows_of(x, 0, here) for x in everyone]
        consts = [rows_of(x, a, here) for x, a in zip(self.consts, self.positions, strict=True)]
        active, carry, tally = steps(lanes, consts, (lanes.active, carry, tally))
        everyone = [with_rows(x, r, lanes.index) for x, r in zip(everyone, carry, strict=True)]
        return everyone, lanes._replace(active=active), tally


def _refilled_at(plan: Window, width: int) -> int:
    """How many active lanes a window of that width has at most when it is refilled, or left."""
    return width - max(1, round(width * (plan.share or 0)))


def _waiting(plan: Window) -> SkiRental | None:
    """When idle lanes have waited enough; None: as soon as the user's share of them is done."""
    return SkiRental(plan.patience) if plan.share is None else None


def _blank(plan: Window) -> Tally:
    return (np.uint32(0),) * 3 if plan.counts else ()


def counted(tally: Tally, count: Value) -> Tally:
    """A tally of one more iteration, in which so many lanes are active."""
    if not tally:
        return tally
    iterations, high, low = tally
    total = low + lax.convert_element_type(count, np.uint32)
    return iterations + np.uint32(1), high + lax.convert_element_type(total < low, np.uint32), total
