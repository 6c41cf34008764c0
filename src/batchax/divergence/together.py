"""All lanes of a loop at once, until few of them are left.

To find out how many are left takes a part of what a short step takes. So they may be counted
seldom: after a few steps, and again when a quarter as many more have been taken. Whether any is
left must be known after each step, as where lanes are masked, and is at the first one who is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax.divergence.blocks import Blocks
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.varying import alike
from batchax.execution.gathered_lanes import count_active
from batchax.kernel.staged import staged_once, while_loop

_MORE = 4  # the share of the steps taken that are taken before lanes are counted again


@dataclass(frozen=True)
class Together:
    """When all lanes stop to run at once.

    Attributes:
      size: how many there are.
      left: how many may be left when they stop.
      waiting: when lanes that are done have waited enough; None: when so many are left.
      pause: how many steps are taken at least before lanes are counted; 1: they are after each.
    """

    size: int
    left: int
    waiting: SkiRental | None
    pause: int = 1

    def run(self, begins: Any, once: Callable[[Any], Any], state: Any) -> tuple[Any, Any]:
        """The state after some steps, and whether any lane is left.

        Args:
          begins: whether any lane is active.
          once: a step, from a state to the next.
          state: begins with which lanes are active.
        """

        def step(whole: Any) -> Any:
            state, taken, asked, *_ = whole
            state = once(state)
            return state, *staged_once(self, self._judged, state[0], taken, asked)

        whole = state, np.int32(0), np.int32(self.pause), begins, begins
        whole = alike(whole, jax.tree.leaves(state))
        state, _, _, left, _ = while_loop(lambda whole: whole[-1], step, whole)
        return state, left

    def _judged(self, active: Any, taken: Any, asked: Any) -> tuple[Any, ...]:
        """The steps taken, when lanes are counted, whether any are left, whether all go on.

        Args:
          active: which lanes are active after one step more.
          taken: how many steps were taken before.
          asked: after how many lanes are counted.
        """
        blocks = Blocks.of(active)
        if blocks is None:
            return self._of_count(np.True_, np.True_, count_active(active), taken, asked)

        # All is in the loop: what is not would be compiled as functions of their own.
        def once(state: Any) -> Any:
            place, count, taken, asked, *_ = state
            new = lax.convert_element_type(blocks.at(place), np.int32)
            count = lax.add(count, lax.reduce_sum(new, tuple(range(new.ndim))))
            first, place = lax.eq(place, np.int32(0)), lax.add(place, blocks.step)
            last = lax.ge(place, blocks.end)
            return place, count, *self._of_count(first, last, count, taken, asked)

        def goes_on(state: Any) -> Any:
            place, count, taken, asked, *_ = state
            more = lax.bitwise_or(lax.eq(count, np.int32(0)), lax.ge(taken, asked))
            return lax.bitwise_and(lax.lt(place, blocks.end), more)

        start = np.int32(0), np.int32(0), taken, asked, np.False_, np.False_
        return while_loop(goes_on, once, alike(start, [active]))[2:]

    def _of_count(self, first: Any, last: Any, count: Any, taken: Any, asked: Any) -> tuple:
        """As `_judged`, from the count of some lanes, which may be the first, and the last."""
        taken = lax.add(taken, lax.convert_element_type(first, np.int32))
        some, many = lax.gt(count, np.int32(0)), lax.gt(count, np.int32(self.left))
        waits = lax.bitwise_or(many, lax.bitwise_and(some, self._bears(count, taken)))
        counts = lax.ge(taken, asked)
        goes_on = lax.bitwise_and(some, lax.bitwise_or(lax.bitwise_not(counts), waits))
        pause = lax.select(lax.bitwise_and(counts, last), self._pause(taken), np.int32(0))
        return taken, lax.add(asked, pause), some, goes_on

    def _pause(self, taken: Any) -> Any:
        least = np.int32(self.pause)
        return least if least == 1 else lax.max(least, lax.div(taken, np.int32(_MORE)))

    def _bears(self, count: Any, taken: Any) -> Any:
        """Whether what was lost by waiting costs less than to move those that are left.

        Who is done has waited for half of the steps, on average, if they were done one by one.
        """
        if self.waiting is None:
            return np.False_
        lanes, taken = (lax.convert_element_type(x, np.float32) for x in (count, taken))
        idle = lax.mul(lax.sub(np.float32(self.size), lanes), lax.mul(np.float32(0.5), taken))
        return self.waiting.waits(idle, lanes)
