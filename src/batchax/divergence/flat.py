"""Nested loops in which each lane advances independently, and when loops run so.

Under ``jax.vmap`` all lanes leave an inner loop before any continues with the outer one, so that in
each step of that they wait for the slowest. Here lanes leave an inner loop when waiting for it has
cost as much as what comes after it costs all lanes. Those that were not done stay in it: in the
next step of the outer loop they skip what comes before it, and continue where they were.

To wait so long is the best one can do, if lanes are done at a steady rate: a run of `n` steps
wastes about `b * n**2` and what comes after it costs `c`, so a step costs least, ``(c + b * n**2) /
n``, where both are the same.

What lanes do between two loops is a segment. It costs most where it is wide. If lanes come to it a
few at a time it is run for those, in blocks of a fixed width; if one lane of many makes a small
part of what it takes to begin, for all lanes, of which those that are elsewhere are masked.

The idea is old: nested loops become one loop (von Hanxleden and Kennedy, "Relaxing SIMD control
flow constraints using loop transformations", 1992), and lanes are batched by where they are (Radul
et al., 2020; Dance, Glaser, Orbanz and Adams, "Efficiently vectorized MCMC on modern accelerators",
2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.divergence.costs import HOST, can_move, launch_time, may_wait, why_together
from batchax.divergence.loops import (
    VARIES_LESS,
    DivergentLoop,
    Waiting,
    as_weak_as,
    bind,
    with_index,
)
from batchax.divergence.nest import Inner, Nest, Segment, nest_of, prices_of_step
from batchax.divergence.opening import scan_as_while, while_of_scan
from batchax.divergence.policy import SHOWN, Loop, Masked, NestDecision, NestedLoop, Probed
from batchax.divergence.probed import masked_until_unequal
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.varying import alike
from batchax.divergence.windows import Tally, counted, rows_of, with_rows
from batchax.execution.gathered_lanes import (
    count_active,
    in_order,
    taken_at,
)
from batchax.execution.names import index_as_input
from batchax.execution.slices import blank
from batchax.jaxprs.bodies import control_flow, is_seen
from batchax.jaxprs.evaluate import variables_used
from batchax.jaxprs.types import ClosedJaxpr, Tree, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    AnyLoop,
    Axis,
    PlacedOutputs,
    Position,
    Positions,
    WhileLoop,
    match_axis,
)
from batchax.kernel.differing import (
    LOOPS,
    differing_in_steps,
    differing_in_while,
    looks_at_lanes,
)
from batchax.kernel.inner import batched_aval, closed_over, remembered, stage_function, while_loop
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import with_values
from batchax.rules.loops import MaskedBody, match_carry, predicate, split_operands

# Results do not depend on these; the benchmark `nests` does.
NARROWEST = 8  # lanes in a block
MASKED = 1.0  # how much more expensive masked lanes are than by their price
_COME = 8  # the share of all lanes that come to a segment at a time: a guess
_BLOCKS = 3  # at least, of all lanes


@dataclass(frozen=True)
class SegmentRun:
    """A segment for lanes that advance independently."""

    axis: Axis  # the axis of the lanes
    test: ClosedJaxpr  # the predicate of the loop that the segment is a part of
    segment: Segment  # what is done
    positions: Positions  # where each value of the loop has the batch axis, slots included

    def __call__(self, here: Value, values: Values) -> list[Any]:
        if not self.segment.writes:
            return list(values)
        width = self.width
        if width is None:
            return self._masked(here, list(values))
        return self._in_blocks(width, here, values)

    @property
    def width(self) -> int | None:
        """How many lanes do it at a time, as many as may come; None if all do it, masked."""
        size, part = self.axis.size, self.segment
        width = NARROWEST
        while width * _COME < size:
            width *= 2
        if looks_at_lanes.in_program(part.program):  # at those that are elsewhere, too
            return min(width, size)
        block = part.price.of(width) + part.moves.of(width)
        masked = MASKED * (part.price.of(size) + part.keeps.of(size))
        return width if block < masked and width * _BLOCKS <= size else None

    @property
    def overhead(self) -> float:
        """Nanoseconds that it takes besides the work of the lanes that do it."""
        part, size = self.segment, self.axis.size
        if not part.writes:
            return 0.0
        if self.width is None:
            return part.price.of(size) + part.keeps.of(size)
        # The last block is half empty, on average.
        return part.price.of(self.width / 2) + part.moves.of(self.width / 2)

    @property
    def _reads_at(self) -> list[Position]:
        return [self.positions[k] for k in self.segment.reads]

    def _masked(self, here: Value, values: list[Any]) -> list[Any]:
        part = self.segment
        masked = MaskedBody.of(self.axis, self.test, part.program, tuple(self._reads_at))
        reads, old = ([values[k] for k in some] for some in (part.reads, part.writes))
        return with_values(values, part.writes, masked.step(here, reads, old))

    def _in_blocks(self, width: int, here: Value, values: Values) -> list[Any]:
        """The values, after the lanes that are `here` have done it in blocks of that width."""
        part, size, axis = self.segment, self.axis.size, replace(self.axis, size=width)
        program, used = part.program, _used(part.program)
        operands_at = [*self._reads_at, *[0] * len(part.writes)]

        def once(state: Tree) -> Tree:
            first, changing = state
            now = with_values(values, part.writes, changing)
            entry = lax.add(first, places)
            # The queue depends on `first`, or it would be computed before the loop, unused.
            begun = lax.broadcast(lax.ge(first, np.int32(0)), (size,))
            queue, _ = in_order(lax.bitwise_and(here, begun), 1)
            # Places after the last lane hold that once more.
            lanes = taken_at(queue, lax.min(entry, last), 0)
            target = lax.select(lax.lt(entry, count), lanes, lax.add(places, np.int32(size)))
            reads = [rows_of(now[k], self.positions[k], lanes) for k in part.reads]
            # Of what is not read any lanes will do, and those in front need not be looked for.
            old = [
                rows_of(x, 0, lanes) if u else lax.slice_in_dim(x, 0, width)
                for x, u in zip(changing, used, strict=True)
            ]
            operands = [*reads, *old]
            outs, at = interpret(axis, program.jaxpr, program.consts, operands, operands_at)
            outs = [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
            changing = [with_rows(x, r, target) for x, r in zip(changing, outs, strict=True)]
            return lax.add(first, np.int32(width)), changing

        count = count_active(here, np.int32)
        places, last = lax.iota(np.int32, width), lax.sub(count, np.int32(1))
        start = alike((np.int32(0), [values[k] for k in part.writes]), values)
        _, changing = while_loop(lambda state: lax.lt(state[0], count), once, start)
        return with_values(values, part.writes, changing)


def _used(program: ClosedJaxpr) -> list[bool]:
    """For each result whether the operand in its place is read."""
    jaxpr = program.jaxpr
    used = variables_used(jaxpr)
    return [v in used for v in jaxpr.invars[len(jaxpr.invars) - len(jaxpr.outvars) :]]


_ENTERED = 16  # operations that it takes to enter and leave a loop inside: who waits, who goes on
_NOBODY = np.float32(1e-6)  # lanes: what is divided by must not be zero


@_compat.held_weakly
@dataclass(frozen=True)
class FlatLoop(DivergentLoop):
    """A loop of one example that holds others, for lanes that advance independently."""

    nest: Nest  # the nested loop, cut
    length: int | None  # how many steps it has for each lane, if that is known
    # The program of the same loop for one example, of the same operands, as JAX has it. Of that
    # derivatives are taken.
    together: ClosedJaxpr

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        return *super().but_for_body, self.nest

    def replanned(self, lanes: int, positions: tuple[Position, ...]) -> NestDecision:
        differs = [a is not None for a in positions[self.n_test :]]
        differs += [True] * len(self.body.out_avals)
        whole = Loop(lanes, self.test, self.body, tuple(differs))
        return self.axis.divergence.decide(NestedLoop(whole, self.nest, self.length))

    def run(self, *operands: Value) -> list[Any]:
        """As that of any loop."""
        if not isinstance(self.plan, Probed):
            return super().run(*operands)
        consts, carry = operands[: len(self.positions)], operands[len(self.positions) :]
        together = replace(self.axis, divergence=None)
        loop = self.test, self.body, self.positions, self.n_test
        carry = masked_until_unequal(together, *loop, self.plan.slowdown, consts, carry)
        return self._sequentially(consts, carry)

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
        consts: Values,
        active: Value,
        carry: Values,
        tally: Tally,
    ) -> tuple[Any, list[Any], Tally]:
        axis = replace(self.axis, size=width)
        lanes = Lanes(axis, self.nest, self.positions)
        active, values, _, tally = lanes.step(active, [*consts, *carry], None, tally)
        return active, values[len(consts) :], tally

    def differentiated(self, program: ClosedJaxpr, operands: Values) -> list[Any]:
        """As `run`, with lanes that wait for each other: a ``scan`` has derivatives in reverse."""
        return self.masked(*operands)

    def masked(self, *operands: Value) -> list[Any]:
        """As `run`, with lanes that wait for each other."""
        axis = replace(self.axis, divergence=None)
        positions = [*self.positions, *[0] * (len(operands) - len(self.positions))]
        outs, at = interpret(axis, self.together.jaxpr, self.together.consts, operands, positions)
        outs = [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
        return alike(outs, operands)


@dataclass(frozen=True)
class Lanes:
    """Some lanes of a nested loop."""

    axis: Axis  # their axis
    nest: Nest  # the nested loop
    # where its constants have the batch axis; slots have it in front
    constants_at: tuple[Position, ...]

    def step(
        self, active: Value, values: Values, deadline: Value, tally: Tally
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
                tally = counted(tally, count_active(active))
            return lax.bitwise_and(active, self.predicates(values)), values, self.time, tally
        here, spent = lax.bitwise_and(active, self._at(0, values)), self.time
        for number, part in enumerate(nest.parts):
            match part:
                case Segment():
                    values = self._run_of(part)(here, values)
                case Inner():
                    left = None if deadline is None else lax.sub(deadline, spent)
                    here, values, taken, tally = self._come_through(
                        number, part, here, active, values, left, tally
                    )
                    spent = lax.add(spent, taken)
        stays = lax.bitwise_or(self.predicates(values), lax.bitwise_not(here))
        return lax.bitwise_and(active, stays), values, spent, tally

    def predicates(self, values: Sequence[Any]) -> Value:
        nest = self.nest
        carry = values[nest.n_consts : nest.n_consts + nest.n_carry]
        at = [*self.constants_at[: nest.n_test], *[0] * nest.n_carry]
        return predicate(self.axis, nest.test, [*values[: nest.n_test], *carry], at)

    @property
    def time(self) -> Value:
        """How long a step takes, except for the loops inside and the work of lanes in segments."""
        around = sum(self._run_of(part).overhead for part in self.nest.segments)
        inner = len(self.nest.parts) - len(self.nest.segments)
        entered = launch_time(_ENTERED * inner)
        return np.float32(self.nest.price.of(self.axis.size) + around + entered)

    @property
    def _place(self) -> int:
        return self.nest.n_consts + self.nest.n_carry

    def _at(self, number: int, values: Sequence[Any]) -> Value:
        place = values[self._place]
        return lax.eq(place, np.asarray(number, place.dtype))

    def _run_of(self, segment: Segment) -> SegmentRun:
        positions = (*self.constants_at, *[0] * len(self.nest.slots))
        return SegmentRun(self.axis, self.nest.test, segment, positions)

    def _moved(self, come: Value, stay: Value, number: int, values: list[Any]) -> Value:
        """Who has come through a part: of those that `come` to it, all but those that `stay`."""
        place = values[self._place]
        through = lax.bitwise_and(come, lax.bitwise_not(stay))
        place = lax.select(stay, lax.broadcast(np.asarray(number, place.dtype), place.shape), place)
        values[self._place] = lax.select(through, _zeros(place), place)
        return through

    def _constants(
        self, part: Inner, values: Sequence[Any]
    ) -> tuple[list[Any], tuple[Position, ...]]:
        """The constants of a loop inside, and where each has the batch axis."""
        program = part.constants
        at = [*self.constants_at, *[0] * len(self.nest.slots)]
        reads, reads_at = [values[k] for k in part.reads], [at[k] for k in part.reads]
        consts, at = interpret(self.axis, program.jaxpr, program.consts, reads, reads_at)
        return consts, tuple(at)

    def _come_through(
        self,
        number: int,
        part: Inner,
        here: Value,
        active: Value,
        values: list[Any],
        deadline: Value,
        tally: Tally,
    ) -> tuple[Any, list[Any], Any, Tally]:
        """Runs a loop inside, for who comes to it and who is in it, until waiting costs too much.

        Returns:
          Which lanes have come through, the values, how long it took, and the count of steps.
        """
        values = list(values)
        consts, consts_at = self._constants(part, values)
        lanes = Lanes(self.axis, part.nest, consts_at)
        mine = [values[k] for k in part.slots]
        inside = lax.bitwise_and(active, self._at(number, values))
        first = lax.bitwise_or(inside, lax.bitwise_and(here, lanes.predicates([*consts, *mine])))
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
        # 0 at first and the price is not.
        #
        # Loops further inside waste the time of who waits here, too: they get what is `left` of the
        # limit, for each lane that waits.
        everyone = count_active(active, np.float32)
        limit = SkiRental(float(self.time)).limit(everyone)

        def goes_on(state: Tree) -> Value:
            _, _, count, wasted, spent, _ = state
            going = lax.bitwise_and(lax.gt(count, np.float32(0)), lax.lt(wasted, limit))
            return going if deadline is None else lax.bitwise_and(going, lax.lt(spent, deadline))

        def once(state: Tree) -> Tree:
            runs, mine, count, wasted, spent, tally = state
            # A lane that waits here waits for loops further inside, too.
            others = lax.max(lax.sub(everyone, count), _NOBODY)
            left = lax.div(lax.sub(limit, wasted), others)
            left = left if deadline is None else lax.min(left, lax.sub(deadline, spent))
            with recording.inside(self.axis, part.eqn):
                recording.note(divergence="flat", widths=(self.axis.size,))
                runs, own, taken, tally = lanes.step(runs, [*consts, *mine], left, tally)
            count = count_active(runs, np.float32)
            wasted = lax.add(wasted, lax.mul(taken, lax.sub(everyone, count)))
            return runs, own[len(consts) :], count, wasted, lax.add(spent, taken), tally

        count, zero = count_active(first, np.float32), np.float32(0)
        state = alike((first, mine, count, zero, zero, tally), values)
        runs, mine, _, _, spent, tally = while_loop(goes_on, once, state)
        for k, x in zip(part.slots, mine, strict=True):
            values[k] = x
        through = self._moved(lax.bitwise_or(here, inside), runs, number, values)
        return through, values, spent, tally


def _zeros(x: Value) -> Value:
    return lax.broadcast(np.asarray(0, x.dtype), x.shape)


_Form = tuple[WhileLoop, Positions, Callable[[], ClosedJaxpr]]
"""A loop as a ``while`` of one example; where what it carries has the batch axis; and what makes a
program, of all its operands, that runs it as it was. What it carries ends with its results."""


def run_flat(axis: Axis, loop: AnyLoop, least: float) -> PlacedOutputs | None:
    """The results of a loop for all lanes, which advance independently.

    None if no loop in it parts lanes, if something needs lanes together, or if it would not pay.

    Args:
      axis: the axis of the lanes.
      loop: the loop.
      least: nanoseconds that a step of the loops inside must take for all lanes.
    """
    params, is_scan = loop.params, loop.primitive is scan_p
    body = params[control_flow(loop.primitive).step]
    if not may_wait.in_program(body):  # most do not: the checks below run for few
        return None
    if loop.primitive.name in LOOPS or not can_move(axis, loop.args):
        return None
    given = tuple(a is not None for a in loop.axes)
    if is_scan:
        step = body.jaxpr, *_compat.scan_counts(params), given
    else:
        count = params["body_nconsts"], len(body.out_avals)
        step = body.jaxpr, *count, given[params["cond_nconsts"] :]
    if not differing_in_steps(*step).parts:
        return None
    prices = prices_of_step(*step, axis.size)
    if not prices.pays(axis.size) or prices.inside.of(axis.size) < least:
        recording.note(why="the loops inside cost too little next to what is around them")
        return None
    why = _together([p for p in params.values() if isinstance(p, ClosedJaxpr)])
    if why:
        recording.note(why=why)
        return None
    form = (_scan if is_scan else _while)(axis, loop)
    if form is None:
        return None
    whole, carry_at, make_together = form
    first = whole.carry
    whole = replace(whole, carry=match_carry(axis, first, carry_at, [0] * len(first)))
    together = remembered(whole.body, ("together", axis), make_together)
    if any_uses_axis(axis, whole.test, whole.body):
        together = _with_index(axis, together, len(whole.test_consts))
        whole = with_index(axis, whole)
    differs = tuple(a is not None for a in (*whole.body_at, *carry_at))
    inside = replace(axis, name=None, divergence=axis.divergence.inside())
    nest = nest_of(inside, whole.test, whole.body, differs)
    if not nest.parts:
        recording.note(why="copies of what the loops inside use would cost too much")
        return None
    tested = tuple(a is not None for a in whole.test_at)
    apart = differing_in_while(whole.test.jaxpr, whole.body.jaxpr, tested, differs).results
    results = range(len(first) - len(body.out_avals), len(first))
    own = [k for k in results if apart[k]]
    consts, consts_at = [*whole.test_consts, *whole.body_consts], (*whole.test_at, *whole.body_at)
    waiting = Waiting(inside, together, [*consts, *first], (*consts_at, *carry_at))
    if waiting.varies_less(own):
        recording.note(why=VARIES_LESS)
        return None
    length = params.get("length")
    of_whole = Loop(axis.size, whole.test, whole.body, differs)
    plan = axis.divergence.decide(NestedLoop(of_whole, nest, length))
    if isinstance(plan, Masked):
        recording.note(why=plan.reason)
        return None
    n_test = len(whole.test_consts)
    flat = FlatLoop(inside, whole.test, whole.body, n_test, consts_at, plan, nest, length, together)
    recording.note(divergence=SHOWN[type(plan)], widths=plan.widths)
    outs = bind(flat, _compat.varying_alike([*consts, *whole.carry]))
    at: list[Position] = [0] * len(outs)
    shared = [k for k in results if not apart[k]]
    for k, x, a in zip(shared, *waiting.results(shared), strict=True):
        outs[k], at[k] = x, a
    outs = [as_weak_as(aval, outs[k]) for aval, k in zip(body.out_avals, results, strict=True)]
    return outs, [at[k] for k in results]


def _scan(axis: Axis, loop: AnyLoop) -> _Form | None:
    params = loop.params
    n_consts, n_carry = _compat.scan_counts(params)
    if params["length"] < 2:
        return None
    test, body = while_of_scan(axis, params)
    consts, carry = scan_as_while(axis, params, loop.args)
    consts_at, carry_at, xs_at = split_operands(loop.axes, n_consts, n_carry)
    added = len(carry) - n_carry - 1
    count = len(consts)

    def together() -> ClosedJaxpr:
        def run(*operands: Value) -> list[Any]:
            consts, (_, *carry) = operands[:count], operands[count:]
            operands = (*consts[:n_consts], *carry[:n_carry], *consts[n_consts:])
            return [np.int32(params["length"]), *scan_p.bind(*operands, **params)]

        return stage_function(axis, run, body.in_avals)

    whole = WhileLoop(test, body, (), (), consts, (*consts_at, *xs_at), carry)
    return whole, (None, *carry_at, *[None] * added), together


def _while(axis: Axis, loop: AnyLoop) -> _Form | None:
    params = loop.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test_consts, body_consts, carry = split_operands(loop.args, n_test, n_body)
    test_at, body_at, carry_at = split_operands(loop.axes, n_test, n_body)
    if test.out_avals[0].shape:
        return None

    def together() -> ClosedJaxpr:
        run = lambda *operands: while_p.bind(*operands, **params)
        return stage_function(axis, run, [*test.in_avals[:n_test], *body.in_avals])

    return (
        WhileLoop(test, body, test_consts, test_at, body_consts, body_at, carry),
        carry_at,
        together,
    )


def _together(programs: Sequence[ClosedJaxpr]) -> str:
    """Why lanes must take each step of a loop together; empty if they need not."""
    why = why_together(programs)
    if why:
        return why
    for program in programs:
        if is_seen(program):
            return HOST
        if _compat.makes_references(program.effects) or _compat.written_inputs(program.jaxpr):
            return "a step writes to a reference"
        if any(map(closed_over, program.jaxpr.eqns)):
            return "a derivative rule in it closes over values"
    return ""


def _with_index(axis: Axis, together: ClosedJaxpr, n_test: int) -> ClosedJaxpr:
    """`together` of the operands of a loop that is given the index of the lane twice."""
    given = index_as_input(axis, together)
    index, *types = given.in_avals
    run = lambda *xs: eval_jaxpr(given.jaxpr, given.consts, *xs[: 1 + n_test], *xs[2 + n_test :])
    return _compat.stage(run, [index, *types[:n_test], index, *types[n_test:]])
