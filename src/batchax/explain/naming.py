"""Names for the values of a program, as a listing shows them."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from jax.extend.core import Literal

_LETTERS = string.ascii_lowercase


class Names:
    """A name for each variable: that of the argument it is, or a letter."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._numbers: set[Any] = set()  # variables that are a literal outside
        self._letters = 0
        self._taken: set[str] = set()  # by arguments

    def give(self, variable: Any, name: str) -> None:
        """Says what a variable is called, unless it has a name."""
        self._names.setdefault(variable, name)
        self.take(name)

    def take(self, name: str) -> None:
        """Says that no variable without a name may be called so: something else is."""
        self._taken.add(name)

    def enter(self, program: Any) -> None:
        """Forgets what is inside a program: called twice, it has other values each time."""
        made = (v for eqn in program.eqns for v in eqn.outvars)
        for variable in (*program.constvars, *program.invars, *made):
            self._names.pop(variable, None)
            self._numbers.discard(variable)

    def same(self, variable: Any, other: Any) -> None:
        """Says that a variable, inside a call, is what `other` is outside."""
        self._names[variable] = self.of(other)
        if self.is_number(other):
            self._numbers.add(variable)

    def is_number(self, variable: Any) -> bool:
        """Whether it is a literal, here or outside of the calls around, and called by its value."""
        return isinstance(variable, Literal) or variable in self._numbers

    def of(self, variable: Any) -> str:
        """What a variable is called; a literal is called by its value."""
        if isinstance(variable, Literal):
            return _number(variable.val)
        if variable not in self._names:
            while letters(self._letters) in self._taken:
                self._letters += 1
            self._names[variable] = letters(self._letters)
            self._letters += 1
        return self._names[variable]


def letters(n: int) -> str:
    """The name of the `n`-th variable: a, b, ..., z, ba, bb, ..."""
    name = _LETTERS[n % 26]
    while n >= 26:
        n = n // 26
        name = _LETTERS[n % 26] + name
    return name


def _number(value: Any) -> str:
    if getattr(value, "shape", ()) != ():
        return "..."
    try:
        number = np.asarray(value).item()
    except TypeError:  # of a type that has no numbers, such as a random key
        return "..."
    return f"{number:g}" if isinstance(number, float) else str(number)
