"""Derivatives of loops in which each lane is at a place of its own: those of one example, batched.

A flat loop is a ``while``, and has no derivative in reverse. That of one example may have one: a
``scan`` whose loops inside are bounded has. Its tangents are a loop of loops again, and the way
back is one that goes forth and another that goes back. So lanes are at places of their own in all.

On the way back dear branches are computed again (`computed_again.py`).

What lanes share has a cotangent in each of them, before these are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.divergence.branch_derivatives import only_in_reverse
from batchax.divergence.computed_again import computed_again
from batchax.divergence.loops import as_weak_as
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.derivatives import pullback_of, tangents_of
from batchax.kernel.differing import Differs
from batchax.kernel.inner import batch_inner, remembered
from batchax.kernel.interpreter import interpret
from batchax.programs.shapes import bytes_of
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

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
        dear = computed_again(program, differs)
        again = lambda *xs: eval_jaxpr(dear.jaxpr, dear.consts, *xs)
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
