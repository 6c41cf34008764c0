"""A loop of one example, cut at the loops in it that lanes leave one by one: a `Nest`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import dynamic_slice_p, dynamic_update_slice_p, while_p

from batchax import _compat
from batchax.divergence.costs import (
    Price,
    price_of,
    price_of_copying,
    price_of_keeping,
    price_of_moving,
    total,
    width_of_block,
)
from batchax.divergence.opening import DeferredBranchId, opened_places
from batchax.jaxprs.evaluate import plan, variables_in, variables_read
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.rewriter import Rewriter, fresh
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn
from batchax.kernel.axis import Axis
from batchax.kernel.differing import (
    Differs,
    differing_in_steps,
    differing_through,
    differs_of,
)
from batchax.kernel.inner import remembered
from batchax.programs.cost import bytes_of
from batchax.programs.one_function import lower_for_kernel
from batchax.rules.in_place import kept_carries


@dataclass(frozen=True, eq=False)
class Segment:
    """What is done between two loops, or in an expensive branch.

    Attributes:
      program: of the values it reads, of the entries it takes, and of what is in the slots it
        writes. It returns what it writes to those slots; then the entries it puts, each with its
        index after it, in whose place it is given anything.
      reads: the values, numbered: constants of the nest first, then slots.
      writes: the slots, numbered likewise.
      takes: constants of which an entry is taken along the first axis, and not all is read.
      indices: the program of the indices of those entries, of the same values.
      puts: slots into which an entry is put along the first axis.
      price: what the program costs.
      moves: what it costs to move what it reads and writes to a block of lanes, and back.
      keeps: what it costs that lanes which are elsewhere keep what they have.
    """

    program: ClosedJaxpr
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    takes: tuple[int, ...]
    indices: ClosedJaxpr
    puts: tuple[int, ...]
    price: Price
    moves: Price
    keeps: Price

    @property
    def is_empty(self) -> bool:
        """Whether nothing is done: what a loop carries stays where the loop around it keeps it."""
        return not (self.writes or self.puts)


@dataclass(frozen=True, eq=False)
class Inner:
    """A loop inside.

    Attributes:
      nest: the loop.
      constants: the program of its constants, of the values it reads.
      reads: these, as those of a `Segment`.
      slots: its own slots, among the values of the loop around it; some are slots of that, too.
      eqn: its equation.
      differs: which constants of its body differ between lanes.
    """

    nest: Nest
    constants: ClosedJaxpr
    reads: tuple[int, ...]
    slots: tuple[int, ...]
    eqn: Eqn
    differs: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class DeferredBranch:
    """An expensive branch, before which lanes wait until a block of them is full.

    Attributes:
      segment: what is done in it, of constants of its own and then its slots.
      constants: the program of its constants, of the values it reads.
      reads: these, as those of a `Segment`.
      slots: its slots, among the values of the loop around it: whether the lane is still to take
        it, what it computes, and for how long the lane has waited.
      width: how many lanes make a block.
      branch: which branch it is, of which ``cond``.
    """

    segment: Segment
    constants: ClosedJaxpr
    reads: tuple[int, ...]
    slots: tuple[int, ...]
    width: int
    branch: DeferredBranchId

    @property
    def block(self) -> Price:
        """The price of a block."""
        price, moves = self.segment.price, self.segment.moves
        return Price.made(price.of(self.width) + moves.of(self.width), 0.0)


Part = Segment | Inner | DeferredBranch


@dataclass(frozen=True, eq=False)
class Nest:
    """A ``while`` of one example.

    Attributes:
      test: the predicate, of its constants and what is carried.
      body: the program of a step; None if it is cut in parts.
      parts: segments, and loops and expensive branches inside, in order; none of a loop that is
      not cut. n_test, n_consts: how many constants the predicate has, and how many all have: those
        of the predicate come first.
      n_carry: how many slots hold what is carried; they are the first. If there are parts, the
        next one holds the number of the part that the lane is in, zero before the first.
      slots: the types of all.
      price: what a step costs, except for the parts.
      own: the types of the constants of its body that differ between lanes.
      copies: whether each lane would have a copy of something large that lanes share at a step.
    """

    test: ClosedJaxpr
    body: ClosedJaxpr | None
    parts: tuple[Part, ...]
    n_test: int
    n_consts: int
    n_carry: int
    slots: tuple[Aval, ...]
    price: Price
    own: tuple[Aval, ...]
    copies: bool = False

    @property
    def only_branches(self) -> bool:
        """Whether lanes wait at expensive branches alone, and leave no loop inside one by one."""
        return bool(self.parts) and all(nest.only_branches for nest in self.inner)

    @property
    def inner(self) -> list[Nest]:
        """The loops inside that lanes leave one by one."""
        return [part.nest for part in self.parts if isinstance(part, Inner)]

    @property
    def programs(self) -> list[ClosedJaxpr] | None:
        """All that lanes run in it; None if they wait at branches, or put entries into arrays."""
        programs = [self.test] if self.body is None else [self.test, self.body]
        for part in self.parts:
            match part:
                case Segment(puts=()):
                    programs += [part.program, part.indices]
                case Inner() if (inside := part.nest.programs) is not None:
                    programs += [part.constants, *inside]
                case _:
                    return None
        return programs

    @property
    def inside(self) -> list[ClosedJaxpr] | None:
        """All that lanes run in the loops inside; None as for `programs`, or if there are none."""
        each = [inner.programs for inner in self.inner]
        if not each or None in each:
            return None
        return [program for some in each for program in some or ()]

    @property
    def segments(self) -> list[Segment]:
        """Those of its parts."""
        return [part for part in self.parts if isinstance(part, Segment)]


@dataclass(frozen=True, eq=False)
class Entries:
    """Those of one body.

    Attributes:
      arrays: its constants that each lane has its own of.
      zeros: variables that are zero, cast to vary over the axes of a mesh.
    """

    arrays: frozenset[Any]
    zeros: frozenset[Any]

    @classmethod
    def of(cls, body: ClosedJaxpr, n_consts: int, apart: Mapping[Any, bool]) -> Entries:
        """Those of a body, of which so many inputs are constants, by what differs between lanes."""
        jaxpr = body.jaxpr
        casts = [eqn for eqn in jaxpr.eqns if facts_of(eqn.primitive).cast]
        zeros = (
            eqn.outvars[0]
            for eqn in casts
            if isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0
        )
        return cls(frozenset(v for v in jaxpr.invars[:n_consts] if apart[v]), frozenset(zeros))

    def taken(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        """Those that take an entry, at an index that is not made of other entries."""
        takes: list[Eqn] = []
        for eqn in filter(self._is_taken, eqns):
            if not any(step.eqn in takes for step in plan(eqns, eqn.invars[1:2])):
                takes.append(eqn)
        return takes

    def _is_taken(self, eqn: Eqn) -> bool:
        if eqn.primitive is not dynamic_slice_p or isinstance(eqn.invars[0], Literal):
            return False
        operand, _, *others = eqn.invars
        whole = eqn.params["slice_sizes"] == (1, *operand.aval.shape[1:])
        return whole and operand in self.arrays and all(map(self._is_zero, others))

    def is_put(self, eqn: Eqn) -> bool:
        """Whether an equation puts an entry into an array."""
        if eqn.primitive is not dynamic_update_slice_p or isinstance(eqn.invars[0], Literal):
            return False
        operand, update, _, *others = eqn.invars
        whole = update.aval.shape == (1, *operand.aval.shape[1:])
        return whole and all(map(self._is_zero, others))

    def _is_zero(self, v: Any) -> bool:
        return v.val == 0 if isinstance(v, Literal) else v in self.zeros


FEW_STEPS = 4  # of a loop inside: those which lanes wait for anyhow
# What all lanes share at a step, and would each have their own of once they are at steps of their
# own, may take so many times the bytes of what differs between them.
_MOST_COPIED = 4
_PLACE = jax.typeof(np.int32(0))
_WAITED = jax.typeof(np.float32(0))


def nest_of(
    axis: Axis, test: ClosedJaxpr, body: ClosedJaxpr, differs: Differs, one_function: bool = False
) -> Nest:
    """A ``while``, cut at the loops in it that lanes leave one by one.

    Args:
      axis: the axis of the lanes.
      test, body: its programs; each has its own constants in front.
      differs: which constants of the body, and what of the first carry, differ between lanes.
      one_function: whether the loops in it are to be in a form that can be one function.
    """
    key = ("nest", axis, test, differs, one_function)
    return remembered(body, key, lambda: _nest_of(axis, test, body, differs, one_function))


def _nest_of(
    axis: Axis, test: ClosedJaxpr, body: ClosedJaxpr, differs: Differs, one_function: bool
) -> Nest:
    n_carry = len(body.out_avals)
    n_body = len(body.in_avals) - n_carry
    n_test = len(test.in_avals) - n_carry
    asked = price_of(test, (True,) * len(test.in_avals))
    counts = n_test, n_test + n_body, n_carry
    inside = differing_in_steps(body.jaxpr, n_body, n_carry, differs)
    copies, own = False, tuple(itertools.compress(body.in_avals[:n_body], differs))
    if inside.parts:
        differs = (*differs[:n_body], *inside.results)
        places: dict[Any, DeferredBranchId] = {}
        # Else what a branch hands on to nobody would be kept for it.
        opened = opened_places(axis, _compat.without_dead(body), differs, places)
        cut = _Cut(axis, test, opened, n_body, differs, places, one_function=one_function)
        parts, slots = cut.parts(), tuple(cut.types[n_test + n_body :])
        copies = cut.copies_what_is_shared()
        copies |= any(part.nest.copies for part in parts if isinstance(part, Inner))
        if not copies and _pays(parts, axis.size):
            return Nest(test, None, parts, *counts, slots, asked, own)
    slots = tuple(body.out_avals)
    step = price_of(body, (*differs[:n_body], *[True] * n_carry))
    kept = kept_carries(body, n_body)
    written = price_of_keeping([aval for k, aval in enumerate(slots) if k not in kept])
    price = total([asked, step, written])
    return Nest(test, body, (), *counts, slots, price, own, copies)


def _pays(parts: Sequence[Part], lanes: int) -> bool:
    """Whether it may pay that lanes are at places of their own.

    Not if what is around the loops inside is much more expensive than some of their steps: nobody
    would wait less for those.
    """
    around = total([part.price for part in parts if isinstance(part, Segment)]).of(lanes)
    return around < FEW_STEPS * _inside(parts).of(lanes)


def price_inside(nest: Nest) -> Price:
    """The price of a step of each loop inside, and of a block of each expensive branch."""
    return _inside(nest.parts)


def _inside(parts: Sequence[Part]) -> Price:
    expensive = [part.block for part in parts if isinstance(part, DeferredBranch)]
    return total([*expensive, *(_step(part.nest) for part in parts if isinstance(part, Inner))])


def _step(nest: Nest) -> Price:
    return total([nest.price, *(part.price for part in nest.segments), _inside(nest.parts)])


class _Cut:
    """A body of a loop, cut at the loops in it that lanes leave one by one.

    Attributes:
      inner: those loops, and expensive branches as loops.
      entries: which equations take or put one entry of an array.
      slots: the types of what a lane keeps.
    """

    def __init__(
        self,
        axis: Axis,
        test: ClosedJaxpr,
        body: ClosedJaxpr,
        n_body: int,
        differs: Differs,
        places: Mapping[Any, DeferredBranchId],
        whole: bool = False,
        one_function: bool = False,
    ) -> None:
        self.one_function = one_function
        self.axis, self.test, self.body, self.n_body = axis, test, body, n_body
        self.places = places
        jaxpr = body.jaxpr
        self.n_test = len(test.in_avals) - len(body.out_avals)
        self.carry = jaxpr.invars[n_body:]
        self.apart = dict(zip(jaxpr.invars, differs, strict=True))
        through = differing_through(jaxpr, self.apart)
        self.entries = Entries.of(body, n_body, self.apart)
        inner = [eqn for eqn, of in through if of.parts and eqn.primitive is while_p]
        self.inner = [] if whole else inner

    def parts(self) -> tuple[Part, ...]:
        """The segments, and the loops and expensive branches, in order."""
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
            inside = self._deferred(eqn) if eqn.outvars[0] in self.places else self._nest(eqn)
            types = _types_of(eqn) if isinstance(inside, Segment) else inside.slots
            read = self._read_after(groups, j)
            slots = self._slots(eqn, types, read)
            if isinstance(inside, Segment):
                slots = (*slots, *self._keep([_WAITED]))
            self.place.update(zip(eqn.outvars, slots, strict=False))
            inner.append((eqn, inside, slots, read))
        parts: list[Part] = []
        for j, (eqn, inside, slots, read) in enumerate(inner):
            first = _first_carry(eqn)
            begins = zip(slots, first, strict=False)
            writes = {k: v for k, v in begins if isinstance(v, Literal) or self.place.get(v) != k}
            moved: list[Aval] = []
            if isinstance(inside, Segment):
                writes[slots[len(first)]] = Literal(np.float32(0), _WAITED)
            else:
                # What a loop updates in place is copied where lanes come to it.
                program, count = eqn.params["body_jaxpr"], eqn.params["body_nconsts"]
                kept = [k for k in kept_carries(program, count) if slots[k] in writes]
                moved = [inside.slots[k] for k in kept]
                if inside.parts:
                    writes[slots[inside.n_carry]] = Literal(np.int32(0), _PLACE)
            kept = [v for made in groups[j] for v in made.outvars if v in read]
            places = self._keep([v.aval for v in kept])
            writes.update(zip(places, kept, strict=True))
            segment = self._segment(groups[j], writes)
            price = total([segment.price, price_of_copying(moved)])
            parts.append(replace(segment, price=price))
            # Only now: the segment computes these, and does not read them.
            self.place.update(zip(kept, places, strict=True))
            program, reads = self._program([], _constants(eqn), ())
            if isinstance(inside, Segment):
                branch = self.places[eqn.outvars[0]]
                width = width_of_block(inside.price, inside.moves, self.axis.size)
                parts.append(DeferredBranch(inside, program, reads, slots, width, branch))
            else:
                count = eqn.params["cond_nconsts"]
                own = differs_of(self.apart, _constants(eqn)[count:])
                parts.append(Inner(inside, program, reads, slots, eqn, own))
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
        if self.one_function:
            test, body = lower_for_kernel(test), lower_for_kernel(body)
        return nest_of(self.axis, test, body, differs)

    def _deferred(self, eqn: Eqn) -> Segment:
        """What an expensive branch does, a ``while`` of one step."""
        test, body, count = (eqn.params[k] for k in ("cond_jaxpr", "body_jaxpr", "body_nconsts"))
        differs = (*differs_of(self.apart, eqn.invars[:count]), *[True] * len(eqn.outvars))
        (segment,) = _Cut(self.axis, test, body, count, differs, {}, whole=True).parts()
        assert isinstance(segment, Segment)
        return segment

    def _segment(self, eqns: Sequence[Eqn], writes: dict[int, Any]) -> Segment:
        slots = {v: k for k, v in writes.items() if not isinstance(v, Literal)}
        outs = list(writes.values())
        read = {v for eqn in eqns for v in variables_read(eqn)}
        puts = {}
        for eqn in eqns:
            (array, *_), (result, *_) = eqn.invars, eqn.outvars
            k = slots.get(result)
            if k is None or result in read or outs.count(result) > 1:
                continue  # all of it is needed
            if self.entries.is_put(eqn) and self.place.get(array) == k:
                puts[eqn] = k
        takes = {eqn: self.place[eqn.invars[0]] for eqn in self.entries.taken(eqns)}
        written = {k: v for k, v in writes.items() if k not in puts.values()}
        entries = [v for eqn in puts for v in eqn.invars[1:3]]
        eqns = [eqn for eqn in eqns if eqn not in puts and eqn not in takes]
        at = [eqn.invars[1] for eqn in takes]
        _, reads = self._program(eqns, at, ())
        program, reads = self._program(
            eqns,
            [*written.values(), *entries],
            tuple(written),
            [eqn.outvars[0] for eqn in takes],
            reads,
            entries,
        )
        indices, _ = self._program(eqns, at, (), (), reads)
        shared = {k for k, v in enumerate(self.body.jaxpr.invars) if not self.apart[v]}
        differs = [k - self.n_test not in shared for k in reads]
        differs += [True] * (len(program.in_avals) - len(reads))
        return Segment(
            program,
            reads,
            tuple(written),
            tuple(takes.values()),
            indices,
            tuple(puts.values()),
            price_of(program, differs),
            price_of_moving(program.in_avals[: len(reads)], program.out_avals),
            price_of_keeping(program.out_avals[: len(written)]),
        )

    def _program(
        self,
        eqns: Sequence[Eqn],
        outs: Sequence[Any],
        writes: Sequence[int],
        given: Sequence[Any] = (),
        more: Sequence[int] = (),
        spare: Sequence[Any] = (),
    ) -> tuple[ClosedJaxpr, tuple[int, ...]]:
        """A program of `eqns` that computes `outs`, and what it reads.

        Its inputs are what it reads, with `more` before that, what is `given`, the slots that it
        `writes`, and something of the types of what is `spare`.
        """
        every = set(eqns) | set(self.again)
        steps = plan([e for e in self.body.jaxpr.eqns if e in every], outs)
        made = {v for step in steps for v in step.eqn.outvars} | set(given)
        read = [v for step in steps for v in step.eqn.invars] + list(outs)
        program = Rewriter(self.body, [step.eqn for step in steps])
        ours = (v for v in variables_in(read) if not (v in made or v in program.constants))
        own = {self.place[v]: v for v in dict.fromkeys(ours)}
        reads = tuple(dict.fromkeys([*more, *(k for k in own if k not in writes)]))
        inputs = [
            # What is read and written comes with what is written.
            *((None if k in writes else own.get(k), self.types[k]) for k in reads),
            *((v, v.aval) for v in given),
            *((own.get(k), self.types[k]) for k in writes),
            *((None, v.aval) for v in spare),
        ]
        variables = [fresh(aval) if v is None else v for v, aval in inputs]
        return program.program(variables, outs), reads


def _types_of(eqn: Eqn) -> list[Aval]:
    return [v.aval for v in eqn.outvars]


def _first_carry(loop: Eqn) -> list[Any]:
    return [*loop.invars][loop.params["cond_nconsts"] + loop.params["body_nconsts"] :]


def _constants(loop: Eqn) -> list[Any]:
    return [*loop.invars][: loop.params["cond_nconsts"] + loop.params["body_nconsts"]]
