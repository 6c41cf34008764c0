"""How long each value of a compiled program lives, and what shares memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchax.programs.hlo import Computation, Instruction, Module, Shape, UnreadableProgram

Kind = Literal["argument", "output", "temporary", "constant"]
_RANK: dict[Kind, int] = {"temporary": 0, "constant": 1, "output": 2, "argument": 3}


@dataclass(eq=False)
class Buffer:
    """Memory for a value, and for those that take it one after another.

    Attributes:
      bytes: its size.
      shape: the type of the value.
      first: when the value is written.
      last: when it is last read.
      kind: what the memory is for.
      made: the instruction that writes the value.
      values: all that take the memory, this one included.
      lodges: whether it is part of the memory of an output, while that holds nothing yet.
    """

    bytes: int
    shape: str
    first: int
    last: int
    kind: Kind
    made: Instruction
    values: list[Buffer] = field(default_factory=list, repr=False)
    lodges: bool = False
    into: Buffer | None = field(default=None, repr=False)

    def found(self) -> Buffer:
        """The buffer that this one has become a part of."""
        buffer = self
        while buffer.into is not None:
            buffer = buffer.into
        if buffer is not self:
            self.into = buffer
        return buffer

    def __post_init__(self):
        self.values.append(self)

    def spans(self) -> list[tuple[int, int]]:
        """When the memory holds something, in order and without overlaps."""
        spans: list[tuple[int, int]] = []
        for first, last in sorted((v.first, v.last) for v in self.values):
            if spans and first <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(last, spans[-1][1])
            else:
                spans.append((first, last))
        return spans

    def holds_at(self, time: int) -> bool:
        """Whether the memory holds something then."""
        return any(first <= time <= last for first, last in self.spans())

    def telling(self) -> Instruction:
        """The instruction that says most about where the values come from."""
        return max((v.made for v in self.values), key=_says)


def _says(made: Instruction) -> tuple[bool, bool, int]:
    copies = made.opcode in ("copy", "parameter", "broadcast")
    return made.op_name is not None, not copies, (made.op_name or "").count("/")


def unite(a: Buffer, b: Buffer) -> None:
    """Says that two buffers are the same memory."""
    a, b = a.found(), b.found()
    if a is b:
        return
    if (b.bytes, _RANK[b.kind]) > (a.bytes, _RANK[a.kind]) and _RANK[b.kind] >= _RANK[a.kind]:
        a, b = b, a
    a.kind = max(a.kind, b.kind, key=_RANK.__getitem__)
    a.values += b.values
    b.into = a


# The buffers of a value: one, or a tuple of them and of such tuples.
Tree = Any


def _leaves(tree: Tree) -> Iterator[Buffer]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def _unite_trees(a: Tree, b: Tree) -> None:
    for x, y in zip(_leaves(a), _leaves(b), strict=True):
        unite(x, y)


def lives_of(module: Module) -> Lives:
    """Follows the values of a program through its schedule.

    Raises:
      UnreadableProgram: it holds what is not known here.
    """
    lives = Lives(module)
    try:
        lives.follow()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UnreadableProgram(str(error)) from error
    return lives


class Lives:
    """The buffers of a program, each with the time from its first value to its last reader.

    Computations that are called are followed where they are called, so that there is one
    time line. A loop works in place: what it is given, what each step gets and returns, and
    what it returns are the same memory, which the compiler has seen to by copies.
    """

    def __init__(self, module: Module):
        self._module = module
        self._made: list[Buffer] = []
        self._may_share: list[tuple[int, Buffer, Buffer]] = []
        self._time = 0

    def follow(self) -> None:
        """Follows the whole program."""
        entry = self._module.computations[self._module.entry]
        parameters = [i for i in entry.instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: i.number or 0)
        arguments = [self._new(i, i.shape, "argument") for i in parameters]
        results = self._computation(entry, arguments)
        for path, number in self._module.aliases.items():
            _unite_trees(_at(results, path), arguments[number])
        for buffer in _leaves(results):
            buffer.last = self._time
            memory = buffer.found()
            memory.kind = max(memory.kind, "output", key=_RANK.__getitem__)
        self._share()
        self._lodge()

    def buffers(self) -> list[Buffer]:
        """All buffers that hold something, but those in the memory of an output."""
        return [b for b in self._made if b.into is None and b.bytes and not b.lodges]

    def worst_moment(self) -> int:
        """When most memory is taken by temporaries."""
        changes = [0] * (self._time + 2)
        for b in self.buffers():
            if b.kind == "temporary":
                for first, last in b.spans():
                    changes[first] += b.bytes
                    changes[last + 1] -= b.bytes
        sizes = list(itertools.accumulate(changes))
        return sizes.index(max(sizes))

    def _new(self, made: Instruction, shape: Shape, kind: Kind = "temporary") -> Tree:
        if shape.parts is not None:
            return tuple(self._new(made, part, kind) for part in shape.parts)
        buffer = Buffer(shape.bytes, shape.text, self._time, self._time, kind, made)
        self._made.append(buffer)
        return buffer

    def _read(self, tree: Tree) -> None:
        for buffer in _leaves(tree):
            buffer.last = max(buffer.last, self._time)

    def _computation(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        values: dict[str, Tree] = {}
        for instruction in computation.instructions:
            self._time += 1
            if instruction.opcode == "parameter":
                values[instruction.name] = arguments[instruction.number or 0]
                continue
            operands = [values[name] for name in instruction.operands]
            if instruction.opcode not in _VIEWS:
                for operand in operands:
                    self._read(operand)
            values[instruction.name] = self._result(instruction, operands)
        return values[computation.root]

    def _result(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            return operands[0][instruction.index]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "optimization-barrier" or opcode in _VIEWS:
            return operands[0]
        if opcode == "copy-done" or opcode.endswith("-done") or opcode == "async-update":
            return self._done(operands[0])
        if opcode == "while":
            return self._while(instruction, operands[0])
        if opcode == "conditional":
            return self._conditional(instruction, operands)
        if opcode == "call":
            return self._call(instruction, operands)
        result = self._new(instruction, instruction.shape, _KINDS.get(opcode, "temporary"))
        self._sharing(instruction, operands, result)
        return result

    def _done(self, started: Tree) -> Tree:
        """The result of what was started: by convention the second of what starting returns."""
        return started[1] if isinstance(started, tuple) and len(started) > 1 else started

    def _run(self, name: str, arguments: Sequence[Tree]) -> Tree:
        return self._computation(self._module.computations[name], arguments)

    def _while(self, instruction: Instruction, carry: Tree) -> Tree:
        (condition,), (body,) = instruction.called["condition"], instruction.called["body"]
        self._run(condition, [carry])
        result = self._run(body, [carry])
        _unite_trees(result, carry)
        self._time += 1
        self._read(result)
        return result

    def _conditional(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        called = instruction.called
        names = called.get("branch_computations") or (
            *called["true_computation"],
            *called["false_computation"],
        )
        results = []
        for name, operand in zip(names, operands[1:], strict=True):
            results.append(self._run(name, [operand]))
            self._time += 1
            self._read(results[-1])
        result = self._new(instruction, instruction.shape)
        for returned in results:
            _unite_trees(result, returned)
        return result

    def _call(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        (name,) = instruction.called.get("to_apply") or instruction.called["called_computations"]
        result = self._run(name, operands)
        self._time += 1
        for operand in operands:
            self._read(operand)
        return result

    # --- results in the memory of an operand ---------------------------------------------------

    def _sharing(self, instruction: Instruction, operands: list[Tree], result: Tree) -> None:
        """Notes which operands a result may take the memory of, should they not be needed again."""
        for path, number in instruction.aliases:
            self._note(operands[number], _at(result, path))
        if instruction.opcode in _IN_PLACE:
            for operand, part in zip(operands, _parts(result), strict=False):
                self._note(operand, part)
        elif instruction.opcode in _ELEMENTWISE:
            for operand in operands:
                self._note(operand, result)
        elif instruction.opcode == "fusion":
            (name,) = instruction.called["calls"]
            for number, path in _in_place(self._module.computations[name]):
                self._note(operands[number], _at(result, path))

    def _note(self, operand: Tree, result: Tree) -> None:
        if isinstance(operand, Buffer) and isinstance(result, Buffer):
            self._may_share.append((self._time, operand, result))

    def _share(self) -> None:
        taken: set[Buffer] = set()
        for time, operand, result in self._may_share:
            old, new = operand.found(), result.found()
            fits = old is not new and old.bytes == new.bytes and old.kind == "temporary"
            if fits and result not in taken and _apart(old.spans(), new.spans(), but=time):
                taken.add(result)
                unite(old, new)

    def _lodge(self) -> None:
        """Temporaries use the memory of outputs that are written later, the largest first."""
        outputs = [b for b in self.buffers() if b.kind == "output"]
        outputs.sort(key=lambda b: b.bytes)
        taken = {b: b.spans() for b in outputs}
        temporaries = [b for b in self.buffers() if b.kind == "temporary"]
        for b in sorted(temporaries, key=lambda b: b.bytes, reverse=True):
            for output in outputs:
                if b.bytes <= output.bytes and _apart(b.spans(), taken[output]):
                    taken[output] += b.spans()
                    b.lodges = True
                    break


def _apart(
    some: list[tuple[int, int]], others: list[tuple[int, int]], but: int | None = None
) -> bool:
    """Whether spans of time do not meet, unless it is where one ends and another begins."""
    return all(b < c or d < a or b == c == but for a, b in some for c, d in others)


def _at(tree: Tree, path: Sequence[int]) -> Tree:
    for index in path:
        tree = tree[index]
    return tree


def _parts(tree: Tree) -> tuple[Tree, ...]:
    return tree if isinstance(tree, tuple) else (tree,)


_VIEWS = frozenset(["get-tuple-element", "tuple", "bitcast", "add-dependency"])
_KINDS: dict[str, Kind] = {"constant": "constant"}
_IN_PLACE = frozenset(
    ["dynamic-update-slice", "scatter", "sort", "triangular-solve", "cholesky", "all-reduce"]
)
_ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare complex convert cosine count-leading-zeros divide
    erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum
    minimum multiply negate not or popcnt power real reduce-precision remainder
    round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sqrt subtract tan tanh xor
    """.split()
)


def _in_place(fused: Computation) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The operands of a fusion that a result may take the place of, and where that result is."""
    made = {i.name: i for i in fused.instructions}
    root = made[fused.root]
    roots = [(root, ())]
    if root.opcode == "tuple":
        roots = [(made[name], (k,)) for k, name in enumerate(root.operands)]
    for result, path in roots:
        result = _seen_through(result, made)
        written = result.opcode in ("dynamic-update-slice", "scatter")
        for parameter in fused.instructions:
            if parameter.opcode != "parameter":
                continue
            if written:
                fits = _seen_through(made[result.operands[0]], made) is parameter
            else:
                fits = _elementwise_on(parameter.name, fused)
            if fits:
                yield parameter.number or 0, path


def _seen_through(made: Instruction, by_name: dict[str, Instruction]) -> Instruction:
    while made.opcode in ("bitcast", "copy"):
        made = by_name[made.operands[0]]
    return made


def _elementwise_on(name: str, fused: Computation) -> bool:
    """Whether what is made of a value inside a fusion is made of each element alone."""
    reached = {name}
    for made in fused.instructions:
        if reached.intersection(made.operands):
            if made.opcode not in _ELEMENTWISE and made.opcode != "tuple":
                return False  # a copy is to another layout
            reached.add(made.name)
    return fused.root in reached
