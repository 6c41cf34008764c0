"""How a chunk loop runs: as the primitive, or as a scan whose residuals JAX keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.chunk_loop import (
    ChunkBody,
    ChunkLoop,
    chunk_loop,
)
from batchax.execution.chunk_results import collect, results_before
from batchax.execution.chunk_run import chosen_chunk, run
from batchax.execution.chunk_states import in_parts
from batchax.execution.memory import Auto
from batchax.execution.operand_specs import Extreme, Lanes, PerChunk
from batchax.execution.slices import scan_slices
from batchax.execution.watched import Steps
from batchax.jaxprs.words import Value
from batchax.rules.in_turn import calls_library, in_turn


def run_loop(loop: ChunkLoop, operands: Sequence[Value], keep: bool) -> list[Any]:
    """Runs a chunk loop.

    Args:
      loop: what to do.
      operands: its operands.
      keep: whether reverse mode keeps what every chunk computed.
    """
    # A result with an entry for each chunk has a shape only once the chunk size is chosen.
    if isinstance(loop.chunk, Auto) and any(isinstance(k, PerChunk) for k in loop.results):
        loop = replace(loop, chunk=chosen_chunk(loop, list(map(jax.typeof, operands))))
    if not keep:
        return chunk_loop(loop, operands)
    if isinstance(loop.chunk, int) and loop.size <= loop.chunk and not loop.gathers:
        # Of the only chunk what JAX keeps is what it keeps without chunks.
        return run(loop, _compat.varying_alike(operands))
    loop, of_all = in_parts(loop, operands)
    # The derivative of an extreme value compares values again, in a second loop, whatever is kept:
    # extremes stay results of the primitive, which has that derivative.
    extreme = [k for k, spec in enumerate(loop.results) if isinstance(spec, Extreme)]
    others = [k for k in range(len(loop.results)) if k not in extreme]
    outs = dict(zip(others, _run_keeping(_selected(loop, others), operands), strict=True))
    if extreme:
        rest = _selected(replace(loop, progress=None), extreme)  # one of the two tells
        outs |= zip(extreme, chunk_loop(rest, operands), strict=True)
    return of_all([outs[k] for k in range(len(loop.results))])


def _selected(loop: ChunkLoop, which: Sequence[int]) -> ChunkLoop:
    """`loop` with only the results `which`."""

    def of_width(width: int) -> Any:
        function = loop.body.function(width)

        def run(start: Any, *xs: Any) -> list[Any]:
            outs = function(start, *xs)
            return [outs[k] for k in which]

        return run

    return replace(
        loop, body=ChunkBody(of_width, of=loop.body), results=tuple(loop.results[k] for k in which)
    )


def _run_keeping(loop: ChunkLoop, operands: Sequence[Value]) -> list[Any]:
    """A chunk loop as a scan, whose residuals JAX keeps for each chunk."""
    operands = _compat.varying_alike(operands)
    avals = [jax.typeof(x) for x in operands]
    if isinstance(loop.chunk, Auto):
        loop = replace(loop, chunk=chosen_chunk(loop, avals))
    assert isinstance(loop.chunk, int)
    chunk = min(loop.chunk, max(loop.size, 1))  # a shard may have fewer lanes than a chunk
    loop = replace(loop, chunk=chunk)
    program = loop.program(avals, chunk)
    types = program.out_avals
    axes = [spec.axis if isinstance(spec, Lanes) else None for spec in loop.operands]

    steps = Steps(-(-loop.size // chunk), loop.progress)

    def step(index: Any, results: list[Value], parts: Sequence[Any], width: int) -> list[Any]:
        (start,) = _compat.varying_alike([index * np.int32(chunk)], like=operands)
        outs = loop.body.function(width)(start, *parts)
        return collect(loop, results, outs, index)

    def in_loop(index: Any, results: list[Value], parts: Sequence[Any]) -> tuple[list[Any], None]:
        if full > 1:  # a loop of one step is none, to a compiler
            steps.begin(index)
            results = steps.through(results, index)
        return step(index, results, parts, chunk), None

    results = _compat.varying_alike(results_before(loop, program), like=operands)
    full, rest = divmod(loop.size, chunk)
    results, _ = scan_slices(
        in_loop,
        results,
        operands,
        axes,
        chunk,
        full,
    )
    if rest:
        parts = [
            x if a is None else lax.slice_in_dim(x, full * chunk, loop.size, axis=a)
            for x, a in zip(operands, axes, strict=True)
        ]
        if calls_library(program.jaxpr):  # two such calls must not run at once: `rules/in_turn.py`
            results, parts = in_turn(results, parts)
        results = step(jnp.int32(full), results, parts, rest)
    steps.end(steps.most, results=results)
    return [lax.convert_element_type(x, t.dtype) for x, t in zip(results, types, strict=True)]
