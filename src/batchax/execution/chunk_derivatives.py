"""Derivatives of the chunk loop, which are chunk loops.

How much a chunk adds to a reduction depends on the other chunks, which a loop with one state no
longer has: so the state of each chunk is stacked.

The cotangent of a single scalar result, a loss, is one number, by which the gradient is multiplied.
So the gradient is computed together with the loss, before that number is known, and no chunk is
computed twice. The tangent is the inner product of the gradient with the tangents of the operands.

As in ``jnp.max``, the lanes that hold the extreme value share its derivative evenly. Two jaxprs
look for these lanes: one counts them, one adds up the derivative. A value that another jaxpr
computed may differ in its last bit (compilers fuse and reorder floating-point operations). So
values are compared only with values of the same jaxpr: the first finds the chunks that hold the
extreme value, and in how many lanes; the second, the lanes that hold the extreme of their chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import unmapped_aval
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.chunk_loop import (
    SUM,
    WHOLE,
    ChunkBody,
    ChunkLoop,
    Combined,
    Extreme,
    Gathered,
    GatheredOrZero,
    OfWidth,
    Operand,
    PerChunk,
    Result,
    Sum,
    chunk_loop,
    chunk_loop_p,
    cotangent_spec,
    of_only_chunk,
    of_states,
    result_types,
)
from batchax.execution.chunk_run import chosen_chunk
from batchax.execution.memory import Auto
from batchax.jaxprs.neutral import accumulator
from batchax.jaxprs.words import Aval, Value
from batchax.kernel.own_primitive import pullback_of, tangents_of, transposed, with_values
from batchax.rules.calls import calls_library, in_turn
from batchax.rules.custom_derivatives import reached
from batchax.rules.masking import is_inexact


def in_parts(
    loop: ChunkLoop, operands: Sequence[Value]
) -> tuple[ChunkLoop, Callable[[Sequence[Any]], list[Any]]]:
    """A loop that returns the state of each chunk, and what makes the results of `loop` of its."""
    combined = [isinstance(spec, Combined) for spec in loop.results]
    if not any(combined):
        return loop, list
    chunk = loop.chunk
    if isinstance(chunk, Auto):  # how many entries there are must be known by now
        chunk = chosen_chunk(loop, list(map(jax.typeof, operands)))

    def of_width(width: int) -> Callable[..., list[Any]]:
        function = loop.body.function(width)
        return lambda start, *xs: [
            x[None] if state else x for x, state in zip(function(start, *xs), combined, strict=True)
        ]

    results = tuple(
        PerChunk(0) if state else spec for spec, state in zip(loop.results, combined, strict=True)
    )
    body = ChunkBody(of_width, of=loop.body)
    each = replace(loop, chunk=chunk, body=body, results=results)
    return each, lambda outs: of_states(
        loop.results, outs, lambda spec, places: spec.folded(outs[places])
    )


def is_loss(
    loop: ChunkLoop, dependent: Sequence[int], outs: Sequence[Value], operands: Sequence[Value]
) -> bool:
    """Whether `dependent` results are one real scalar, a sum, and the operands are real, too."""
    return (
        len(dependent) == 1
        and isinstance(loop.results[dependent[0]], Sum)
        and outs[dependent[0]].shape == ()
        and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (*operands, outs[dependent[0]]))
    )


def loop_with_gradient(loop: ChunkLoop, which: int, moving: Sequence[int]) -> ChunkLoop:
    """A loop whose results are those of `loop`, and behind them the gradient of one.

    The gradient is with respect to the `moving` operands.
    """

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Any:
            primal = of(width)

            def run(start: Any, *xs: Any) -> list[Any]:
                of_chunk = functools.partial(primal, start)
                outs, pull = pullback_of(of_chunk, xs, moving, [which])
                return [*outs, *pull([lax.full_like(outs[which], 1)])]

            return run

        return of_width

    results = (*loop.results, *(cotangent_spec(loop.operands[i]) for i in moving))
    return loop.derivative("gradient", differentiate, results=results)


def can_run(loop: ChunkLoop, operands: Sequence[Value]) -> bool:
    """Whether the program of a loop can be staged.

    The program with a gradient cannot be where something in it has no reverse mode, such as a
    loop of unknown length. What is raised then is anything: JAX's own errors, or a user's.
    """
    avals = [jax.typeof(x) for x in _compat.varying_alike(operands)]
    try:
        loop.program(avals, loop.width)
    except Exception:
        return False
    return True


def inner_product(gradient: Sequence[Any], tangents: Sequence[Value]) -> Any:
    """The inner product of two lists of arrays: the tangent of a loss with this gradient."""
    products = [jnp.sum(g * t) for g, t in zip(gradient, tangents, strict=True)]
    return sum(products[1:], start=products[0])


def shares(loop: ChunkLoop, extremes: Sequence[int], operands: Sequence[Value]) -> list[Any]:
    """For each of the results `extremes`, by chunk: the part of its derivative that a holder gets.

    A holder is a lane with the extreme value. The part is one divided by the number of holders,
    and zero in chunks that have none.
    """
    if not extremes:
        return []

    def of_width(width: int) -> Any:
        primal = loop.body.function(width)

        def run(start: Any, *xs: Any) -> list[Any]:
            outs = primal(start, *xs)
            counted = []
            for k in extremes:
                spec = _extreme(loop, k)
                best = of_only_chunk(outs[k], spec)
                holders = _holders(spec, outs[k], best)
                count = jnp.sum(holders, spec.axis, dtype=accumulator(outs[k].dtype))
                counted += [best[None], count[None]]
            return counted

        return run

    body = ChunkBody(of_width, of=loop.body)
    counting = replace(loop, body=body, results=(PerChunk(0),) * (2 * len(extremes)))
    counted = chunk_loop(counting, list(map(lax.stop_gradient, operands)))
    return [
        _shares(_extreme(loop, k).kind, best, count)
        for k, best, count in zip(extremes, counted[::2], counted[1::2], strict=True)
    ]


def _shares(kind: str, best: Any, count: Any) -> Any:
    spec = Extreme(kind, 0)
    holds = _holders(spec, best, of_only_chunk(best, spec)).astype(count.dtype)
    return holds / jnp.sum(holds * count, axis=0, keepdims=True)


def extreme_tangent(spec: Extreme, x: Value, tangent: Any, share: Any) -> Any:
    """What one chunk adds to the tangent of an extreme value.

    Args:
      spec: which extreme, and where the lanes are in `x`.
      x: the chunk's values.
      tangent: their tangents.
      share: the chunk's entry in `shares`.
    """
    hit = _holders(spec, x, of_only_chunk(x, spec))
    held = jnp.sum(lax.select(hit, tangent, lax.full_like(tangent, 0)), axis=spec.axis)
    return held * share[0].astype(held.dtype)


def _holders(spec: Extreme, x: Value, best: Any) -> Any:
    return lax.eq(x, jnp.broadcast_to(jnp.expand_dims(best, spec.axis), x.shape))


def _extreme(loop: ChunkLoop, k: int) -> Extreme:
    spec = loop.results[k]
    assert isinstance(spec, Extreme)
    return spec


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

    Both call a library, and must not run at the same time (`rules/calls.py` says why). It is
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
