"""Which carries of a loop are kept, to go back over its steps: online binomial checkpointing.

Going back needs the carry before each step, from the last step to the first. A few are kept, the
*checkpoints*, and the others computed again from the last one before them. While the loop runs
nobody knows how many steps there will be, so what is kept changes as it goes on (Stumm and
Walther, "New algorithms for optimal online checkpointing", 2010).

A place is taken in rounds. In the first the carries after 0, 1, ... steps go into all c places, one
after another; in the second into those from the second place on, and so on. So what the first
place has from the first round stays, what the second has from the second, and between those at most
c - 1, c - 2, ... carries are missing: on the way back there is room for them, since what comes
later is no longer needed. No step is computed again more than once, and of n steps only n + 1 - c
are, the fewest that can be. That is so for fewer than ``c * (c + 1) / 2`` steps, hence
``sqrt(2 * length)`` places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.entries import entry_of, put_entry

UNUSED = np.iinfo(np.int32).max
"""The number of the step in a place where no carry is kept."""

_ONE = np.int32(1)


def n_checkpoints(length: int) -> int:
    """The least c with ``c * (c + 1) / 2 > length``: no step is computed again twice."""
    return (math.isqrt(8 * length + 8) + 1) // 2


def blank_checkpoints(checkpoints: Sequence[Any]) -> list[Any]:
    """As these in type, with nothing kept."""
    numbers, *carries = checkpoints
    return [lax.full_like(numbers, UNUSED), *carries]


class Round(NamedTuple):
    """Carries of a running loop that go into one place after another, up to the last.

    Attributes:
      both: after how many steps the first of them comes, and the place it goes to, which is also
        how many rounds there were before. As one array, which a compiler leaves out of a loop
        when it is not used, as it does not with two numbers that depend on each other.
    """

    both: Any

    @property
    def start(self) -> Any:
        """After how many steps the first carry comes."""
        return self.both[0]

    @property
    def lowest(self) -> Any:
        """The place it goes to."""
        return self.both[1]

    def place_of(self, number: Any) -> Any:
        """Where the carry after so many steps goes."""
        return number - self.start + self.lowest

    def at(self, number: Any, count: int) -> Round:
        """The round of the carry after so many steps, of which the one before was in this one."""
        full = self.place_of(number) == np.int32(count)
        following = jnp.stack([number, self.lowest + _ONE])
        return Round(jnp.where(full, following, self.both))

    def numbers(self, last: Any, count: int) -> Any:
        """After how many steps the carry in each place came, if this many were the last."""
        i = jnp.arange(count, dtype=np.int32)
        firsts = i * np.int32(count) - i * (i - _ONE) // np.int32(2)  # of all rounds
        before = self.lowest - _ONE
        shift = self.start - (np.int32(count) - before) - before  # of the round before this one
        older = jnp.where(self.lowest > 0, i + shift, np.int32(UNUSED))
        newer = i + self.start - self.lowest
        numbers = jnp.where(i <= self.place_of(last), newer, older)
        return jnp.where(i < self.lowest, firsts, numbers)


class Stack(NamedTuple):
    """Checkpoints on the way back, those after fewer steps below.

    Attributes:
      numbers: after how many steps each came, in the order of the stack.
      order: in which place it is.
      places: the carries, stacked.
      height: how many there are; from there on places are free.
    """

    numbers: Any
    order: Any
    places: list[Any]
    height: Any

    @classmethod
    def of(cls, checkpoints: Sequence[Any], first: Sequence[Any], count: Any) -> Stack:
        """Those after fewer than `count` steps; `first` is the first carry.

        A loop that recorded fewer steps may leave no place free for those that are missing. Of its
        checkpoints only the first is taken: with all other places free any number of steps fits.
        """
        numbers, *places = checkpoints
        zero, order = np.int32(0), lax.iota(np.int32, numbers.shape[0])
        numbers = put_entry(numbers, zero, zero, 0)
        places = [put_entry(x, y, zero, 0) for x, y in zip(places, first, strict=True)]
        numbers, order = lax.sort(_compat.varying_alike([numbers, order]), num_keys=1)
        height = jnp.sum(numbers < count, dtype=np.int32)
        # The carry before the last step is always recorded (`Round`).
        latest = jnp.max(jnp.where(numbers == UNUSED, zero, numbers))
        height = lax.select(latest < count - _ONE, _ONE, lax.max(height, _ONE))
        return cls(numbers, order, places, height)

    @property
    def last(self) -> Any:
        """After how many steps the carry on top came."""
        return entry_of(self.numbers, self.height - _ONE, 0)

    def carry_at(self, below: Any) -> list[Any]:
        """The carry so many below the top."""
        place = entry_of(self.order, self.height - _ONE - below, 0)
        return [entry_of(x, place, 0) for x in self.places]

    def leg(self, number: Any) -> tuple[Any, Callable[[Any], Any], Stack]:
        """The way from the carry on top to the one after `number` steps, or a part of it.

        If all carries on the way fit into the free places, they are kept. Otherwise a single one
        is, as far away as what is missing before it will fit later. The others took its place
        before.

        Returns:
          Where it ends; the place of each carry on the way, as a function of its number of steps;
          and the stack with them on top, for which places have to be filled.
        """
        here = self.last
        distance, free = number - here, np.int32(len(self.order)) - self.height
        all_fit = distance <= free
        end = jnp.where(all_fit, number, here + lax.min(distance - free, free) + _ONE)
        first = jnp.where(all_fit, here + _ONE, end)
        height = self.height + end - first + _ONE

        def place_of(number: Any) -> Any:
            return entry_of(self.order, self.height + lax.max(number - first, np.int32(0)), 0)

        i = jnp.arange(len(self.order), dtype=np.int32)
        added = (i >= self.height) & (i < height)
        numbers = jnp.where(added, i - self.height + first, self.numbers)
        return end, place_of, self._replace(numbers=numbers, height=height)

    def run(self, number: Any) -> Any:
        """How many on top came after `number` steps, one step less, and so on without a gap."""
        i = jnp.arange(len(self.order), dtype=np.int32)
        in_run = (i < self.height) & (self.numbers - i == number - self.height + _ONE)
        return jnp.sum(in_run, dtype=np.int32)
