"""The program of the class that a block of rows is in: one of several, which do the same.

A derivative of `lax.switch` in reverse is two of them, and the first hands on what any of its
branches keeps for the second: zeros from all but one. Where a block is computed again in reverse
(see `execution/chunk_loop.py`) nothing has to be handed on. So this is a primitive whose
derivatives are switches between those of its programs: they compile in half of the time, and run in
two thirds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive, tangents_of, transposed, with_values
from batchax.rules.masking import is_inexact


def class_switch(
    number: Value, programs: Sequence[ClosedJaxpr], operands: Sequence[Value]
) -> list[Any]:
    """What one of `programs` returns, which take and return the same types.

    Args:
      number: which one, clipped to those that there are.
      programs: of each class.
      operands: of the program.
    """
    programs, consts = _compat.hoist_constants(*programs)
    operands = _compat.varying_alike([number, *consts, *operands])
    return class_switch_p.bind(*operands, programs=tuple(programs))


def _run(program: ClosedJaxpr, *operands: Any) -> list[Any]:
    return eval_jaxpr(program.jaxpr, program.consts, *operands)


def _operations(number: Any, *operands: Any, programs: Sequence[ClosedJaxpr]) -> list[Any]:
    return lax.switch(number, [functools.partial(_run, p) for p in programs], *operands)


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, programs: Any) -> Any:
    number, *xs = primals
    outs = class_switch_p.bind(*primals, programs=programs)
    moving = [i for i, t in enumerate(tangents[1:]) if type(t) is not ad.Zero]
    smooth = [k for k, x in enumerate(outs) if is_inexact(x)]
    dots: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    if not moving or not smooth:
        return outs, dots
    given = [tangents[i + 1] for i in moving]

    def of_program(program: ClosedJaxpr) -> ClosedJaxpr:
        def run(*xs: Any) -> list[Any]:
            points, dots = xs[: -len(given)], xs[-len(given) :]
            return tangents_of(functools.partial(_run, program), points, moving, dots, smooth)[1]

        return _compat.stage(run, list(map(jax.typeof, [*xs, *given])))

    moved = class_switch(number, list(map(of_program, programs)), [*xs, *given])
    for k, dot in zip(smooth, moved, strict=True):
        dots[k] = dot
    return outs, dots


def _transpose(cotangents: Any, number: Any, *operands: Any, programs: Any) -> list[Any]:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    nothing: list[Any] = [None] * (1 + len(operands))
    places = [i + 1 for i in linear]
    if not given:
        return with_values(nothing, places, [ad.Zero(operands[i].aval) for i in linear])
    others = [x for x in operands if not ad.is_undefined_primal(x)]
    of_linear, cts = [operands[i].aval for i in linear], [cotangents[k] for k in given]

    def of_program(program: ClosedJaxpr) -> ClosedJaxpr:
        def run(*xs: Any) -> list[Any]:
            residuals, cts = xs[: len(others)], xs[len(others) :]
            forward = functools.partial(_run, program)
            return transposed(forward, residuals, linear, of_linear, given)(cts)

        return _compat.stage(run, list(map(jax.typeof, [*others, *cts])))

    outs = class_switch(number, list(map(of_program, programs)), [*others, *cts])
    return with_values(nothing, places, outs)


def _types(*avals: Aval, programs: Sequence[ClosedJaxpr]) -> list[Any]:
    return list(programs[0].out_avals)


def _batched(
    axis: Axis, args: Any, axes: Any, /, *, programs: Any
) -> tuple[Any, Sequence[Position]]:
    return batch_function(axis, functools.partial(_operations, programs=programs), args, axes)


class_switch_p = own_primitive(
    "class_switch",
    called="rows in size classes",
    operations=_operations,
    types=_types,
    programs=("programs",),
    facts="",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
)
