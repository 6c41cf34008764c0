"""Tracebacks without the frames between a user's call and the user's function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from types import FunctionType
from typing import Any, TypeVar

import jax

# Below functions marked so JAX hides frames of files that are registered, as the option
# ``jax_traceback_filtering`` says. Publicly that can be had for neither functions nor files.
from jax._src.traceback_util import api_boundary as _of_function
from jax._src.traceback_util import filter_traceback, register_exclusion

from batchax._compat.lines import BATCHAX

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

# Between ours there are frames of what Python makes decorators of.
for _path in (BATCHAX, contextlib.__file__, functools.__file__):
    register_exclusion(_path)


def api_boundary(what: T) -> T:
    """Marks a function that users call, or the public methods of a class.

    The traceback of an exception that leaves it shows no frames of batchax and of JAX, unless
    the user wants to see them (``JAX_TRACEBACK_FILTERING=off``).
    """
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
    """For ``raise ... from error``: at an `api_boundary` a cause keeps all of its frames."""
    mode = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    if mode == "off" or error.__traceback__ is None:
        return error
    return error.with_traceback(filter_traceback(error.__traceback__))
