"""The user's line that an equation comes from."""

from __future__ import annotations

import linecache
import os
import re
from typing import NamedTuple

from batchax import _compat
from batchax.jaxprs.words import Eqn


class SourceLine(NamedTuple):
    """A line of the user's code; of number 0 if it is not known."""

    file: str
    line: int
    text: str


def source_line(eqn: Eqn) -> SourceLine:
    """The line that made an equation, its text without indentation, as far as it can be read."""
    return _at(*_compat.user_file_and_line(eqn.source_info))


_INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")


def calling_line(eqn: Eqn) -> SourceLine | None:
    """The line of the user's own that called the library whose line made an equation.

    None if no library's line made it, or none of the user's is known.
    """
    calls = list(_compat.calling_files_and_lines(eqn.source_info))
    if not calls or not is_installed(calls[0][0]):
        return None
    own = next(((f, n) for f, n in calls if not is_installed(f)), None)
    return None if own is None else _at(*own)


def is_installed(file: str) -> bool:
    """Whether a file is of a library that was installed, and so is none that the user writes."""
    return _INSTALLED.match(file) is not None


def _at(file: str, line: int) -> SourceLine:
    return SourceLine(file, line, linecache.getline(file, line).strip() if line else "")


def shown_place(file: str, line: int) -> str:
    """`file:line`, the path as short as it is clear: from the current directory or a library's.

    In a notebook `cell 3, line 1`.
    """
    cell = _compat.in_cell(file, line)
    if cell:
        return cell
    installed = _INSTALLED.match(file)
    if installed:
        return f"{file[installed.end() :]}:{line}"
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"
