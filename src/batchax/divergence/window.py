"""Loops that lanes leave when they are done.

A loop batched by ``jax.vmap`` runs all lanes until the slowest is done (see JAX #8409).

First all lanes run, as they do where lanes are masked, until a share of them is done. Those
that are left queue for a window of fixed width. The first of the queue run until some of them are
done, and the others return to the front of the queue: so waiting lanes take the places of those
that are done (refill). When none waits, those who are left run in a narrower window (compaction),
so that the last slow lanes do not run in a window full of lanes that are done.

A window holds the indices of its lanes: what belongs to a lane is read from, and written to,
the arrays of all lanes by index. That is the same program for all widths, of which only steps are
compiled once more for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.gathered_lanes import put, taken_at
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position

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
        no threshold.
      patience: how many steps of a lane cost as much as moving it in and out of a window.
      counts: whether lane-steps are counted.
      why: why there is no window but that of all lanes; empty if there is.
      neighbours: whether the lanes of a window are neighbours that stay in it until all of them are
        done, and other neighbours are next: so no lane is moved.
    """

    widths: tuple[int, ...]
    threshold: float | None
    most_left: int
    patience: float
    counts: bool
    why: str = ""
    neighbours: bool = False

    def refilled_at(self, width: int) -> int:
        """How many active lanes a window of that width has at most when it is refilled, or left."""
        return width - max(1, round(width * (self.threshold or 0)))

    def bears(self, wasted: Any, moving: Any) -> Any:
        """Whether so many wasted lane-steps cost less than it costs to move so many lanes.

        Nobody knows how many steps are to come. Whoever stays until waiting has cost as much as
        moving does pays at most twice what the best choice would have cost that knew (Karlin,
        Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988).
        """
        if self.threshold is not None:
            return np.False_
        return wasted < np.float32(self.patience) * lax.convert_element_type(moving, np.float32)

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
    if plan.neighbours:
        return _neighbours_in_turn(plan, step, consts, positions, active, carry)
    varying = [active, *carry, *consts]
    size, widths = active.shape[0], plan.widths
    tallies, count = [], np.int32(size)  # at most
    if widths[0] == size:
        widths = widths[1:]
        left = plan.most_left if plan.threshold is None else plan.refilled_at(size)
        left = max(left, widths[0]) if widths else 0
        stays = lambda wasted, count: plan.bears(wasted, count) & (count > 0)
        state = (active, carry, plan.blank)
        state = alike(state, varying)
        state = _steps(step, size, consts, left, stays, state, count_active(active))
        active, carry, tally, count = state
        tallies = [tally]
    if widths:
        window = _Window(plan, widths, step, consts, positions)
        carry, others = window.run(active, carry, count, varying)
        tallies += others
    return carry, tallies


def _neighbours_in_turn(
    plan: Plan,
    step: LaneStep,
    consts: Sequence[Value],
    positions: Sequence[Position],
    active: Any,
    carry: list[Value],
) -> tuple[list[Any], list[Tally]]:
    """As `run_in_windows`, for neighbours that run until the last of them is done."""
    size, (width,) = active.shape[0], plan.widths
    fewer = size % width  # with these are some that are done

    def turn(state: Any) -> Any:
        first, everyone, tally = state
        start = lax.min(first, np.int32(size - width)) if fewer else first

        def cut(x: Value, axis: Position) -> Any:
            if axis is None:
                return x
            return lax.dynamic_slice_in_dim(x, start, width, axis, allow_negative_indices=False)

        active, *rows = (cut(x, 0) for x in everyone)
        own = list(map(cut, consts, positions))
        waits = lambda *_: np.False_
        state = active, rows, tally
        active, rows, tally, _ = _steps(step, width, own, 0, waits, state, count_active(active))

        def put_back(x: Value, rows: Any) -> Any:
            return lax.dynamic_update_slice_in_dim(x, rows, start, 0, allow_negative_indices=False)

        ended = put_back(everyone[0], active) if fewer else everyone[0]
        everyone = [ended, *map(put_back, everyone[1:], rows)]
        return first + np.int32(width), everyone, tally

    state = alike((np.int32(0), [active, *carry], plan.blank), [active, *carry, *consts])
    _, (_, *carry), tally = lax.while_loop(lambda state: state[0] < size, turn, state)
    return carry, [tally]


def _steps(
    step: LaneStep,
    width: int,
    consts: Sequence[Value],
    left: Any,
    stays: Callable[[Any, Any], Any],
    state: Any,
    count: Any,
) -> Any:
    """Steps of `width` lanes, while more than `left` of them are active, or `stays` says to go on.

    `count` of them are active at first. `stays` is given the lane-steps wasted so far, and how
    many are active.
    """
    active, carry, tally = state

    def goes_on(state: Any) -> Any:
        _, _, _, count, wasted = state
        return (count > left) | stays(wasted, count)

    def once(state: Any) -> Any:
        active, carry, tally, count, wasted = state
        active, carry, tally = step(width, consts, active, carry, tally)
        count = count_active(active)
        wasted += lax.convert_element_type(width - count, np.float32)
        return active, carry, tally, count, wasted

    start = active, carry, tally, count, lax.full_like(count, 0, np.float32)
    return lax.while_loop(goes_on, once, start)[:4]


class _Window:
    """A window of the first of these `widths`, or of a narrower one when nobody waits.

    Attributes:
      plan: how the lanes are run.
      widths: from the widest down, without that of all lanes.
      step: one step of some lanes.
      consts, positions: what it is given beside the carry, and where each has the batch axis.
    """

    def __init__(
        self,
        plan: Plan,
        widths: Sequence[int],
        step: LaneStep,
        consts: Sequence[Value],
        positions: Sequence[Position],
    ) -> None:
        self.plan, self.widths, self.step = plan, widths, step
        self.consts, self.positions = consts, positions

    def run(
        self, active: Any, everyone: list[Any], left: Any, varying: Any
    ) -> tuple[list[Any], Sequence[Tally]]:
        """From the carries of all lanes to their last ones, with counts of lane-steps.

        No more than `left` lanes are active, and none if that is zero.
        """
        size = active.shape[0]
        queue = lax.iota(np.int32, size), np.int32(0), np.int32(size), left
        state = [active, *everyone], queue, [self.plan.blank] * len(self.widths)

        def goes_on(state: Any) -> Any:
            _, (_, _, end, left), _ = state
            return (end < size) | (left > 0)

        everyone, _, tallies = lax.while_loop(goes_on, self._turn, alike(state, varying))
        return everyone[1:], tallies

    def _turn(self, state: Any) -> Any:
        """Runs the first lanes of the queue until enough are done; the others stay in front of it.

        The queue begins with the lanes of the turn before, up to `end`, of which `left` are active.
        """
        everyone, (queue, first, end, _), tallies = state
        queue, first = _without_done(queue, first, end, everyone[0])
        size, width = queue.shape[0], self.widths[0]
        end = lax.min(first + width, np.int32(size))
        place = lax.iota(np.int32, width)
        taken = place < end - first
        lanes = taken_at(queue, lax.min(first + place, np.int32(size - 1)), 0)
        carry = [rows_of(x, 0, lanes) for x in everyone[1:]]
        consts = [rows_of(x, a, lanes) for x, a in zip(self.consts, self.positions, strict=True)]
        fits = [end - first <= w for w in self.widths[1:]]
        k = sum((lax.convert_element_type(fit, np.int32) for fit in fits), np.int32(0))
        runs = [functools.partial(self._run_at, k) for k in range(len(self.widths))]
        rows, left, tallies = lax.switch(
            k, runs, end < size, end - first, taken, carry, consts, tallies
        )
        # Places without a lane are written out of bounds, where they are dropped: each to another
        # index, since indices are said to be unique.
        target = lax.select(taken, lanes, size + place)
        everyone = list(map(functools.partial(with_rows, target=target), everyone, rows))
        return everyone, (queue, first, end, left), tallies

    def _run_at(
        self,
        k: int,
        some_wait: Any,
        count: Any,
        active: Any,
        carry: list[Value],
        consts: list[Value],
        tallies: list[Tally],
    ) -> Any:
        """Steps of the first places, as many as the width `k`, until enough lanes are done."""
        width = self.widths[k]
        left: Any = self.widths[k + 1] if k + 1 < len(self.widths) else 0
        if k == 0:
            left = lax.select(some_wait, np.int32(self.plan.refilled_at(width)), np.int32(left))

        def stays(wasted: Any, count: Any) -> Any:
            if k:
                return np.False_  # nobody waits
            return some_wait & (count > 0) & self.plan.bears(wasted, np.int32(width))

        def narrow(x: Value, axis: Position) -> Any:
            if axis is None or not k:
                return x
            return lax.slice_in_dim(x, 0, width, axis=axis)

        consts = [narrow(x, a) for x, a in zip(consts, self.positions, strict=True)]
        state = (narrow(active, 0), [narrow(x, 0) for x in carry], tallies[k])
        run, rows, tally, count = _steps(self.step, width, consts, left, stays, state, count)
        everyone = [run, *rows]
        if k:
            everyone = [
                lax.dynamic_update_slice_in_dim(x, row, 0, 0)
                for x, row in zip((active, *carry), everyone, strict=True)
            ]
        return everyone, count, [*tallies[:k], tally, *tallies[k + 1 :]]


def _without_done(queue: Any, first: Any, end: Any, active: Any) -> tuple[Any, Any]:
    """`queue` with only the active lanes of those from `first` to `end`, and where they start."""
    size = queue.shape[0]
    if jax.default_backend() != "cpu":
        place = lax.iota(np.int32, size)
        stays = (place >= first) & (place < end) & taken_at(active, queue, 0)
        before = end - lax.cumsum(lax.convert_element_type(stays, np.int32), reverse=True)
        # Others are written out of bounds, where they are dropped; each differs, as places must.
        target = lax.select(stays, before, size + place)
        queue = put(queue, queue, target, 0)
        return queue, end - count_active(stays)

    def once(state: Any) -> Any:
        queue, at, to = state
        lane = lax.dynamic_index_in_dim(queue, at - 1, 0, False, allow_negative_indices=False)
        # Whoever comes next, if anyone, writes over a lane that is not active.
        queue = lax.dynamic_update_index_in_dim(
            queue, lane, to - 1, 0, allow_negative_indices=False
        )
        on = lax.dynamic_index_in_dim(active, lane, 0, False, allow_negative_indices=False)
        return queue, at - 1, to - lax.convert_element_type(on, np.int32)

    # On a processor that takes half as long as sums and a scatter do, and less to compile.
    queue, _, first = lax.while_loop(lambda state: state[1] > first, once, (queue, end, end))
    return queue, first


def rows_of(x: Value, position: Position, lanes: Any) -> Any:
    """What these lanes have of an array of all lanes; `lanes` may repeat some."""
    if position is None:
        return x
    return taken_at(x, lanes, position)


def with_rows(x: Value, rows: Any, target: Any) -> Any:
    """`x` with `rows` for the lanes `target`; those that are out of bounds are dropped."""
    return put(x, rows, target, 0)


def count_active(active: Any, dtype: Any = np.int32) -> Any:
    """How many lanes are active."""
    if jax.default_backend() != "cpu" or active.shape[0] >= 1 << 24:  # which a float counts to
        return lax.convert_element_type(jnp.sum(active, dtype=np.int32), dtype)
    # A processor is given several operations for a sum, each to be compiled, but one for this.
    ones = lax.convert_element_type(active, np.float32)
    return lax.convert_element_type(lax.dot(ones, ones), dtype)


def counted(tally: Tally, count: Any) -> Tally:
    """A tally of one more iteration, in which so many lanes are active."""
    if not tally:
        return tally
    iterations, high, low = tally
    total = low + lax.convert_element_type(count, np.uint32)
    return iterations + np.uint32(1), high + lax.convert_element_type(total < low, np.uint32), total


def alike(state: Any, like: Sequence[Any]) -> Any:
    """A first carry whose values, inside ``shard_map``, vary over all that `like` varies over.

    The types of a carry must be the same before and after a step.
    """
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, _compat.varying_alike(leaves, like=like))
