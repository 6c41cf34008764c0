"""How the body of a loop is opened, so that all where lanes may wait are loops in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax import _compat
from batchax.divergence.branch_as_while import DearBranch, opened_branches
from batchax.divergence.scan_as_while import opened_scan
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.joined import called, copy_of, joined, named_inputs, renamed
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.differing import Differs, differing_in, differs_of
from batchax.kernel.unvmap import asked_of_each_lane
from batchax.kernel.written_out import written_out
from batchax.programs.dear_branches import dear_branches


def opened_places(
    axis: Axis, program: ClosedJaxpr, differs: Differs, places: dict[Any, DearBranch]
) -> ClosedJaxpr:
    """`program` with each call that holds such a loop replaced by what it calls.

    And with each ``scan`` that holds one, and each dear branch, replaced by a ``while``; those of
    branches join `places`.
    """
    jaxpr = program.jaxpr
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    apart = dict(zip(jaxpr.invars, differs, strict=True))
    opening = _Opening(axis, apart, {}, constants, places, renamed)
    eqns = list(opening.equations(jaxpr))
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return program
    outputs = [called(v, opening.names) for v in jaxpr.outvars]
    return joined(jaxpr, jaxpr.invars, eqns, outputs, constants)


@dataclass(frozen=True, eq=False)
class _Opening:
    """How a program is opened that is, or becomes, a part of another.

    Attributes:
      axis: the axis of the lanes.
      apart: which of its variables differ between lanes: its inputs, and then all.
      names: what its variables are called in the other program.
      constants: the values of constants of that, which more join.
      places: the loops that are dear branches, by the first variable that each returns.
      own: makes of an equation, with `names`, one that is in the program once.
    """

    axis: Axis
    apart: dict[Any, bool]
    names: dict[Any, Any]
    constants: dict[Any, Any]
    places: dict[Any, DearBranch]
    own: Callable[[Eqn, dict[Any, Any]], Any]

    def equations(self, jaxpr: Jaxpr) -> Iterator[Any]:
        """Its equations, opened."""
        for step in plan(jaxpr.eqns, jaxpr.outvars):
            eqn = step.eqn
            of_operands = differs_of(self.apart, eqn.invars)
            of_results = differing_in(eqn, of_operands)
            self.apart.update(zip(eqn.outvars, of_results.results, strict=True))
            if eqn.primitive is while_p:
                yield self._asked_of_each(self.own(eqn, self.names))
            elif not of_results.parts:
                yield self.own(eqn, self.names)
            elif eqn.primitive is scan_p:
                yield from opened_scan(self.axis, self.own(eqn, self.names), self.constants)
            elif eqn.primitive is cond_p:
                dear, own = dear_branches(eqn, of_operands), self.own(eqn, self.names)
                yield from opened_branches(self.axis, own, dear, self.constants, self.places)
            else:
                yield from self._called(eqn, of_operands)

    def _asked_of_each(self, eqn: Eqn) -> Any:
        test = asked_of_each_lane(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
        if test is eqn.params["cond_jaxpr"]:
            return eqn
        return eqn.replace(params={**eqn.params, "cond_jaxpr": test})

    def _called(self, eqn: Eqn, differs: Differs) -> Iterator[Any]:
        inner = written_out(eqn) or _compat.close(bodies_of(eqn)[0].program)
        names = named_inputs(inner, [called(v, self.names) for v in eqn.invars], self.constants)
        apart = dict(zip(inner.jaxpr.invars, differs, strict=True))
        inside = _Opening(self.axis, apart, names, self.constants, self.places, copy_of)
        yield from inside.equations(inner.jaxpr)
        results = [called(v, names) for v in inner.jaxpr.outvars]
        self.names.update(zip(eqn.outvars, results, strict=True))
