"""Reads a compiled program: a scheduled module of HLO, and the memory that XLA assigned to it.

It reads what the life of values depends on: the instructions of each computation in the order in
which they run, their operands, the computations that they call, and their source. The numbers of
fields are those of `xla/service/hlo.proto` and `xla/xla_data.proto`.

A protocol buffer is a sequence of fields, each with a number and a value: an integer, or bytes,
which may be a text, a message, or packed integers. The encoding does not distinguish these; the
reader does, by the numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchax._compat import hlo_proto

Fields = defaultdict[int, list[Any]]


def read_message(data: bytes) -> Fields:
    """The values of each field, in order: none of a field that is at its default.

    Raises:
      ValueError: it is not a message.
    """
    fields: Fields = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _integer(data, at)
        else:
            if kind == 2:
                size, at = _integer(data, at)
            elif kind in (1, 5):  # numbers of 8 and of 4 bytes
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"no field of a message starts with {key}")
            value, at = data[at : at + size], at + size
        fields[key >> 3].append(value)
    if at > len(data):
        raise ValueError("a message ends within a field")
    return fields


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """The integer that starts there, and where it ends: seven bits to a byte, lowest first."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a message ends within an integer")


def message(values: Sequence[bytes]) -> Fields:
    """The value of a field that holds a message."""
    return read_message(values[-1] if values else b"")


def messages(values: Sequence[bytes]) -> Iterator[Fields]:
    """The values of a field that holds messages."""
    return map(read_message, values)


def integers(values: Sequence[int | bytes]) -> tuple[int, ...]:
    """The values of a field that holds any number of integers, by themselves or packed."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _integer(value, at)
            numbers.append(one)
    return tuple(numbers)


def integer(values: Sequence[int]) -> int:
    """The value of a field that holds an integer."""
    return values[-1] if values else 0


def text(values: Sequence[bytes]) -> str:
    """The value of a field that holds a text."""
    return values[-1].decode() if values else ""


class UnreadableProgram(Exception):
    """A compiled program is not to be had as a scheduled module of HLO."""


@dataclass(frozen=True)
class Shape:
    """The type of a value: of an array, or of a tuple of values.

    Attributes:
      text: the type of an array, such as "f32[8,300]"; empty for a tuple.
      bytes: the memory that it takes; for a tuple, what its parts take.
      parts: those of a tuple; None for an array.
    """

    text: str
    bytes: int
    parts: tuple[Shape, ...] | None = None


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      id: its number in the module, by which the compiler speaks of it.
      name: its name in the module.
      shape: what it returns.
      opcode: such as "fusion".
      operands: names of instructions of the same computation.
      called: names of computations that it runs; of a `while`, the body and the condition.
      number: of a parameter, its number.
      index: of a `get-tuple-element`, which one.
      op_name: the operation of the user's program that it comes from.
      source: the file and line of the user's program.
    """

    id: int
    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    number: int
    index: int
    op_name: str | None
    source: tuple[str, int] | None


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run; the name of the one that is returned."""

    instructions: Sequence[Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str


def read_module(compiled: Any) -> Module:
    """Reads a compiled program.

    Args:
      compiled: as from `jax.jit(f).lower(...).compile()`.

    Raises:
      UnreadableProgram: the compiler does not hand it out, or it is not scheduled.
    """
    try:
        return _module(read_message(hlo_proto(compiled)))
    except (NotImplementedError, LookupError, ValueError) as error:
        raise UnreadableProgram(str(error)) from error


def _module(module: Fields) -> Module:
    sequences = messages(message(module[7])[1])
    orders = {integer(s[1]): integers(message(s[2])[1]) for s in sequences}
    if not orders:
        raise ValueError("the program has no schedule")
    computations = list(messages(module[3]))
    called = {integer(c[5]): text(c[1]) for c in computations}
    sources = _sources(message(module[17]))
    return Module(
        {text(c[1]): _computation(c, orders, called, sources) for c in computations},
        called[integer(module[6])],
    )


# The file and line of a stack frame, by its number.
_Sources = Mapping[int, tuple[str, int]]


def _sources(frames: Fields) -> _Sources:
    # All of these are numbered from one.
    files = [name.decode() for name in frames[1]]
    places = [(files[integer(p[1]) - 1], integer(p[3])) for p in messages(frames[3])]
    return {n: places[integer(f[1]) - 1] for n, f in enumerate(messages(frames[4]), 1)}


def _computation(
    computation: Fields,
    orders: Mapping[int, Sequence[int]],
    called: Mapping[int, str],
    sources: _Sources,
) -> Computation:
    made = {integer(i[35]): i for i in messages(computation[2])}
    names = {number: text(i[1]) for number, i in made.items()}
    # Inside a fusion nothing is scheduled: there the order is that in which it is written.
    order = orders.get(integer(computation[5]), made)
    instructions = [_instruction(made[number], names, called, sources) for number in order]
    return Computation(instructions, names[integer(computation[6])])


def _instruction(
    made: Fields, names: Mapping[int, str], called: Mapping[int, str], sources: _Sources
) -> Instruction:
    metadata = message(made[7])
    here = text(metadata[3]), integer(metadata[4])
    return Instruction(
        integer(made[35]),
        text(made[1]),
        read_shape(message(made[3])),
        text(made[2]),
        tuple(names[number] for number in integers(made[36])),
        tuple(called[number] for number in integers(made[38])),
        integer(made[9]),
        integer(made[13]),
        text(metadata[2]) or None,
        here if here[0] else sources.get(integer(metadata[15])),
    )


# --- shapes ------------------------------------------------------------------------------------

# In the order of their numbers.
_TYPES = """
    invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2
    f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu
""".split()
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_DIGITS = re.compile(r"[a-z]+(\d+)")


def read_shape(shape: Fields) -> Shape:
    """The shape that a message stands for."""
    number, sizes = integer(shape[2]), integers(shape[3])
    kind = _TYPES[number] if number < len(_TYPES) else f"type{number}"
    if kind == "tuple":
        parts = tuple(map(read_shape, messages(shape[4])))
        return Shape("", sum(p.bytes for p in parts), parts)
    digits = _DIGITS.match(kind)
    bits = _BITS[kind] if kind in _BITS else int(digits[1]) if digits else 8
    return Shape(f"{kind}[{','.join(map(str, sizes))}]", math.prod(sizes) * bits // 8)


def normalised_hlo(text: str) -> str:
    """Optimised HLO without what depends on names and source lines alone."""
    text = re.sub(r"/\*.*?\*/", "", text)
    text = re.sub(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text)
    # Before the first computation: the module's name, and tables of source lines.
    lines = text.splitlines()
    first = next((i for i, x in enumerate(lines) if x.startswith(("%", "ENTRY"))), 0)
    lines = [re.sub(r"[\w.\-]+: ", "", x) if x.endswith("{") else x for x in lines[first:]]
    names: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), "\n".join(lines)
    )


def operations(hlo: str) -> Counter[str]:
    """How often each operation occurs in normalised HLO."""
    return Counter(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", hlo))


Kind = Literal["argument", "output", "temporary", "constant"]


@dataclass(frozen=True, order=True)
class Place:
    """A piece of memory.

    Attributes:
      allocation: the number of the allocation that it is part of.
      offset: where in there it starts.
      bytes: its size.
      kind: what the allocation is for.
    """

    allocation: int
    offset: int
    bytes: int
    kind: Kind


# By the id of an instruction and the path to a value in what it returns.
Places = Mapping[tuple[int, tuple[int, ...]], Place]


def read_places(assignment: bytes) -> Places:
    """Reads a compiler's assignment of buffers: the place of each value that has one.

    A value without is another by another name, such as an element of a tuple.
    """
    fields = read_message(assignment)
    made = {integer(b[1]): message(b[3]) for b in messages(fields[1])}
    places = {}
    for allocation in messages(fields[3]):
        for assigned in messages(allocation[9]):
            place = Place(
                integer(allocation[1]),
                integer(assigned[2]),
                integer(assigned[3]),
                _kind(allocation),
            )
            location = made[integer(assigned[1])]
            places[integer(location[4]), integers(location[3])] = place
    return places


def _kind(allocation: Fields) -> Kind:
    if integer(allocation[5]):
        return "argument"
    if integer(allocation[12]):
        return "constant"
    return "output" if integer(allocation[7]) else "temporary"
