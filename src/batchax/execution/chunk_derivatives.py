"""Derivatives of the chunk loop, which are chunk loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.chunk_loop import (
    SUM,
    WHOLE,
    Body,
    Extreme,
    Lanes,
    Loop,
    Operand,
    PerChunk,
    Result,
    Sum,
    Whole,
    chunk_loop,
    chunk_loop_p,
)
from batchax.rules.pullback import reached


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop, program: Any) -> Any:
    outs = chunk_loop_p.bind(*primals, loop=loop, program=program)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    marked = [False, *(i in moving for i in range(len(primals)))]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    found = [
        k
        for k, (hit, zero) in enumerate(zip(reached(program.jaxpr, marked), zeros, strict=True))
        if hit and zero.aval.dtype != jax.dtypes.float0
    ]
    if not found:
        return outs, zeros
    _refuse_effects(program)

    extremes = [k for k in found if isinstance(loop.results[k], Extreme)]
    body = _tangent_body(loop, moving, found, extremes)
    result_kinds = tuple(SUM if k in extremes else loop.results[k] for k in found)
    operands = (*loop.operands, *(loop.operands[i] for i in moving), *[WHOLE] * len(extremes))
    tangent_loop = loop.derivative("tangents", body=body, operands=operands, results=result_kinds)
    best = [lax.stop_gradient(outs[k]) for k in extremes]
    found_tangents = dict(
        zip(
            found,
            chunk_loop(tangent_loop, [*primals, *(tangents[i] for i in moving), *best]),
            strict=True,
        )
    )
    # Lanes that share the largest value share its derivative, as in jnp.max.
    counts = _counts(loop, extremes, primals, best)
    for k, n in zip(extremes, counts, strict=True):
        t = found_tangents[k]
        found_tangents[k] = lax.div(t, lax.convert_element_type(n, t.dtype))
    return outs, [found_tangents.get(k, zero) for k, zero in enumerate(zeros)]


def _tangent_body(
    loop: Loop, moving: Sequence[int], found: Sequence[int], extremes: Sequence[int]
) -> Body:
    """The tangents `found` of one chunk, from operands, their tangents and extremes."""
    n = len(loop.operands)

    def of_width(width: int) -> Any:
        primal = loop.body.function(width)

        def run(start: Any, *xs: Any) -> list[Any]:
            primals, tangents, best = xs[:n], xs[n : n + len(moving)], xs[n + len(moving) :]

            def of_moving(*values: Any) -> list[Any]:
                full = list(primals)
                for i, x in zip(moving, values, strict=True):
                    full[i] = x
                outs = primal(start, *full)
                return [outs[k] for k in found]

            outs, dots = jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents))
            bests = dict(zip(extremes, best, strict=True))
            return [
                _of_extreme(loop.results[k], x, t, bests[k]) if k in bests else t
                for k, x, t in zip(found, outs, dots, strict=True)
            ]

        return run

    return Body(of_width, of=loop.body)


def _of_extreme(kind: Any, x: Any, tangent: Any, best: Any) -> Any:
    """Of a chunk: the summed tangents of the lanes that hold the extreme value."""
    hit = lax.eq(x, jnp.broadcast_to(jnp.expand_dims(best, kind.axis), x.shape))
    return jnp.sum(lax.select(hit, tangent, lax.full_like(tangent, 0)), axis=kind.axis)


def _counts(
    loop: Loop, extremes: Sequence[int], primals: Sequence[Any], best: Sequence[Any]
) -> list[Any]:
    """How many lanes hold the extreme value, for each of the results `extremes`."""
    if not extremes:
        return []
    n = len(loop.operands)

    def of_width(width: int) -> Any:
        primal = loop.body.function(width)

        def run(start: Any, *xs: Any) -> list[Any]:
            outs = primal(start, *xs[:n])
            counts = []
            for k, m in zip(extremes, xs[n:], strict=True):
                axis = loop.results[k].axis
                counts.append(jnp.sum(outs[k] == jnp.expand_dims(m, axis), axis, dtype=jnp.int32))
            return counts

        return run

    operands = (*loop.operands, *[WHOLE] * len(extremes))
    results = (SUM,) * len(extremes)
    counting = replace(loop, body=Body(of_width, of=loop.body), operands=operands, results=results)
    return chunk_loop(counting, [*map(lax.stop_gradient, primals), *best])


def _refuse_effects(program: Any) -> None:
    if _compat.ordered_by_lane(program.effects):
        raise UnsupportedError(
            "a function that does input or output (io_callback, ordered debug callbacks) is "
            "differentiated and runs in chunks: computing each chunk again in its derivative "
            'would do it twice. Pass residuals="keep" to vmap, or leave batch_size out.'
        )


def _transpose(cotangents: Sequence[Any], *operands: Any, loop: Loop, program: Any) -> list[Any]:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    if not given:
        return [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(operands)]
    others = [i for i in range(len(operands)) if i not in linear]
    avals = [operands[i].aval if i in linear else jax.typeof(x) for i, x in enumerate(operands)]

    def of_width(width: int) -> Any:
        forward = loop.body.function(width)
        types = loop.of_chunk(avals, width)

        def run(start: Any, *xs: Any) -> list[Any]:
            residuals, cts = xs[: len(others)], xs[len(others) :]

            def of_linear(*values: Any) -> list[Any]:
                full = dict(zip([*others, *linear], [*residuals, *values], strict=True))
                outs = forward(start, *(full[i] for i in range(len(operands))))
                return [outs[k] for k in given]

            pull = jax.linear_transpose(of_linear, *(types[i] for i in linear))
            return list(pull(list(cts)))

        return run

    kinds = (*(loop.operands[i] for i in others), *(_as_operand(loop.results[k]) for k in given))
    results = tuple(_as_result(loop.operands[i]) for i in linear)
    reverse = loop.derivative(
        "cotangents", body=Body(of_width, of=loop.body), operands=kinds, results=results
    )
    outs = chunk_loop(reverse, [*(operands[i] for i in others), *(cotangents[k] for k in given)])
    by_operand = dict(zip(linear, outs, strict=True))
    return [by_operand.get(i) for i in range(len(operands))]


def _as_operand(kind: Result) -> Operand:
    """The kind of the cotangent of a result."""
    assert isinstance(kind, (Lanes, PerChunk, Sum))
    return WHOLE if isinstance(kind, Sum) else kind


def _as_result(kind: Operand) -> Result:
    """The kind of the cotangent of an operand."""
    return SUM if isinstance(kind, Whole) else kind


ad.primitive_jvps[chunk_loop_p] = _jvp
ad.primitive_transposes[chunk_loop_p] = _transpose
