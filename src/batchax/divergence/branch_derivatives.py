"""Derivatives of a branch that runs for the lanes that take it, in chunks.

A chunk loop computes each chunk again in its derivative. That is right where it takes longer to
write and read what a derivative needs than to compute it again. Of a sort, say, it does not: there
it is kept, of each lane that takes the branch, and what is left of the derivative is linear.

That is the choice of what to keep in reverse mode (Griewank and Walther, "Revolve", 2000), made
once for each branch: all of it, or nothing. Where neither surely pays, all lanes run, masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from batchax import _compat
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.axis import Position
from batchax.kernel.derivatives import with_values
from batchax.programs.dear_branches import time_to_move
from batchax.programs.shapes import bytes_of
from batchax.rules.masking import is_inexact

RunLanes = Callable[[ClosedJaxpr, Sequence[Position], Any, Sequence[Value]], list[Any]]
"""Runs a program for active lanes, of where operands have the batch axis, a mask, and operands."""

# How many times as long as to write and read it, it must take to compute what is kept.
_WORTH = 8.0


class Derivative(NamedTuple):
    """How a branch and its derivatives are run.

    Attributes:
      run: for the lanes that take it.
      masked: for all lanes.
      pays: whether derivatives are for those that take it, or it is decided while the program runs
        whether they are, by how many bytes they keep of a lane.
      work: nanoseconds that the branch takes for a lane.
    """

    run: RunLanes
    masked: RunLanes
    pays: Callable[[int], bool]
    work: float


def run_differentiable(
    way: Derivative,
    program: ClosedJaxpr,
    positions: Sequence[Position],
    active: Any,
    operands: Sequence[Value],
) -> list[Any]:
    """The results of a program for the lanes that are active, at the front.

    Of a function whose derivative in reverse is a rule nothing can be kept: there is no other.

    Args:
      way: how it is run.
      program: what one example does, without effects.
      positions: where operands have the batch axis.
      active: which lanes run it.
      operands: its operands.
    """
    run = way.run
    if only_in_reverse.in_program(program):
        return run(program, positions, active, operands)

    @jax.custom_jvp
    def branch(active: Any, *xs: Any) -> list[Any]:
        return run(program, positions, active, xs)

    @functools.partial(branch.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        active, *xs = primals
        moving = [i for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)]
        dots = [tangents[1 + i] for i in moving]
        kept = _kept(program, moving)
        pays = way.pays(0 if kept is None else bytes_of(kept.types))
        if kept is None or not pays or time_to_move(kept.types) * _WORTH > way.work:
            of_all = run if pays else way.masked
            some = lambda *ms: of_all(program, positions, active, with_values(xs, moving, ms))
            return jax.jvp(some, [xs[i] for i in moving], dots)
        outs = run(kept.forward, positions, active, xs)
        count = len(program.out_avals)
        outs, residuals = outs[:count], outs[count:]
        operands = [*(xs[i] for i in kept.reads), *residuals, *dots]
        at = [*(positions[i] for i in kept.reads), *[0] * len(residuals)]
        at += [positions[i] for i in moving]
        of_some = dict(zip(kept.of, run(kept.linear, at, active, operands), strict=True))
        none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return outs, [of_some[k] if k in of_some else none(x) for k, x in enumerate(outs)]

    return branch(active, *operands)


only_in_reverse = Anywhere(
    lambda eqn: eqn.primitive.name in ("custom_vjp_call", "custom_vjp_call_jaxpr")
)
"""Whether a program calls a function whose derivative is a rule for cotangents."""


class _Kept(NamedTuple):
    """A program, and its derivative as a program of what is kept.

    Attributes:
      forward: returns what the program does, and what is kept.
      linear: of operands that the derivative `reads`, what is kept, and tangents.
      reads: which operands of the program these are.
      types: of what is kept.
      of: the results that have tangents.
    """

    forward: ClosedJaxpr
    linear: ClosedJaxpr
    reads: Sequence[int]
    types: Sequence[Aval]
    of: Sequence[int]


def _kept(program: ClosedJaxpr, moving: Sequence[int]) -> _Kept | None:
    """A program in two parts; None if it has none, which has no derivative in reverse either.

    Of ``lax.reduce_window`` with a function JAX computes values and tangents together.
    """
    names = _compat.names_in_scope()
    of = [k for k, aval in enumerate(program.out_avals) if is_inexact(aval)]
    made: list[tuple[ClosedJaxpr, list[int]]] = []

    def forward(*xs: Any) -> list[Any]:
        def some(*ms: Any) -> tuple[list[Any], list[Any]]:
            outs = eval_jaxpr(program.jaxpr, program.consts, *with_values(xs, moving, ms))
            return [outs[k] for k in of], outs

        _, derivative, outs = jax.linearize(some, *(xs[i] for i in moving), has_aux=True)
        dots = [jax.typeof(xs[i]).to_tangent_aval() for i in moving]
        linear = _compat.stage(derivative, dots)
        residuals = [i for i, c in enumerate(linear.consts) if isinstance(c, Tracer)]
        given = [
            next((k for k, x in enumerate(xs) if x is linear.consts[i]), None) for i in residuals
        ]
        read = [(i, k) for i, k in zip(residuals, given, strict=True) if k is not None]
        computed = [i for i, k in zip(residuals, given, strict=True) if k is None]
        places, consts = [*(i for i, _ in read), *computed], linear.consts

        def of_kept(*ys: Any) -> list[Any]:
            held = with_values(consts, places, ys[: len(places)])
            return eval_jaxpr(linear.jaxpr, held, *ys[len(places) :])

        types = [*(jax.typeof(consts[i]) for i in places), *dots]
        made.append((_compat.stage(of_kept, types, names), [k for _, k in read]))
        return [*outs, *(consts[i] for i in computed)]

    try:
        whole = _compat.stage(forward, program.in_avals, names)
    except ValueError:  # of `jax.linearize`: the program itself was staged before
        return None
    ((linear, reads),) = made
    return _Kept(whole, linear, reads, whole.out_avals[len(program.out_avals) :], of)
