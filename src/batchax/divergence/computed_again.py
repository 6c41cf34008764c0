"""Dear branches of one example that keep their operands alone for the way back.

JAX hands on what a branch keeps for its derivative as results of the ``cond``: the weights, too, of
which lanes would have copies at each step. Here the transpose of a dear branch is one ``cond`` of
the same operands, whose branches compute theirs again (Griewank and Walther, "Revolve", 2000). It
is a dear branch as any other: lanes wait before it on the way back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.joined import copied, joined
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.derivatives import Flat, pullback_of, tangents_of
from batchax.kernel.differing import Differs, differing_in_steps, differing_through, differs_of
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

# Whose derivatives are those of the program inside.
_CALLS = frozenset("scan call checkpoint closed_call core_call jit remat2".split())


def computed_again(program: ClosedJaxpr, differs: Differs) -> ClosedJaxpr:
    """`program`, in which each dear branch is computed again where it is differentiated.

    Args:
      program: what one example does.
      differs: which of its operands differ between lanes.
    """
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.invars, differs, strict=True))
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    eqns = list(_equations(jaxpr, env, constants))
    return joined(jaxpr, jaxpr.invars, eqns, jaxpr.outvars, constants)


def _equations(jaxpr: Jaxpr, env: dict[Any, bool], constants: dict[Any, Any]) -> Iterator[Any]:
    for eqn, of_equation in differing_through(jaxpr, env):
        operands = differs_of(env, eqn.invars)
        if not of_equation.parts:
            yield eqn
        elif eqn.primitive is cond_p:
            yield from _again(eqn, constants)
        elif eqn.primitive is bounded_loop_p:
            yield _bounded(eqn, operands)
        elif eqn.primitive.name in _CALLS:
            (body,) = bodies_of(eqn)
            yield _with_body(eqn, body, [operands[k] for k in body.operands])
        else:
            yield eqn


def _with_body(eqn: Eqn, body: Body, given: Sequence[bool]) -> Any:
    carry = differing_in_steps(body.jaxpr, body.same, body.carried, tuple(given)).results
    last = body.same + body.carried
    given = (*given[: body.same], *carry[: body.carried], *given[last:])
    program: Any = computed_again(_compat.close(body.program), given)
    if not isinstance(body.program, ClosedJaxpr):
        program = program.jaxpr
    held = {k: program for k, x in eqn.params.items() if x is body.program}
    return eqn.replace(params={**eqn.params, **held})


def _bounded(eqn: Eqn, operands: Differs) -> Any:
    """A bounded loop; what is differentiated in the place of its body computes again."""
    form = eqn.params["form"]
    at = form.split(operands)
    given = (*at.consts, *[True] * form.n_carry, *at.xs)  # which lanes leave at their own step
    guarded = computed_again(eqn.params["guarded"], given)
    return eqn.replace(params={**eqn.params, "guarded": guarded})


def _again(eqn: Eqn, constants: dict[Any, Any]) -> list[Any]:
    """What a ``cond`` does, with a derivative that computes the branch taken again."""
    params = eqn.params
    run = _with_derivative(lambda *xs: cond_p.bind(*xs, **params), params["branches"])
    program = _compat.stage(run, [v.aval for v in eqn.invars])
    eqns, outs = copied(program, eqn.invars, constants)
    names = dict(zip(outs, eqn.outvars, strict=True))
    return [e.replace(outvars=[names.get(v, v) for v in e.outvars]) for e in eqns]


def _with_derivative(cond: Flat, branches: Sequence[ClosedJaxpr]) -> Flat:
    of = [k for k, aval in enumerate(branches[0].out_avals) if is_inexact(aval)]

    @jax.custom_jvp
    def run(*xs: Any) -> list[Any]:
        return cond(*xs)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def forward(xs: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
            return tangents_of(cond, xs, moving, dots, of)[1]

        def back(xs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            types = list(map(jax.typeof, [*xs[1:], *cotangents]))
            ways = [_way_back(branch, types, [i - 1 for i in moving], of) for branch in branches]
            return cond_p.bind(xs[0], *xs[1:], *cotangents, branches=tuple(ways))

        outs = run(*primals)
        dots = linear_with_transpose(forward, back, primals, [tangents[i] for i in moving])
        moved = dict(zip(of, dots, strict=True))
        none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return outs, [moved[k] if k in moved else none(x) for k, x in enumerate(outs)]

    return run


def _way_back(
    branch: ClosedJaxpr, types: Sequence[Aval], moving: Sequence[int], of: Sequence[int]
) -> ClosedJaxpr:
    """From operands of a branch and cotangents of its results to those of `moving` operands."""
    count = len(types) - len(of)
    run = lambda *xs: eval_jaxpr(branch.jaxpr, branch.consts, *xs)

    def back(*xs: Any) -> list[Any]:
        return list(pullback_of(run, xs[:count], moving, of)[1](list(xs[count:])))

    return _compat.stage(back, types)
