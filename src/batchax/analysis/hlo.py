"""Reading a compiled program: the text of a module of HLO.

What is read are the instructions of each computation, their operands, what they call, and where
they come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax


class UnreadableProgram(Exception):
    """Signals that a compiled program is not available as an HLO module."""


@dataclass(frozen=True)
class Shape:
    text: str  # such as "f32[8,300]"; empty for a tuple
    bytes: int  # its memory; of a tuple, that of its parts


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: Shape
    opcode: str  # such as "fusion"
    operands: tuple[str, ...] = ()  # names of instructions in the same computation
    called: tuple[str, ...] = ()  # computations that it runs; of a `while`, condition and body
    op_name: str | None = None  # the user's operation that it comes from


@dataclass(frozen=True)
class Computation:
    """Holds instructions, and the name of the result."""

    instructions: Sequence[Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]


_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\w+=\{?(%[\w.\-]+(?:, *%[\w.\-]+)*)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def read_module(compiled: jax.stages.Compiled) -> Module:
    """Parses a compiled program.

    Raises UnreadableProgram if XLA does not return it.
    """
    try:
        return _module((compiled.as_text() or "").split("\n"))
    except (NotImplementedError, LookupError, TypeError, ValueError) as error:
        raise UnreadableProgram(str(error)) from error


def _module(lines: Sequence[str]) -> Module:
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
    computations[entry]  # raises if the text has no entry
    return Module(computations)


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
    origin = _OP_NAME.search(rest)
    # Quoted text may contain parentheses.
    inside, rest = _parted(_QUOTED.sub('""', rest))
    called = [n for names in _CALLED.findall(rest) for n in _NAME.findall(names)]
    return Instruction(
        name,
        read_shape(shape),
        opcode,
        tuple(_NAME.findall(inside)),
        tuple(called) if opcode not in ("parameter", "constant") else (),
        origin[1] if origin else None,
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
            parts = open_.pop()
            open_[-1].append(Shape("", sum(p.bytes for p in parts)))
        else:
            open_[-1].append(_array(part[1], part[2]))
    return open_[0][0]


def _array(kind: str, dimensions: str) -> Shape:
    digits = _DIGITS.match(kind)
    bits = _BITS[kind] if kind in _BITS else int(digits[1]) if digits else 8
    sizes = [int(n) for n in re.findall(r"\d+", dimensions)]
    return Shape(f"{kind}[{','.join(map(str, sizes))}]", math.prod(sizes) * bits // 8)
