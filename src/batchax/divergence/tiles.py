"""Loops whose steps are too cheap to move lanes: tiles of adjacent lanes, one after another.

A tile is a window that is read by slices instead of gathers, so no lane is moved. All is a single
kernel, which begins no operations, so there moving a lane is cheap as well: a few lanes of each
tile are left behind. After the last tile those that are left run together, as many at a time, until
again few are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.policy import Tiles
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.varying import alike
from batchax.divergence.windows import LaneStep, rows_of
from batchax.execution.gathered_lanes import count_active
from batchax.execution.slices import entry_of, part_of, put_entry, put_part
from batchax.jaxprs.types import Tree, Value, Values
from batchax.kernel.axis import Position, Positions
from batchax.kernel.inner import while_loop

_SEARCHED = 2  # how many times as much as to move a lane it costs if it is to be searched, too


def run_in_tiles(
    plan: Tiles,
    step: LaneStep,
    consts: Values,
    positions: Positions,
    active: Value,
    carry: list[Value],
) -> list[Any]:
    """The last carry of a loop; see `run_in_windows`."""
    tiles = _Tiles(plan, step, positions, active.shape[0], plan.width)

    def whole(active: Value, *operands: Value) -> list[Any]:
        return tiles.run(operands[: len(positions)], active, operands[len(positions) :])

    operands = [active, *consts, *carry]
    operands = _compat.varying_alike(operands, like=operands)
    types = list(map(jax.typeof, operands[1 + len(consts) :]))
    return _compat.single_kernel(whole, types, operands)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles of a loop."""

    plan: Tiles  # how they run
    step: LaneStep  # one step of some lanes
    positions: Positions  # where each constant has the batch axis
    size: int  # how many lanes there are
    width: int  # how many make a tile

    def run(self, consts: Sequence[Any], active: Value, carry: Sequence[Any]) -> list[Any]:
        """The last carry. Few lanes may be left when a tile ends, and run again later.

        The place where a tile begins counts on after the last one: its remainder by the number of
        lanes is where lanes that were left are searched from.
        """
        size, width = np.int32(self.size), np.int32(self.width)
        varying = [active, *consts, *carry]
        lanes = lax.iota(np.int32, self.width)

        def turn(state: Tree) -> Tree:
            place, left, everyone = state
            again, start = lax.ge(place, size), self._within(place)
            own, (active, *rows) = self._slices(consts, everyone, start)
            before = [active, *rows]
            begins: Any = active
            begun: Any = width
            if self.size % self.width:  # the last tile overlaps the one before it
                begins = lax.bitwise_and(active, lax.ge(lax.add(start, lanes), place))
                begun = lax.min(width, lax.sub(size, place))
            enough = lax.select(again, lax.min(left, width), np.int32(0))
            ended_at, index = self._searched(place, enough, everyone[0], varying)

            def gathered(state: Tree) -> Tree:
                own = [rows_of(x, a, index) for x, a in zip(consts, self.positions, strict=True)]
                rows = [rows_of(x, 0, index) for x in everyone[1:]]
                return lax.bitwise_not(state[0]), own, rows

            first = alike((again, own, rows), varying)
            _, own, rows = while_loop(lambda state: state[0], gathered, first)
            here = lax.select(again, lax.lt(lanes, enough), begins)
            # The last ones run to their end.
            leave_at = np.int32(self.plan.leave_at)
            few = lax.select(lax.eq(left, enough), np.int32(0), leave_at)
            begun = lax.select(again, enough, begun)
            ended, rows, stay = self._steps(few, own, begun, (here, rows), varying)
            kept: Any = ended
            if self.size % self.width:
                kept = lax.bitwise_or(ended, lax.bitwise_xor(active, begins))
            new = [lax.select(again, *pair) for pair in zip(before, [kept, *rows], strict=True)]
            everyone = [put_part(x, r, start) for x, r in zip(everyone, new, strict=True)]
            everyone = self._each_back(everyone, enough, index, [ended, *rows])
            place = lax.select(again, ended_at, lax.add(place, width))
            return place, lax.add(lax.sub(left, begun), stay), everyone

        # A lane that takes no step at all is counted until its tile is over.
        left = lax.select(lax.reduce_or(active, (0,)), size, np.int32(0))
        state = alike((np.int32(0), left, [active, *carry]), varying)
        goes_on = lambda state: lax.gt(state[1], np.int32(0))
        _, _, (_, *last) = while_loop(goes_on, turn, state)
        return last

    def _searched(
        self, place: Value, enough: Value, active: Value, varying: Values
    ) -> tuple[Value, Value]:
        """Where the search for so many lanes that were left ends, and their indices."""

        def once(state: Tree) -> Tree:
            place, count, index = state
            lane = lax.rem(place, np.int32(self.size))
            index = put_entry(index, lane, count)
            count = lax.add(count, lax.convert_element_type(entry_of(active, lane), np.int32))
            return lax.add(place, np.int32(1)), count, index

        start = alike((place, np.int32(0), np.zeros(self.width, np.int32)), varying)
        place, _, index = while_loop(lambda state: lax.lt(state[1], enough), once, start)
        return place, index

    def _steps(
        self, few: Value, consts: Sequence[Any], begun: Value, state: Tree, varying: Values
    ) -> Tree:
        """Steps of lanes until few are left, and how many that are.

        Those wait until that has cost what it costs to move them.
        """
        width, rule = np.int32(self.width), SkiRental(math.ceil(_SEARCHED * self.plan.patience))

        def once(state: Tree) -> Tree:
            active, carry, wasted, _ = state
            active, carry, _ = self.step(self.width, consts, active, carry, ())
            count = count_active(active, one_function=True)
            idle = lax.select(lax.gt(count, few), np.int32(0), lax.sub(width, count))
            return active, carry, lax.add(wasted, idle), count

        def goes_on(state: Tree) -> Value:
            *_, wasted, count = state
            return lax.bitwise_or(lax.gt(count, few), rule.waits(wasted, count))

        start = alike((*state, np.int32(0), begun), varying)
        active, carry, _, count = while_loop(goes_on, once, start)
        return active, carry, count

    def _each_back(
        self, everyone: Sequence[Any], count: Value, index: Value, rows: Sequence[Any]
    ) -> list[Any]:
        """All lanes with the first `count` of the `rows` at the lanes of `index`."""

        def once(state: Tree) -> Tree:
            place, everyone = state
            lane, new = entry_of(index, place), [part_of(r, place, 0, 1) for r in rows]
            everyone = [put_part(x, r, lane) for x, r in zip(everyone, new, strict=True)]
            return lax.add(place, np.int32(1)), everyone

        first = alike((np.int32(0), list(everyone)), [index, *everyone, *rows])
        return while_loop(lambda state: lax.lt(state[0], count), once, first)[1]

    def _within(self, first: Value) -> Value:
        if self.size % self.width:
            return lax.min(first, np.int32(self.size - self.width))
        return first

    def _slices(
        self, consts: Sequence[Any], everyone: Sequence[Any], start: Value
    ) -> tuple[list[Any], list[Any]]:
        """What a tile has of constants, and of what all lanes carry."""

        def cut(x: Value, axis: Position) -> Value:
            return x if axis is None else part_of(x, start, axis, self.width)

        return list(map(cut, consts, self.positions)), [cut(x, 0) for x in everyone]
