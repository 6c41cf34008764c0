"""A chunk loop under an outer vmap, of batchax or of JAX: each chunk has all outer lanes.

If a mask selects the lanes, each outer lane has its own mask. If the loop has many lanes, the outer
lanes run in sequence, as chunks of one, each with its own loop. If it has few, those of one outer
lane would not fill a chunk: then the lanes of both axes become the lanes of one loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
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
    Gathered,
    Lanes,
    Sum,
    Whole,
    chunk_loop,
    chunk_loop_p,
    of_states,
    result_types,
)
from batchax.execution.chunk_run import compute, elsewhere, run
from batchax.execution.gathered_lanes import fitting_width
from batchax.execution.names import find_meeting, index_as_input
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.primitive_facts import accumulator
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, broadcast_axis, match_axis, move_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.custom_derivatives import reached

# How many full chunks the inner lanes must make for each outer lane to have its own loop: then its
# last chunk, which may not be full, is one of several.
_CHUNKS_EACH = 4


def batch_gathered(
    axis: Axis, args: Values, axes: Positions, loop: ChunkLoop, named: bool
) -> list[Any]:
    """Batches a loop with a batched mask over `axis`; results have its lanes along axis 0.

    `named`: the loop may use the index of a lane of `axis`.
    """
    if named:
        loop = _with_index(axis, loop)
        args, axes = [*args, lax.iota(np.int32, axis.size)], [*axes, 0]
    mask = loop.operands[0]
    assert isinstance(mask, ActiveMask)
    assert isinstance(loop.chunk, int)
    wide = mask.most or loop.chunk
    # With many inner lanes, one loop for each outer lane wastes little of its last chunk.
    run = _one_by_one if loop.size >= _CHUNKS_EACH * wide else _as_one
    return run(axis, args, axes, loop)


def _with_index(axis: Axis, loop: ChunkLoop) -> ChunkLoop:
    """Adds the index of the lane of `axis` to `loop` as its last operand."""

    def given(body: ChunkBody) -> ChunkBody:
        def of_width(width: int) -> Callable[..., list[Any]]:
            one_example = body.function(width)

            def run(start: Any, *xs: Value) -> list[Any]:
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
            'every lane takes, and divergence="compact" runs lanes of several axes together there. '
            f"Take lax.axis_index({axis.name!r}) outside of the branch, or use "
            'divergence="predicate".'
        )


def _one_by_one(axis: Axis, args: Values, axes: Positions, loop: ChunkLoop) -> list[Any]:
    """Runs the outer lanes in sequence, each with a chunk loop."""

    def run(start: Any, *xs: Value) -> list[Any]:
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


def _as_one(axis: Axis, args: Values, axes: Positions, loop: ChunkLoop) -> list[Any]:
    """Runs one loop over the lanes of both axes."""
    specs = tuple(map(_joined_spec, loop.operands, axes))
    operands = [_joined(axis, loop, *each) for each in zip(args, axes, loop.operands, strict=True)]
    size = axis.size * loop.size
    most = specs[0].most
    # More lanes may allow wider chunks, up to the requested width.
    chunk = loop.chunk if most is None else fitting_width(most, size)
    chunk = size if loop.serial else chunk

    def joined(body: ChunkBody) -> ChunkBody:
        def of_width(width: int) -> Callable[..., list[Any]]:
            one_lane = body.function(1)
            lanes = replace(axis, size=width, name=None, spmd_name=None, mesh_axis=None)

            def run(start: Any, *xs: Value) -> list[Any]:
                # Lanes of a chunk may belong to different outer lanes, which differ in operands
                # that are whole in `loop`. So what runs is a chunk of one lane, batched over the
                # lanes: a value has an axis for these, and next to it one of size one for the
                # chunk's.
                pairs = [(start, None), *map(_apart, xs, specs, loop.operands)]
                xs_at = [a for _, a in pairs]
                outs, outs_at = batch_function(lanes, one_lane, [x for x, _ in pairs], xs_at)
                placed = zip(outs, outs_at, loop.results, strict=True)
                return [_together(lanes, *each) for each in placed]

            return run

        return ChunkBody(of_width, of=body)

    # A sum is one over the inner lanes of each outer lane: `_split` adds up what each lane returns.
    results = tuple(Gathered(0) if isinstance(spec, Sum) else spec for spec in loop.results)
    how = {"operands": specs, "results": results, "size": size, "chunk": chunk, "progress": None}
    serial = loop.serial * axis.size
    outs = chunk_loop(loop.changed(joined, serial=serial, **how), operands)
    return [_split(axis, loop, *each) for each in zip(outs, loop.results, strict=True)]


def _joined_spec(spec: Any, position: Position) -> Any:
    if isinstance(spec, ActiveMask):
        return replace(spec, first=False)
    # Outer lanes differ in a batched operand, so it is gathered for each lane.
    return Gathered(0) if isinstance(spec, Whole) and position is not None else spec


def _joined(axis: Axis, loop: ChunkLoop, x: Value, position: Position, spec: Any) -> Any:
    """Merges the lanes of both axes of an operand into one."""
    if isinstance(spec, Whole):
        if position is None:
            return x
        x = move_axis(x, position, 0)
        x, at = broadcast_axis(Axis(loop.size), x, 1), 0
    else:
        at = 0 if isinstance(spec, ActiveMask) else spec.axis
        x = match_axis(axis, x, position, at)
    return lax.reshape(x, (*x.shape[:at], axis.size * loop.size, *x.shape[at + 2 :]))


def _apart(x: Value, spec: Any, before: Any) -> tuple[Any, Position]:
    """Returns what one-lane chunks see of an operand, and the axis of the lanes.

    `spec` is its spec in the loop over both axes, and `before` that in the loop over inner lanes.
    """
    if isinstance(spec, Whole):
        return x, None
    if isinstance(before, Whole):
        return x, 0
    at = 0 if isinstance(spec, ActiveMask) else spec.axis
    return lax.expand_dims(x, (at + 1,)), at


def _together(lanes: Axis, x: Value, position: Position, spec: Any) -> Any:
    if isinstance(spec, Sum):
        return match_axis(lanes, x, position, 0)
    return lax.squeeze(match_axis(lanes, x, position, spec.axis), (spec.axis + 1,))


def _split(axis: Axis, loop: ChunkLoop, x: Value, spec: Any) -> Any:
    """Splits a result of the loop over both axes into outer and inner lanes, outer ones first."""
    at = 0 if isinstance(spec, Sum) else spec.axis
    x = lax.reshape(x, (*x.shape[:at], axis.size, loop.size, *x.shape[at + 1 :]))
    if isinstance(spec, Sum):
        # Sums accumulate in float32 at least, as in the loop.
        return jnp.sum(x, 1, dtype=accumulator(x.dtype)).astype(x.dtype)
    return move_axis(x, at, 0)


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    loop: ChunkLoop,
    program: Any,
) -> tuple[list[Any], list[Position]]:
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
        def of_width(width: int) -> Any:
            one_example = body.function(width)

            def batched(start: Value, *xs: Value) -> list[Any]:
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
    """Adapts the spec of a value to one more axis at `position`."""
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
