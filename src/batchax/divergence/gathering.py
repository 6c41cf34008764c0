"""Lanes that wait before a dear branch, until they are many or have waited enough.

A branch runs in blocks of a fixed width, and a block costs as much with one lane in it as with
many. So lanes that come to it wait: full blocks run at once. The rest runs when its lanes have
waited for as long, in sum, as the empty places of its block cost all active lanes, or when no
other lane can move. Who waits until that has cost as much as not to wait costs pays at most twice
what the best choice would have cost that knew who is to come (Karlin, Manasse, Rudolph and
Sleator, "Competitive snoopy caching", 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from batchax.divergence.segments import SegmentRun, in_front
from batchax.divergence.staged import staged_once
from batchax.execution.gathered_lanes import count_active
from batchax.jaxprs.words import Value


@dataclass(frozen=True)
class Gathering:
    """How lanes come through a dear branch.

    Attributes:
      run: what is done in it.
      width: how many lanes make a block.
      block: nanoseconds that a block takes.
    """

    run: SegmentRun
    width: int
    block: float

    def __call__(
        self, waited: Any, come: Any, everyone: Any, others_move: Any, values: Sequence[Value]
    ) -> tuple[list[Any], Any]:
        """Runs it for those whose time it is.

        Args:
          waited, come: which lanes waited before it, and which have just come.
          everyone: how many are active in the loop around it.
          others_move: whether some of these do not wait before any branch.
          values: its constants, and what all lanes hold in its slots, of which the last says how
            long each has waited.

        Returns:
          The values, and how long it took: in nanoseconds, by a model.
        """
        width, block = self.width, np.float32(self.block)
        told = waited, come, everyone, others_move, values[-1]
        queue, done = staged_once(("who comes through", width, self.block), self._who, *told)
        values = self.run.in_blocks(width, queue, done, values)
        blocks = lax.div(lax.add(done, np.int32(width - 1)), np.int32(width))
        return values, lax.mul(lax.convert_element_type(blocks, np.float32), block)

    def _who(
        self, waited: Any, come: Any, everyone: Any, others_move: Any, long: Any
    ) -> tuple[Any, Any]:
        """The lanes in the order in which they come, and how many of them come through."""
        width = self.width
        count = count_active(waited | come, np.int32)
        rest = lax.rem(count, np.int32(width))
        long = lax.reduce_sum(lax.select(waited, long, lax.full_like(long, 0)), (0,))
        empty = lax.convert_element_type(np.int32(width) - rest, np.float32)
        enough = np.float32(self.block / width) * empty * everyone.astype(np.float32)
        last = (long >= enough) | ~others_move | (count == everyone)
        done = count - lax.select(last, lax.full_like(rest, 0), rest)
        # Who waited is first, or some would be left behind.
        nobody = lambda *_: lax.iota(np.int32, waited.shape[0])
        queue = lax.cond(done > 0, lambda *sets: in_front(sets)[0], nobody, waited, come)
        return queue, done
