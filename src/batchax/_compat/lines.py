"""The user's lines, names of operations in compiled programs, and shorter tracebacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, TypeVar

import jax
import jax.core
from jax._src.source_info_util import user_frame, user_frames
from jax._src.traceback_util import api_boundary as _of_function
from jax._src.traceback_util import filter_traceback, register_exclusion
from jax.extend import source_info_util

current_name_stack = source_info_util.current_name_stack
name_stack_extended = source_info_util.transform_name_stack
current_source = source_info_util.current
in_source = source_info_util.user_context  # of frames, and with keyword `name_stack`

BATCHAX = os.path.dirname(os.path.dirname(__file__)) + os.sep

# JAX must not report a line of batchax as the user's line.
source_info_util.register_exclusion(BATCHAX)


def user_source(
    source_info: source_info_util.SourceInfo, outer_name_stack: source_info_util.NameStack
) -> AbstractContextManager[None]:
    """Sets the user's line and names for operations that are emitted."""
    stack = outer_name_stack + source_info.name_stack
    return in_source(source_info.traceback, name_stack=stack)


def user_line(source_info: source_info_util.SourceInfo, running: bool = False) -> str:
    """Returns `file:line (function)` of the user's code that made an equation.

    If there is none, "", or, if `running`, the line that runs now.
    """
    made = user_frame(source_info.traceback)
    cell = in_cell(made.file_name, made.start_line) if made is not None else ""
    name = made.function_name if made is not None else ""
    line = f"{cell} ({name})" if cell else source_info_util.summarize(source_info)
    if line or not running:
        return line
    frame = _calling_frame()
    if frame is None:
        return ""
    cell = in_cell(frame.filename, frame.lineno or 0)
    return f"{cell or f'{frame.filename}:{frame.lineno}'} ({frame.name})"


def in_cell(file: str, line: int) -> str:
    """Returns `cell 3, line 1` for a file that stands for a notebook cell; else ""."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)(file)
    number = re.fullmatch(r"In\s?\[(\d+)\]", name[1]) if name else None
    return f"cell {number[1]}, line {line}" if number else ""


def user_file_and_line(source_info: source_info_util.SourceInfo) -> tuple[str, int]:
    """Returns file and line of the user's code that made an equation, for warnings.

    If there is none, those of the line that runs now.
    """
    frame = user_frame(source_info.traceback)
    if frame is not None:
        return frame.file_name, frame.start_line
    frame = _calling_frame()
    return (frame.filename, frame.lineno or 0) if frame else ("<unknown>", 0)


def calling_files_and_lines(source_info: source_info_util.SourceInfo) -> Iterator[tuple[str, int]]:
    """Yields file and line of each call on the stack when an equation was made, innermost first.

    Calls in JAX, batchax, and Python's library are omitted.
    """
    for frame in user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line


# JAX forgets where a function was called from when it traces it. If the batched function is one of
# JAX, the line of an equation may not be the user's: then the call's line is used.
_NOT_THE_USERS = (os.path.dirname(jax.__file__), BATCHAX, contextlib.__file__, functools.__file__)


def _calling_frame() -> traceback.FrameSummary | None:
    """Finds the innermost line of the user on the stack."""
    return next(_frames_of_users(traceback.walk_stack(None)), None)


def raised_at(error: BaseException) -> str:
    """Returns `file:line (function)` of the innermost user line that an error passed."""
    frames = list(_frames_of_users(traceback.walk_tb(error.__traceback__)))
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""


def _frames_of_users(frames: Iterable[tuple[Any, int]]) -> Iterator[traceback.FrameSummary]:
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_USERS):
            yield traceback.FrameSummary(code.co_filename, line, code.co_qualname)


T = TypeVar("T")
E = TypeVar("E", bound=Exception)

# Between frames of batchax there are frames of Python's decorators.
for _path in (BATCHAX, contextlib.__file__, functools.__file__):
    register_exclusion(_path)


def api_boundary(what: T) -> T:
    """Marks a function that users call, or the public methods of a class."""
    # The traceback of an exception that leaves it hides frames of batchax and JAX, unless the user
    # sets ``JAX_TRACEBACK_FILTERING=off``.
    cls: Any = what
    if not isinstance(cls, type):
        return _of_function(cls)
    for name, x in list(vars(cls).items()):
        if name.startswith(("_", "tree_")) and name not in _CALLED_BY_USERS:
            continue
        if isinstance(x, classmethod):
            setattr(cls, name, classmethod(_of_function(x.__func__)))
        elif isinstance(x, FunctionType):
            if name == "__init__" and dataclasses.is_dataclass(cls):  # its code is in no file
                x.__code__ = x.__code__.replace(co_filename=__file__)
            setattr(cls, name, _of_function(x))
    return what


_CALLED_BY_USERS = ("__init__", "__call__", "__getitem__", "__iter__")


def without_hidden_frames(error: E) -> E:
    """Filters the traceback of a cause in ``raise ... from``, which `api_boundary` does not."""
    mode = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode == "off" or error.__traceback__ is None:
        return error
    return error.with_traceback(filter_traceback(error.__traceback__))
