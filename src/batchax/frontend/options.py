"""Options, checked where they are given: what they may be, whoever takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.spoken import brief, show


def is_word(given: Any, *words: str) -> bool:
    """Whether `given` is one of these words; an array would be compared element by element."""
    return isinstance(given, str) and given in words


def check_one_of(name: str, given: Any, *choices: str | None) -> None:
    """Refuses an option that is none of some words, or None where that is a choice."""
    if not (is_word(given, *filter(None, choices)) or (given is None and None in choices)):
        *others, last = ["None" if choice is None else f'"{choice}"' for choice in choices]
        raise ArgumentTypeError(
            f"{name} must be {', '.join(others)} or {last}, got {brief(given)}."
        )


def check_callable(where: str, what: str, fun: Any) -> None:
    """Refuses what is no function."""
    if not callable(fun):
        raise ArgumentTypeError(f"{where} expects {what}, got {show(fun)}.")


def checked_list(where: str, what: str, given: Any) -> list[Any]:
    """`given` as a list; refuses what has no order, or nothing in it."""
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(type(given), "__iter__"):
        raise ArgumentTypeError(f"{where} expects a list of {what}, got {show(given)}.")
    return list(given)


def check_flags(**flags: Any) -> None:
    """Refuses what is neither True nor False, such as a word: it would count as True."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise ArgumentTypeError(f"{name} must be True or False, got {show(flag)}.")


def check_tolerances(**tolerances: Any) -> None:
    """Refuses what is neither a number, zero or more, nor None."""
    for name, given in tolerances.items():
        number = isinstance(given, (int, float, np.number)) and not isinstance(given, bool)
        if not (given is None or (number and given >= 0)):
            raise ArgumentTypeError(f"{name} must be a number, zero or more, got {brief(given)}.")


def check_small_matrices(option: Any) -> None:
    """Refuses, when `vmap` is called, what the option `small_matrices` cannot be."""
    check_one_of("small_matrices", option, "auto", "library", "vectorized")


def check_progress(progress: Any, unit: str) -> None:
    """Refuses what the option `progress` cannot be: it is neither a bool nor callable."""
    if not (isinstance(progress, bool) or callable(progress)):
        raise ArgumentTypeError(
            f"progress must be True, False, or a function of the {unit} done and of those there "
            f"are; got {brief(progress)}."
        )
