"""A loop of one example that holds others, or dear branches, taken apart where lanes may wait.

The body of such a loop is cut at each loop in it that lanes leave one by one, and at each dear
branch (Radul, Patton, Maclaurin, Hoffman and Saurous, "Automatically batching control-intensive
programs for modern accelerators", 2020, cut whole programs so). Between two cuts is a `Segment`.
What a lane must keep while it is in a loop inside is in *slots*: what it carries, what an earlier
segment computed for a later one, and, of each loop inside, all that this has slots for.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchax.divergence.branch_as_while import DearBranch
from batchax.divergence.price import Price
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn


@dataclass(frozen=True, eq=False)
class Segment:
    """What is done between two loops, or in a dear branch.

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
class Dear:
    """A dear branch, before which lanes wait until a block of them is full.

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
    branch: DearBranch

    @property
    def block(self) -> Price:
        """The price of a block."""
        price, moves = self.segment.price, self.segment.moves
        return Price(price.of(self.width) + moves.of(self.width), 0.0)


Part = Segment | Inner | Dear


@dataclass(frozen=True, eq=False)
class Nest:
    """A ``while`` of one example.

    Attributes:
      test: the predicate, of its constants and what is carried.
      body: the program of a step; None if it is cut in parts.
      parts: segments, and loops and dear branches inside, in order; none of a loop that is not cut.
      n_test, n_consts: how many constants the predicate has, and how many all have: those of the
        predicate come first.
      n_carry: how many slots hold what is carried; they are the first. If there are parts, the
        next one holds the number of the part that the lane is in, zero before the first.
      slots: the types of all.
      price: what a step costs, but for the parts.
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
        """Whether lanes wait at dear branches alone, and leave no loop inside one by one."""
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
