"""Derivatives of a call that has a batching rule of the user's, which are such calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.own_primitive import tangents_of
from batchax.rules.batched_transpose import reached
from batchax.rules.masking import is_inexact
from batchax.user_rules.call import (
    Cotangents,
    DerivativeStep,
    MappedStep,
    Tangents,
    custom_call_p,
    per_example,
    result_types,
    without_effects,
)


def jvp(
    primals: Sequence[Value],
    tangents: Sequence[Value],
    *,
    jaxpr: ClosedJaxpr,
    steps: Any,
    rule: Any,
) -> tuple[Sequence[Any], list[Any]]:
    moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    types = result_types(jaxpr, steps)
    of = _differentiable(jaxpr, steps, moving, types)
    dots: list[Any] = [ad.Zero(aval.to_tangent_aval()) for aval in types]
    given = [_compat.varying_as(tangents[i], jax.typeof(primals[i])) for i in moving]
    if of and not any(isinstance(x, Tracer) for x in primals):
        # No axis can turn up any more over which these are batched.
        outs, found_dots = tangents_of(per_example(jaxpr, steps), primals, moving, given, of)
    else:
        whole, jaxpr = jaxpr, without_effects(jaxpr)  # they are had with the results
        _refuse_effects(jaxpr, of)
        call = dict(jaxpr=jaxpr, rule=rule)
        first = len(primals) - _count_linear(steps)
        # Before the results: a program that is batched has them of this call, too.
        if not of:
            found_dots = []
        elif all(i >= first for i in moving):  # what is linear is its own derivative
            linear = map(ad.instantiate_zeros, tangents[first:])
            found_dots = custom_call_p.bind(*primals[:first], *linear, steps=steps, **call)
            of = tuple(range(len(types)))
        else:
            further = (*steps, Tangents(moving, of))
            found_dots = custom_call_p.bind(*primals, *given, steps=further, **call)
        outs = custom_call_p.bind(*primals, steps=steps, jaxpr=whole, rule=rule)
    for k, dot in zip(of, found_dots, strict=True):
        dots[k] = dot
    return outs, dots


def _differentiable(
    jaxpr: ClosedJaxpr,
    steps: Sequence[DerivativeStep],
    moving: Sequence[int],
    types: Sequence[Aval],
) -> tuple[int, ...]:
    """Which results have a derivative with respect to the `moving` operands."""
    hits = [True] * len(types)
    if not steps:
        hits = reached(jaxpr.jaxpr, [i in moving for i in range(len(jaxpr.in_avals))])
    return tuple(
        k for k, (aval, hit) in enumerate(zip(types, hits, strict=True)) if hit and is_inexact(aval)
    )


def _count_linear(steps: Sequence[DerivativeStep]) -> int:
    """How many operands, the last ones, a call is linear in."""
    for step in reversed(steps):
        if not isinstance(step, MappedStep):
            return len(step.moving if isinstance(step, Tangents) else step.of)
    return 0


def _refuse_effects(jaxpr: ClosedJaxpr, of: Sequence[int]) -> None:
    if of and _compat.ordered_by_lane(jaxpr.effects):
        raise UnsupportedError(
            "a function with a batching rule is differentiated whose results depend on input or "
            "output (io_callback, or ordered callbacks in a loop or branch): its derivative "
            "computes the results again, which would do that twice. Do it outside of the "
            "function, or give the function a derivative with def_jvp or def_vjp."
        )


def transpose(
    cotangents: Sequence[Value], *operands: Any, jaxpr: ClosedJaxpr, steps: Any, rule: Any
) -> list[Any]:
    linear = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    of = tuple(k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    results: list[Value] = [None] * len(operands)
    if not of:
        for i in linear:
            results[i] = ad.Zero(operands[i].aval)
        return results
    types = tuple(operands[i].aval for i in linear)
    others = [x for i, x in enumerate(operands) if i not in linear]
    further = (*steps, Cotangents(linear, types, of))
    given = [cotangents[k] for k in of]
    outs = custom_call_p.bind(*others, *given, jaxpr=jaxpr, steps=further, rule=rule)
    for i, ct in zip(linear, outs, strict=True):
        results[i] = ct
    return results
