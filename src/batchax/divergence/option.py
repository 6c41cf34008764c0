"""The option `divergence` of ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax.divergence.auto import Auto
from batchax.divergence.compact import Compact
from batchax.errors import ArgumentTypeError
from batchax.execution.call import Call, Pass
from batchax.frontend.options import is_word
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value


def parted(how: Compact | None, values: Sequence[Value], spread: bool = False) -> Compact | None:
    """What lanes of these arguments do that part ways; None: they are masked.

    `spread` says whether each of several devices is to run lanes of its own.
    """
    return None if isinstance(how, Auto) and not spread and how.leaves(values) else how


def parting_ways(how: Compact | None, spread: bool = False) -> Pass:
    """The pass that says so of the axis of a call."""

    def change(call: Call) -> Call:
        divergence = parted(how, call.values, spread)
        return replace(call, axis=replace(call.axis, divergence=divergence))

    return change


def find_divergence(option: Any) -> Compact | None:
    """What the option `divergence` of ``vmap`` asks for; None if lanes are to be masked.

    Raises:
      ArgumentTypeError: it is none of what it may be.
    """
    if isinstance(option, Compact):
        return option
    if is_word(option, *_NAMED):
        return _NAMED[option]()
    raise ArgumentTypeError(
        'divergence must be "auto", "predicate", "compact" or a batchax.Compact(...), got '
        f"{brief(option)}."
    )


_NAMED = {"auto": Auto, "predicate": lambda: None, "compact": Compact}
