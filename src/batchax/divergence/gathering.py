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

from batchax import _compat
from batchax.divergence.segments import SegmentRun
from batchax.jaxprs.words import Value
from batchax.kernel.staged import staged_once


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
        self, waited: Any, come: Any, active: Any, moving: Any, values: Sequence[Value]
    ) -> tuple[list[Any], Any]:
        """Runs it for those whose time it is.

        Args:
          waited, come: which lanes waited before it, and which have just come.
          active: which are active in the loop around it.
          moving: which of these did not wait before any branch.
          values: its constants, and what all lanes hold in its slots, of which the last says how
            long each has waited.

        Returns:
          The values, and how long it took: in nanoseconds, by a model.
        """
        width, block = self.width, np.float32(self.block)
        told = waited, come, active, moving, values[-1]
        (done,) = staged_once(("how many come through", width, self.block), self._done, *told)
        # Who waited is first, or some would be left behind.
        run = self.run.masked_if_most if self.run.masked_is_cheaper(width) else self.run.in_blocks
        values = run(width, [waited, come], done, values)
        blocks = lax.div(lax.add(done, np.int32(width - 1)), np.int32(width))
        return values, lax.mul(lax.convert_element_type(blocks, np.float32), block)

    def _done(self, waited: Any, come: Any, active: Any, moving: Any, long: Any) -> list[Any]:
        """How many lanes come through."""
        width = self.width
        long = lax.select(waited, long, lax.full_like(long, 0))
        count, everyone, others, long = _sums([waited | come, active, moving], long)
        rest = lax.rem(count, np.int32(width))
        empty = lax.convert_element_type(np.int32(width) - rest, np.float32)
        enough = np.float32(self.block / width) * empty * everyone.astype(np.float32)
        last = (long >= enough) | (others == 0) | (count == everyone)
        return [count - lax.select(last, lax.full_like(rest, 0), rest)]


def _sums(masks: Sequence[Any], long: Any) -> Sequence[Any]:
    """How many lanes are in each set, and the sum of what waiting took.

    By one operation: where nobody takes a branch, most of a step is to begin its operations.
    """
    terms = [*(lax.convert_element_type(mask, np.int32) for mask in masks), long]
    zeros = _compat.varying_alike([np.zeros((), x.dtype) for x in terms], like=terms)
    add = lambda sums, more: tuple(map(lax.add, sums, more))
    return lax.reduce(tuple(terms), tuple(zeros), add, (0,))
