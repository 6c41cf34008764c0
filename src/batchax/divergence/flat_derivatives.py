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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.divergence.branches import only_in_reverse
from batchax.divergence.loops import as_weak_as
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.rewriter import Rewriter
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.differing import Differs, differing_in_steps, differing_through, differs_of
from batchax.kernel.inner import batch_inner, remembered
from batchax.kernel.interpreter import interpret
from batchax.kernel.own_primitive import (
    Flat,
    Linearized,
    tangents_of,
    with_tangent_rule,
    with_values,
)
from batchax.programs.cost import bytes_of
from batchax.rules.masking import is_inexact
from batchax.user_rules.own_derivatives import linear_with_transpose

# Whose derivatives are those of the program inside.
_CALLS = frozenset("scan call checkpoint closed_call core_call jit remat2".split())


def computed_again(program: ClosedJaxpr, differs: Differs) -> ClosedJaxpr:
    """`program`, in which each expensive branch is recomputed where it is differentiated.

    Args:
      program: what one example does.
      differs: which of its operands differ between lanes.
    """
    to, jaxpr = Rewriter(program), program.jaxpr
    env = dict(zip(jaxpr.invars, differs, strict=True))
    for eqn, of_equation in differing_through(jaxpr, env):
        operands = differs_of(env, eqn.invars)
        if of_equation.parts and eqn.primitive is cond_p:
            to.replace(eqn, _again(eqn))
            continue
        if of_equation.parts and eqn.primitive is bounded_loop_p:
            eqn = _bounded(eqn, operands)
        elif of_equation.parts and eqn.primitive.name in _CALLS:
            (body,) = bodies_of(eqn)
            eqn = _with_body(eqn, body, [operands[k] for k in body.operands])
        to.eqns.append(to.own(eqn))
    return to.program()


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
    """A bounded loop; what is differentiated in the place of its body recomputes."""
    form = eqn.params["form"]
    at = form.split(operands)
    given = (*at.consts, *[True] * form.n_carry, *at.xs)  # which lanes leave at their own step
    guarded = computed_again(eqn.params["guarded"], given)
    return eqn.replace(params={**eqn.params, "guarded": guarded})


def _again(eqn: Eqn) -> ClosedJaxpr:
    """What a ``cond`` does, with a derivative that computes the branch taken again."""
    params = eqn.params
    run = _recomputed(lambda *xs: cond_p.bind(*xs, **params), params["branches"])
    return _compat.stage(run, [v.aval for v in eqn.invars])


def _recomputed(cond: Flat, branches: Sequence[ClosedJaxpr]) -> Flat:
    of = [k for k, aval in enumerate(branches[0].out_avals) if is_inexact(aval)]

    def rule(
        primals: Sequence[Value], moving: Sequence[int], dots: Sequence[Value]
    ) -> tuple[list[Any], list[Any]]:
        def forward(xs: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
            return tangents_of(cond, xs, moving, dots, of)[1]

        def back(xs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            inner = [i - 1 for i in moving]
            ways = [Linearized.of(b, inner, of, saved="nothing").transpose() for b in branches]
            return cond_p.bind(*xs, *cotangents, branches=tuple(ways))

        moved = linear_with_transpose(forward, back, primals, dots)
        outs = run(*primals)
        return outs, with_values([None] * len(outs), of, moved)

    run = with_tangent_rule(cond, rule)
    return run


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
    of, types, reads = both.of, program.out_avals, both.saving.reads
    with recording.paused(axis):
        jaxpr, consts = both.saving.values.jaxpr, both.saving.values.consts
        outs, out_at = interpret(axis, jaxpr, consts, operands, positions)
    # Residuals follow the operands: the way forth needs none of them, and a compiler drops them.
    count, saved_at = len(operands), [*(positions[i] for i in reads), *out_at[len(types) :]]
    residuals = [*operands, *outs[len(types) :]]
    at = (*positions, *(positions[i] for i in moving))
    ahead, _ = batch_inner(axis, both.forward, at, [0] * len(of))

    def forward(given: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(ahead.jaxpr, ahead.consts, *given[:count], *dots)

    def back(given: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        at = [*saved_at, *[0] * len(of)]
        to = [positions[i] for i in moving]
        saved = [*(given[i] for i in reads), *given[count:]]
        return both.cotangents(axis, [*saved, *cotangents], at, to)

    moved = linear_with_transpose(forward, back, residuals, tangents)
    dots = with_values([None] * len(types), of, moved)
    placed = zip(types, outs[: len(types)], out_at, strict=False)
    results = [as_weak_as(t, match_axis(axis, x, a, 0)) for t, x, a in placed]
    return results, dots


def why_meeting_back(program: ClosedJaxpr, positions: Sequence[Position]) -> str | None:
    """Why lanes meet at each step on the way back over a loop, if all is differentiated.

    Empty where they do not; None if there is no way back.
    """
    if only_in_reverse.in_program(program):
        return _RULE
    moving = [i for i, aval in enumerate(program.in_avals) if is_inexact(aval)]
    try:
        both = _both_ways(program, positions, moving)
    except Exception:  # of a rule of the user: told where it is differentiated
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
      saving: the program, in which expensive branches are recomputed, and its derivative.
      back: the transpose of this derivative.
      of: the results.
      own: bytes that a lane has of its own.
      copied: bytes of sums of what all lanes share that each would carry back.
    """

    forward: ClosedJaxpr
    saving: Linearized
    back: ClosedJaxpr
    of: Sequence[int]
    own: int
    copied: int

    @classmethod
    def made(cls, program: ClosedJaxpr, differs: Differs, moving: Sequence[int]) -> _Both | None:
        """Those of a program, and of operands that are `moving`; None without a transpose."""
        of = [k for k, aval in enumerate(program.out_avals) if is_inexact(aval)]
        try:
            ahead = Linearized.of(program, moving, of, saved="nothing").tangents
            saving = Linearized.of(computed_again(program, differs), moving, of)
            behind = saving.transpose()
        except (ValueError, UnsupportedError):  # a loop without a bound: said where transposed
            return None
        own = bytes_of(aval for aval, d in zip(program.in_avals, differs, strict=True) if d)
        copied = bytes_of(program.in_avals[i] for i in moving if not differs[i])
        return cls(ahead, saving, behind, of, own, copied)

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
