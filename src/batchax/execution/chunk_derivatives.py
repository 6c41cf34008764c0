"""Derivatives of the chunk loop, which are chunk loops.

How much a chunk adds to a reduction depends on the other chunks, which a loop with one state no
longer has: so the state of each chunk is stacked.

The cotangent of a single scalar result, a loss, is one number, by which the gradient is multiplied.
So the gradient is computed together with the loss, before that number is known, and no chunk is
computed twice. The tangent is the inner product of the gradient with the tangents of the operands.

As in ``jnp.max``, the lanes that hold the extreme value share its derivative evenly. A value that
another jaxpr computed may differ in its last bit (compilers fuse and reorder floating-point
operations). So values are compared only with values of the same jaxpr: the state of a chunk is its
extreme, and how many of its lanes hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
from batchax.jaxprs.primitive_facts import accumulator
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.own_primitive import pullback_of, tangents_of, transposed, with_values
from batchax.kernel.reverse_rules import staged_with_reverse_rules, without_forward_mode
from batchax.rules.calls import calls_library, in_turn
from batchax.rules.custom_derivatives import reached
from batchax.rules.masking import is_inexact


def in_parts(
    loop: ChunkLoop, operands: Values, moving: Sequence[int] | None = None
) -> tuple[ChunkLoop, Callable[[Sequence[Any]], list[Value]]]:
    """Returns a loop that stacks the state of each chunk, and a function to combine them.

    For a loop that combines states or finds extremes. `moving` are the operands that are
    differentiated, if chunks are recomputed for that.
    """
    if not any(isinstance(spec, (Combined, Extreme)) for spec in loop.results):
        return loop, list

    def of_width(width: int) -> Callable[..., list[Value]]:
        function = loop.body.function(width)

        def run(start: Value, *xs: Value) -> list[Value]:
            outs = map(_state, function(start, *xs), loop.results)
            return [part for parts in outs for part in parts]

        return run

    def of_all(outs: Sequence[Any]) -> list[Value]:
        rest = iter(outs)
        xs = [
            _extreme_of_all(spec.kind)(next(rest), next(rest))
            if isinstance(spec, Extreme)
            else next(rest)
            for spec in loop.results
        ]
        return of_states(loop.results, xs, lambda spec, places: spec.folded(xs[places]))

    def with_parts(state: Result) -> ChunkLoop:
        results: list[Result] = []
        for spec in loop.results:
            parts = isinstance(spec, (Combined, Extreme))
            results += [state if parts else spec] * (1 + isinstance(spec, Extreme))
        return replace(loop, body=ChunkBody(of_width, of=loop.body), results=tuple(results))

    # Autodiff then only sees a stack of independent chunks.
    each = with_parts(PerChunk(0))
    if isinstance(loop.chunk, Auto):
        # How many entries there are must be known by now. What one chunk has of them is as much as
        # if they were added up.
        avals = list(map(jax.typeof, operands))
        added_up = with_parts(SUM)
        chosen = chosen_chunk(*_reverse_of(added_up, moving, avals) if moving else (loop, avals))
        each = replace(each, chunk=chosen)
    return each, of_all


def _state(x: Value, spec: Result) -> list[Value]:
    """Returns what is stacked for a chunk: of an extreme, also how many lanes attain it."""
    match spec:
        case Extreme(_, axis):
            best = of_only_chunk(x, spec)
            holders = lax.eq(x, jnp.broadcast_to(jnp.expand_dims(best, axis), x.shape))
            return [best[None], jnp.sum(holders, axis, dtype=np.int32)[None]]
        case Combined():
            return [x[None]]
        case _:
            return [x]


def _extreme_of_all(kind: str) -> Callable[[Any, Any], Any]:
    """Combines extremes of chunks, given how many lanes attain each."""
    spec = Extreme(kind, 0)

    @jax.custom_jvp
    def extreme(best: Value, count: Value) -> Value:
        return of_only_chunk(best, spec)

    @extreme.defjvp
    def _(primals: Values, tangents: Values) -> tuple[Value, Value]:
        (best, count), dot = primals, tangents[0]
        most, wide = extreme(best, count), accumulator(best.dtype)
        # As in JAX, the derivative of an extreme is divided evenly among all lanes that attain it.
        holds = lax.eq(best, jnp.broadcast_to(most[None], best.shape))
        held = lax.select(holds, count, lax.full_like(count, 0)).astype(wide)
        share = held / jnp.sum(held, 0, keepdims=True)
        moved = share * dot.astype(wide)  # of a NaN, which no lane attains, the share is 0 / 0
        return most, jnp.sum(moved, 0).astype(dot.dtype)

    return extreme


def is_loss(loop: ChunkLoop, dependent: Sequence[int], outs: Values, operands: Values) -> bool:
    return (
        len(dependent) == 1
        and isinstance(loop.results[dependent[0]], Sum)
        and outs[dependent[0]].shape == ()
        and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (*operands, outs[dependent[0]]))
    )


def loop_with_gradient(loop: ChunkLoop, which: int, moving: Sequence[int]) -> ChunkLoop:
    """Returns a loop that also computes the gradient of result `which`.

    The gradient, with respect to the `moving` operands, follows the results.
    """

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Callable[..., list[Value]]:
            primal = of(width)

            def run(start: Value, *xs: Value) -> list[Value]:
                of_chunk = functools.partial(primal, start)
                outs, pull = pullback_of(of_chunk, xs, moving, [which])
                # The cotangent of a sum is 1 for each chunk, so the gradient needs no second pass.
                return [*outs, *pull([lax.full_like(outs[which], 1)])]

            return run

        return of_width

    results = (*loop.results, *(cotangent_spec(loop.operands[i]) for i in moving))
    return loop.derivative("gradient", differentiate, results=results)


def can_run(loop: ChunkLoop, operands: Values) -> bool:
    """Returns whether the program of a loop can be traced."""
    try:
        _traced(loop, operands)
    # With a gradient it cannot if something inside has no reverse mode, such as a loop of unknown
    # length. JAX or the user's code may raise any error then.
    except Exception:
        return False
    return True


def _traced(loop: ChunkLoop, operands: Values) -> ClosedJaxpr:
    avals = [jax.typeof(x) for x in _compat.varying_alike(operands)]
    return loop.program(avals, loop.width)


def inner_product(gradient: Sequence[Any], tangents: Values) -> Value:
    products = [jnp.sum(g * t) for g, t in zip(gradient, tangents, strict=True)]
    return sum(products[1:], start=products[0])


def jvp(primals: Values, tangents: Values, *, loop: ChunkLoop, program: ClosedJaxpr) -> Any:
    # A call reads operands that its body may not use. Their cotangent is a symbolic zero: zeros
    # would be multiplied by derivatives that may be infinite.
    used = _compat.used_inputs(program, [True] * len(program.out_avals))[1:]
    pairs = enumerate(zip(tangents, used, strict=True))
    moving = [i for i, (t, is_used) in pairs if is_used and type(t) is not ad.Zero]
    types = result_types(loop, program)
    zeros: list[Any] = [ad.Zero(aval.to_tangent_aval()) for aval in types]
    dependent = _dependent(program, moving, types)
    # Differentiate the stack of chunk states, and combine those in ordinary operations.
    if any(isinstance(loop.results[k], (Combined, Extreme)) for k in dependent):
        each, of_all = in_parts(loop, primals, moving)
        of_moving = lambda *xs: of_all(chunk_loop(each, with_values(primals, moving, xs)))
        given, moved = ([x[i] for i in moving] for x in (primals, tangents))
        outs, dots = jax.jvp(of_moving, given, moved)
        return outs, [dots[k] if k in dependent else zero for k, zero in enumerate(zeros)]
    if not dependent:
        return chunk_loop_p.bind(*primals, loop=loop, program=program), zeros
    if not is_loss(loop, dependent, types, [primals[i] for i in moving]):
        _reject_effects(program)
    tangent_loop = _tangent_loop(loop, program, moving, dependent)
    # A rounded operand is used, and its tangent is not. It gets no cotangent: what made it, such as
    # a loop of unknown length, may have no reverse mode.
    inner = _traced(tangent_loop, [*primals, *(tangents[i] for i in moving)])
    read = _compat.used_inputs(inner, [True] * len(inner.out_avals))[1 + len(primals) :]
    if not all(read):
        moving = [i for i, is_read in zip(moving, read, strict=True) if is_read]
        tangent_loop = _tangent_loop(loop, program, moving, dependent)
    # One pass computes a scalar loss with its gradient: the tangent is then an inner product, and
    # reverse mode runs no chunk twice.
    if moving and is_loss(loop, dependent, types, [primals[i] for i in moving]):
        (k,) = dependent
        with_gradient = loop_with_gradient(loop, k, moving)
        if can_run(with_gradient, primals):
            outs = chunk_loop(with_gradient, primals)
            outs, gradient = outs[: len(types)], outs[len(types) :]
            zeros[k] = inner_product(gradient, [tangents[i] for i in moving])
            return outs, zeros
    _reject_effects(program)
    outs = chunk_loop_p.bind(*primals, loop=loop, program=program)
    if not moving:
        return outs, zeros
    given = _after(outs, primals) if calls_library(program.jaxpr) else primals
    given = map(_compat.unconsumed, given)  # the derivative uses keys again
    dots = chunk_loop(tangent_loop, [*given, *(tangents[i] for i in moving)])
    dots_of = dict(zip(dependent, dots, strict=True))
    return outs, [dots_of.get(k, zero) for k, zero in enumerate(zeros)]


def _dependent(program: ClosedJaxpr, moving: Sequence[int], types: Sequence[Aval]) -> list[int]:
    """Lists the results that have tangents if the `moving` operands have."""
    marked = [False, *(i in moving for i in range(len(program.in_avals) - 1))]
    hits = zip(reached(program.jaxpr, marked), types, strict=True)
    float0 = jax.dtypes.float0
    return [k for k, (hit, t) in enumerate(hits) if hit and t.to_tangent_aval().dtype != float0]


def _after(outs: Values, operands: Values) -> list[Value]:
    """Makes `operands` wait for `outs`, for loops that call a library."""
    # Two library calls must not run at the same time (see `rules/calls.py`). One waiting operand
    # suffices, and as waiting may copy it, the smallest is chosen.
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
    loop: ChunkLoop, program: ClosedJaxpr, moving: Sequence[int], dependent: Sequence[int]
) -> ChunkLoop:
    """Builds the loop for the tangents of results `dependent`.

    `program` is that of a chunk. Tangents of `moving` operands follow the operands.
    """
    n = len(loop.operands)

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Callable[..., list[Value]]:
            primal = of(width)

            def run(start: Value, *xs: Value) -> list[Value]:
                of_chunk = functools.partial(primal, start)
                if without_forward_mode.in_program(program):
                    of_chunk = staged_with_reverse_rules(of_chunk)
                return tangents_of(of_chunk, xs[:n], moving, xs[n:], dependent)[1]

            return run

        return of_width

    return loop.derivative(
        "tangents",
        differentiate,
        operands=(*loop.operands, *(loop.operands[i] for i in moving)),
        results=tuple(loop.results[k] for k in dependent),
    )


def _reverse_of(
    loop: ChunkLoop, moving: Sequence[int], avals: Sequence[Aval]
) -> tuple[ChunkLoop, list[Any]]:
    """Builds the loop for the cotangents of `moving` operands, and returns its operand types."""
    program = loop.program(avals, loop.width)
    types = result_types(loop, program)
    dependent = _dependent(program, moving, types)
    linear = range(len(avals), len(avals) + len(moving))
    both = [*avals, *(avals[i].to_tangent_aval() for i in moving)]
    tangent_loop = _tangent_loop(loop, program, moving, dependent)
    reverse, others = _reverse_loop(tangent_loop, linear, range(len(dependent)), both)
    cotangents = (types[k].to_tangent_aval() for k in dependent)
    return reverse, [*(both[i] for i in others), *cotangents]


def _reject_effects(program: ClosedJaxpr) -> None:
    if _compat.ordered_by_lane(program.effects):
        raise UnsupportedError(
            "a function that does input or output (io_callback, ordered debug callbacks) is "
            "differentiated and runs in chunks: its derivative recomputes each chunk, which "
            'would do it twice. Pass residuals="keep" to vmap, or remove batch_size.'
        )


def transpose(
    cotangents: Values, *operands: Value, loop: ChunkLoop, program: ClosedJaxpr
) -> list[Value]:
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
    """Transposes a loop that is linear in operands `linear`.

    Returns the loop and the operands it takes, before cotangents of the results `given`. `avals`
    are the operand types.
    """
    others = [i for i in range(len(avals)) if i not in linear]

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Callable[..., list[Value]]:
            forward = of(width)
            types = loop.of_chunk(avals, width)

            def run(start: Value, *xs: Value) -> list[Value]:
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
    match spec:
        case Sum():
            return WHOLE
        case Gathered(axis):
            # A lane that stands in for a missing one must add nothing.
            return GatheredOrZero(axis)
        case _:
            assert not isinstance(spec, (Extreme, Combined))
            return spec
