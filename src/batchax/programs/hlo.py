"""Reading the text of a compiled program: a scheduled module of HLO.

What is read is what the life of values takes: the instructions of each computation in the order
in which they run, their operands, what they call, and where they come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")


class UnreadableProgram(Exception):
    """A text is not a scheduled HLO module."""


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
      name: its name in the module.
      shape: what it returns.
      opcode: such as "fusion".
      operands: names of instructions of the same computation.
      called: computations that it runs, by the attribute that names them.
      number: of a parameter, its number.
      index: of a `get-tuple-element`, which one.
      op_name: the operation of the user's program that it comes from.
      source: the file and line of the user's program.
      aliases: of a custom call, pairs of path in the result and operand that share memory.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)
    number: int | None = None
    index: int | None = None
    op_name: str | None = None
    source: tuple[str, int] | None = None
    aliases: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass
class Computation:
    """Instructions in the order in which they run; the name of the one that is returned."""

    instructions: list[Instruction] = field(default_factory=list)
    root: str = ""


@dataclass
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
      aliases: for paths in the result the number of the argument whose memory it takes.
    """

    computations: dict[str, Computation]
    entry: str
    aliases: dict[tuple[int, ...], int]


def read_module(text: str) -> Module:
    """Reads the text of a scheduled module.

    Raises:
      UnreadableProgram: it is not one.
    """
    header, _, rest = text.partition("\n")
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise UnreadableProgram("not a scheduled HLO module")
    module = Module({}, "", _aliases(header))
    lines = rest.splitlines()
    sources = _Sources(lines)
    current: Computation | None = None
    for line in lines:
        opening = _COMPUTATION.match(line)
        if opening:
            current = module.computations[opening["name"]] = Computation()
            if opening["entry"]:
                module.entry = opening["name"]
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            is_root, instruction = _instruction(line, sources)
            current.instructions.append(instruction)
            if is_root:
                current.root = instruction.name
    if not module.entry:
        raise UnreadableProgram("no entry computation")
    return module


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+) \(.*\{$")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{\}")


def _aliases(header: str) -> dict[tuple[int, ...], int]:
    start = header.find("input_output_alias=")
    if start < 0:
        return {}
    found = _ALIAS.findall(_balanced(header, header.index("{", start), "{}"))
    return {_numbers(path): int(number) for path, number in found}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


# --- instructions ------------------------------------------------------------------------------

_START = re.compile(r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-<>]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)(?=\()")
_OPERAND = re.compile(r"%([\w.\-<>]+)")
_CALLS = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|"
    r"true_computation|false_computation|async_execution_thread)="
    r"(\{[^}]*\}|%[\w.\-<>]+)"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_OUTPUT_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}\)")


def _instruction(line: str, sources: _Sources) -> tuple[bool, Instruction]:
    line = re.sub(r"/\*index=\d+\*/", "", line)
    start = _START.match(line)
    if start is None:
        raise UnreadableProgram(line)
    shape_text = _shape_text(line, start.end())
    opcode = _OPCODE.match(line, start.end() + len(shape_text))
    if opcode is None:
        raise UnreadableProgram(line)
    operands = _balanced(line, opcode.end(), "()")
    attributes = line[opcode.end() + len(operands) :]
    plain = attributes.split("metadata={")[0]
    op_name, index = _OP_NAME.search(attributes), _INDEX.search(plain)
    aliases = plain.partition("output_to_operand_aliasing=")[2]
    return bool(start["root"]), Instruction(
        start["name"],
        read_shape(shape_text),
        opcode[1],
        () if opcode[1] == "constant" else tuple(_OPERAND.findall(operands)),
        {kind: tuple(_OPERAND.findall(names)) for kind, names in _CALLS.findall(attributes)},
        int(operands[1:-1]) if opcode[1] == "parameter" else None,
        int(index[1]) if index else None,
        op_name[1] if op_name else None,
        sources.of(attributes),
        tuple((_numbers(path), int(n)) for path, n in _OUTPUT_ALIAS.findall(aliases)),
    )


def _shape_text(line: str, start: int) -> str:
    if line[start] == "(":
        return _balanced(line, start, "()")
    return line[start : line.index(" ", start)]


def _balanced(text: str, start: int, pair: str) -> str:
    """From the bracket at `start` up to and with the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == pair[0]) - (text[end] == pair[1])
        if depth == 0:
            return text[start : end + 1]
    raise UnreadableProgram(text[start : start + 80])


def read_shape(text: str) -> Shape:
    """The shape that a text such as "(s32[], f32[8,300]{1,0})" stands for."""
    if not text.startswith("("):
        return _array(text)
    parts = tuple(read_shape(part) for part in _split(text[1:-1]))
    return Shape("", sum(p.bytes for p in parts), parts)


def _split(text: str) -> Iterator[str]:
    """What stands between commas that are in no bracket."""
    depth, start = 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _array(text: str) -> Shape:
    found = _ARRAY.match(text)
    if found is None:
        return Shape(text, 0)
    kind, sizes = found[1], math.prod(_numbers(found[2]))
    bits = _BITS.match(kind)
    if kind in _BYTES:
        return Shape(found[0], sizes * _BYTES[kind])
    return Shape(found[0], sizes * int(bits[1] if bits else 8) // 8)


# --- where instructions come from --------------------------------------------------------------

_ENTRY = re.compile(r"(\d+) (.*)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


class _Sources:
    """The tables of files, lines and stack frames that a module may start with."""

    def __init__(self, lines: list[str]):
        self._tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in lines:
            entry = _ENTRY.fullmatch(line)
            if entry:
                table[int(entry[1])] = entry[2]
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables[line] = {}
            elif line.endswith("{"):
                break

    def of(self, attributes: str) -> tuple[str, int] | None:
        """The file and line, either given there or as the number of a stack frame."""
        here = _FILE_AND_LINE.search(attributes)
        if here:
            return here[1], int(here[2])
        frame = self._entry("StackFrames", "stack_frame_id", attributes)
        place = self._entry("FileLocations", "file_location_id", frame)
        name = self._entry("FileNames", "file_name_id", place)
        line = re.search(r"\bline=(\d+)", place)
        return (name.strip('"'), int(line[1])) if name and line else None

    def _entry(self, table: str, key: str, text: str) -> str:
        found = re.search(rf"\b{key}=(\d+)", text)
        return self._tables.get(table, {}).get(int(found[1]), "") if found else ""
