"""Derivatives of loops in which each lane is at a place of its own: those of one example, batched.

A flat loop is a ``while``, and has no derivative in reverse. That of one example may have one: a
``scan`` whose loops inside are bounded has. Its tangents are a loop of loops again, and the way
back is one that goes forth and another that goes back. So lanes are at places of their own in all.

On the way back dear branches are computed again (`computed_again.py`).

What lanes share has a cotangent in each of them, before these are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr

from batchax import _compat
from batchax.divergence.branch_derivatives import only_in_reverse
from batchax.divergence.computed_again import computed_again
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.derivatives import pullback_of, tangents_of
from batchax.kernel.differing import Differs
from batchax.kernel.inner import batch_inner, remembered
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
) -> list[Any] | None:
    """The tangents of a program for all lanes, at the front; those of integers are None.

    None if it has no transpose, or none but a rule of the user's; or if that would take too much
    memory.

    Args:
      axis: the axis of the lanes.
      program: what one example does.
      operands, positions: what it is applied to, and where each has the batch axis.
      moving: which operands have tangents.
      tangents: these, with batch axes as the operands have.
    """
    of_lane = [i for i, a in enumerate(positions) if a is not None]
    shared = [i for i in moving if positions[i] is None]
    own, copied = (bytes_of(program.in_avals[i] for i in some) for some in (of_lane, shared))
    if copied > _MOST_SHARED * own or only_in_reverse.in_program(program):
        return None
    moving = tuple(moving)
    of = tuple(k for k, aval in enumerate(program.out_avals) if is_inexact(aval))
    key = ("tangents", moving, of)
    differs = tuple(a is not None for a in positions)
    linear = remembered(program, (*key, differs), lambda: _linear(program, differs, moving, of))
    if linear is None:
        return None
    at = (*positions, *(positions[i] for i in moving))
    batched, _ = batch_inner(axis, linear, at, [0] * len(of))
    outs = eval_jaxpr(batched.jaxpr, batched.consts, *operands, *tangents)
    dots = dict(zip(of, outs, strict=True))
    return [dots.get(k) for k in range(len(program.out_avals))]


def _linear(
    program: ClosedJaxpr, differs: Differs, moving: Sequence[int], of: Sequence[int]
) -> ClosedJaxpr | None:
    """The tangents of the results `of`, from all operands and tangents of those that are `moving`.

    None if they have no transpose.
    """
    count = len(program.in_avals)
    run = lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)
    kept = computed_again(program, differs)
    again = lambda *xs: eval_jaxpr(kept.jaxpr, kept.consts, *xs)

    def forward(primals: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        return tangents_of(run, primals, moving, dots, of)[1]

    def back(primals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return list(pullback_of(again, primals, moving, of)[1](list(cotangents)))

    def both(*xs: Any) -> list[Any]:
        return linear_with_transpose(forward, back, xs[:count], xs[count:])

    types = [program.in_avals[i].to_tangent_aval() for i in moving]
    try:
        return _compat.stage(both, [*program.in_avals, *types])
    except (ValueError, UnsupportedError):  # a loop without a bound: said where it is transposed
        return None
