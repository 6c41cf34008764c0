"""Nested loops in which each lane is at a step of its own.

Under ``jax.vmap`` all lanes leave an inner loop before any continues with the outer one, so that in
each step of that they wait for the slowest. Here lanes leave an inner loop when waiting for it has
cost as much as what comes after it costs all lanes. Those that were not done stay in it: in the
next step of the outer loop they skip what comes before it, and continue where they were.

To wait so long is the best one can do, if lanes are done at a steady rate: a run of `n` steps
wastes about `b * n**2` and what comes after it costs `c`, so a step costs least, ``(c + b * n**2) /
n``, where both are the same.

What lanes do between two loops is a segment. It costs most where it is wide. If lanes come to it a
few at a time it is run for those, in blocks of a fixed width; if one lane of many makes a small
part of what it takes to begin, for all lanes, of which those that are elsewhere are masked. Before
an expensive branch lanes wait, until they fill a block or have waited enough (`Gathering`).

The idea is old: nested loops become one loop (von Hanxleden and Kennedy, "Relaxing SIMD control
flow constraints using loop transformations", 1992), and lanes are batched by where they are (Radul
et al., 2020; Dance, Glaser, Orbanz and Adams, "Efficiently vectorized MCMC on modern accelerators",
2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.divergence.costs import launch_time, length
from batchax.divergence.flat_derivatives import tangents_of_lanes
from batchax.divergence.loops import PartingLoop, masked_inside
from batchax.divergence.nest import DeferredBranch, Inner, Nest, Segment
from batchax.divergence.policy import Masked
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.varying import alike
from batchax.divergence.windows import Tally, counted, rows_of, with_rows
from batchax.execution.gathered_lanes import (
    count_active,
    entries_at,
    in_front,
    put_entries,
    taken_at,
)
from batchax.execution.slices import blank
from batchax.jaxprs.evaluate import variables_used
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.differing import looks_at_lanes
from batchax.kernel.inner import batched_aval, staged_once, while_loop
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import varying_of
from batchax.rules.loops import MaskedBody, predicate

# Results do not depend on these; the benchmark `nests` does.
NARROWEST = 8  # lanes in a block
MASKED = 1.0  # how much more expensive masked lanes are than by their price
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
        """As `in_blocks`, except for all lanes, masked, if most of them do it."""

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


@dataclass(frozen=True)
class Gathering:
    """How lanes come through an expensive branch.

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
        waits = SkiRental(self.block / width).waits(long, empty * everyone.astype(np.float32))
        waits &= (others != 0) & (count != everyone)
        return [count - lax.select(waits, rest, lax.full_like(rest, 0))]


def _sums(masks: Sequence[Any], long: Any) -> Sequence[Any]:
    """How many lanes are in each set, and the sum of what waiting took.

    By one operation: where nobody takes a branch, most of a step is to begin its operations.
    """
    terms = [*(lax.convert_element_type(mask, np.int32) for mask in masks), long]
    zeros = _compat.varying_alike([np.zeros((), x.dtype) for x in terms], like=terms)
    add = lambda sums, more: tuple(map(lax.add, sums, more))
    return lax.reduce(tuple(terms), tuple(zeros), add, (0,))


_ENTERED = 16  # operations that it takes to enter and leave a loop inside: who waits, who goes on
_NOBODY = np.float32(1e-6)  # lanes: what is divided by must not be zero


@_compat.held_weakly
@dataclass(frozen=True)
class FlatLoop(PartingLoop):
    """A loop of one example that holds others, for lanes at places of their own.

    Attributes:
      nest: the loop, cut.
      length: how many steps it has for each lane, if that is known.
      together: the program of the same loop for one example, of the same operands, as JAX has it.
        Of that derivatives are taken.
    """

    nest: Nest
    length: int | None
    together: ClosedJaxpr

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        """As that of any loop."""
        return *super().but_for_body, self.nest

    def replanned(self, lanes: int, positions: tuple[Position, ...]) -> Any:
        """How so many lanes are run."""
        plan = self.axis.divergence.plan_of_nest(lanes, self.nest, self.length)
        if isinstance(plan, Masked):
            return plan
        # If not, the loops inside are not in a form that can be a single kernel.
        return replace(plan, kernel=plan.kernel and self._for_kernel)

    @property
    def _unchanged(self) -> list[int]:
        """None: a slot may hold something else between two steps."""
        return []

    def more_slots(self) -> list[Any]:
        """The place of each lane, and slots that each writes to before it reads them."""
        place, *others = self.nest.slots[len(self.body.out_avals) :]
        others = [blank(batched_aval(self.axis, t, 0), k) for k, t in enumerate(others)]
        return [lax.full((self.axis.size,), 0, place.dtype), *others]

    def _step(
        self,
        width: int,
        consts: Sequence[Value],
        active: Any,
        carry: Sequence[Value],
        tally: Tally,
    ) -> tuple[Any, list[Any], Tally]:
        axis = replace(self.axis, size=width)
        lanes = Lanes(axis, self.nest, self.positions, inside_in_one=self._for_kernel)
        active, values, _, tally = lanes.step(active, [*consts, *carry], None, tally)
        return active, values[len(consts) :], tally

    def tangents(
        self, operands: Sequence[Value], moving: Sequence[int], tangents: Sequence[Value]
    ) -> tuple[list[Any], list[Any]] | None:
        """The results and their tangents, where one example has derivatives in reverse."""
        if any(varying_of(operands)):  # inside ``shard_map`` what is shared would have to be cast
            return None
        positions = [*self.positions, *[0] * (len(operands) - len(self.positions))]
        return tangents_of_lanes(self.axis, self.together, operands, positions, moving, tangents)

    def differentiated(self, program: ClosedJaxpr, operands: Sequence[Value]) -> list[Any]:
        """As `run`, with lanes that wait for each other: a ``scan`` has derivatives in reverse.

        An expensive branch runs for those that take it, and has derivatives of its own, which
        compute it
        again: what it keeps is much to move.
        """
        if self.nest.only_branches:
            return self._of_example(operands, self.axis.divergence.in_lockstep())
        return self.masked(*operands)

    def masked(self, *operands: Any) -> list[Any]:
        """As `run`, with lanes that wait for each other."""
        return self._of_example(operands, None)

    def _of_example(self, operands: Sequence[Value], divergence: Any) -> list[Any]:
        axis = replace(self.axis, divergence=divergence)
        positions = [*self.positions, *[0] * (len(operands) - len(self.positions))]
        outs, at = interpret(axis, self.together.jaxpr, self.together.consts, operands, positions)
        outs = [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
        return alike(outs, operands)


@dataclass(frozen=True)
class Lanes:
    """Some lanes of a nest.

    Attributes:
      axis: their axis.
      nest: the loop.
      constants_at: where its constants have the batch axis; slots have it in front.
      inside_in_one: whether each loop inside is one function of the compiler.
      one_function: whether all of it is in such a function.
    """

    axis: Axis
    nest: Nest
    constants_at: tuple[Position, ...]
    inside_in_one: bool = False
    one_function: bool = False

    def step(
        self, active: Any, values: Sequence[Value], deadline: Any, tally: Tally
    ) -> tuple[Any, list[Any], Any, Tally]:
        """A step of the active lanes, or less for those that stay in a loop inside.

        Args:
          active: which lanes are in this loop.
          values: its constants, and what all lanes hold in its slots.
          deadline: how long it may take before lanes that wait elsewhere have waited enough; None
            if none waits elsewhere.
          tally: the count of steps of loops that hold no others.

        Returns:
          Which lanes are in it afterwards, the values, how long it took: in nanoseconds, by a
          model; and the count.
        """
        nest, values = self.nest, list(values)
        if nest.body is not None:
            n_test, n_consts = nest.n_test, nest.n_consts
            masked = MaskedBody.of(self.axis, nest.test, nest.body, self.constants_at[n_test:])
            values[n_consts:] = masked.step(active, values[n_test:n_consts], values[n_consts:])
            if tally:
                tally = counted(tally, self._count(active, np.int32))
            return lax.bitwise_and(active, self.asked(values)), values, self.time, tally
        here, spent = lax.bitwise_and(active, self._at(0, values)), self.time
        moving = self._moving(active, values)
        for number, part in enumerate(nest.parts):
            match part:
                case Segment():
                    # Whoever takes a step comes through the last of them.
                    with recording.uncounted(part is nest.parts[-1]):
                        values = self._run_of(part)(here, values)
                case Inner():
                    left = None if deadline is None else lax.sub(deadline, spent)
                    here, values, taken, tally = self._come_through(
                        number, part, here, active, values, left, tally
                    )
                    spent = lax.add(spent, taken)
                case DeferredBranch():
                    here, values, taken = self._come_to_branch(
                        number, part, here, active, moving, values
                    )
                    spent = lax.add(spent, taken)
        for number, part in self._deferred:
            k = part.slots[-1]
            waits = self._at(number, values)
            values[k] = lax.select(waits, lax.add(values[k], spent), _zeros(values[k]))
        stays = lax.bitwise_or(self.asked(values), lax.bitwise_not(here))
        return lax.bitwise_and(active, stays), values, spent, tally

    def asked(self, values: Sequence[Any]) -> Any:
        """The predicate of each lane."""
        nest = self.nest
        carry = values[nest.n_consts : nest.n_consts + nest.n_carry]
        at = [*self.constants_at[: nest.n_test], *[0] * nest.n_carry]
        return predicate(self.axis, nest.test, [*values[: nest.n_test], *carry], at)

    @property
    def time(self) -> Any:
        """How long a step takes, except for the loops inside and the work of lanes in segments."""
        around = sum(self._run_of(part).overhead for part in self.nest.segments)
        inner = len(self.nest.parts) - len(self.nest.segments)
        entered = launch_time(_ENTERED * inner)
        return np.float32(self.nest.price.of(self.axis.size) + around + entered)

    @property
    def _place(self) -> int:
        return self.nest.n_consts + self.nest.n_carry

    def _at(self, number: int, values: Sequence[Any]) -> Any:
        """Which lanes are in that part."""
        place = values[self._place]
        return lax.eq(place, np.asarray(number, place.dtype))

    def _run_of(self, segment: Segment) -> SegmentRun:
        positions = (*self.constants_at, *[0] * len(self.nest.slots))
        return SegmentRun(self.axis, self.nest.test, segment, positions, self.one_function)

    def _count(self, active: Any, dtype: Any) -> Any:
        return count_active(active, dtype, one_function=self.one_function)

    @property
    def _deferred(self) -> list[tuple[int, DeferredBranch]]:
        return [
            (n, part) for n, part in enumerate(self.nest.parts) if isinstance(part, DeferredBranch)
        ]

    def _moving(self, active: Any, values: Sequence[Any]) -> Any:
        """Which lanes do not wait before an expensive branch."""
        for number, _ in self._deferred:
            active = lax.bitwise_and(active, lax.bitwise_not(self._at(number, values)))
        return active

    def _come_to_branch(
        self,
        number: int,
        part: DeferredBranch,
        here: Any,
        active: Any,
        moving: Any,
        values: list[Any],
    ) -> tuple[Any, list[Any], Any]:
        """Runs an expensive branch for those who come to it and who wait there, if it is time.

        Returns:
          Which lanes have come through, the values, and how long it took.
        """
        values = list(values)
        consts, consts_at = self._constants(part, values)
        waited = lax.bitwise_and(active, self._at(number, values))
        come = lax.bitwise_and(here, values[part.slots[0]])
        mine = [values[k] for k in part.slots]
        positions = (*consts_at, *[0] * len(mine))
        run = SegmentRun(self.axis, self.nest.test, part.segment, positions)
        gathering = Gathering(run, min(part.width, self.axis.size), part.block.begin)
        eqn, branch, expensive = part.branch
        with recording.inside(self.axis, eqn), recording.part(f"branch {branch}"):
            recording.note(divergence="gathered", apart=expensive, widths=(gathering.width,))
            cheap = [i for i in range(len(eqn.params["branches"])) if i not in expensive]
            recording.note(why=dict.fromkeys(cheap, "costs too little to wait for others"))
            own, taken = gathering(waited, come, active, moving, [*consts, *mine])
        for k, x in zip(part.slots, own[len(consts) :], strict=True):
            values[k] = x
        waits = lax.bitwise_and(lax.bitwise_or(waited, come), values[part.slots[0]])
        return self._moved(lax.bitwise_or(here, waited), waits, number, values), values, taken

    def _moved(self, come: Any, stay: Any, number: int, values: list[Any]) -> Any:
        """Who has come through a part: of those that `come` to it, all but those that `stay`."""
        place = values[self._place]
        through = lax.bitwise_and(come, lax.bitwise_not(stay))
        place = lax.select(stay, lax.broadcast(np.asarray(number, place.dtype), place.shape), place)
        values[self._place] = lax.select(through, _zeros(place), place)
        return through

    def _constants(
        self, part: Inner | DeferredBranch, values: Sequence[Any]
    ) -> tuple[list[Any], tuple[Position, ...]]:
        """The constants of a loop or branch inside, and where each has the batch axis."""
        program = part.constants
        at = [*self.constants_at, *[0] * len(self.nest.slots)]
        reads, reads_at = [values[k] for k in part.reads], [at[k] for k in part.reads]
        with recording.uncounted():
            consts, at = interpret(self.axis, program.jaxpr, program.consts, reads, reads_at)
        return consts, tuple(at)

    def _come_through(
        self,
        number: int,
        part: Inner,
        here: Any,
        active: Any,
        values: list[Any],
        deadline: Any,
        tally: Tally,
    ) -> tuple[Any, list[Any], Any, Tally]:
        """Runs a loop inside, for who comes to it and who is in it, until waiting costs too much.

        Returns:
          Which lanes have come through, the values, how long it took, and the count of steps.
        """
        values = list(values)
        consts, consts_at = self._constants(part, values)
        in_one = self.inside_in_one or self.one_function
        axis = masked_inside(self.axis) if in_one else self.axis
        lanes = Lanes(axis, part.nest, consts_at, one_function=in_one)
        mine = [values[k] for k in part.slots]
        inside = lax.bitwise_and(active, self._at(number, values))
        first = lax.bitwise_or(inside, lax.bitwise_and(here, lanes.asked([*consts, *mine])))
        # Invariants: each lane has one place, which is the part that it is in, and 0 between steps.
        # It takes the parts of a step in order. A lane that is elsewhere keeps what it holds: it is
        # masked, or in no block. A step of this loop ends with each lane at the start of its next
        # step, or inside a part: none stops in a segment.
        #
        # The rule: `count` of `everyone` are inside, the others wait. A step inside that takes
        # `taken` wastes ``taken * (everyone - count)``. What comes after this loop takes
        # `self.time`, for all lanes, however many are there: that is the price of leaving. The loop
        # is left when the waste since it was entered has reached the price.
        #
        # Bound: the waste is at most the price and a step, each time, so all lane-steps together
        # take at most twice those of the best moments to leave (`SkiRental`). Masked lanes have no
        # such bound: they waste ``max(n) - n`` at each step of the loop around.
        #
        # Progress: lanes that are inside take a step before the loop may be left, since `wasted` is
        # 0 at first and the price is not. If a deadline has passed, the branch runs that it is for.
        #
        # Loops further inside waste the time of who waits here, too: they get what is `left` of the
        # limit, for each lane that waits. `deadline` is the same for lanes before a branch.
        everyone = self._count(active, np.float32)
        limit = SkiRental(float(self.time)).limit(everyone)

        def run(given: Any, state: Any) -> Any:
            consts, everyone, limit, deadline = given

            def goes_on(state: Any) -> Any:
                _, _, count, wasted, spent, _ = state
                going = lax.bitwise_and(lax.gt(count, np.float32(0)), lax.lt(wasted, limit))
                return (
                    going if deadline is None else lax.bitwise_and(going, lax.lt(spent, deadline))
                )

            def once(state: Any) -> Any:
                runs, mine, count, wasted, spent, tally = state
                # Whoever waits here waits for loops further inside, too.
                others = lax.max(lax.sub(everyone, count), _NOBODY)
                left = lax.div(lax.sub(limit, wasted), others)
                left = left if deadline is None else lax.min(left, lax.sub(deadline, spent))
                with recording.inside(self.axis, part.eqn):
                    recording.note(divergence="flat", widths=(self.axis.size,))
                    runs, own, taken, tally = lanes.step(runs, [*consts, *mine], left, tally)
                count = lanes._count(runs, np.float32)
                wasted = lax.add(wasted, lax.mul(taken, lax.sub(everyone, count)))
                return runs, own[len(consts) :], count, wasted, lax.add(spent, taken), tally

            return while_loop(goes_on, once, state)

        count, zero = self._count(first, np.float32), np.float32(0)
        state = alike((first, mine, count, zero, zero, tally), values)
        given = consts, everyone, limit, deadline
        if self.inside_in_one and all(np.size(x) for x in jax.tree.leaves((given, state))):
            run = functools.partial(_in_one_function, run)
        runs, mine, _, _, spent, tally = run(given, state)
        for k, x in zip(part.slots, mine, strict=True):
            values[k] = x
        through = self._moved(lax.bitwise_or(here, inside), runs, number, values)
        return through, values, spent, tally


def _in_one_function(run: Callable[..., Any], given: Any, state: Any) -> Any:
    """What `run` returns, which is of the types of `state`."""
    leaves, structure = jax.tree.flatten(state)
    operands, both = jax.tree.flatten((state, given))  # the first is a mask, and no key
    operands = _compat.varying_alike(operands, like=operands)
    called = lambda *xs: jax.tree.leaves(run(*both.unflatten(xs)[::-1]))
    outs = _compat.single_kernel(called, list(map(jax.typeof, leaves)), operands)
    return structure.unflatten(outs)


def _zeros(x: Value) -> Any:
    return lax.broadcast(np.asarray(0, x.dtype), x.shape)
