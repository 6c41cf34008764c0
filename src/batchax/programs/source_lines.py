"""The user's line that an equation comes from."""

from __future__ import annotations

import linecache
import os
from typing import Any, NamedTuple

from batchax import _compat


class SourceLine(NamedTuple):
    """A line of the user's code; of number 0 if it is not known."""

    file: str
    line: int
    text: str


def source_line(eqn: Any) -> SourceLine:
    """The line that made an equation, its text without indentation, as far as it can be read."""
    file, line = _compat.user_file_and_line(eqn.source_info)
    return SourceLine(file, line, linecache.getline(file, line).strip() if line else "")


def shown_place(file: str, line: int) -> str:
    """`file:line`, the path as short as it is clear from the current directory."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"
