"""Derivatives of the chunk loop, which are chunk loops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import unmapped_aval
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.chunk_extremes import extreme_tangent, shares
from batchax.execution.chunk_loop import (
    ChunkLoop,
    OfWidth,
    chunk_loop,
    chunk_loop_p,
    result_types,
)
from batchax.execution.chunk_run import chosen_chunk
from batchax.execution.chunk_scalar import can_run, inner_product, is_loss, loop_with_gradient
from batchax.execution.chunk_states import in_parts
from batchax.execution.memory import Auto
from batchax.execution.operand_specs import (
    SUM,
    WHOLE,
    Combined,
    Extreme,
    Gathered,
    GatheredOrZero,
    Operand,
    PerChunk,
    Result,
    Sum,
    cotangent_spec,
)
from batchax.jaxprs.neutral import accumulator
from batchax.jaxprs.words import Aval, Value
from batchax.kernel.derivatives import tangents_of, transposed, with_values
from batchax.rules.batched_transpose import reached
from batchax.rules.in_turn import calls_library, in_turn
from batchax.rules.masking import is_inexact


def jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, loop: ChunkLoop, program: Any
) -> Any:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    marked = [False, *(i in moving for i in range(len(primals)))]
    types = result_types(loop, program)
    zeros: list[Any] = [ad.Zero(aval.to_tangent_aval()) for aval in types]
    dependent = [
        k
        for k, (hit, zero) in enumerate(zip(reached(program.jaxpr, marked), zeros, strict=True))
        if hit and zero.aval.dtype != jax.dtypes.float0
    ]
    if any(isinstance(loop.results[k], Combined) for k in dependent):
        each, of_all = in_parts(loop, primals)
        of_moving = lambda *xs: of_all(chunk_loop(each, with_values(primals, moving, xs)))
        given, moved = ([x[i] for i in moving] for x in (primals, tangents))
        outs, dots = jax.jvp(of_moving, given, moved)
        return outs, [dots[k] if k in dependent else zero for k, zero in enumerate(zeros)]
    if is_loss(loop, dependent, types, [primals[i] for i in moving]):
        (k,) = dependent
        with_gradient = loop_with_gradient(loop, k, moving)
        if can_run(with_gradient, primals):
            outs = chunk_loop(with_gradient, primals)
            outs, gradient = outs[: len(types)], outs[len(types) :]
            zeros[k] = inner_product(gradient, [tangents[i] for i in moving])
            return outs, zeros
    outs = chunk_loop_p.bind(*primals, loop=loop, program=program)
    if not dependent:
        return outs, zeros
    _refuse_effects(program)

    extremes = [k for k in dependent if isinstance(loop.results[k], Extreme)]
    if extremes and isinstance(loop.chunk, Auto):
        # `shares` has an entry for each chunk, so the number of chunks must be known by now.
        loop = replace(loop, chunk=_chunk_of_reverse(loop, moving, dependent, primals, outs))
    parts = shares(loop, extremes, primals)
    tangent_loop = _tangent_loop(loop, moving, dependent, [PerChunk(0)] * len(parts))
    given = _after(outs, primals) if calls_library(program.jaxpr) else primals
    given = map(_compat.unconsumed, given)  # the derivative uses keys again
    dots = chunk_loop(tangent_loop, [*given, *(tangents[i] for i in moving), *parts])
    dots_of = dict(zip(dependent, dots, strict=True))
    return outs, [dots_of.get(k, zero) for k, zero in enumerate(zeros)]


def _after(outs: Sequence[Value], operands: Sequence[Value]) -> list[Any]:
    """`operands` for a loop that is to run after the one that computes `outs`.

    Both call a library, and must not run at the same time (`rules/in_turn.py` says why). It is
    enough that one operand waits. Waiting may cost a copy of it, so it is the smallest.
    """
    waiting = min(
        (i for i, x in enumerate(operands) if is_inexact(x)),
        key=lambda i: operands[i].size,
        default=None,
    )
    operands = list(operands)
    if waiting is not None:
        _, (operands[waiting],) = in_turn(outs, [operands[waiting]])
    return operands


def _tangent_loop(
    loop: ChunkLoop, moving: Sequence[int], dependent: Sequence[int], share_kinds: Sequence[Operand]
) -> ChunkLoop:
    """The loop for the tangents of the results `dependent`.

    Its operands are those of `loop`, the tangents of those that are `moving`, and the
    `shares` of the extremes among its results.
    """
    n = len(loop.operands)

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Any:
            primal = of(width)

            def run(start: Any, *xs: Any) -> list[Any]:
                primals, tangents, parts = xs[:n], xs[n : n + len(moving)], xs[n + len(moving) :]

                of_chunk = functools.partial(primal, start)
                outs, dots = tangents_of(of_chunk, primals, moving, tangents, dependent)
                share = iter(parts)
                results = []
                for k, t in zip(dependent, dots, strict=True):
                    spec = loop.results[k]
                    extreme = isinstance(spec, Extreme)
                    results.append(extreme_tangent(spec, outs[k], t, next(share)) if extreme else t)
                return results

            return run

        return of_width

    specs = (loop.results[k] for k in dependent)
    return loop.derivative(
        "tangents",
        differentiate,
        operands=(*loop.operands, *(loop.operands[i] for i in moving), *share_kinds),
        results=tuple(SUM if isinstance(spec, Extreme) else spec for spec in specs),
    )


def _chunk_of_reverse(
    loop: ChunkLoop, moving: Sequence[int], dependent: Sequence[int], primals: Any, outs: Any
) -> int:
    """The chunk size that fits the reverse pass of a loop with extremes.

    The number of chunks is still open, so shares are taken to be whole: what one chunk sees.
    """
    types = [jax.typeof(x) for x in primals]
    parts = [
        unmapped_aval(1, 0, jax.typeof(outs[k]).update(dtype=accumulator(outs[k].dtype)))
        for k in dependent
        if isinstance(loop.results[k], Extreme)
    ]
    tangent_loop = _tangent_loop(loop, moving, dependent, [WHOLE] * len(parts))
    linear = range(len(types), len(types) + len(moving))
    avals = [*types, *(types[i].to_tangent_aval() for i in moving), *parts]
    reverse, others = _reverse_loop(tangent_loop, linear, range(len(dependent)), avals)
    cotangents = [jax.typeof(outs[k]).to_tangent_aval() for k in dependent]
    return chosen_chunk(reverse, [*(avals[i] for i in others), *cotangents])


def _refuse_effects(program: Any) -> None:
    if _compat.ordered_by_lane(program.effects):
        raise UnsupportedError(
            "a function that does input or output (io_callback, ordered debug callbacks) is "
            "differentiated and runs in chunks: computing each chunk again in its derivative "
            'would do it twice. Pass residuals="keep" to vmap, or leave batch_size out.'
        )


def transpose(
    cotangents: Sequence[Value], *operands: Any, loop: ChunkLoop, program: Any
) -> list[Any]:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    if not given:
        return [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(operands)]
    avals = [x.aval if i in linear else jax.typeof(x) for i, x in enumerate(operands)]
    reverse, others = _reverse_loop(loop, linear, given, avals)
    outs = chunk_loop(reverse, [*(operands[i] for i in others), *(cotangents[k] for k in given)])
    by_operand = dict(zip(linear, outs, strict=True))
    return [by_operand.get(i) for i in range(len(operands))]


def _reverse_loop(
    loop: ChunkLoop, linear: Sequence[int], given: Sequence[int], avals: Sequence[Aval]
) -> tuple[ChunkLoop, list[int]]:
    """The transpose of a loop, and which of its operands it takes, before cotangents.

    Args:
      loop: a loop that is linear in some operands.
      linear: those operands.
      given: the results whose cotangents are not zero.
      avals: the types of its operands.
    """
    others = [i for i in range(len(avals)) if i not in linear]

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Any:
            forward = of(width)
            types = loop.of_chunk(avals, width)

            def run(start: Any, *xs: Any) -> list[Any]:
                residuals, cts = xs[: len(others)], xs[len(others) :]
                of_chunk, of_linear = functools.partial(forward, start), [types[i] for i in linear]
                return transposed(of_chunk, residuals, linear, of_linear, given)(cts)

            return run

        return of_width

    cotangent_kinds = (_as_operand(loop.results[k]) for k in given)
    reverse = loop.derivative(
        "cotangents",
        differentiate,
        operands=(*(loop.operands[i] for i in others), *cotangent_kinds),
        results=tuple(cotangent_spec(loop.operands[i]) for i in linear),
    )
    return reverse, others


def _as_operand(spec: Result) -> Operand:
    """The spec of the cotangent of a result."""
    match spec:
        case Sum():
            return WHOLE
        case Gathered(axis):
            return GatheredOrZero(axis)
        case _:
            assert not isinstance(spec, (Extreme, Combined))
            return spec
