"""Reading a compiled program: the text of a scheduled module of HLO.

What is read is what the life of values takes: the instructions of each computation in the order
in which they run, their operands, what they call, and where they come from.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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


Path = tuple[int, ...]
"""Where a value is in a tuple of values and of such tuples."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: its name in the module.
      shape: what it returns.
      opcode: such as "fusion".
      operands: names of instructions of the same computation.
      called: names of computations that it runs; of a `while`, the condition and the body.
      number: of a parameter, its number; of a `get-tuple-element`, that of the element.
      op_name: the operation of the user's program that it comes from.
      aliases: results that take the memory of an operand: the path to each, and which operand.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    number: int = 0
    op_name: str | None = None
    aliases: Mapping[Path, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run; the name of the one that is returned."""

    instructions: Sequence[Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
      donated: outputs that take the memory of an argument: the path to each output in what is
        returned, and the number of the argument.
    """

    computations: Mapping[str, Computation]
    entry: str
    donated: Mapping[Path, int]


_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\w+=\{?(%[\w.\-]+(?:, *%[\w.\-]+)*)")
_NUMBER = re.compile(r"(?:^|, index=)(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}[^)]*\)")
_ALIASES = re.compile(
    rf"(?:input_output_alias|output_to_operand_aliasing)=\{{((?:,? ?{_ALIAS.pattern})*)"
)


def read_module(compiled: Any) -> Module:
    """Reads a compiled program.

    Args:
      compiled: as from `jax.jit(f).lower(...).compile()`.

    Raises:
      UnreadableProgram: the compiler does not hand it out, or it is not scheduled.
    """
    try:
        first, *lines = (compiled.as_text() or "").split("\n")
        if "is_scheduled=true" not in first:
            raise ValueError("the program has no schedule")
        return _module(first, lines)
    except (NotImplementedError, LookupError, TypeError, ValueError) as error:
        raise UnreadableProgram(str(error)) from error


def _module(first: str, lines: Sequence[str]) -> Module:
    computations: dict[str, Computation] = {}
    instructions: list[Instruction] = []
    name = entry = root = ""
    for line in lines:
        if line == "}":
            computations[name] = Computation(instructions, root)
        elif (head := _HEAD.fullmatch(line)) is not None:
            name, instructions = head[2], []
            entry = name if head[1] else entry
        elif (made := _LINE.match(line)) is not None:
            instructions.append(_instruction(*made.groups()[1:]))
            root = made[2] if made[1] else root
    computations[entry]
    return Module(computations, entry, _aliases(first))


def _aliases(text: str) -> dict[Path, int]:
    """Which results have the memory of which operand, or argument, by the path to each."""
    some = _ALIASES.search(text)
    pairs = _ALIAS.findall(some[1]) if some else ()
    return {tuple(map(int, re.findall(r"\d+", path))): int(number) for path, number in pairs}


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
    origin = _OP_NAME.search(rest)
    inside, rest = _parted(_QUOTED.sub('""', rest))
    called = [n for names in _CALLED.findall(rest) for n in _NAME.findall(names)]
    number = _NUMBER.search(inside if opcode == "parameter" else rest)
    return Instruction(
        name,
        read_shape(shape),
        opcode,
        tuple(_NAME.findall(inside)),
        tuple(called) if opcode not in ("parameter", "constant") else (),
        int(number[1]) if number else 0,
        origin[1] if origin else None,
        _aliases(rest),
    )


def _parted(text: str) -> tuple[str, str]:
    """What is before the parenthesis that closes one that is open, and what is after it."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return text[: match.start()], text[match.end() :]
    raise ValueError(f"no parenthesis closes the operands in {text!r}")


# --- shapes ------------------------------------------------------------------------------------

_PARTS = re.compile(r"[()]|([a-z]\w*)\[([^\]]*)\](?:\{[^}]*\})?")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_DIGITS = re.compile(r"[a-z]+(\d+)")


def read_shape(text: str) -> Shape:
    """The shape that a text stands for: of arrays, with or without layouts, and tuples."""
    open_: list[list[Shape]] = [[]]
    for part in _PARTS.finditer(text):
        if part[0] == "(":
            open_.append([])
        elif part[0] == ")":
            parts = tuple(open_.pop())
            open_[-1].append(Shape("", sum(p.bytes for p in parts), parts))
        else:
            open_[-1].append(_array(part[1], part[2]))
    return open_[0][0]


def _array(kind: str, dimensions: str) -> Shape:
    digits = _DIGITS.match(kind)
    bits = _BITS[kind] if kind in _BITS else int(digits[1]) if digits else 8
    sizes = [int(n) for n in re.findall(r"\d+", dimensions)]
    return Shape(f"{kind}[{','.join(map(str, sizes))}]", math.prod(sizes) * bits // 8)


# --- text that is compared ---------------------------------------------------------------------


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
