"""Derivatives of loops in which each lane is at a step of its own: those of one example, batched.

A flat loop is a ``while``, and has no derivative in reverse. That of one example may have one: a
``scan`` whose loops inside are bounded has. Its tangents are a nested loop again, and the way back
is one that goes forth and another that goes back. So lanes are at steps of their own in all. What
lanes share has a cotangent in each of them, before these are added up.

JAX hands on what a branch saves for its derivative as results of the ``cond``: the weights, too, of
which lanes would have copies at each step. Here the transpose of an expensive branch is one
``cond`` of the same operands, whose branches recompute theirs (Griewank and Walther, "Revolve",
2000). Lanes wait before it on the way back as before any other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.divergence.branches import only_in_reverse
from batchax.divergence.loops import as_weak_as
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.joined import copied, joined
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.differing import Differs, differing_in_steps, differing_through, differs_of
from batchax.kernel.inner import batch_inner, remembered
from batchax.kernel.interpreter import interpret
from batchax.kernel.own_primitive import Flat, pullback_of, tangents_of
from batchax.programs.cost import bytes_of
from batchax.rules.masking import is_inexact
from batchax.user_rules.own_derivatives import linear_with_transpose

# Whose derivatives are those of the program inside.
_CALLS = frozenset("scan call checkpoint closed_call core_call jit remat2".split())


def computed_again(program: ClosedJaxpr, differs: Differs) -> ClosedJaxpr:
    """`program`, in which each expensive branch is computed again where it is differentiated.

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


# The cotangents that each lane has of what all share may take so many times the bytes of what it
# has of its own.
_MOST_SHARED = 4


def tangents_of_lanes(
    axis: Axis,
    program: ClosedJaxpr,
    operands: Sequence[Value],
    positions: Sequence[Position],
    moving: Sequence[int],
    tangents: Sequence[Value],
) -> tuple[list[Any], list[Any]] | None:
    """The results of a program for all lanes, and their tangents; those of integers are None.

    All have the batch axis at the front. None if it has no transpose, or none but a rule of the
    user's; or if that would take too much memory.

    Args:
      axis: the axis of the lanes.
      program: what one example does.
      operands, positions: what it is applied to, and where each has the batch axis.
      moving: which operands have tangents.
      tangents: these, with batch axes as the operands have.
    """
    if only_in_reverse.in_program(program):
        return None
    both = _both_ways(program, positions, moving)
    if both is None or both.why_meeting:
        return None
    of, types = both.of, program.out_avals
    with recording.paused(axis):
        jaxpr, consts = both.keeping.jaxpr, both.keeping.consts
        outs, out_at = interpret(axis, jaxpr, consts, operands, positions)
    # What is kept follows the operands: the way forth needs none of it, and a compiler drops it.
    count, kept_at = len(operands), out_at[len(types) :]
    residuals = [*operands, *outs[len(types) :]]
    at = (*positions, *(positions[i] for i in moving))
    ahead, _ = batch_inner(axis, both.forward, at, [0] * len(of))

    def forward(given: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(ahead.jaxpr, ahead.consts, *given[:count], *dots)

    def back(given: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        at = [*kept_at, *[0] * len(of)]
        to = [positions[i] for i in moving]
        return both.cotangents(axis, [*given[count:], *cotangents], at, to)

    moved = linear_with_transpose(forward, back, residuals, tangents)
    dots = dict(zip(of, moved, strict=True))
    placed = zip(types, outs[: len(types)], out_at, strict=False)
    results = [as_weak_as(t, match_axis(axis, x, a, 0)) for t, x, a in placed]
    return results, [dots.get(k) for k in range(len(types))]


def why_meeting_back(program: ClosedJaxpr, positions: Sequence[Position]) -> str | None:
    """Why lanes meet at each step on the way back over a loop, if all is differentiated.

    Empty where they do not; None if there is no way back.
    """
    if only_in_reverse.in_program(program):
        return _RULE
    moving = [i for i, aval in enumerate(program.in_avals) if is_inexact(aval)]
    try:
        both = _both_ways(program, positions, moving)
    except Exception:  # of a rule of the user's: told where it is differentiated
        return None
    return None if both is None else both.why_meeting


_RULE = "a rule gives cotangents alone (jax.custom_vjp)"
_COPIED = "each would carry a sum of its own of what all share"


def _both_ways(
    program: ClosedJaxpr, positions: Sequence[Position], moving: Sequence[int]
) -> _Both | None:
    differs = tuple(a is not None for a in positions)
    key = ("both ways", tuple(moving), differs)
    return remembered(program, key, lambda: _Both.made(program, differs, moving))


@dataclass(frozen=True, eq=False)
class _Both:
    """The tangents of one example, and the way back.

    Attributes:
      forward: from all operands and tangents of some to tangents of the results.
      keeping: from all operands to the results, and then to what is kept for the way back.
      back: from what is kept and cotangents of the results to those of these operands.
      of: the results.
      own: bytes that a lane has of its own.
      copied: bytes of sums of what all lanes share that each would carry back.
    """

    forward: ClosedJaxpr
    keeping: ClosedJaxpr
    back: ClosedJaxpr
    of: Sequence[int]
    own: int
    copied: int

    @classmethod
    def made(cls, program: ClosedJaxpr, differs: Differs, moving: Sequence[int]) -> _Both | None:
        """Those of a program, and of operands that are `moving`; None without a transpose."""
        of = [k for k, aval in enumerate(program.out_avals) if is_inexact(aval)]
        count = len(program.in_avals)
        run = lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)
        expensive = computed_again(program, differs)
        again = lambda *xs: eval_jaxpr(expensive.jaxpr, expensive.consts, *xs)
        pulls: list[Any] = []

        def forward(*xs: Any) -> list[Any]:
            return tangents_of(run, xs[:count], moving, xs[count:], of)[1]

        def keeping(*xs: Any) -> list[Any]:
            outs, pull = pullback_of(again, xs, moving, of)
            kept, structure = jax.tree.flatten(pull)
            pulls[:] = [structure]
            return [*outs, *kept]

        def back(*xs: Any) -> list[Any]:
            n_kept = len(xs) - len(of)
            return list(pulls[0].unflatten(xs[:n_kept])(list(xs[n_kept:])))

        tangents, cotangents = (
            [aval.to_tangent_aval() for aval in avals]
            for avals in ((program.in_avals[i] for i in moving), (program.out_avals[k] for k in of))
        )
        try:
            ahead = _compat.stage(forward, [*program.in_avals, *tangents])
            first = _compat.stage(keeping, program.in_avals)
            kept = first.out_avals[len(program.out_avals) :]
            behind = _compat.stage(back, [*kept, *cotangents])
        except (ValueError, UnsupportedError):  # a loop without a bound: said where transposed
            return None
        own = bytes_of(aval for aval, d in zip(program.in_avals, differs, strict=True) if d)
        copied = bytes_of(program.in_avals[i] for i in moving if not differs[i])
        return cls(ahead, first, behind, of, own, copied)

    @property
    def why_meeting(self) -> str:
        """Why lanes meet at each step; empty if they do not."""
        return _COPIED if self.copied > _MOST_SHARED * self.own else ""

    def cotangents(
        self, axis: Axis, given: Sequence[Value], at: Sequence[Position], to: Sequence[Position]
    ) -> list[Any]:
        """The cotangents of all lanes; of what these share the sum.

        Args:
          axis: the axis of the lanes.
          given, at: what `back` is given, and where that has the batch axis.
          to: where operands have it, that have cotangents.
        """
        outs, out_at = interpret(axis, self.back.jaxpr, self.back.consts, given, at)
        results = []
        for x, x_at, a in zip(outs, out_at, to, strict=True):
            x = match_axis(axis, x, x_at, 0 if a is None else a)
            results.append(jnp.sum(x, 0) if a is None else x)
        return results
