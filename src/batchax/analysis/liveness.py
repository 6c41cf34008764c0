"""What makes up the memory that a compiled program holds at its worst moment.

When values are alive is found by following them through the schedule of the compiled program, from
the instruction that makes one to the last that reads it. Which of them share their memory is
estimated by the rules of XLA: what a loop carries stays where it is, and an operation on each
element, or an update, may be written over an operand that nothing else reads.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax

from batchax.analysis.hlo import Instruction, Module, Shape, UnreadableProgram, read_module
from batchax.jaxprs.types import Tree

Kind = Literal["argument", "output", "temporary", "constant"]


@dataclass(frozen=True)
class LiveValue:
    opcode: str
    bytes: int
    shape: str  # such as "f32[8,300]"
    op_name: str | None  # the user's operation, such as "jit(f)/vmap/tanh"
    kind: Kind


def values_at_peak(compiled: jax.stages.Compiled) -> tuple[LiveValue, ...]:
    """Lists what memory holds at its peak, largest first; empty if the program is unreadable.

    These are arguments, outputs, constants, and temporaries that are alive then.
    """
    try:
        return held_at_worst(read_module(compiled))
    except UnreadableProgram:
        return ()


def held_at_worst(module: Module) -> tuple[LiveValue, ...]:
    """Lists as `values_at_peak` for a parsed program.

    Raises UnreadableProgram for an unknown form.
    """
    try:
        lives = _Lives(module)
        lives.follow()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableProgram(str(error)) from error
    buffers = lives.buffers()
    # Add a buffer at its first moment, and subtract it after its last: the running sum is memory.
    changes = [0] * (lives.end + 2)
    for buffer in buffers:
        if buffer.kind == "temporary":
            changes[buffer.first] += buffer.bytes
            changes[buffer.last + 1] -= buffer.bytes
    sizes = list(itertools.accumulate(changes))
    worst = sizes.index(max(sizes))
    held = []
    for buffer in buffers:
        if buffer.kind == "temporary" and not buffer.first <= worst <= buffer.last:
            continue
        moment = worst if buffer.kind == "temporary" else lives.end
        # A buffer is described by the value that it holds at that moment.
        value = [v for v in buffer.values if v.first <= moment or v is buffer.values[0]][-1]
        made, origin = value.made, value.origin
        held.append(
            LiveValue(made.opcode, buffer.bytes, value.shape.text, origin.op_name, buffer.kind)
        )
    return tuple(sorted((v for v in held if v.bytes), key=lambda v: -v.bytes))


@dataclass(eq=False)
class _Value:
    made: Instruction  # the instruction that writes it
    # Where it comes from: of an unnamed copy, the source; of the start of a loop, what replaces it
    # in a step.
    origin: Instruction
    shape: Shape
    kind: Kind
    first: int  # when it is written
    last: int  # when it is last read
    over: Sequence[_Value] = ()  # values whose memory it may reuse if nothing reads them later
    same: _Value | None = None  # a value whose memory it has
    members: list[_Value] = field(init=False)  # of a place: the values that have it

    def __post_init__(self):
        self.members = [self]

    def place(self) -> _Value:
        """Returns the value that represents all in the same memory."""
        value = self
        while value.same is not None:
            value = value.same
        return value

    def join(self, other: _Value, if_free: bool = False) -> None:
        """Moves it to the memory of another value; `if_free`: only if no two overlap in time."""
        own, others = self.place(), other.place()
        # Memory of arguments and outputs is fixed: a temporary joins it.
        if own.kind != "temporary":
            own, others = others, own
        if own is others or own.kind != "temporary":
            return
        pairs = itertools.product(own.members, others.members) if if_free else ()
        if any(_overlap(a, b) for a, b in pairs if {a, b} != {self, other}):
            return
        own.same = others
        others.members += own.members


@dataclass(eq=False)
class _Buffer:
    """Describes a piece of memory, and the values in it over time."""

    values: list[_Value]
    kind: Kind

    @functools.cached_property
    def bytes(self) -> int:
        return max(v.shape.bytes for v in self.values)

    @property
    def first(self) -> int:
        return min(v.first for v in self.values)

    @property
    def last(self) -> int:
        return max(v.last for v in self.values)

    def has_room(self, other: _Buffer) -> bool:
        """Returns whether the values of another fit in, at the times when they are alive."""
        pairs = itertools.product(self.values, other.values)
        return other.bytes <= self.bytes and not any(_overlap(a, b) for a, b in pairs)


def _overlap(a: _Value, b: _Value) -> bool:
    return a.first <= b.last and b.first <= a.last


def _leaves(tree: Tree) -> Iterator[_Value]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def _at(tree: Tree, path: Sequence[int]) -> Tree:
    return functools.reduce(operator.getitem, path, tree)


# These return their operand, or a part of it.
_VIEWS = frozenset(["bitcast", "add-dependency", "optimization-barrier", "async-update"])

# These read elements of an operand after they wrote others, so they cannot overwrite it.
_NOT_IN_PLACE = frozenset(
    "all-gather all-to-all broadcast cholesky concatenate convolution copy copy-start custom-call "
    "dot dynamic-slice fft gather iota pad parameter reduce reduce-window reverse "
    "rng-bit-generator select-and-scatter slice topk transpose triangular-solve".split()
)


class _Lives:
    # Called computations are followed where they are called, on one time line. A loop body is
    # followed once.
    def __init__(self, module: Module):
        self._module = module
        self._values: list[_Value] = []
        self.end = 0

    def follow(self) -> None:
        entry = self._module.computations[self._module.entry]
        parameters = [i for i in entry.instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: i.number)
        arguments = [self._written(i, i.shape, kind="argument") for i in parameters]
        result = self._run(self._module.entry, arguments)
        self._read(result)
        # XLA writes a result over an operand that nothing reads later.
        for value in self._values:
            for other in value.over:
                if other.last == value.first and other.place().kind == "temporary":
                    value.join(other, if_free=True)
        for path, number in self._module.donated.items():
            _at(result, path).join(arguments[number])
        for output in _leaves(result):
            if output.place().kind == "temporary":
                output.place().kind = "output"

    def buffers(self) -> list[_Buffer]:
        """Assigns memory to all values. Temporaries may use that of outputs not yet written."""
        together: dict[_Value, list[_Value]] = {}
        for value in self._values:
            together.setdefault(value.place(), []).append(value)
        buffers = [_Buffer(values, place.kind) for place, values in together.items()]
        outputs = [b for b in buffers if b.kind == "output"]
        # Largest first, as XLA's heap simulator does.
        for buffer in sorted(buffers, key=lambda b: -b.bytes):
            fits = (o for o in outputs if buffer.kind == "temporary" and o.has_room(buffer))
            output = next(fits, None)
            if output is not None:
                output.values = [*buffer.values, *output.values]
                buffers.remove(buffer)
        return buffers

    def _read(self, tree: Tree) -> None:
        for value in _leaves(tree):
            value.last = self.end

    def _written(
        self, made: Instruction, shape: Shape, over: Sequence[_Value] = (), kind: Kind = "temporary"
    ) -> Tree:
        if shape.parts is not None:
            return tuple(self._written(made, part, over, kind) for part in shape.parts)
        alike = [v for v in over if v.shape.text == shape.text]
        value = _Value(made, made, shape, kind, self.end, self.end, alike)
        self._values.append(value)
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
                results[instruction.name] = operands[0][instruction.number]
            elif instruction.opcode in _VIEWS:
                results[instruction.name] = operands[0]
            else:
                self._read(tuple(operands))
                results[instruction.name] = self._result(instruction, operands)
        return results[computation.root]

    def _result(self, instruction: Instruction, operands: Sequence[Tree]) -> Tree:
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            condition, body = called
            self._run(condition, operands)
            result = self._returned(body, operands)
            # The carry of a loop stays in one place.
            for before, after in zip(_leaves(operands[0]), _leaves(result), strict=True):
                if after.origin.op_name is not None:
                    before.origin = after.origin
                after.join(before)
            return result
        if opcode == "conditional":
            # Branches return their results in the same memory: those of one stand for all.
            branches = zip(called, operands[1:], strict=True)
            results = [self._returned(name, [operand]) for name, operand in branches]
            self._read(tuple(operands))
            for other in results[:-1]:
                for one, last in zip(_leaves(other), _leaves(results[-1]), strict=True):
                    one.join(last)
            return results[-1]
        if opcode == "call":
            return self._run(called[0], operands)
        if opcode == "async-start":
            return tuple(operands), self._run(called[0], operands)
        if opcode.endswith("-done"):
            return self._done(opcode, operands[0])
        if opcode == "constant":
            return self._written(instruction, instruction.shape, kind="constant")
        over = list(_leaves(tuple(operands))) if self._is_in_place(instruction) else []
        result = self._written(instruction, instruction.shape, over)
        for path, number in instruction.aliases.items():
            _at(result, path).join(operands[number])
        if opcode == "copy" and instruction.op_name is None and operands[0].kind != "argument":
            result.origin = operands[0].origin
        return result

    def _is_in_place(self, instruction: Instruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode not in _NOT_IN_PLACE
        inside = self._module.computations[instruction.called[0]].instructions
        return not any(
            i.opcode in _NOT_IN_PLACE - {"broadcast", "iota", "parameter"} for i in inside
        )

    def _returned(self, name: str, arguments: Sequence[Tree]) -> Tree:
        """Returns the result of a computation, alive at its end."""
        result = self._run(name, arguments)
        # The end is a separate moment, at which all results are alive.
        self.end += 1
        self._read(result)
        return result

    def _done(self, opcode: str, started: Tree) -> Tree:
        if opcode == "all-reduce-done":
            # A start returns its operands and results in a tuple.
            return started
        return started[0 if opcode == "copy-done" else 1]
