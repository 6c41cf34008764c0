"""The derivative of a maximum or minimum over all lanes, chunk by chunk.

As in ``jnp.max``, the lanes that hold the extreme value share its derivative evenly.
Which lanes these are is found twice: once to count them, once where the derivative is
added up. The two are different programs, and a value computed by another program may
differ in its last bit (compilers fuse and reorder floating-point operations). So values
are compared only with values of the same program: the first says which chunks hold the
extreme value, and in how many lanes; the second, which lanes of its chunk hold the
chunk's own extreme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.execution.chunk_loop import ChunkBody, ChunkLoop, chunk_loop
from batchax.execution.chunk_results import of_only_chunk
from batchax.execution.operand_specs import Extreme, PerChunk
from batchax.jaxprs.neutral import accumulator
from batchax.jaxprs.words import Value


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
