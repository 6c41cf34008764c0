"""Loops that lanes leave when they are done.

A loop batched by ``jax.vmap`` runs all lanes until the slowest is done (see JAX #8409).

First all lanes run, as they do where lanes are masked, until a share of them is done. Those
that are left wait for a place in a window of fixed width: lanes that are done leave it, and
waiting ones take their places (refill). When none waits, the lanes that are left move to
narrower and narrower windows (compaction), so that the last slow lanes do not run in a window
full of lanes that are done.

A window holds the indices of its lanes: what belongs to a lane is read from, and written to,
the arrays of all lanes by index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.kernel.axis import AxisPosition
from batchax.rules.masking import select_lanes

LaneStep = Callable[[int, Sequence[Any], Any, Sequence[Any]], tuple[Any, list[Any]]]
"""One step of some lanes: (width, consts, active, carry) -> (active, carry)."""

Tally = tuple[Any, ...]
"""Iterations, and lane-steps of active lanes in two halves of 32 bits, the high one first: in
single precision JAX has no integers of 64 bits. Empty where nothing is counted."""


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
    """

    widths: tuple[int, ...]
    threshold: float | None
    most_left: int
    patience: float
    counts: bool

    def left(self, k: int) -> int:
        """How many lanes may still be active when window `k` is left for the next: its width."""
        return self.widths[k + 1] if k + 1 < len(self.widths) else 0

    def refilled_at(self, k: int) -> int:
        """How many active lanes window `k` has at most when it is refilled, or left."""
        return self.widths[k] - max(1, round(self.widths[k] * (self.threshold or 0)))

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
    consts: Sequence[Any],
    positions: Sequence[AxisPosition],
    active: Any,
    carry: list[Any],
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
    everyone, first = active.shape[0], 0
    tallies = []
    if plan.widths[0] == everyone:
        left = plan.most_left if plan.threshold is None else plan.refilled_at(0)
        left = max(left, plan.left(0)) if len(plan.widths) > 1 else 0
        stays = lambda wasted, count: plan.bears(wasted, count) & (count > 0)
        state = (active, carry, plan.blank)
        active, carry, tally = _steps(step, everyone, consts, left, stays, _alike(state, varying))
        tallies, first = [tally], 1
    waiting, count = _compressed(active, lax.iota(np.int32, everyone), everyone)
    for k in range(first, len(plan.widths)):
        window = _Window(plan, k, step, consts, positions, waiting, count)
        carry, waiting, count, tally = window.run(carry, varying)
        tallies.append(tally)
    return carry, tallies


def _steps(
    step: LaneStep,
    width: int,
    consts: Sequence[Any],
    left: Any,
    stays: Callable[[Any, Any], Any],
    state: Any,
) -> Any:
    """Steps of `width` lanes, while more than `left` of them are active, or `stays` says to go on.

    `stays` is given the lane-steps wasted so far, and the number of active lanes.
    """
    active, carry, tally = state

    def goes_on(state: Any) -> Any:
        _, _, _, count, wasted = state
        return (count > left) | stays(wasted, count)

    def once(state: Any) -> Any:
        active, carry, tally, count, wasted = state
        tally = _counted(tally, count)
        active, carry = step(width, consts, active, carry)
        count = _count(active)
        wasted += lax.convert_element_type(width - count, np.float32)
        return active, carry, tally, count, wasted

    count = _count(active)
    start = active, carry, tally, count, lax.full_like(count, 0, np.float32)
    return lax.while_loop(goes_on, once, start)[:3]


class _Window:
    """Window `k`, for the first `count` of the lanes whose indices are in `waiting`."""

    def __init__(
        self,
        plan: Plan,
        k: int,
        step: LaneStep,
        consts: Sequence[Any],
        positions: Sequence[AxisPosition],
        waiting: Any,
        count: Any,
    ) -> None:
        self.plan, self.k, self.step = plan, k, step
        self.width = plan.widths[k]
        self.consts, self.positions = consts, positions
        self.waiting, self.count = waiting, count

    def run(self, everyone: list[Any], varying: Any) -> tuple[list[Any], Any, Any, Tally]:
        """From the carries of all lanes to those after this window.

        Also returns the lanes that are left, how many they are, and the count of lane-steps.
        """
        width = self.width
        nobody = jnp.zeros(width, np.int32)  # a free place holds some lane, which is masked
        places = (
            nobody,
            jnp.zeros(width, np.bool_),
            [x[nobody] for x in everyone],
            self._consts_of(nobody),
        )
        state = (everyone, np.int32(0), places, self.plan.blank)
        everyone, _, (lanes, active, _, _), tally = lax.while_loop(
            lambda state: state[1] < self.count, self._turn, _alike(state, varying)
        )
        if not self.plan.left(self.k):
            return everyone, None, None, tally
        return everyone, *_compressed(active, lanes, self.plan.left(self.k)), tally

    def _turn(self, state: Any) -> Any:
        """Fills free places, runs until enough lanes are done, and writes what they hold."""
        everyone, next_waiting, places, tally = state
        lanes, active, carry, consts = self._filled(everyone, next_waiting, places)
        next_waiting = next_waiting + _count(active & ~places[1])
        some_wait = next_waiting < self.count
        left = lax.select(some_wait, self.plan.refilled_at(self.k), self.plan.left(self.k))

        given = iter(consts)
        operands = [
            x if a is None else next(given)
            for x, a in zip(self.consts, self.positions, strict=True)
        ]

        def stays(wasted: Any, count: Any) -> Any:
            return some_wait & (count > 0) & self.plan.bears(wasted, np.int32(self.width))

        began, state = active, (active, carry, tally)
        active, carry, tally = _steps(self.step, self.width, operands, left, stays, state)
        leaves = began & ~(active & some_wait)
        # Places that no lane leaves are written out of bounds, where they are dropped: each to
        # another index, since indices are said to be unique.
        beyond = everyone[0].shape[0] + lax.iota(np.int32, self.width)
        target = lax.select(leaves, lanes, beyond)
        everyone = [
            x.at[target].set(row, mode="drop", unique_indices=True)
            for x, row in zip(everyone, carry, strict=True)
        ]
        return everyone, next_waiting, (lanes, active, carry, consts), tally

    def _filled(self, everyone: Sequence[Any], next_waiting: Any, places: Any) -> Any:
        lanes, active, carry, consts = places
        place = next_waiting + lax.cumsum(lax.convert_element_type(~active, np.int32)) - 1
        enters = ~active & (place < self.count)
        lanes = lax.select(enters, self.waiting.at[place].get(mode="clip"), lanes)
        rows = [x.at[lanes].get(mode="clip") for x in everyone]
        carry = [select_lanes(enters, 0, row, old) for row, old in zip(rows, carry, strict=True)]
        # Constants never change, so those of all places are read again: nothing to select.
        consts = self._consts_of(lanes) if consts else consts
        return lanes, active | enters, carry, consts

    def _consts_of(self, lanes: Any) -> list[Any]:
        return [
            x.at[(slice(None),) * a + (lanes,)].get(mode="clip")
            for x, a in zip(self.consts, self.positions, strict=True)
            if a is not None
        ]


def _compressed(active: Any, lanes: Any, size: int) -> tuple[Any, Any]:
    """The `lanes` that are active, one after another in an array of that size, and how many."""
    places = lax.cumsum(lax.convert_element_type(active, np.int32)) - 1
    beyond = size + lax.iota(np.int32, active.shape[0])  # dropped; each differs, as places must
    target = lax.select(active, places, beyond)
    listed = jnp.zeros(size, np.int32).at[target].set(lanes, mode="drop", unique_indices=True)
    return listed, _count(active)


def _count(active: Any) -> Any:
    return jnp.sum(active, dtype=np.int32)


def _counted(tally: Tally, count: Any) -> Tally:
    if not tally:
        return tally
    iterations, high, low = tally
    total = low + lax.convert_element_type(count, np.uint32)
    return iterations + np.uint32(1), high + lax.convert_element_type(total < low, np.uint32), total


def _alike(state: Any, like: Sequence[Any]) -> Any:
    """A first carry whose values, inside ``shard_map``, vary over all that `like` varies over.

    The types of a carry must be the same before and after a step.
    """
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, _compat.varying_alike(leaves, like=like))
