"""Reading a compiled program: a scheduled module of HLO.

What is read is what the life of values takes: the instructions of each computation in the order
in which they run, their operands, what they call, and where they come from. The numbers of fields
are those of `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchax._compat import hlo_proto
from batchax.programs.wire import Fields, integer, integers, message, messages, read_message, text


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
