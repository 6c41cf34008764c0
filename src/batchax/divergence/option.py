"""The option `divergence` of ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax.config import config
from batchax.divergence.auto import Auto
from batchax.divergence.compact import Compact
from batchax.errors import ArgumentTypeError
from batchax.execution.call import Call, Pass
from batchax.frontend.options import is_word
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value


def parted(option: Any, values: Sequence[Value], spread: bool = False) -> Compact | None:
    """What the option `divergence` makes of lanes that part ways; None: they are masked.

    It is asked when a batched function is called, and not before: the default depends on the
    device, and to ask for the device initializes JAX's backends.

    Args:
      option: one that `check_divergence` let pass.
      values: the arguments.
      spread: whether each of several devices is to run lanes of its own.
    """
    option = resolved(option)
    how = option if isinstance(option, Compact) else _NAMED[option]()
    return None if isinstance(how, Auto) and not spread and how.leaves(values) else how


def parting_ways(option: Any, spread: bool = False) -> Pass:
    """The pass that says so of the axis of a call."""

    def change(call: Call) -> Call:
        divergence = parted(option, call.values, spread)
        return replace(call, axis=replace(call.axis, divergence=divergence))

    return change


def check_divergence(option: Any) -> None:
    """Refuses what the option `divergence` cannot be.

    Raises:
      ArgumentTypeError: it is none of what it may be.
    """
    if not (isinstance(option, Compact) or is_word(option, *_NAMED)):
        raise ArgumentTypeError(
            'divergence must be "auto", "predicate", "compact" or a batchax.Compact(...), got '
            f"{brief(option)}."
        )


def is_asked(option: Any) -> bool:
    """Whether the user asks for lanes to part ways, and does not leave it to batchax."""
    return is_word(option, "compact") or (isinstance(option, Compact) and option.asked)


def resolved(option: Any) -> Any:
    """`option`, with what `batchax.config` says in the place of "auto"."""
    return config.divergence if is_word(option, "auto") else option


_NAMED = {"auto": Auto, "predicate": lambda: None, "compact": Compact}
