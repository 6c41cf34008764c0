"""What the way back over a scan computes again: that takes less than to keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from jax.extend.core import Literal

from batchax.jaxprs.evaluate import plan, variables_in, variables_read
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn, Jaxpr
from batchax.programs.cost import cost_of_equation

_FEW = 8
"""Operations that take less than to write an element and to read it again."""


class MadeAgain:
    """What of a program is computed again, from values that are kept anyway.

    Args:
      jaxpr: the program.
      places: of the values that are kept, where; more may be added.
    """

    def __init__(self, jaxpr: Jaxpr, places: Mapping[Any, Any]) -> None:
        self._jaxpr, self._places = jaxpr, places
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def makes(self, v: Any) -> bool:
        """Whether that takes so little that a value need not be kept, or it is kept already."""
        return self._left(v, _FEW) >= 0

    def _left(self, v: Any, left: float) -> float:
        """Of so many operations for each element those left once it is made; negative: too few.

        What is read twice counts twice, as nobody may look on for longer than there are some left.
        """
        if isinstance(v, Literal) or v in self._places:
            return left
        eqn = self._made_by.get(v)
        if eqn is None or not facts_of(eqn.primitive).elementwise:
            return -inf
        if cost_of_equation(eqn).transcendentals:
            return -inf
        left -= 1
        for x in eqn.invars:
            left = self._left(x, left) if left >= 0 else left
        return left

    def program(self, outvars: Sequence[Any]) -> Any:
        """From what is kept to all that is needed."""
        made = [v for v in variables_in(outvars) if v not in self._places]
        steps = plan(self._jaxpr.eqns, made, lambda _: False, self._not_kept)
        eqns = [step.eqn for step in steps]
        read = variables_in([*outvars, *(v for eqn in eqns for v in eqn.invars)])
        invars = [v for v in dict.fromkeys(read) if v in self._places]
        return self._jaxpr.replace(
            constvars=[], invars=invars, eqns=eqns, outvars=list(outvars), effects=set()
        )

    def _not_kept(self, eqn: Eqn) -> list[Any]:
        return [v for v in variables_read(eqn) if v not in self._places]
