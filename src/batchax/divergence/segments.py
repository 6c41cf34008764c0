"""What lanes do between two loops, each when it has come through the first.

A segment costs most where it is wide. If lanes come to it a few at a time it is run for those, in
blocks of a fixed width; if one lane of many makes a small part of what it takes to begin, for all
lanes, of which those that are elsewhere are masked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax

from batchax.divergence.nest import Segment
from batchax.divergence.varying import alike
from batchax.divergence.widths import length
from batchax.divergence.window_rows import rows_of, with_rows
from batchax.execution.buffers import blank
from batchax.execution.gathered_lanes import (
    count_active,
    entries_at,
    in_front,
    put_entries,
    taken_at,
)
from batchax.jaxprs.evaluate import variables_used
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.inner import batched_aval
from batchax.kernel.interpreter import interpret
from batchax.kernel.staged import while_loop
from batchax.kernel.unvmap import looks_at_lanes
from batchax.rules.masked_loops import MaskedBody

# Results do not depend on these; the benchmark `nests` does.
NARROWEST = 8  # lanes in a block
MASKED = 1.0  # how much dearer masked lanes are than by their price
CHEAPER = 1.1  # how many times as long as all lanes, masked, blocks of all take,
COMPILING = 500.0  # and nanoseconds that all take for each operation, where both are compiled
MOST = 0.75  # the share of the lanes from which on all of them run then
_COME = 8  # the share of all lanes that come to a segment at a time, of which nobody knows
_BLOCKS = 3  # at least, of all lanes


@dataclass(frozen=True)
class SegmentRun:
    """A segment for lanes of which each is at a place of its own.

    Attributes:
      axis: the axis of the lanes.
      test: the predicate of the loop that the segment is a part of.
      segment: what is done.
      positions: where each value of the loop has the batch axis, slots included.
      one_function: whether all of it is in one function of the compiler.
    """

    axis: Axis
    test: ClosedJaxpr
    segment: Segment
    positions: Sequence[Position]
    one_function: bool = False

    def __call__(self, here: Any, values: Sequence[Value]) -> list[Any]:
        """The values, after the lanes that are `here` have done it."""
        if self.segment.is_empty:
            return list(values)
        width = self.width
        if width is None:
            return self._masked(here, list(values))
        count = count_active(here, np.int32)
        return self.in_blocks(width, [here], count, values)

    @property
    def width(self) -> int | None:
        """How many lanes do it at a time, as many as may come; None if all do it, masked."""
        size, part = self.axis.size, self.segment
        if self.one_function:  # which cannot write to several places at a time
            return None
        width = NARROWEST
        while width * _COME < size:
            width *= 2
        if looks_at_lanes.in_program(part.program):  # at those that are elsewhere, too
            return min(width, size)
        block = part.price.of(width) + part.moves.of(width)
        masked = MASKED * (part.price.of(size) + part.keeps.of(size))
        return width if block < masked and width * _BLOCKS <= size else None

    def masked_if_most(
        self, width: int, sets: Sequence[Any], count: Any, values: Sequence[Value]
    ) -> list[Any]:
        """As `in_blocks`, but for all lanes, masked, if most of them do it."""

        def blocks(values: list[Any], sets: list[Any]) -> list[Any]:
            return self.in_blocks(width, sets, count, values)

        def every(values: list[Any], sets: list[Any]) -> list[Any]:
            return self._masked(functools.reduce(lax.bitwise_or, sets), values)

        most = lax.ge(count, np.int32(MOST * self.axis.size))
        return lax.cond(most, every, blocks, list(values), list(sets))

    def masked_is_cheaper(self, width: int) -> bool:
        """Whether all lanes take surely less time than blocks of all, and that much is saved."""
        part, size = self.segment, self.axis.size
        masked = part.price.of(size) + part.keeps.of(size)
        blocks = -(-size // width) * (part.price.of(width) + part.moves.of(width))
        compiling = COMPILING * length(part.program.jaxpr)
        return blocks > CHEAPER * masked and part.price.lane * size >= compiling

    @property
    def overhead(self) -> float:
        """Nanoseconds that it takes besides the work of the lanes that do it."""
        part, size = self.segment, self.axis.size
        if part.is_empty:
            return 0.0
        if self.width is None:
            return part.price.of(size) + part.keeps.of(size)
        # The last block is half empty, on average.
        return part.price.of(self.width / 2) + part.moves.of(self.width / 2)

    @property
    def _operands_at(self) -> list[Position]:
        part = self.segment
        at = [*(self.positions[k] for k in part.reads), *[0] * len(part.takes)]
        return at + [0] * len(part.program.out_avals)

    def _masked(self, here: Any, values: list[Any]) -> list[Any]:
        part, axis = self.segment, self.axis
        n_new = len(part.program.out_avals)
        at = self._operands_at[:-n_new] if n_new else self._operands_at
        masked = MaskedBody.of(axis, self.test, part.program, tuple(at))
        lanes = lax.iota(np.int32, axis.size)
        reads = [values[k] for k in part.reads]
        types = part.program.out_avals[len(part.writes) :]
        spare = [blank(batched_aval(axis, aval, 0), 0) for aval in types]
        old = [values[k] for k in part.writes]
        new = masked.step(here, [*reads, *self._taken(axis, values, reads, lanes)], [*old, *spare])
        target = lax.select(here, lanes, lax.add(lanes, np.int32(axis.size)))
        return self._put(values, target, new, old=None)

    def in_blocks(
        self, width: int, sets: Sequence[Any], count: Any, values: Sequence[Value]
    ) -> list[Any]:
        """The values, after so many lanes have done it in blocks, those of the first set first."""
        part, size, axis = self.segment, self.axis.size, replace(self.axis, size=width)
        program, changed, values = part.program, [*part.writes, *part.puts], list(values)
        old_places = list(zip(part.writes, _used(program), strict=False))

        def once(state: Any) -> Any:
            first, changing = state
            now = list(values)
            for k, x in zip(changed, changing, strict=True):
                now[k] = x
            entry = lax.add(first, places)
            # The queue depends on `first`, or it would be computed before the loop, for nobody.
            begun = lax.broadcast(lax.ge(first, np.int32(0)), (size,))
            queue = in_front([lax.bitwise_and(some, begun) for some in sets])
            # Places after the last lane hold that once more.
            lanes = taken_at(queue, lax.min(entry, last), 0)
            target = lax.select(lax.lt(entry, count), lanes, lax.add(places, np.int32(size)))
            reads = [rows_of(now[k], self.positions[k], lanes) for k in part.reads]
            entries = self._taken(axis, now, reads, lanes)
            # Of what is not read any lanes will do, and those in front need not be looked for.
            old = [
                rows_of(now[k], 0, lanes) if u else lax.slice_in_dim(now[k], 0, width)
                for k, u in old_places
            ]
            spare = [
                blank(batched_aval(axis, aval, 0), 0)
                for aval in program.out_avals[len(part.writes) :]
            ]
            operands = [*reads, *entries, *old, *spare]
            outs, at = interpret(axis, program.jaxpr, program.consts, operands, self._operands_at)
            outs = [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
            now = self._put(now, target, outs, old)
            return lax.add(first, np.int32(width)), [now[k] for k in changed]

        places, last = lax.iota(np.int32, width), lax.sub(count, np.int32(1))
        start = alike((np.int32(0), [values[k] for k in changed]), values)
        _, changing = while_loop(lambda state: lax.lt(state[0], count), once, start)
        for k, x in zip(changed, changing, strict=True):
            values[k] = x
        return values

    def _taken(
        self, axis: Axis, values: Sequence[Any], reads: Sequence[Any], lanes: Any
    ) -> list[Any]:
        """The entries that these lanes take, of arrays of all lanes."""
        part = self.segment
        if not part.takes:
            return []
        at = self._operands_at[: len(reads)]
        program = part.indices
        with recording.uncounted():
            indices, places = interpret(axis, program.jaxpr, program.consts, reads, at)
        taken = []
        for k, index, place in zip(part.takes, indices, places, strict=True):
            x = match_axis(axis, values[k], self.positions[k], 0)
            index = _within(match_axis(axis, index, place, 0), x.shape[1])
            taken.append(entries_at(x, lanes, index))
        return taken

    def _put(
        self, values: list[Any], target: Any, new: Sequence[Any], old: Sequence[Any] | None
    ) -> list[Any]:
        """`values` with what lanes write; `target` is out of bounds for those that do not.

        Where there is no `old` what is written is of all lanes, and others have what they had.
        """
        part, count = self.segment, len(self.segment.writes)
        values = list(values)
        for k, x in zip(part.writes, new, strict=False):
            values[k] = x if old is None else with_rows(values[k], x, target)
        for j, k in enumerate(part.puts):
            entry, index = new[count + 2 * j], new[count + 2 * j + 1]
            index = _within(index, values[k].shape[1])
            values[k] = put_entries(values[k], entry, target, index)
        return values


def _within(index: Any, length: int) -> Any:
    """Indices of entries, as ``dynamic_slice`` takes them: within bounds."""
    if index.dtype.itemsize < 4:
        index = lax.convert_element_type(index, np.int32)  # which can hold the length
    least, most = (np.asarray(n, index.dtype) for n in (0, length - 1))
    return lax.convert_element_type(lax.clamp(least, index, most), np.int32)


def _used(program: ClosedJaxpr) -> list[bool]:
    """For each result whether the operand in its place is read."""
    jaxpr = program.jaxpr
    used = variables_used(jaxpr)
    return [v in used for v in jaxpr.invars[len(jaxpr.invars) - len(jaxpr.outvars) :]]
