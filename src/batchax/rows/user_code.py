"""Whose code is running: the user's, or that of JAX and of what it is made of."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

_JAX = frozenset({"jax", "jaxlib", "batchax"})

# What they do they do on behalf of whoever calls them, be that the user or JAX.
_TOOLS = frozenset({"numpy", "scipy", "opt_einsum", *sys.stdlib_module_names})


def is_users(frame: FrameType) -> bool:
    """Whether what happens in `frame` happens on behalf of the user, not of JAX."""
    return not _belongs(_caller(frame), _JAX)


def line_around(frame: FrameType) -> str:
    """`file:line (function)` of the user's code that runs in `frame`, or called what does."""
    caller = _caller(frame)
    return _line(caller, caller.f_lineno)


def line_of(error: BaseException) -> str:
    """`file:line (function)` of the user's code that raised `error`; "" if there is none."""
    places = list(_places(error))
    return _line(*places[-1]) if places else ""


def names_of(error: BaseException) -> dict[str, Any]:
    """What the names of the user's code that raised `error` stood for."""
    names: dict[str, Any] = {}
    for frame, _ in list(_places(error))[-1:]:
        names |= {k: v for k, v in frame.f_globals.items() if k in frame.f_code.co_names}
        names |= frame.f_locals
    return names


def _places(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not (_is_tool(frame) or _belongs(frame, _JAX)):
            yield frame, line


def _caller(frame: FrameType) -> FrameType:
    """The innermost code around `frame` that is no mere tool."""
    around: FrameType | None = frame
    while around is not None:
        if not _is_tool(around):
            return around
        around = around.f_back
    return frame


def _is_tool(frame: FrameType) -> bool:
    # A method that `dataclasses` writes is in the user's module, and has no line.
    code = frame.f_code
    written = code.co_filename == "<string>" and code.co_name.startswith("__")
    return written or _belongs(frame, _TOOLS)


def _belongs(frame: FrameType, packages: frozenset[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"
