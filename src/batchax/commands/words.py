"""What is written in a command line: functions, Python values, numbers of rows."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Literal, Protocol

_OF_LIBRARIES = ("site-packages", os.path.dirname(os.path.dirname(__file__)))
_MOST_NAMED = 10  # functions, where there is none of a name


class Commands(Protocol):
    """The subcommands of a parser."""

    def add_parser(self, name: str, /, **how: Any) -> argparse.ArgumentParser: ...


def add_ways(command: argparse.ArgumentParser, what: str, default: str | None) -> None:
    """Adds to a parser how loops and small matrices run, of `what`: lanes, or rows."""
    command.add_argument(
        "--divergence",
        choices=["auto", "predicate", "compact", "serial"],
        default=default,
        help=f"what finished {what} of a loop do: wait for the others (predicate), leave "
        "(compact), run sequentially from the start (serial), or leave where the cost model "
        "predicts no slowdown (auto, the default)",
    )
    command.add_argument(
        "--small-matrices",
        choices=["auto", "library", "vectorized"],
        default=default,
        help="how small matrices are decomposed: by a library call for each (library), together "
        "where that is faster (vectorized), or the same except where results are not unique "
        "(auto, the default)",
    )


class Mistake(Exception):
    """The command line is invalid."""


def in_words_of_options(message: str, options: Collection[str]) -> str:
    """A message of the library's, with options as a command line gives them."""
    value = lambda m: f" {m[3]}" if m[3] and m[3] != "True" else ""
    as_flag = lambda m: f"--{m[1].replace('_', '-')}{value(m)}"
    message = re.sub(rf"\b({'|'.join(options)})=(?:([\"']?)([\w.]+)\2)?", as_flag, message)
    # Words without an underscore are those of sentences, too.
    names = "|".join(name for name in options if "_" in name)
    as_word = lambda m: f"--{m[1].replace('_', '-')}"
    return re.sub(rf"\b({names})\b", as_word, message) if names else message


_MISSING = re.compile(r"missing \d+ required positional argument")


def of_function(error: Exception, name: str, option: str) -> str:
    """In a line, an error that is raised where a function is run: what, and at which line.

    `option` is what passes an argument.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _OF_LIBRARIES)]
    at = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    remedy = f". Pass {option} for each argument" if _MISSING.search(str(error)) else ""
    return f"{name}: {type(error).__name__}: {error}{at}{remedy}"


def function(name: str) -> Callable[..., Any]:
    """The function called `module:name`, or `path/to/file.py:name`."""
    place, colon, attributes = name.rpartition(":")
    if not colon or not place or not attributes:
        raise Mistake(
            f"{name!r} does not name a function. Write module:function, such as model:loss, or "
            "path/to/file.py:function."
        )
    target = _module(place)
    for attribute in attributes.split("."):
        if not hasattr(target, attribute):
            there = [n for n, f in vars(target).items() if callable(f) and not n.startswith("_")]
            hint = f" It has {', '.join(sorted(there)[:_MOST_NAMED])}." if there else ""
            raise Mistake(f"{place} has no {attribute!r}.{hint}")
        target = getattr(target, attribute)
    if not callable(target):
        raise Mistake(f"{name} is not a function, but a {type(target).__name__}.")
    return target


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        if spec is None or spec.loader is None or not os.path.exists(place):
            raise Mistake(f"there is no file {place}.")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name != place.partition(".")[0] and error.name != place:
            raise
        raise Mistake(
            f"there is no module {place!r}, here or installed. Pass the path of a file, such as "
            f"{place.replace('.', '/')}.py:function, or change the directory."
        ) from None


def literal(text: str, option: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise Mistake(
            f"{option}: {text!r} is not understood. Write a Python value, such as 0, None or "
            "(0, None)" + (", or a type, such as f32[5,3]." if option == "--args" else ".")
        ) from None


def batch_size(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit()):
        raise Mistake(f'--batch-size: {text!r} is neither a number nor "auto".')
    return int(text)
