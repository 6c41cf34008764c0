"""A mask in blocks of lanes, so small that a processor compiles a loop over them as one function.

A sum over a longer dimension is compiled as several, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax.divergence.varying import alike
from batchax.execution.entries import part_of
from batchax.kernel.staged import staged_once, while_loop

_ROW = 32
_ROWS = 16
_MOST = 256  # blocks: more take longer than the sum of all


@dataclass(frozen=True)
class Blocks:
    """The blocks of a mask.

    Attributes:
      mask: the mask, or rows of rows of it.
      step: how many entries of its first dimension make a block.
      end: how many there are.
      lanes: how many lanes are in a block.
    """

    mask: Any
    step: np.int32
    end: np.int32
    lanes: int

    @classmethod
    def of(cls, mask: Any) -> Blocks | None:
        """Of a mask of lanes: two at least, if it has as many; None where it is best left whole."""
        if jax.default_backend() != "cpu":
            return None
        size = mask.shape[0]
        row = _divisor(size, min(_ROW, max(1, size // 2)))
        rows = size // row
        if rows <= _MOST:  # to reshape a mask is to compute it once more
            return cls(mask, np.int32(row), np.int32(size), row)
        many = _divisor(rows, _ROWS)
        if rows // many > _MOST:
            return None
        mask = lax.reshape(mask, (rows // many, many, row))
        return cls(mask, np.int32(1), np.int32(rows // many), many * row)

    def at(self, place: Any) -> Any:
        """The block that begins there."""
        return part_of(self.mask, place, 0, int(self.step))


def _divisor(number: int, most: int) -> int:
    """The largest that is not above `most`."""
    return next(n for n in range(most, 0, -1) if number % n == 0)


def anyone(active: Any) -> Any:
    """Whether any lane is active."""
    return staged_once("anyone", lambda active: [_anyone(active)], active)[0]


def _anyone(active: Any) -> Any:
    blocks = Blocks.of(active)
    if blocks is None:
        return lax.reduce_or(active, (0,))

    def once(state: Any) -> Any:
        place, _ = state
        block = blocks.at(place)
        return lax.add(place, blocks.step), lax.reduce_or(block, tuple(range(block.ndim)))

    def goes_on(state: Any) -> Any:
        place, hit = state
        return lax.bitwise_and(lax.lt(place, blocks.end), lax.bitwise_not(hit))

    return while_loop(goes_on, once, alike((np.int32(0), np.False_), [active]))[1]
