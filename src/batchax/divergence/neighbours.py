"""Loops whose steps are too cheap to move lanes: neighbours run together, and then the next ones.

Nobody is moved, and neighbours run until the last of them is done. Where that is one function of
the compiler, which begins no operations, to move a lane is cheap as well: there few of them are
left behind, and when all neighbours have had their turn, those that are left run together, as many
at a time, until again few are left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.blocks import anyone
from batchax.divergence.varying import alike
from batchax.divergence.window import LaneStep, Plan, Tally, until_all_are_done
from batchax.divergence.window_rows import rows_of
from batchax.execution.entries import entry_of, part_of, put_entry, put_part
from batchax.execution.gathered_lanes import count_active
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position
from batchax.kernel.staged import while_loop

_MORE = 4  # the share of the steps taken that are taken before lanes are counted again


def neighbours_in_turn(
    plan: Plan,
    step: LaneStep,
    consts: Sequence[Value],
    positions: Sequence[Position],
    active: Any,
    carry: list[Value],
) -> tuple[list[Any], list[Tally]]:
    """As `run_in_windows`, for neighbours that run one after others."""
    (width,) = plan.widths
    turns = _Turns(plan, step, positions, active.shape[0], width)
    run = turns.until_few_are_left if plan.one_function and plan.most_left else turns.one_by_one

    def whole(active: Any, *operands: Any) -> list[Any]:
        consts, carry = operands[: len(positions)], operands[len(positions) :]
        carry, tally = run(consts, active, carry)
        return [*carry, *tally]

    operands = [active, *consts, *carry]
    if plan.one_function:
        operands = _compat.varying_alike(operands, like=operands)
        types = [jax.typeof(x) for x in (*operands[1 + len(consts) :], *plan.blank)]
        outs = _compat.in_one_function(whole, types, operands)
    else:
        outs = whole(*operands)
    return outs[: len(carry)], [tuple(outs[len(carry) :])]


@dataclass(frozen=True, eq=False)
class _Turns:
    """The turns of neighbours.

    Attributes:
      plan: how they are run.
      step: one step of some lanes.
      positions: where each constant has the batch axis.
      size: how many lanes there are.
      width: how many have a turn together.
    """

    plan: Plan
    step: LaneStep
    positions: Sequence[Position]
    size: int
    width: int

    def one_by_one(
        self, consts: Sequence[Any], active: Any, carry: Sequence[Any]
    ) -> tuple[list[Any], Tally]:
        """The last carry, and the count of lane-steps, of neighbours that wait for each other."""
        fewer = self.size % self.width  # with these are some that are done

        def turn(state: Any) -> Any:
            first, everyone, tally = state
            start = self._within(first)
            own, (active, *rows) = self._slices(consts, everyone, start)
            state = active, rows, tally
            active, rows, tally = until_all_are_done(self.step, self.width, own, state)
            back = functools.partial(put_part, start=start)
            ended = back(everyone[0], active) if fewer else everyone[0]
            everyone = [ended, *map(back, everyone[1:], rows)]
            return lax.add(first, np.int32(self.width)), everyone, tally

        # If nobody takes a step, nothing is copied.
        first = lax.select(anyone(active), np.int32(0), np.int32(self.size))
        state = alike((first, [active, *carry], self.plan.blank), [active, *consts, *carry])
        goes_on = lambda state: lax.lt(state[0], np.int32(self.size))
        _, (_, *carry), tally = while_loop(goes_on, turn, state)
        return carry, tally

    def until_few_are_left(
        self, consts: Sequence[Any], active: Any, carry: Sequence[Any]
    ) -> tuple[list[Any], Tally]:
        """As `one_by_one`; few may be left at the end of a turn, and have another one later."""
        size, width = np.int32(self.size), np.int32(self.width)
        varying = [active, *consts, *carry]
        lanes = lax.iota(np.int32, self.width)

        def turn(state: Any) -> Any:
            place, again, left, everyone, tally = state
            start = self._within(place)
            own, (active, *rows) = self._slices(consts, everyone, start)
            begins, old = active, lax.full_like(active, False)
            if self.size % self.width:  # in the last turn may be some that had theirs
                mine = lax.ge(lax.add(start, lanes), place)
                begins, old = (lax.bitwise_and(active, x) for x in (mine, lax.bitwise_not(mine)))
            place, count, index = self._searched(again, place, left, everyone[0], varying)

            def gathered(state: Any) -> Any:
                own = [rows_of(x, a, index) for x, a in zip(consts, self.positions, strict=True)]
                rows = [rows_of(x, 0, index) for x in everyone[1:]]
                return lax.bitwise_not(state[0]), own, rows

            first = alike((again, own, rows), varying)
            _, own, rows = while_loop(lambda state: state[0], gathered, first)
            here = lax.select(again, lax.lt(lanes, count), begins)
            few = lax.select(
                lax.bitwise_and(again, lax.eq(left, count)),
                np.int32(0),
                np.int32(self.plan.most_left),
            )
            # The last ones run to their end.
            begun = count_active(here, one_function=True)
            state = here, rows, tally
            ended, rows, tally, stay = self._steps(few, own, begun, state, varying)
            kept = lax.bitwise_or(ended, old)
            everyone = self._neighbours_back(everyone, again, start, [kept, *rows])
            everyone = self._each_back(everyone, count, index, [ended, *rows])
            left = lax.add(left, lax.select(again, lax.sub(stay, begun), stay))
            place = lax.select(again, place, lax.add(place, width))
            more = lax.bitwise_or(again, lax.ge(place, size))
            place = lax.select(lax.ge(place, size), np.int32(0), place)
            return place, more, left, everyone, tally

        none = lax.bitwise_not(anyone(active))
        state = np.int32(0), none, np.int32(0), [active, *carry], self.plan.blank
        state = alike(state, varying)
        goes_on = lambda state: lax.bitwise_or(
            lax.bitwise_not(state[1]), lax.gt(state[2], np.int32(0))
        )
        _, _, _, (_, *carry), tally = while_loop(goes_on, turn, state)
        return carry, tally

    def _searched(self, again: Any, place: Any, left: Any, active: Any, varying: Any) -> Any:
        """Who has a turn again: where the search ended, how many they are, and their indices."""
        size, width = np.int32(self.size), np.int32(self.width)
        enough = lax.select(again, lax.min(left, width), np.int32(0))

        def once(state: Any) -> Any:
            place, count, index = state
            index = put_entry(index, place, count)
            count = lax.add(count, lax.convert_element_type(entry_of(active, place), np.int32))
            place = lax.add(place, np.int32(1))
            return lax.select(lax.ge(place, size), np.int32(0), place), count, index

        start = alike((place, np.int32(0), np.zeros(self.width, np.int32)), varying)
        return while_loop(lambda state: lax.lt(state[1], enough), once, start)

    def _steps(self, few: Any, consts: Sequence[Any], begun: Any, state: Any, varying: Any) -> Any:
        """Steps of lanes until few are left, and how many that are.

        Those wait until that has cost what it costs to move them. To count lanes takes a good part
        of what a step takes.
        """

        def once(state: Any) -> Any:
            n, active, carry, tally, _ = state
            active, carry, tally = self.step(self.width, consts, active, carry, tally)
            some = lax.reduce_or(active, (0,))
            return lax.add(n, np.int32(1)), active, carry, tally, some

        def until_asked(state: Any) -> Any:
            (asked, wasted, _), (n, *rest) = state
            goes_on = lambda state: lax.bitwise_and(state[-1], lax.lt(state[0], asked))
            last = while_loop(goes_on, once, (n, *rest))
            taken, active = last[0], last[1]
            count = count_active(active, one_function=True)
            idle = lax.select(lax.gt(count, few), np.int32(0), lax.sub(np.int32(self.width), count))
            each = [lax.convert_element_type(x, np.float32) for x in (idle, lax.sub(taken, n))]
            wasted = lax.add(wasted, lax.mul(*each))
            pause = lax.max(np.int32(self.plan.pause), lax.div(taken, np.int32(_MORE)))
            return (lax.add(taken, pause), wasted, count), last

        def goes_on(state: Any) -> Any:
            (_, wasted, count), _ = state
            lanes = lax.convert_element_type(count, np.float32)
            bears = lax.lt(wasted, lax.mul(np.float32(self.plan.patience), lanes))
            some = lax.bitwise_and(lax.gt(count, np.int32(0)), bears)
            return lax.bitwise_or(lax.gt(count, few), some)

        begins = lax.gt(begun, np.int32(0))
        start = (np.int32(self.plan.pause), np.float32(0), begun), (np.int32(0), *state, begins)
        (_, _, count), (_, active, carry, tally, _) = while_loop(
            goes_on, until_asked, alike(start, varying)
        )
        return active, carry, tally, count

    def _neighbours_back(
        self, everyone: Sequence[Any], again: Any, start: Any, rows: Sequence[Any]
    ) -> list[Any]:
        """All lanes with the `rows` of neighbours; as they are in turns of those that were left."""

        # A loop of one step, or none, updates in place, as a branch would not.
        def once(state: Any) -> Any:
            done, everyone = state
            everyone = [put_part(x, r, start) for x, r in zip(everyone, rows, strict=True)]
            return lax.bitwise_not(done), everyone

        first = alike((again, list(everyone)), [*everyone, *rows])
        return while_loop(lambda state: lax.bitwise_not(state[0]), once, first)[1]

    def _each_back(
        self, everyone: Sequence[Any], count: Any, index: Any, rows: Sequence[Any]
    ) -> list[Any]:
        """All lanes with the first `count` of the `rows` at the lanes of `index`."""

        def once(state: Any) -> Any:
            place, everyone = state
            lane, new = entry_of(index, place), [entry_of(r, place) for r in rows]
            everyone = [put_entry(x, r, lane) for x, r in zip(everyone, new, strict=True)]
            return lax.add(place, np.int32(1)), everyone

        first = alike((np.int32(0), list(everyone)), [index, *everyone, *rows])
        return while_loop(lambda state: lax.lt(state[0], count), once, first)[1]

    def _within(self, first: Any) -> Any:
        if self.size % self.width:
            return lax.min(first, np.int32(self.size - self.width))
        return first

    def _slices(
        self, consts: Sequence[Any], everyone: Sequence[Any], start: Any
    ) -> tuple[list[Any], list[Any]]:
        """What neighbours have of constants, and of what all lanes carry."""

        def cut(x: Value, axis: Position) -> Any:
            return x if axis is None else part_of(x, start, axis, self.width)

        return list(map(cut, consts, self.positions)), [cut(x, 0) for x in everyone]
