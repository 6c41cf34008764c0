"""The states of reductions, chunk by chunk: derivatives need that of each, not of all so far.

How much a chunk adds to the result of all depends on what the others are, which a loop that goes on
with one state has forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from batchax.execution.chunk_loop import ChunkBody, ChunkLoop
from batchax.execution.chunk_run import chosen_chunk
from batchax.execution.memory import Auto
from batchax.execution.operand_specs import Combined, PerChunk, of_states
from batchax.jaxprs.words import Value


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
