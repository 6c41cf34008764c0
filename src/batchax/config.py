"""`bx.config`: switches for a whole process.

A switch decides where a call leaves a choice to batchax. It is first read from an environment
variable, when batchax is imported. This module is below all others, so that each may ask it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from batchax.errors import ArgumentTypeError, OptionError


class _Switch(NamedTuple):
    """A switch.

    Attributes:
      variable: the environment variable that sets it.
      values: its values, by their names in that variable; the first is the default.
    """

    variable: str
    values: dict[str, Any]


_SWITCHES = {
    "divergence": _Switch("BATCHAX_DIVERGENCE", {"auto": "auto", "predicate": "predicate"}),
    "single_kernels": _Switch("BATCHAX_SINGLE_KERNELS", {"1": True, "0": False}),
}


class Config:
    """Switches for a whole process, read as attributes and set by `update`.

    Attributes:
      divergence: what ``divergence="auto"`` stands for, the default of every function that has
        this option.

        - ``"auto"``: lanes diverge where the cost model predicts no slowdown.
        - ``"predicate"``: lanes are masked, as in ``jax.vmap``. An explicit ``"compact"`` or
          `Compact` still holds.
      single_kernels: whether loops of small arrays may be compiled as a single XLA kernel on CPU.
        False also excludes them on a version of jaxlib that batchax was tested on.

    Example:
      >>> bx.config.update("divergence", "predicate")
      >>> bx.config.divergence
      'predicate'
      >>> bx.config.update("divergence", "auto")
    """

    divergence: str
    single_kernels: bool

    def __init__(self) -> None:
        for name, (variable, values) in _SWITCHES.items():
            given = os.environ.get(variable) or next(iter(values))
            if given not in values:
                raise OptionError(
                    f"The environment variable {variable} is {given!r}. Set it to "
                    f"{' or '.join(map(repr, values))}, or unset it."
                )
            vars(self)[name] = values[given]

    def __setattr__(self, name: str, value: str | bool) -> None:
        self.update(name, value)

    def update(self, name: str, value: str | bool) -> None:
        """Sets a switch for the whole process.

        A change clears JAX's caches, as `jax.clear_caches` does: functions that were traced or
        compiled before are traced and compiled again.

        Args:
          name: The name of the switch, an attribute of `Config`.
          value: The new value.

        Raises:
          ArgumentTypeError: (a TypeError) there is no such switch, or the value is of another type.
          OptionError: (a ValueError) the switch does not take this word.
        """
        switch = _SWITCHES.get(name) if isinstance(name, str) else None
        if switch is None:
            raise ArgumentTypeError(
                f"batchax.config has no switch {name!r}. Use one of {_listed(_SWITCHES)}."
            )
        allowed = switch.values.values()
        if not any(type(value) is type(each) and value == each for each in allowed):
            error = OptionError if isinstance(value, str) else ArgumentTypeError
            raise error(f"batchax.config: {name} is {value!r}. Pass {_listed(allowed)}.")
        if value != getattr(self, name):
            vars(self)[name] = value
            jax.clear_caches()  # programs that exist were made with the old value


def _listed(values: Iterable[object]) -> str:
    return " or ".join(map(repr, values))


config = Config()
