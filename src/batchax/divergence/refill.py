"""Who takes the places of lanes that are done: the first of those that wait, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from batchax.divergence.varying import alike
from batchax.execution.entries import entry_of, put_entry
from batchax.execution.gathered_lanes import put, taken_at
from batchax.kernel.staged import staged_once, while_loop


class Queue(NamedTuple):
    """Lanes in the order in which they come.

    Attributes:
      lanes: their indices; None for all lanes in their order.
      active: which of them are not done: the others never come.
    """

    lanes: Any
    active: Any

    @classmethod
    def of_all(cls, active: Any) -> Queue:
        """All lanes."""
        return cls(None, active)


class InWindow(NamedTuple):
    """Who is in a window.

    Attributes:
      index: the lane at each place. Where nobody was ever, it is out of bounds, and differs.
      active: whether the lane is not done.
      first: the place in the queue of the first who waits.
      waiting: whether somebody may wait.
      any_active: whether any lane is active.
    """

    index: Any
    active: Any
    first: Any
    waiting: Any
    any_active: Any

    @classmethod
    def empty(cls, size: int, width: int) -> InWindow:
        """A window of that width for that many lanes, before anybody has come."""
        index = np.arange(size, size + width, dtype=np.int32)
        return cls(index, np.zeros(width, bool), np.int32(0), np.True_, np.False_)


def refill(queue: Queue, window: InWindow) -> InWindow:
    """The window with those who wait where lanes are done."""
    of_all = queue.lanes is None

    def run(*operands: Any) -> InWindow:
        asked = Queue(None, operands[0]) if of_all else Queue(*operands[:2])
        how = _one_by_one if jax.default_backend() == "cpu" else _at_once
        return how(asked, InWindow(*operands[len(queue) - of_all :]))

    return InWindow(*staged_once("refill", run, *queue[of_all:], *window))


def _one_by_one(queue: Queue, window: InWindow) -> InWindow:
    """As `refill`: on a processor that is one function to compile, and takes less time."""
    size, width = np.int32(queue.active.shape[0]), np.int32(window.index.shape[0])

    def once(state: Any) -> Any:
        place, (index, active, first, _, any_active) = state
        # What is read and written in one step would be copied in each.
        stays = entry_of(window.active, place)
        asked = lax.bitwise_and(lax.bitwise_not(stays), lax.lt(first, size))
        comes = lax.bitwise_and(asked, entry_of(queue.active, first))
        lane = first if queue.lanes is None else entry_of(queue.lanes, first)
        old = entry_of(window.index, place)
        index = put_entry(index, lax.select(comes, lane, old), place)
        here = lax.bitwise_or(stays, comes)
        active = put_entry(active, here, place)
        first = lax.add(first, lax.convert_element_type(asked, np.int32))
        taken = lax.bitwise_or(comes, lax.bitwise_not(asked))
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
    # Whoever goes nowhere is written out of bounds, each to another index.
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


def _rank(chosen: Any) -> Any:
    """How many are chosen before each."""
    ones = lax.convert_element_type(chosen, np.int32)
    return lax.cumsum(ones) - ones
