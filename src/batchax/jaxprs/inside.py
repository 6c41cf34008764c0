"""All that is inside an equation, whatever it is there for: `bodies` has what an equation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.types import Eqn, Value


def programs_inside(eqn: Eqn) -> list[Any]:
    """Lists all programs in the parameters of an equation, without their constants.

    Among them are those with which it combines two elements, or is differentiated.
    """
    return [getattr(program, "jaxpr", program) for program in programs_held(eqn)]


def programs_held(eqn: Eqn) -> list[Any]:
    """Lists the same, with their constants if the parameters hold these, too."""
    programs: list[Any] = []
    _add_programs(eqn.params.values(), programs)
    return programs


def _add_programs(values: Iterable[Value], programs: list[Any]) -> None:
    for value in values:
        if type(value) in _PLAIN:  # as most are, of which there are many
            continue
        if isinstance(value, (tuple, list)):
            if not _PLAIN.issuperset(map(type, value)):
                _add_programs(value, programs)
        elif isinstance(value, _compat.JAXPR_TYPES):
            programs.append(value)


_PLAIN = frozenset({int, bool, str, float, type(None), np.dtype, type(np.dtype(float))})


def with_inside(
    eqns: Iterable[Eqn], enters: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """Iterates over equations, and after each over those inside it, if `enters` says so of it."""
    for eqn in eqns:
        yield eqn
        if enters(eqn):
            for program in programs_inside(eqn):
                yield from with_inside(program.eqns, enters)


@dataclass(frozen=True, eq=False)
class Anywhere:
    """Answers whether `is_true` of an equation, or of one inside it; keeps the answers for
    programs.
    """

    is_true: Callable[[Any], bool]

    def in_equation(self, eqn: Eqn) -> bool:
        return self.is_true(eqn) or any(map(self.in_program, programs_inside(eqn)))

    def in_program(self, program: Any) -> bool:
        jaxpr = getattr(program, "jaxpr", program)
        find = lambda: any(map(self.in_equation, jaxpr.eqns))
        return _answers.get(self, find, owner=jaxpr)


_answers = Cache("what is true anywhere in programs", most=8192)
