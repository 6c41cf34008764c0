"""A loop of one example, cut at the loops in it that lanes leave one by one: a `Nest`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.analysis.cost import Cost, bytes_of, cost_of_equation
from batchax.cache import cached_on
from batchax.divergence.costs import (
    STEPS_INSIDE,
    Price,
    price_of,
    price_of_copying,
    price_of_cost,
    price_of_keeping,
    price_of_moving,
    total,
)
from batchax.divergence.opening import opened
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import Rewriter, fresh, plan, variables_in, variables_read
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.differing import (
    Differs,
    differing_in,
    differing_in_steps,
    differing_through,
    differs_of,
    expand_bounded_loop,
)
from batchax.kernel.inner import remembered
from batchax.rules.in_place import kept_carries


@dataclass(frozen=True, eq=False)
class Segment:
    """What is done between two loops."""

    # Of the values it reads, and of what is in the slots it writes. It returns what it writes to
    # those.
    program: ClosedJaxpr
    reads: tuple[int, ...]  # the values, numbered: constants of the loop first, then slots
    writes: tuple[int, ...]  # the slots, numbered likewise
    price: Price  # what the program costs
    moves: Price  # what it costs to move what it reads and writes to a block of lanes, and back
    keeps: Price  # what it costs that lanes which are elsewhere keep what they have


@dataclass(frozen=True, eq=False)
class Inner:
    """A loop inside."""

    nest: Nest  # the nested loop
    constants: ClosedJaxpr  # the program of its constants, of the values it reads
    reads: tuple[int, ...]  # these, as those of a `Segment`
    # its own slots, among the values of the loop around it; some are slots of that, too
    slots: tuple[int, ...]
    eqn: Eqn  # its equation
    differs: tuple[bool, ...]  # which constants of its body differ between lanes


Part = Segment | Inner


@dataclass(frozen=True, eq=False)
class Nest:
    """A ``while`` of one example."""

    test: ClosedJaxpr  # the predicate, of its constants and what is carried
    body: ClosedJaxpr | None  # the program of a step; None if it is cut in parts
    parts: tuple[Part, ...]  # segments, and loops inside, in order; none of a loop that is not cut
    # How many constants the predicate has, and how many all have: those of the predicate come
    # first
    n_test: int
    n_consts: int
    # How many slots hold what is carried; they are the first. If there are parts, the next one
    # holds the number of the part that the lane is in, zero before the first.
    n_carry: int
    slots: tuple[Aval, ...]  # the types of all
    price: Price  # what a step costs, except for the parts
    own: tuple[Aval, ...]  # the types of the constants of its body that differ between lanes
    # whether each lane would have a copy of something large that lanes share at a step
    copies: bool = False

    @property
    def loops(self) -> list[Inner]:
        """The loops inside that lanes leave one by one."""
        return [part for part in self.parts if isinstance(part, Inner)]

    @property
    def inside(self) -> list[ClosedJaxpr]:
        """Their programs."""
        return [loop.eqn.params[k] for loop in self.loops for k in ("cond_jaxpr", "body_jaxpr")]

    @property
    def segments(self) -> list[Segment]:
        return [part for part in self.parts if isinstance(part, Segment)]


FEW_STEPS = 4  # of a loop inside: those which lanes wait for anyhow
# Unbatched values, of which each lane needs a copy once lanes advance independently, may take so
# many times the bytes of batched ones.
_MOST_COPIED = 4
_PLACE = jax.typeof(np.int32(0))


def nest_of(axis: Axis, test: ClosedJaxpr, body: ClosedJaxpr, differs: Differs) -> Nest:
    """A ``while``, cut at the loops in it that lanes leave one by one.

    Args:
      axis: the axis of the lanes.
      test, body: its programs; each has its own constants in front.
      differs: which constants of the body, and what of the first carry, differ between lanes.
    """
    return remembered(
        body, ("nest", axis, test, differs), lambda: _nest_of(axis, test, body, differs)
    )


def _nest_of(axis: Axis, test: ClosedJaxpr, body: ClosedJaxpr, differs: Differs) -> Nest:
    n_carry = len(body.out_avals)
    n_body = len(body.in_avals) - n_carry
    n_test = len(test.in_avals) - n_carry
    test_price = price_of(test, (True,) * len(test.in_avals))
    counts = n_test, n_test + n_body, n_carry
    inside = differing_in_steps(body.jaxpr, n_body, n_carry, differs)
    copies, own = False, tuple(itertools.compress(body.in_avals[:n_body], differs))
    steps = prices_of_step(body.jaxpr, n_body, n_carry, differs, axis.size)
    if inside.parts and steps.pays(axis.size):
        differs = (*differs[:n_body], *inside.results)
        # Else results of a branch that are not read would be kept.
        whole = opened(axis, _compat.without_dead(body), differs)
        cut = _Cut(axis, test, whole, n_body, differs)
        parts, slots = cut.parts(), tuple(cut.types[n_test + n_body :])
        copies = cut.copies_what_is_shared()
        copies |= any(part.nest.copies for part in parts if isinstance(part, Inner))
        if not copies:
            return Nest(test, None, parts, *counts, slots, test_price, own)
    slots = tuple(body.out_avals)
    step = price_of(body, (*differs[:n_body], *[True] * n_carry))
    kept = kept_carries(body, n_body)
    written = price_of_keeping([aval for k, aval in enumerate(slots) if k not in kept])
    price = total([test_price, step, written])
    return Nest(test, body, (), *counts, slots, price, own, copies)


class StepPrices(NamedTuple):
    """The prices of a step of a loop, found before it is cut: to cut it takes 10x as long."""

    around: Price  # between the loops in it that lanes leave one by one
    inside: Price  # a step of these

    def pays(self, lanes: int) -> bool:
        """Whether it may be profitable that lanes advance independently.

        Not if what is around the loops inside is much more expensive than some of their steps:
        lanes would wait as long for that.
        """
        return self.around.of(lanes) < FEW_STEPS * self.inside.of(lanes)


def prices_of_step(
    jaxpr: Jaxpr, same: int, carried: int, differs: Differs, lanes: int
) -> StepPrices:
    """Prices a step of a ``scan`` or ``while``, from its body, as `differing_in_steps` takes it."""
    results = differing_in_steps(jaxpr, same, carried, differs).results
    sliced = same + carried
    differs = (*differs[:same], *results[:carried], *differs[sliced:])
    around, inside = _prices_in(jaxpr, differs, lanes)
    taken = list(itertools.compress(jaxpr.invars[sliced:], differs[sliced:]))
    put = list(itertools.compress(jaxpr.outvars[carried:], results[carried:]))
    places, moved = len(taken) + 2 * len(put), [v.aval for v in (*taken, *put)]
    entries = Cost(places=places, bytes=2 * bytes_of(moved), launches=len(moved) + 1)
    return StepPrices(total([around, price_of_cost(entries)]), inside)


@cached_on("what programs cost around loops inside, and in these")
def _prices_in(jaxpr: Jaxpr, differs: Differs, lanes: int) -> StepPrices:
    apart = dict(zip(jaxpr.invars, differs, strict=True))
    around, prices = Cost(), []
    for step in plan(jaxpr.eqns, jaxpr.outvars):
        eqn, given = step.eqn, differs_of(apart, step.inputs)
        of_equation = differing_in(eqn, given)
        apart.update(zip(eqn.outvars, of_equation.results, strict=True))
        if eqn.primitive in (scan_p, while_p) and of_equation.parts:
            prices.append(_prices_of_inner(jaxpr, eqn, given, lanes))
        elif of_equation.parts:
            called = expand_bounded_loop(eqn) or bodies_of(eqn)[0]
            prices.append(_prices_in(called.jaxpr, given, lanes))
        elif any(given):
            around += cost_of_equation(eqn, None, given, STEPS_INSIDE)
    prices.append(StepPrices(price_of_cost(around), total([])))
    return StepPrices(*map(total, zip(*prices, strict=True)))


def _prices_of_inner(jaxpr: Jaxpr, eqn: Eqn, given: Differs, lanes: int) -> StepPrices:
    """What it costs to come to a loop inside, and a step of it."""
    *tests, body = bodies_of(eqn)
    # Lanes are at different steps of a ``while``.
    differs = tuple(given[k] or bool(tests and k in body.carry_operands) for k in body.operands)
    step = prices_of_step(body.jaxpr, body.same, body.carried, differs, lanes)
    first = [eqn.invars[k] for k in body.carry_operands]
    kept = kept_carries(_compat.close(body.program), body.same)
    keeps = price_of_keeping([v.aval for k, v in enumerate(first) if k not in kept])
    often = 1 if step.pays(lanes) else STEPS_INSIDE
    # To come to a loop is one operation, and the predicate of a scan, which counts, is another.
    begin = price_of_cost(Cost(launches=1))
    of_tests = [price_of(_compat.close(t.program), (True,) * len(t.operands)) for t in tests]
    inside = [step.around, *[step.inside] * often, keeps, *(of_tests or [begin])]
    # What it updates in place is copied, except for what it alone reads of what is held around it.
    needed = {eqn, *(s.eqn for s in plan(jaxpr.eqns, eqn.invars))}
    others = [v for e in jaxpr.eqns if e not in needed for v in e.invars]
    free = set(jaxpr.invars).difference(variables_in([*others, *jaxpr.outvars]))
    updated = [first[k] for k in kept if k < body.carried]
    copied = [v for v in updated if isinstance(v, Literal) or v not in free]
    copied += eqn.outvars[body.carried :]
    comes = total([begin, price_of_copying([v.aval for v in copied])])
    return StepPrices(comes, total(inside))


def price_inside(nest: Nest) -> Price:
    """What a step of each loop inside costs, with those in it."""
    inner = [loop.nest for loop in nest.loops]
    segments = [part.price for n in inner for part in n.segments]
    return total([*(n.price for n in inner), *segments, *map(price_inside, inner)])


class _Cut:
    """A body of a loop, cut at the loops in it that lanes leave one by one.

    Attributes:
      inner: those loops.
      slots: the types of what a lane keeps.
    """

    def __init__(
        self,
        axis: Axis,
        test: ClosedJaxpr,
        body: ClosedJaxpr,
        n_body: int,
        differs: Differs,
    ) -> None:
        self.axis, self.test, self.body, self.n_body = axis, test, body, n_body
        jaxpr = body.jaxpr
        self.n_test = len(test.in_avals) - len(body.out_avals)
        self.carry = jaxpr.invars[n_body:]
        self.apart = dict(zip(jaxpr.invars, differs, strict=True))
        through = differing_through(jaxpr, self.apart)
        self.inner = [eqn for eqn, of in through if of.parts and eqn.primitive is while_p]

    def parts(self) -> tuple[Part, ...]:
        """The segments, and the loops, in order."""
        # The types of all values, constants first; and where a variable is kept. What one more is
        # computed of is constants that all lanes share, or numbers: it is recomputed wherever
        # it is read.
        jaxpr = self.body.jaxpr
        self.types = [*self.test.in_avals[: self.n_test], *self.body.in_avals, _PLACE]
        self.place = {v: self.n_test + k for k, v in enumerate(jaxpr.invars)}
        self.again = self._computed_again()
        own = [eqn for eqn in jaxpr.eqns if eqn not in self.inner and eqn not in self.again]
        groups = self._groups(own)
        inner = []
        for j, eqn in enumerate(self.inner):
            nest, read = self._nest(eqn), self._read_after(groups, j)
            slots = self._slots(eqn, nest.slots, read)
            self.place.update(zip(eqn.outvars, slots, strict=False))
            inner.append((eqn, nest, slots, read))
        parts: list[Part] = []
        for j, (eqn, nest, slots, read) in enumerate(inner):
            begins = zip(slots, _first_carry(eqn), strict=False)
            writes = {k: v for k, v in begins if isinstance(v, Literal) or self.place.get(v) != k}
            # What a loop updates in place is copied where lanes come to it.
            program, count = eqn.params["body_jaxpr"], eqn.params["body_nconsts"]
            kept = [k for k in kept_carries(program, count) if slots[k] in writes]
            moved = [nest.slots[k] for k in kept]
            if nest.parts:
                writes[slots[nest.n_carry]] = Literal(np.int32(0), _PLACE)
            kept = [v for made in groups[j] for v in made.outvars if v in read]
            places = self._keep([v.aval for v in kept])
            writes.update(zip(places, kept, strict=True))
            segment = self._segment(groups[j], writes)
            price = total([segment.price, price_of_copying(moved)])
            parts.append(replace(segment, price=price))
            # Only now: the segment computes these, and does not read them.
            self.place.update(zip(kept, places, strict=True))
            program, reads = self._program([], _constants(eqn), ())
            own = differs_of(self.apart, _constants(eqn)[eqn.params["cond_nconsts"] :])
            parts.append(Inner(nest, program, reads, slots, eqn, own))
        last = zip(map(self.place.__getitem__, self.carry), jaxpr.outvars, strict=True)
        changed = {k: v for k, v in last if isinstance(v, Literal) or self.place.get(v) != k}
        return *parts, self._segment(groups[-1], changed)

    def copies_what_is_shared(self) -> bool:
        """Whether each lane would have a copy of something large that they share at a step."""
        again = {v for eqn in self.again for v in eqn.outvars}
        values = [*self.carry, *(v for eqn in self.body.jaxpr.eqns for v in eqn.outvars)]
        shared = [v.aval for v in values if not self.apart[v] and v not in again]
        own = bytes_of(v.aval for v in self.carry if self.apart[v])
        return any(bytes_of([aval]) > _MOST_COPIED * own for aval in shared)

    def _keep(self, types: Sequence[Aval]) -> range:
        """More slots, of these types."""
        self.types += types
        return range(len(self.types) - len(types), len(self.types))

    def _computed_again(self) -> list[Eqn]:
        """Equations whose operands all lanes share, whatever step they are at."""
        moving = set(self.carry)
        again = []
        for eqn in self.body.jaxpr.eqns:
            read = variables_read(eqn)
            if eqn in self.inner or any(v in moving or self.apart.get(v, False) for v in read):
                moving.update(eqn.outvars)
            else:
                again.append(eqn)
        return again

    def _groups(self, eqns: Sequence[Eqn]) -> list[list[Eqn]]:
        """Equations by the loop that needs them first; at last those that none does."""
        groups, left = [], list(eqns)
        for loop in self.inner:
            needed = {s.eqn for s in plan(left, loop.invars)}
            groups.append([eqn for eqn in left if eqn in needed])
            left = [eqn for eqn in left if eqn not in needed]
        return [*groups, left]

    def _slots(self, loop: Eqn, types: Sequence[Aval], read: set[Any]) -> tuple[int, ...]:
        """Slots of these types for a loop inside, whose carry is the first of them.

        That is kept where the loop around it keeps what it begins with, or what becomes of it, if
        what is there is not `read` any more: so it is not copied where lanes come and go.
        """
        first, outs = _first_carry(loop), self.body.jaxpr.outvars
        taken = {self.place[v] for v in read if v in self.place}
        slots: list[int] = []
        for k, aval in enumerate(types):
            ends: list[Any] = []
            if k < len(first):
                begin, result = first[k], loop.outvars[k]
                ends += [begin] if sum(v is begin for v in first) == 1 else []
                ends += [v for v, o in zip(self.carry, outs, strict=True) if o is result][:1]
            at = [self.place[v] for v in ends if not isinstance(v, Literal) and v in self.place]
            free = (p for p in at if p >= self.n_test + self.n_body and p not in taken)
            slot = next((p for p in free if self.types[p] == aval), None)
            (slot,) = self._keep([aval]) if slot is None else (slot,)
            taken.add(slot)
            slots.append(slot)
        return tuple(slots)

    def _read_after(self, groups: Sequence[Sequence[Eqn]], j: int) -> set[Any]:
        """What is read after segment `j`, or by each step of the loop after it."""
        later = [v for group in groups[j + 1 :] for eqn in group for v in eqn.invars]
        for k, loop in enumerate(self.inner[j:]):
            later += _constants(loop) if k == 0 else loop.invars
        return set(variables_in([*later, *self.body.jaxpr.outvars]))

    def _nest(self, eqn: Eqn) -> Nest:
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        count = eqn.params["cond_nconsts"]
        differs = differs_of(self.apart, eqn.invars[count:])
        return nest_of(self.axis, test, body, differs)

    def _segment(self, eqns: Sequence[Eqn], writes: dict[int, Any]) -> Segment:
        program, reads = self._program(eqns, [*writes.values()], tuple(writes))
        shared = {k for k, v in enumerate(self.body.jaxpr.invars) if not self.apart[v]}
        differs = [k - self.n_test not in shared for k in reads]
        kept = kept_carries(program, len(reads))
        written = [aval for k, aval in enumerate(program.out_avals) if k not in kept]
        return Segment(
            program,
            reads,
            tuple(writes),
            price_of(program, [*differs, *[True] * len(writes)]),
            price_of_moving(program.in_avals[: len(reads)], program.out_avals),
            price_of_keeping(written),
        )

    def _program(
        self, eqns: Sequence[Eqn], outs: Sequence[Any], writes: Sequence[int]
    ) -> tuple[ClosedJaxpr, tuple[int, ...]]:
        """A program of `eqns` that computes `outs`, of what it reads and the slots it `writes`."""
        every = set(eqns) | set(self.again)
        steps = plan([e for e in self.body.jaxpr.eqns if e in every], outs)
        made = {v for step in steps for v in step.eqn.outvars}
        read = [v for step in steps for v in step.eqn.invars] + list(outs)
        program = Rewriter(self.body, [step.eqn for step in steps])
        ours = (v for v in variables_in(read) if not (v in made or v in program.constants))
        own = {self.place[v]: v for v in dict.fromkeys(ours)}
        reads = tuple(k for k in own if k not in writes)
        variables = [own.get(k) or fresh(self.types[k]) for k in (*reads, *writes)]
        return program.program(variables, outs), reads


def _first_carry(loop: Eqn) -> list[Any]:
    return [*loop.invars][loop.params["cond_nconsts"] + loop.params["body_nconsts"] :]


def _constants(loop: Eqn) -> list[Any]:
    return [*loop.invars][: loop.params["cond_nconsts"] + loop.params["body_nconsts"]]
