"""The option `divergence` of ``vmap``."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from batchax.config import config
from batchax.divergence.compact import Compact
from batchax.divergence.runner import Runner
from batchax.errors import ArgumentTypeError
from batchax.execution.call import Call, Pass
from batchax.frontend.options import is_word, not_one_of
from batchax.jaxprs.error_format import show
from batchax.jaxprs.types import Values

BatchSize = int | Literal["auto"] | None


def parted(option: object, values: Values, spread: bool = False) -> Runner | None:
    """What the option `divergence` makes of lanes that diverge; None: they are masked.

    It runs when a batched function is called, and not before: the default depends on the
    device, and to ask for the device initializes JAX's backends.

    Args:
      option: one that `check_divergence` let pass.
      values: the arguments.
      spread: whether each of several devices runs its lanes separately.
    """
    option = resolved(option)
    if is_word(option, "predicate", "serial"):
        return None
    if is_word(option, "compact"):
        option = Compact()
    explicit = option if isinstance(option, Compact) else None
    runner = option if isinstance(option, Runner) else Runner.here(explicit)
    return None if not runner.explicit and not spread and runner.leaves(values) else runner


def diverging(option: object, spread: bool = False) -> Pass:
    def change(call: Call) -> Call:
        divergence = parted(option, call.values, spread)
        return replace(call, axis=replace(call.axis, divergence=divergence))

    return change


def check_divergence(option: object) -> None:
    """Rejects values that the option `divergence` does not take.

    Raises:
      ArgumentTypeError: it is neither a word nor a `Compact`.
      OptionError: it is another word.
    """
    if not (isinstance(option, Compact | Runner) or is_word(option, *_WORDS)):
        raise not_one_of("divergence", option, *_WORDS, other="batchax.Compact(...)")


def is_explicit(option: object) -> bool:
    """Whether the user asks for lanes to run apart, and does not leave it to batchax."""
    return is_word(option, "compact") or isinstance(option, Compact)


def resolved(option: object) -> object:
    """`option`, with what `batchax.config` says in the place of "auto"."""
    return config.divergence if is_word(option, "auto") else option


def lanes_at_a_time(option: object, batch_size: BatchSize) -> BatchSize:
    """`batch_size`, which is 1 where lanes run sequentially.

    Raises:
      ArgumentTypeError: another number was passed.
    """
    if not is_word(option, "serial"):
        return batch_size
    if batch_size is not None and batch_size != 1:
        raise ArgumentTypeError(
            f'divergence="serial" runs one lane at a time, but batch_size is {show(batch_size)}. '
            "Omit batch_size, or omit divergence."
        )
    return 1


_WORDS = "auto", "predicate", "compact", "serial"
