"""A chunk loop under an outer vmap, of batchax or of JAX: each chunk has all outer lanes.

If a mask selects the lanes, each outer lane has its own mask. Outer lanes then run in sequence, as
chunks of one, each with its own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.chunk_derivatives import jvp, transpose
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Combined,
    Lanes,
    Sum,
    Whole,
    chunk_loop,
    chunk_loop_p,
    of_states,
    result_types,
)
from batchax.execution.chunk_run import compute, elsewhere, run
from batchax.execution.names import find_meeting, index_as_input
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, match_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.custom_derivatives import reached


def batch_gathered(
    axis: Axis, args: Values, axes: Positions, loop: ChunkLoop, named: bool
) -> list[Value]:
    """Batches a loop with a batched mask over `axis`; results have its lanes along axis 0.

    `named`: the loop may use the index of a lane of `axis`.
    """
    if named:
        loop = _with_index(axis, loop)
        args, axes = [*args, lax.iota(np.int32, axis.size)], [*axes, 0]

    def run(start: Value, *xs: Value) -> list[Value]:
        lane = [x if a is None else lax.squeeze(x, (a,)) for x, a in zip(xs, axes, strict=True)]
        return [lax.expand_dims(x, (0,)) for x in chunk_loop(loop, lane)]

    outer = ChunkLoop(
        ChunkBody(lambda width: run, of=loop.body),
        tuple(WHOLE if a is None else Lanes(a) for a in axes),
        (Lanes(0),) * len(loop.results),
        axis.size,
        1,
    )
    return chunk_loop(outer, args)


def _with_index(axis: Axis, loop: ChunkLoop) -> ChunkLoop:
    """Adds the index of the lane of `axis` to `loop` as its last operand."""

    def given(body: ChunkBody) -> ChunkBody:
        def of_width(width: int) -> Callable[..., list[Value]]:
            one_example = body.function(width)

            def run(start: Value, *xs: Value) -> list[Value]:
                *own, lane = xs
                types = [jax.typeof(start), *map(jax.typeof, own)]
                # The index is the only use of the name that needs no other lanes.
                staged = _compat.stage(one_example, types, [(axis.name, axis.size)])
                _check_apart(axis, staged)
                program = index_as_input(axis, staged)
                return eval_jaxpr(program.jaxpr, program.consts, lane, start, *own)

            return run

        return ChunkBody(of_width, of=body)

    return loop.changed(given, operands=(*loop.operands, WHOLE))


def _check_apart(axis: Axis, program: ClosedJaxpr) -> None:
    eqn = find_meeting(axis, program.jaxpr.eqns)
    if eqn is not None:
        raise UnsupportedError(
            f"{line_of(eqn)}: {spoken(eqn)} uses the axis {axis.name!r} inside a branch that not "
            'every lane takes, and divergence="compact" runs its lanes sequentially there. '
            f"Take lax.axis_index({axis.name!r}) outside of the branch, or use "
            'divergence="predicate".'
        )


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    loop: ChunkLoop,
    program: ClosedJaxpr,
) -> tuple[list[Value], list[Position]]:
    marked = [False, *(a is not None for a in axes)]
    named = axis.name is not None and bool(program.effects)
    if loop.gathers and axes[0] is not None:
        return batch_gathered(axis, args, axes, loop, named), [0] * len(loop.results)
    # A result has the outer lanes if an operand that it depends on has.
    hits = [named or hit for hit in reached(program.jaxpr, marked)]
    # All arrays of a state must be batched alike, as they are combined together.
    of_state = lambda _, places: [any(hits[places])] * len(hits[places])
    hits = of_states(loop.results, hits, of_state)

    def of_all(body: ChunkBody) -> ChunkBody:
        def of_width(width: int) -> Callable[..., list[Value]]:
            one_example = body.function(width)

            def batched(start: Value, *xs: Value) -> list[Value]:
                outs, out_axes = batch_function(axis, one_example, [start, *xs], [None, *axes])
                return [
                    match_axis(axis, x, a, 0) if hit else x
                    for x, a, hit in zip(outs, out_axes, hits, strict=True)
                ]

            return batched

        return ChunkBody(of_width, of=body)

    operands = tuple(map(_shifted, loop.operands, axes))
    results = tuple(
        _shifted(spec, 0 if hit else None) for spec, hit in zip(loop.results, hits, strict=True)
    )
    outer = loop.changed(of_all, operands=operands, results=results)
    return chunk_loop(outer, args), [0 if hit else None for hit in hits]


def _shifted(spec: Any, position: Position) -> Any:
    if position is None or isinstance(spec, (Whole, Sum, ActiveMask)):
        return spec
    if isinstance(spec, Combined):
        return replace(spec, outer=spec.outer + 1)
    return replace(spec, axis=spec.axis + (position <= spec.axis))


own_primitive(
    chunk_loop_p,
    called="vmap in chunks",
    operations=lambda *operands, loop, program: run(loop, operands),
    compute=compute,
    elsewhere=elsewhere,
    types=lambda *avals, loop, program: result_types(loop, program),
    programs=("program",),
    facts="control",
    rule=_batched,
    jvp=jvp,
    transpose=transpose,
)
