"""Where two jaxprs in canonical form first differ, and the user's lines of these equations."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Literal

from batchax import _compat
from batchax.analysis.canonical import LEAVES, CanonicalProgram, Table
from batchax.jaxprs.primitive_facts import shown
from batchax.jaxprs.types import Atom, Eqn


class SourceLine(NamedTuple):
    """Locates a line of the user's code; number 0 if unknown."""

    file: str
    line: int
    text: str


def source_line(eqn: Eqn) -> SourceLine:
    """Returns the line that made an equation, without indentation."""
    return _at(*_compat.user_file_and_line(eqn.source_info))


_INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")


def calling_line(eqn: Eqn) -> SourceLine | None:
    """Returns the user's line that called the library whose line made an equation.

    None if no library did, or no line of the user is known.
    """
    calls = list(_compat.calling_files_and_lines(eqn.source_info))
    if not calls or not is_installed(calls[0][0]):
        return None
    own = next(((f, n) for f, n in calls if not is_installed(f)), None)
    return None if own is None else _at(*own)


def is_installed(file: str) -> bool:
    """Returns whether a file is in an installed library."""
    return _INSTALLED.match(file) is not None


def _at(file: str, line: int) -> SourceLine:
    return SourceLine(file, line, linecache.getline(file, line).strip() if line else "")


def shown_place(file: str, line: int) -> str:
    """Formats `file:line` with a short path, relative to the current directory or library.

    In a notebook: `cell 3, line 1`.
    """
    cell = _compat.in_cell(file, line)
    if cell:
        return cell
    installed = _INSTALLED.match(file)
    if installed:
        return f"{file[installed.end() :]}:{line}"
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"


_LONGEST = 60  # characters of a parameter that is shown


@dataclass(frozen=True)
class ComparedOperation:
    """What one program does where another does something else.

    Attributes:
      text: the operation with the types of its operands and results.
      primitive: its name; None where an output is a value that is given.
      file: the user's file, and
      line: the line in it, that made the equation.
      source: the text of that line, as far as it can be read.
      shapes: the shapes of the operands.
      out_shapes: the shapes of the results.
    """

    text: str
    primitive: str | None
    file: str
    line: int
    source: str
    shapes: tuple[tuple[Any, ...], ...]
    out_shapes: tuple[tuple[Any, ...], ...]

    def __str__(self) -> str:
        if not self.line:
            return self.text
        return f"{self.text}\n    {shown_place(self.file, self.line)}\n      {self.source}".rstrip()


@dataclass(frozen=True)
class Difference:
    """The first difference between two programs.

    Attributes:
      what: a sentence that says where they differ.
      first: what the one does there; None if it does nothing more.
      second: what the other does.
    """

    what: str
    first: ComparedOperation | None = None
    second: ComparedOperation | None = None

    def __str__(self) -> str:
        sides = (("first", self.first), ("second", self.second))
        return "\n".join([self.what, *(f"  {n}: {e}" for n, e in sides if e is not None)])


def operations(table: Table, program: CanonicalProgram) -> tuple[str, ...]:
    return tuple(table.nodes[n].name for n in _needed(table, program))


def first_difference(
    table: Table, programs: tuple[CanonicalProgram, CanonicalProgram], names: Sequence[str]
) -> Difference | None:
    """Finds where two programs first do different things; None if they do not.

    `names` are those of the outputs.
    """
    f, g = programs
    if (f.outputs, f.effect) == (g.outputs, g.effect):
        return None
    # The fronts: operations that only one program has, all of whose operands both have.
    both = _reached(table, f) & _reached(table, g)
    fronts = [[n for n in _needed(table, p) if n not in both and _follows(table, n, both)]
              for p in programs]  # fmt: skip
    if all(fronts):
        left, right = _closest(table, *fronts)
        what = f"They first differ at {_name(table, left)} and {_name(table, right)}"
        if table.nodes[left].name == table.nodes[right].name:
            what = f"They first differ at {_name(table, left)}: {_why(table, left, right)}"
        return Difference(f"{what}.", _equation(table, f, left), _equation(table, g, right))
    for name, *outputs in zip(names, f.outputs, g.outputs, strict=True):
        if outputs[0] != outputs[1]:
            # All that the one does, the other does, too: what it does besides, if anything.
            shown = [front[0] if front else n for front, n in zip(fronts, outputs, strict=True)]
            a, b = (_equation(table, p, n) for p, n in zip(programs, shown, strict=True))
            return Difference(f"They first differ in what {name} is.", a, b)
    what = "Their effects differ, or happen in another order."
    return Difference(what, _equation(table, f, f.effect), _equation(table, g, g.effect))


def _reached(table: Table, program: CanonicalProgram) -> set[int]:
    reached: set[int] = set()
    left = [*program.outputs, program.effect]
    while left:
        n = left.pop()
        if n not in reached:
            reached.add(n)
            left += table.nodes[n].reads
    return reached


def _needed(table: Table, program: CanonicalProgram) -> list[int]:
    """Lists the operations that outputs and effects need, in program order."""
    reached = _reached(table, program)
    return [n for n in program.equations if n in reached and table.nodes[n].name not in LEAVES]


def _follows(table: Table, n: int, both: set[int]) -> bool:
    """Returns whether both programs have all that node `n` reads, except for constants."""

    def known(r: int) -> bool:
        node = table.nodes[r]
        return r in both or (node.name in LEAVES and all(map(known, node.reads)))

    return all(map(known, table.nodes[n].reads))


def _closest(table: Table, left: list[int], right: list[int]) -> tuple[int, int]:
    """Pairs the first node of one side with the most similar one of the other."""

    def alike(pair: tuple[int, int]) -> tuple[bool, int, bool]:
        a, b = (table.nodes[n] for n in pair)
        shared = sum((Counter(a.reads) & Counter(b.reads)).values())
        return a.name == b.name, shared, a.shape == b.shape

    return max([(left[0], n) for n in right] + [(n, right[0]) for n in left], key=alike)


def _why(table: Table, left: int, right: int) -> str:
    a, b = table.nodes[left], table.nodes[right]
    if Counter(a.reads) != Counter(b.reads):
        one, other = Counter(a.reads) - Counter(b.reads), Counter(b.reads) - Counter(a.reads)
        if all(table.nodes[n].name == "constant" for n in (*one, *other)):
            return "a constant in it has another value"
        return "its operands are not the same"
    if a.refs != b.refs:
        return "it reads its operands in another order, or along other axes"
    if a.dtype != b.dtype:
        return f"its result is {a.dtype}, and {b.dtype}"
    return "its parameters are not the same"


def _name(table: Table, n: int) -> str:
    return f"`{table.nodes[n].name}`"


def _equation(table: Table, program: CanonicalProgram, n: int) -> ComparedOperation:
    node = table.nodes[n]
    eqn = program.equations.get(n)
    while eqn is None and node.name == "result":
        n = node.reads[0]
        node, eqn = table.nodes[n], program.equations.get(n)
    if eqn is None:
        if node.name == "argument":
            text = f"argument {node.params}"
        else:
            text = f"a {node.name}" if node.name in LEAVES else node.name
        return ComparedOperation(text, None, "<unknown>", 0, "", (), ())
    file, line, source = source_line(eqn)
    operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
    shapes = (tuple(tuple(getattr(a, "shape", ())) for a in avals) for avals in (operands, results))
    short = (", ".join(map(_short, vs)) for vs in (eqn.invars, eqn.outvars))
    params = ", ".join(
        f"{k}={v}" for k, v in eqn.params.items() if v is not None and len(str(v)) <= _LONGEST
    )
    given = f"[{params}]" if params else ""
    name = shown(eqn.primitive)
    text = f"{name}{given} {' -> '.join(short)}"
    return ComparedOperation(text, name, file, line, source, *shapes)


def _short(v: Atom) -> str:
    short = v.aval.str_short(short_dtypes=True)
    return f"{v.val}:{short}" if isinstance(v, Literal) else short
