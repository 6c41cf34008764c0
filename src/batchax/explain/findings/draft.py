"""What findings are made from, and what work is taken to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchax.explain.account import Equation, StepCount, Timing, Value, Work
from batchax.explain.attribution import Tally
from batchax.explain.entries import number_of
from batchax.explain.wording import count
from batchax.kernel.recording import Record, Recorder
from batchax.programs.hlo import Instruction, Module, UnreadableProgram, read_module
from batchax.programs.weights import FINDINGS


def price(work: Work) -> float:
    """Nanoseconds, roughly."""
    return FINDINGS.flop * work.flops + FINDINGS.byte * work.bytes


def price_fused(equations: Sequence[Equation]) -> float:
    """The same, if what acts on each element is part of what reads it, and moves no bytes."""
    total = 0.0
    for eqn in equations:
        if eqn.parts:
            total += price_fused(eqn.parts)
        elif eqn.rule in _FUSED:
            total += FINDINGS.flop * eqn.work.flops
        else:
            total += price(eqn.work)
    return total


_SLOWER = 1.25  # times what was measured of another way: worth a word


def pays(now: Timing, then: Timing) -> bool:
    """Whether a way is so much faster than another that no round of it took as long."""
    return then.seconds * _SLOWER <= now.seconds and then.spread[1] <= now.spread[0]


_FUSED = frozenset(["rules.elementwise", "rules.shape", "rules.masking"])


@dataclass(frozen=True)
class Draft:
    """An explanation to which findings are yet to be added.

    Attributes:
      equations: of one example.
      numbers: the number in the listing, by record.
      tallies: what each equation became.
      recorder: the notes of how it was batched.
      options: those that `vmap` was given.
      lanes: how many there are.
      each: how many of them a device runs: all, unless they are spread over several.
      compiled: the compiled program; None where there is none.
      temporaries: bytes that it takes for what is neither argument nor output, if known.
      arguments, outputs: of one example and of all.
      timings: what was measured: of the program as it is first.
      tried: the advice that was followed to measure what it brings; it may have been refused.
      steps: the lane-steps of loops and branches, where they were counted.
    """

    equations: Sequence[Equation]
    numbers: Mapping[Record, str]
    tallies: Mapping[Record | None, Tally]
    recorder: Recorder
    options: Mapping[str, Any]
    lanes: int
    each: int
    compiled: Any = None
    temporaries: int | None = None
    arguments: Sequence[Value] = field(default=())
    outputs: Sequence[Value] = field(default=())
    timings: Sequence[Timing] = field(default=())
    tried: Sequence[Mapping[str, Any]] = field(default=())
    steps: Sequence[StepCount] = field(default=())

    @cached_property
    def records(self) -> dict[str, list[Record]]:
        """By number in the listing; that of the most lanes first."""
        by_number: dict[str, list[Record]] = {}
        for record, number in self.numbers.items():
            by_number.setdefault(number, []).append(record)
        for records in by_number.values():
            records.sort(key=lambda r: -r.axis.size if isinstance(r.axis.size, int) else 0)
        return by_number

    @cached_property
    def lanes_at_once(self) -> frozenset[int]:
        """The numbers of lanes that run together: of all, or of a chunk."""
        return frozenset([self.lanes, *(r.axis.size for r in self.numbers)])

    def equation(self, number: str) -> Equation | None:
        """The equation of that number in the listing; None for ""."""
        return self._by_number.get(number)

    @cached_property
    def _by_number(self) -> dict[str, Equation]:
        return {eqn.number: eqn for top in self.equations for eqn in top.walk()}

    def walk(self) -> Iterator[tuple[Equation, Record]]:
        """All equations, with the record that shows how they were batched."""
        for top in self.equations:
            for eqn in top.walk():
                yield eqn, self.records[eqn.number][0]

    @cached_property
    def module(self) -> Module | None:
        """The compiled program, if it can be read."""
        if self.compiled is None:
            return None
        try:
            return read_module(self.compiled)
        except UnreadableProgram:
            return None

    def counted(self, number: str) -> StepCount | None:
        """The lane-steps of a loop, if they were counted and it took any."""
        of_loop = (c for c in self.steps if c.equation == number and c.branch is None)
        count = next(of_loop, None)
        return None if count is None or count.of_use is None else count

    @cached_property
    def price(self) -> float:
        """Of one call, loops without a known number of steps taken as one step."""
        outside = self.tallies.get(None)
        work = Work() if outside is None else outside.work
        return price(sum((eqn.work for eqn in self.equations), work))

    def instructions(self) -> Iterator[Instruction]:
        """Those of the compiled program that write memory: none that are part of others."""
        if self.module is None:
            return
        inside: set[str] = set()
        everything = [i for c in self.module.computations.values() for i in c.instructions]
        for instruction in everything:
            if instruction.opcode not in ("while", "conditional", "call"):
                inside.update(instruction.called)
        for name, computation in self.module.computations.items():
            if name not in inside:
                yield from computation.instructions

    def number_of(self, instruction: Instruction) -> str:
        """The equation that an instruction is of; "" if none."""
        return number_of(instruction.op_name, self.recorder, self.numbers)


def lanes_at_a_time(draft: Draft, record: Record) -> str:
    """How many lanes run together: "8,192 lanes", "the 256 lanes of a chunk"."""
    size = record.axis.size
    if size == draft.lanes or not isinstance(size, int):
        return count(draft.lanes, "lane")
    return f"the {count(size, 'lane')} that run at a time"
