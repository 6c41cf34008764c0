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

import jax


class UnreadableProgram(Exception):
    """Signals that a compiled program is not available as a scheduled HLO module."""


@dataclass(frozen=True)
class Shape:
    text: str  # such as "f32[8,300]"; empty for a tuple
    bytes: int  # its memory; of a tuple, that of its parts
    parts: tuple[Shape, ...] | None = None  # None for an array


Path = tuple[int, ...]
"""Where a value is in a tuple of values and of such tuples."""


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: Shape
    opcode: str  # such as "fusion"
    operands: tuple[str, ...] = ()  # names of instructions in the same computation
    called: tuple[str, ...] = ()  # computations that it runs; of a `while`, condition and body
    number: int = 0  # of a parameter, or of the element of a `get-tuple-element`
    op_name: str | None = None  # the user's operation that it comes from
    # results in the memory of an operand: path to operand
    aliases: Mapping[Path, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Computation:
    """Holds instructions in the order of their execution, and the name of the result."""

    instructions: Sequence[Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: str  # the computation that runs
    donated: Mapping[Path, int]  # outputs in the memory of an argument: path to argument


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


def read_module(compiled: jax.stages.Compiled) -> Module:
    """Parses a compiled program.

    Raises UnreadableProgram if XLA does not return it, or without a schedule.
    """
    try:
        first, *lines = (compiled.as_text() or "").split("\n")
        if "is_scheduled=true" not in first:
            # Without a schedule, the order of instructions says nothing about memory.
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
    """Parses which results share the memory of which operand or argument."""
    some = _ALIASES.search(text)
    pairs = _ALIAS.findall(some[1]) if some else ()
    return {tuple(map(int, re.findall(r"\d+", path))): int(number) for path, number in pairs}


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
    origin = _OP_NAME.search(rest)
    # Quoted text may contain parentheses.
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
    """Splits a text at the parenthesis that closes an open one."""
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
    """Normalizes optimized HLO by removing names and source lines."""
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
    return Counter(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", hlo))
