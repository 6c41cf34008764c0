"""A chunk loop under an outer vmap, of batchax or of JAX: each chunk has all outer lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax.execution.chunk_derivatives import jvp, transpose
from batchax.execution.chunk_loop import (
    ChunkBody,
    ChunkLoop,
    chunk_loop,
    chunk_loop_p,
    result_types,
)
from batchax.execution.chunk_run import compute, elsewhere, run
from batchax.execution.gathered_batching import batch_gathered
from batchax.execution.operand_specs import ActiveMask, Combined, Sum, Whole, of_states
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.batched_transpose import reached


def _batched(
    axis: Axis,
    args: Sequence[Value],
    axes: Sequence[Position],
    /,
    *,
    loop: ChunkLoop,
    program: Any,
) -> tuple[list[Any], list[Position]]:
    marked = [False, *(a is not None for a in axes)]
    named = axis.name is not None and bool(program.effects)
    if loop.gathers and axes[0] is not None:
        return batch_gathered(axis, args, axes, loop, named), [0] * len(loop.results)
    hits = [named or hit for hit in reached(program.jaxpr, marked)]
    of_state = lambda _, places: [any(hits[places])] * len(hits[places])
    hits = of_states(loop.results, hits, of_state)

    def of_all(body: ChunkBody) -> ChunkBody:
        def of_width(width: int) -> Any:
            one_example = body.function(width)

            def batched(start: Any, *xs: Any) -> list[Any]:
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
    """The spec of a value with one more axis, at `position`."""
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
    facts="nests",
    rule=_batched,
    jvp=jvp,
    transpose=transpose,
)
