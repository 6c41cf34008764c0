"""Which equations of a loop's body take one entry of an array, or put one, along its first axis.

A lane at a step of its own has that entry alone moved, and not the array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import dynamic_slice_p, dynamic_update_slice_p

from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn


@dataclass(frozen=True, eq=False)
class Entries:
    """Those of one body.

    Attributes:
      arrays: its constants that each lane has its own of.
      zeros: variables that are zero, cast to vary over the axes of a mesh.
    """

    arrays: frozenset[Any]
    zeros: frozenset[Any]

    @classmethod
    def of(cls, body: ClosedJaxpr, n_consts: int, apart: Mapping[Any, bool]) -> Entries:
        """Those of a body, of which so many inputs are constants, by what differs between lanes."""
        jaxpr = body.jaxpr
        casts = [eqn for eqn in jaxpr.eqns if facts_of(eqn.primitive).cast]
        zeros = (
            eqn.outvars[0]
            for eqn in casts
            if isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0
        )
        return cls(frozenset(v for v in jaxpr.invars[:n_consts] if apart[v]), frozenset(zeros))

    def taken(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        """Those that take an entry, at an index that is not made of other entries."""
        takes: list[Eqn] = []
        for eqn in filter(self._is_taken, eqns):
            if not any(step.eqn in takes for step in plan(eqns, eqn.invars[1:2])):
                takes.append(eqn)
        return takes

    def _is_taken(self, eqn: Eqn) -> bool:
        if eqn.primitive is not dynamic_slice_p or isinstance(eqn.invars[0], Literal):
            return False
        operand, _, *others = eqn.invars
        whole = eqn.params["slice_sizes"] == (1, *operand.aval.shape[1:])
        return whole and operand in self.arrays and all(map(self._is_zero, others))

    def is_put(self, eqn: Eqn) -> bool:
        """Whether an equation puts an entry into an array."""
        if eqn.primitive is not dynamic_update_slice_p or isinstance(eqn.invars[0], Literal):
            return False
        operand, update, _, *others = eqn.invars
        whole = update.aval.shape == (1, *operand.aval.shape[1:])
        return whole and all(map(self._is_zero, others))

    def _is_zero(self, v: Any) -> bool:
        return v.val == 0 if isinstance(v, Literal) else v in self.zeros
