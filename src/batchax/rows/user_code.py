"""Whose code is running: the user's, or that of JAX and of what it is made of."""

from __future__ import annotations

import dis
import functools
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, FrameType
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
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not _belongs(frame, _JAX | _TOOLS):
            found = _line(frame, line)
    return found


def _caller(frame: FrameType) -> FrameType:
    """The innermost code around `frame` that is no mere tool."""
    around: FrameType | None = frame
    while around is not None:
        if not _belongs(around, _TOOLS):
            return around
        around = around.f_back
    return frame


def _belongs(frame: FrameType, packages: frozenset[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"


def looks_up(frame: FrameType) -> bool:
    """Whether a hash is taken in `frame` to look something up, or keep it, by its value.

    Not where a function is called whose results are kept by its arguments, as ``jax.jit`` does:
    it gives what it would compute.
    """
    operation, called = _instruction(frame.f_code, frame.f_lasti)
    if not operation.startswith(("CALL", "PRECALL")):
        return True
    if called is None:
        return False
    kind, name = called
    if kind == "attribute":
        return name in _LOOKUPS
    for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in names:
            return _keeps(names[name])
    return False


_LOOKUPS = frozenset(
    (
        "get pop setdefault fromkeys add discard remove isdisjoint issubset issuperset union "
        "intersection difference symmetric_difference __getitem__ __contains__ getitem contains "
        "Counter OrderedDict"
    ).split()
)


def _keeps(function: Any) -> bool:
    """Whether a function of Python's own keeps, or looks up, what it is called with."""
    if function is hash:
        return False
    if isinstance(function, type):
        return function.__module__ in ("builtins", "collections")
    owner = getattr(function, "__self__", None)
    return isinstance(owner, (dict, set, frozenset)) or (
        getattr(function, "__module__", None) in ("builtins", "_operator", "_collections")
    )


@functools.lru_cache(maxsize=256)
def _instruction(code: CodeType, at: int) -> tuple[str, tuple[str, str] | None]:
    """What the instruction at an offset is; where it is a call, what is called."""
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset == at:
            called = _called(before, instruction.positions)
            return instruction.opname, called
        before.append(instruction)
    return "", None


def _called(before: Sequence[dis.Instruction], call: Any) -> tuple[str, str] | None:
    """The attribute or variable that a call at these positions calls, and its name.

    It begins where the call does, and of what does so before the call it ends last.
    """
    if call is None or call.col_offset is None:
        return None
    start, end = (call.lineno, call.col_offset), (call.end_lineno, call.end_col_offset)
    loads = [
        (at.end_lineno, at.end_col_offset, instruction)
        for instruction in before
        if (at := instruction.positions) and (at.lineno, at.col_offset) == start
        if (at.end_lineno, at.end_col_offset) < end and instruction.opname.startswith("LOAD_")
    ]
    if not loads:
        return None
    last = max(loads, key=lambda load: load[:2])[2]
    attribute = last.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return ("attribute" if attribute else "variable"), str(last.argval)
