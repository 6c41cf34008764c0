"""A dear branch of one example as a ``while`` of at most one step, which a lane may wait before.

What the other branches return is computed first, by the same ``cond``, whose dear branches do
nothing. A lane that takes one of these takes the step; for all others the loop is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import DropVar, Literal
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.execution.buffers import blank
from batchax.jaxprs.evaluate import variables_read
from batchax.jaxprs.joined import copied, fresh, joined
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.inner import remembered, stage_function
from batchax.programs.marks import without_branches

TODO = jax.typeof(np.False_)


class DearBranch(NamedTuple):
    """A branch that is a ``while``: of this ``cond``, this one; and all of it that are."""

    eqn: Eqn
    number: int
    dear: tuple[int, ...]


def opened_branches(
    axis: Axis,
    eqn: Eqn,
    dear: Sequence[int],
    constants: dict[Any, Any],
    places: dict[Any, DearBranch],
) -> list[Any]:
    """The equations that do what a ``cond`` of one example does.

    Args:
      axis: the axis of the lanes.
      eqn: the equation.
      dear: which of its branches are to be loops.
      constants: the values of constants of these equations join it.
      places: the loops join it, each by the first variable that it returns.
    """
    index, *operands = [*eqn.invars]
    branches = eqn.params["branches"]
    made = {d: _made(branches[d], eqn.outvars) for d in dear}
    dear = [d for d in dear if made[d]]  # of others nobody reads anything
    made = {d: made[d] for d in dear}
    others = [
        _doing_nothing(axis, branches, d, made) if d in made else b for d, b in enumerate(branches)
    ]
    results = {
        k: fresh(v.aval) for k, v in enumerate(eqn.outvars) if any(k in m for m in made.values())
    }
    first = eqn.replace(
        outvars=[results.get(k, v) for k, v in enumerate(eqn.outvars)],
        params={**eqn.params, "branches": tuple(others)},
    )
    eqns = [without_branches(first, dear)]
    for d in dear:
        asked = remembered(
            branches[d], ("is taken", d, index.aval), lambda: _is_taken(axis, d, index.aval)
        )
        more, (todo,) = copied(asked, [index], constants)
        test, body, used = _while_of_branch(branches[d], made[d])
        last = {k: all(k not in made[e] for e in dear if e > d) for k in made[d]}
        after = {k: eqn.outvars[k] if last[k] else fresh(eqn.outvars[k].aval) for k in made[d]}
        taken = fresh(TODO)
        loop = eqn.replace(
            primitive=while_p,
            invars=[*(operands[k] for k in used), todo, *(results[k] for k in made[d])],
            outvars=[taken, *after.values()],
            params={
                "cond_nconsts": 0,
                "cond_jaxpr": test,
                "body_nconsts": len(used),
                "body_jaxpr": body,
            },
            effects=body.effects,
        )
        results.update(after)
        places[taken] = DearBranch(eqn, d, tuple(dear))
        eqns += [*more, loop]
    return eqns


def _made(branch: ClosedJaxpr, results: Sequence[Any]) -> tuple[int, ...]:
    """Which results a branch computes, of those that anybody reads: others it hands on."""
    computed = {v for eqn in branch.jaxpr.eqns for v in eqn.outvars}
    outs = zip(branch.jaxpr.outvars, results, strict=True)
    return tuple(
        k
        for k, (v, result) in enumerate(outs)
        if not isinstance(v, Literal) and v in computed and not isinstance(result, DropVar)
    )


def _doing_nothing(
    axis: Axis,
    branches: Sequence[ClosedJaxpr],
    number: int,
    made: dict[int, tuple[int, ...]],
) -> ClosedJaxpr:
    """A branch that hands on what that one hands on, and returns anything for what it computes."""
    branch = branches[number]
    others = tuple(b.jaxpr for i, b in enumerate(branches) if i not in made)

    def build() -> ClosedJaxpr:
        jaxpr = branch.jaxpr
        constants = dict(zip(jaxpr.constvars, branch.consts, strict=True))
        computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        eqns, outs = [], []
        for k, v in enumerate(jaxpr.outvars):
            if not isinstance(v, Literal) and v in computed:
                more, v = _anything(axis, jaxpr, others, k, constants)
                eqns += more
            outs.append(v)
        return joined(jaxpr, jaxpr.invars, eqns, outs, constants)

    return remembered(branch, ("doing nothing", axis, others), build)


def _anything(
    axis: Axis, jaxpr: Jaxpr, others: Sequence[Jaxpr], k: int, constants: dict[Any, Any]
) -> tuple[list[Any], Any]:
    """What may be returned as result `k`: what another branch hands on, so that all agree."""
    for other in others:
        if isinstance(other.outvars[k], Literal):
            return [], other.outvars[k]
        if other.outvars[k] in other.invars:
            return [], jaxpr.invars[other.invars.index(other.outvars[k])]
    aval = jaxpr.outvars[k].aval
    made = stage_function(axis, lambda: [_compat.varying_as(blank(aval, k), aval)], [])
    eqns, (v,) = copied(made, [], constants)
    return eqns, v


def _is_taken(axis: Axis, number: int, index: Any) -> ClosedJaxpr:
    return stage_function(axis, lambda i: [lax.eq(i, np.asarray(number, i.dtype))], [index])


def _while_of_branch(
    branch: ClosedJaxpr, made: Sequence[int]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[int]]:
    """The predicate and the body of the loop, and which operands of the branch are its constants.

    It carries whether the step is still to be taken, and the results that are `made`.
    """

    def build() -> tuple[ClosedJaxpr, ClosedJaxpr, list[int]]:
        jaxpr = branch.jaxpr
        read = {v for eqn in jaxpr.eqns for v in variables_read(eqn)}
        used = [k for k, v in enumerate(jaxpr.invars) if v in read]
        constants = dict(zip(jaxpr.constvars, branch.consts, strict=True))
        outs = [jaxpr.outvars[k] for k in made]
        carry = [fresh(TODO), *(fresh(v.aval) for v in outs)]
        inputs = [*(jaxpr.invars[k] for k in used), *carry]
        body = joined(jaxpr, inputs, jaxpr.eqns, [Literal(np.False_, TODO), *outs], constants)
        carry = [fresh(v.aval) for v in carry]
        return joined(jaxpr, carry, [], carry[:1], {}), body, used

    return remembered(branch, ("as while", tuple(made)), build)
