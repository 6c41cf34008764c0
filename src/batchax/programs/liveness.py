"""How long values of a compiled program live, and which are alive where it needs most memory.

The totals and the memory of each value are XLA's. A value is alive from the instruction that makes
it to the last one that reads it, in the schedule of the compiled program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.programs.hlo import (
    Instruction,
    Kind,
    Module,
    Place,
    Places,
    Shape,
    UnreadableProgram,
    read_module,
    read_places,
)


@dataclass
class HeldValue:
    """An array that is written to memory.

    Attributes:
      made: the instruction that writes it.
      origin: the one that says where it comes from. Of a copy without a name, that of what is
        copied; of what a loop starts from, that of what a step puts in its place.
      shape: its type.
      place: where it is.
      first: when it is written.
      last: when it is last read.
    """

    made: Instruction
    origin: Instruction
    shape: str
    place: Place
    first: int
    last: int


def held_at_worst(module: Module, assignment: bytes) -> list[HeldValue]:
    """What is held at the worst moment: arguments, outputs, constants, and temporaries alive then.

    The worst moment is when most memory is taken by temporaries.

    Args:
      module: the program.
      assignment: the compiler's assignment of its buffers.

    Raises:
      UnreadableProgram: it holds what is not known here, or the compiler has not said all.
    """
    try:
        lives = _Lives(module, read_places(assignment))
        lives.follow()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableProgram(str(error)) from error
    changes = [0] * (lives.end + 2)
    for value in lives.values:
        if value.place.kind == "temporary":
            changes[value.first] += value.place.bytes
            changes[value.last + 1] -= value.place.bytes
    sizes = list(itertools.accumulate(changes))
    moments = {"temporary": sizes.index(max(sizes)), "output": lives.end}
    at = lambda value: moments.get(value.place.kind, 0)
    alive = [v for v in lives.values if v.first <= at(v) <= v.last and v.place.bytes]
    return list({v.place: v for v in alive}.values())


# What an instruction returns: a value, or a tuple of them and of such tuples.
Tree = Any


def _leaves(tree: Tree) -> Iterator[HeldValue]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


# What these return is their operand, or a part of it.
_VIEWS = frozenset(["bitcast", "add-dependency", "optimization-barrier", "async-update"])


class _Lives:
    """The values of a program, each with the time from when it is written to its last reader.

    Computations that are called are followed where they are called, so that there is one
    time line; the body of a loop is followed once.
    """

    def __init__(self, module: Module, places: Places):
        self._module = module
        self._places = places
        self._latest: dict[Place, HeldValue] = {}
        self.values: list[HeldValue] = []
        self.end = 0

    def follow(self) -> None:
        """Follows the whole program."""
        entry = self._module.computations[self._module.entry]
        parameters = [i for i in entry.instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: i.number)
        self._read(self._run(self._module.entry, [self._written(i, i.shape) for i in parameters]))

    def _read(self, tree: Tree) -> None:
        for value in _leaves(tree):
            value.last = self.end

    def _written(
        self,
        made: Instruction,
        shape: Shape,
        operands: Sequence[Tree] = (),
        path: tuple[int, ...] = (),
    ) -> Tree:
        if shape.parts is not None:
            parts = enumerate(shape.parts)
            return tuple(self._written(made, part, operands, (*path, k)) for k, part in parts)
        place = self._places.get((made.id, path))
        if place is None:  # what was given no place of its own is an operand
            operand, *_ = (v for v in _leaves(tuple(operands)) if v.shape == shape.text)
            return operand
        before = self._latest.get(place)
        if before is not None and before.last == self.end:
            before.last -= 1  # it is overwritten as it is read
        value = HeldValue(made, made, shape.text, place, self.end, self.end)
        if place.kind == "constant":
            value.first = 0
        self._latest[place] = value
        self.values.append(value)
        return value

    def _run(self, name: str, arguments: Sequence[Tree]) -> Tree:
        computation = self._module.computations[name]
        results: dict[str, Tree] = {}
        for instruction in computation.instructions:
            self.end += 1
            operands = [results[name] for name in instruction.operands]
            if instruction.opcode == "parameter":
                results[instruction.name] = arguments[instruction.number]
            elif instruction.opcode == "tuple":
                results[instruction.name] = tuple(operands)
            elif instruction.opcode == "get-tuple-element":
                results[instruction.name] = operands[0][instruction.index]
            elif instruction.opcode in _VIEWS:
                results[instruction.name] = operands[0]
            else:
                self._read(tuple(operands))
                results[instruction.name] = self._result(instruction, operands)
        return results[computation.root]

    def _result(self, instruction: Instruction, operands: Sequence[Tree]) -> Tree:
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            body, condition = called
            self._run(condition, operands)
            result = self._returned(body, operands)
            for before, after in zip(_leaves(operands[0]), _leaves(result), strict=True):
                if after.origin.op_name is not None:
                    before.origin = after.origin
            return result
        if opcode == "conditional":
            # Branches return their results in the same memory: those of one stand for all.
            branches = zip(called, operands[1:], strict=True)
            return [self._returned(name, [operand]) for name, operand in branches][-1]
        if opcode == "call":
            return self._run(called[0], operands)
        if opcode == "async-start":
            return tuple(operands), self._run(called[0], operands)
        if opcode.endswith("-done"):
            return self._done(opcode, operands[0])
        result = self._written(instruction, instruction.shape, operands)
        if (
            opcode == "copy"
            and instruction.op_name is None
            and operands[0].place.kind != "argument"
        ):
            result.origin = operands[0].origin
        return result

    def _returned(self, name: str, arguments: Sequence[Tree]) -> Tree:
        """The result of a computation, which is alive when it ends."""
        result = self._run(name, arguments)
        self.end += 1
        self._read(result)
        return result

    def _done(self, opcode: str, started: Tree) -> Tree:
        """The result of what was started, which returned it with its operands and others."""
        if opcode == "all-reduce-done":
            return started
        return started[0 if opcode == "copy-done" else 1]


@dataclass(frozen=True)
class LiveValue:
    """A value that is held at the worst moment.

    Attributes:
      name: its name in the compiled program.
      opcode: what made it there, such as "fusion".
      bytes: the memory that it takes.
      shape: such as "f32[8,300]".
      op_name: the operation of the user's program that made it, such as "jit(f)/vmap/tanh".
      source: file and line of the user's, where the compiler was told.
      kind: "argument", "output", "temporary" or "constant".
    """

    name: str
    opcode: str
    bytes: int
    shape: str
    op_name: str | None
    source: tuple[str, int] | None
    kind: Kind


@dataclass(frozen=True)
class CompilersAccount:
    """The compiler's account of the memory of a program, in bytes.

    Attributes:
      arguments: what is passed in.
      outputs: what is returned.
      temporaries: the most that is held besides.
      aliased: the outputs that take the memory of an argument.
      code: the machine code and what is embedded in it.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int

    @property
    def bytes(self) -> int:
        """What the device must hold: arguments, outputs and temporaries, each once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


@dataclass(frozen=True)
class Peak(CompilersAccount):
    """What a compiled program holds at its worst moment.

    `bytes` is what the device must hold, not what is alive at one moment: arguments and outputs
    have their memory for as long as the program runs.

    Attributes:
      values: what is alive at the worst moment, the largest first; empty if the compiler does
        not say where it put them, as some backends do not.
    """

    values: tuple[LiveValue, ...] = ()

    @property
    def explained(self) -> float:
        """The share of the compiler's temporaries that `values` account for.

        What is missing is lost between values, which do not fit together without gaps, and
        tables of what is in a tuple.
        """
        accounted = sum(v.bytes for v in self.values if v.kind == "temporary")
        return accounted / self.temporaries if self.temporaries else 1.0


def memory_of(compiled: Any) -> CompilersAccount:
    """The compiler's account of the memory of a compiled program."""
    return CompilersAccount(*_totals(compiled))


def _totals(compiled: Any) -> tuple[int, int, int, int, int]:
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )


def peak_of(compiled: Any) -> Peak:
    """What a compiled program holds at its worst moment, and what that is made of.

    Args:
      compiled: as from `jax.jit(f).lower(...).compile()`.
    """
    totals = _totals(compiled)
    try:
        assignment = compiled.memory_analysis().serialized_buffer_assignment_proto
        held = held_at_worst(read_module(compiled), assignment)
    except UnreadableProgram:
        return Peak(*totals)
    values = [
        LiveValue(
            v.made.name,
            v.made.opcode,
            v.place.bytes,
            v.shape,
            v.origin.op_name,
            v.origin.source,
            v.place.kind,
        )
        for v in held
    ]
    return Peak(*totals, tuple(sorted(values, key=_by_bytes, reverse=True)))


_by_bytes: Callable[[LiveValue], int] = lambda value: value.bytes
