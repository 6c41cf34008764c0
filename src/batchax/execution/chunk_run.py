"""Runs the chunks of a chunk loop sequentially, as ordinary operations of JAX.

If a mask selects a few lanes, these run one at a time. A CPU takes 0.3 microseconds to launch an
operation, for one lane as for many. If a lane is little work and few are selected, that is most of
the time. In a sequential loop that is compiled as a single XLA kernel nothing is launched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.analysis.cost import LAUNCH, STEPS, VECTORIZED, cost_of_program
from batchax.analysis.one_function import fits_single_kernel
from batchax.execution import gathered_lanes
from batchax.execution.chunk_loop import (
    ActiveMask,
    AllAtOnce,
    ChunkBody,
    ChunkLoop,
    Gathered,
    GatheredOrZero,
    Lanes,
    Operand,
    PerChunk,
    Sum,
    Whole,
    collect,
    of_only_chunk,
    result_types,
    results_before,
)
from batchax.execution.eager import compile_for_account, run_eagerly, whatever_jit
from batchax.execution.gathered_lanes import GatheredLanes, count_active
from batchax.execution.memory import Auto, fitting_chunk
from batchax.execution.progress import Steps
from batchax.execution.slices import entry_of, part_of, put_part
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.inner import inline_jaxpr, while_loop
from batchax.rules.calls import zero_after
from batchax.rules.convolution import with_channels_last


def run_serial_or_masked(loop: ChunkLoop, operands: Values) -> list[Value]:
    """Runs a few lanes sequentially on a CPU, and more of them masked.

    Lanes that are not selected have arbitrary results.
    """
    count = count_active(operands[0])
    few = lambda *operands: _few(loop, count, operands)
    if loop.serial >= loop.size:
        return few(*operands)
    return list(lax.cond(count <= loop.serial, few, lambda *xs: _all(loop, xs), *operands))


def _all(loop: ChunkLoop, operands: Values) -> list[Value]:
    program = loop.program([jax.typeof(x) for x in operands], loop.size)
    (start,) = _compat.varying_alike([np.int32(0)], like=operands)
    return inline_jaxpr(program, [start, *operands])


def _few(loop: ChunkLoop, count: Value, operands: Values) -> list[Value]:
    program = loop.program([jax.typeof(x) for x in operands], 1)

    def run(count: Value, *operands: Value) -> list[Value]:
        def lane(i: Value, results: Sequence[Any]) -> list[Value]:
            parts = []
            for x, spec in zip(operands, loop.operands, strict=True):
                if not isinstance(spec, Whole):
                    axis = 0 if isinstance(spec, ActiveMask) else spec.axis
                    x = part_of(x, i, axis, 1)
                parts.append(x)
            outs = inline_jaxpr(program, [i, *parts])
            axes = [spec.axis for spec in loop.results if isinstance(spec, Gathered)]
            put = lambda x, out, axis: put_part(x, out, i, axis)
            return list(map(put, results, outs, axes))

        def step(i: Value, results: Sequence[Any]) -> list[Value]:
            (i,) = _compat.varying_alike([lax.convert_element_type(i, np.int32)], like=operands)
            active = entry_of(operands[0], i, 0)
            return list(lax.cond(active, lane, lambda i, results: list(results), i, results))

        before = _compat.varying_alike(results_before(loop, program), like=operands)
        return [count, *lax.fori_loop(np.int32(0), np.int32(loop.size), step, before)]

    operands = [count, *operands]
    # A program that does not fit into a single XLA kernel runs as ordinary operations.
    if not fits_single_kernel(program.jaxpr):
        return run(*operands)[1:]
    types = [jax.typeof(count), *result_types(loop, program)]
    return _compat.single_kernel(run, types, operands)[1:]


def run(loop: ChunkLoop, operands: Values) -> list[Value]:
    avals = [jax.typeof(x) for x in operands]
    if isinstance(loop.chunk, Auto):
        loop = replace(loop, chunk=chosen_chunk(loop, avals))
    if loop.all_at_once is not None:
        return _as_many_are_picked(loop, loop.all_at_once, operands)
    if loop.serial:
        return run_serial_or_masked(loop, operands)
    chunks = _Chunks.of(loop, operands)
    # A single chunk needs no loop, and the compiler may fuse it with what is around it.
    if loop.size <= chunks.width and not loop.gathers:
        outs, _ = chunks.run(np.int32(0), loop.size)
        results = list(map(of_only_chunk, outs, loop.results))
        chunks.steps.end(1, results=results)
        return results

    program = loop.program(avals, chunks.width)
    results = _compat.varying_alike(results_before(loop, program), like=operands)
    results = _in_loop(chunks, program, results)
    chunks.steps.end(chunks.steps.most, results=results)
    return _of_types(loop, program, results)


def _of_types(loop: ChunkLoop, program: ClosedJaxpr, results: Values) -> list[Value]:
    """Casts sums back from their wider type."""
    return [
        lax.convert_element_type(x, t.dtype) if isinstance(spec, Sum) else x
        for x, t, spec in zip(results, program.out_avals, loop.results, strict=True)
    ]


def _as_many_are_picked(loop: ChunkLoop, whole: AllAtOnce, operands: Values) -> list[Value]:
    """Switches by the number of selected lanes: none, few in chunks, or all at once."""
    assert isinstance(loop.chunk, int)
    few = replace(loop, all_at_once=None)
    avals = [jax.typeof(x) for x in operands]
    some = loop.program(avals, loop.chunk)

    def nothing(*operands: Value) -> list[Value]:
        before = _of_types(few, some, results_before(few, some))
        return _compat.varying_alike(before, like=operands)

    count = count_active(operands[0])
    most = np.int32(max(1, math.ceil(whole.share * loop.size)))
    # Index 0: no lane is selected. Index 1: some. Index 2: at least `most`.
    way = lax.convert_element_type(count > 0, np.int32)
    way += lax.convert_element_type(count >= most, np.int32)
    in_chunks = functools.partial(run_flat, few)
    at_once = functools.partial(_all_at_once, few, whole.body)
    return lax.switch(way, [nothing, in_chunks, at_once], *operands)


def _all_at_once(loop: ChunkLoop, body: ChunkBody, *operands: Value) -> list[Value]:
    """Runs `body` for all lanes, of which a mask selects some."""
    every = body.staged(loop.size, [jax.typeof(x) for x in operands])
    (start,) = _compat.varying_alike([np.int32(0)], like=operands)
    # What lanes that are not picked add to cotangents is nothing, whatever they computed.
    mask, back = operands[0], any(isinstance(k, GatheredOrZero) for k in loop.operands)
    or_zero = lambda x, k: gathered_lanes.or_zero_of(x, mask, k.axis)
    picked = lambda x, k, spec: or_zero(x, k) if back and isinstance(k, spec) else x
    xs = [picked(x, k, GatheredOrZero) for x, k in zip(operands, loop.operands, strict=True)]
    outs = inline_jaxpr(every, [start, *xs])
    return [picked(x, k, Gathered) for x, k in zip(outs, loop.results, strict=True)]


def elsewhere(*, loop: ChunkLoop, program: ClosedJaxpr) -> Callable[..., list[Value]] | None:
    """Returns what runs on a platform other than the one the loop was planned for."""
    return None if loop.masked is None else functools.partial(_all_at_once, loop, loop.masked)


@dataclass(frozen=True, eq=False)
class _Chunks:
    loop: ChunkLoop
    width: int  # lanes of a chunk; the last may have fewer
    operands: Values
    # The order and number of selected lanes; None: all run. Both are None where the first lanes run
    # one by one.
    picked: tuple[Any, Any] | None
    steps: Steps

    @classmethod
    def of(cls, loop: ChunkLoop, operands: Values) -> _Chunks:
        assert isinstance(loop.chunk, int)
        picked = _picked(operands[0], loop.operands[0], loop.chunk) if loop.gathers else None
        steps = Steps(-(-loop.size // loop.chunk), loop.progress)
        return cls(loop, loop.chunk, operands, picked, steps)

    def run(
        self, index: Value, width: int, start: Value | None = None
    ) -> tuple[list[Value], GatheredLanes | None]:
        """Runs a chunk of `width` lanes from entry `start`.

        Returns results and the gathered lanes.
        """
        self.steps.begin(index)
        loop, operands = self.loop, self.operands
        program = loop.program([jax.typeof(x) for x in operands], width)
        start = index * np.int32(self.width) if start is None else start
        (start,) = _compat.varying_alike([start], like=operands)
        gathered = None
        if self.picked is not None:
            gathered = gathered_lanes.of_chunk(*self.picked, start, width)
        parts = [
            _part(x, spec, start, index, width, gathered)
            for x, spec in zip(operands, loop.operands, strict=True)
        ]
        return inline_jaxpr(with_channels_last(program), [start, *parts]), gathered

    def step(
        self, index: Value, width: int, results: Values, start: Value | None = None
    ) -> list[Value]:
        outs, gathered = self.run(index, width, start)
        return collect(self.loop, results, outs, index, gathered)


def _picked(mask: Value, spec: Operand, chunk: int) -> tuple[Any, Any]:
    # The selected lanes come first, and a chunk is one lane: nothing is gathered.
    if isinstance(spec, ActiveMask) and spec.first and chunk == 1 and mask.dtype == bool:
        return None, None
    return gathered_lanes.in_order(mask, chunk)


def _in_loop(chunks: _Chunks, program: ClosedJaxpr, results: list[Value]) -> list[Value]:
    """Runs all chunks in a loop, from the results before the first one."""
    full, rest = divmod(chunks.loop.size, chunks.width)

    def step(i: Value, results: list[Value]) -> list[Value]:
        return chunks.step(i, chunks.width, results)

    if chunks.picked is not None:
        (_, count), size = chunks.picked, chunks.loop.size
        width = np.int32(chunks.width)

        def is_left(start: Value) -> Value:
            if count is not None:
                return lax.lt(start, count)
            # To count the lanes that come first is three more operations to compile.
            own = entry_of(chunks.operands[0], lax.min(start, np.int32(size - 1)))
            return lax.bitwise_and(own, lax.lt(start, np.int32(size)))

        (first,) = _compat.varying_alike([jnp.int32(0)], like=chunks.operands)

        # It counts lanes, not chunks: how many of these there are is one more operation to compile.
        def once(state: tuple[Any, list[Any]]) -> tuple[Any, list[Value]]:
            start, results = state
            results = chunks.step(lax.div(start, width), chunks.width, results, start)
            return lax.add(start, width), results

        return while_loop(lambda state: is_left(state[0]), once, (first, results))[1]
    if not rest:
        return lax.fori_loop(np.int32(0), np.int32(full), step, results)
    if chunks.loop.progress is None and not _compat.calls_back(program.effects):
        return _last_after(chunks, full, rest, results)

    # The last chunk is a step of the loop, too. After the loop it would be a program that does
    # not depend on it, and nothing would keep its calls of the host from being made first.
    def either(i: Value, results: list[Value]) -> list[Value]:
        last = functools.partial(chunks.step, i, rest)
        return lax.cond(i < full, functools.partial(step, i), last, results)

    return lax.fori_loop(np.int32(0), np.int32(full + 1), either, results)


def _last_after(chunks: _Chunks, full: int, rest: int, results: list[Value]) -> list[Value]:
    """Runs `full` chunks in a loop, and one of the remaining lanes after it."""

    # The last chunk must not run at the same time as the others (see `rules/calls.py`). Its index
    # is the count of finished chunks, plus a zero that depends on their outputs and that no
    # compiler knows. A zero read from the results would make XLA copy them, as the last chunk
    # writes into them.
    def counted(i: Value, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Value]]:
        done, results = carry
        outs, gathered = chunks.run(i, chunks.width)
        done = lax.add(done, lax.add(np.int32(1), zero_after(outs)))
        (done,) = _compat.varying_alike([done], like=chunks.operands)
        return done, collect(chunks.loop, results, outs, i, gathered)

    (none,) = _compat.varying_alike([jnp.int32(0)], like=chunks.operands)
    done, results = lax.fori_loop(np.int32(0), np.int32(full), counted, (none, results))
    return chunks.step(done, rest, results)


def _part(
    x: Value,
    spec: Operand,
    start: Value,
    index: Value,
    width: int,
    gathered: GatheredLanes | None,
) -> Value:
    match spec:
        case ActiveMask():
            assert gathered is not None
            return gathered.counts
        case Gathered(axis) | GatheredOrZero(axis):
            assert gathered is not None
            return gathered_lanes.take(x, gathered, axis, isinstance(spec, GatheredOrZero))
        case Whole():
            return x
        case Lanes(axis) if x.shape[axis] == width:  # the only chunk
            return x
        case Lanes(axis):
            return part_of(x, start, axis, width)
        case PerChunk(axis):
            return part_of(x, index, axis, 1)


@whatever_jit
def chosen_chunk(loop: ChunkLoop, avals: Sequence[Aval]) -> int:
    """Chooses the chunk size that `batch_size="auto"` means for this loop."""
    assert isinstance(loop.chunk, Auto)
    auto, loop = loop.chunk, replace(loop, progress=None)  # which needs no memory

    # Candidates are compiled, and XLA's memory analysis decides.
    def compiled(chunk: int) -> jax.stages.Compiled:
        candidate = functools.partial(run_flat, replace(loop, chunk=chunk))
        return compile_for_account(candidate, avals)

    key = _key(loop, avals, 1)
    return fitting_chunk(auto, loop.size, key, compiled, least=_least_lanes(loop, avals))


def _least_lanes(loop: ChunkLoop, avals: Sequence[Aval]) -> float | None:
    """Returns how many lanes make the cost of a chunk's start negligible.

    None on devices that a few lanes never fill.
    """
    if jax.default_backend() != "cpu":
        return None
    program = loop.program(avals, 1)
    cost = cost_of_program(program, steps=STEPS)
    # Each operation is launched once a chunk; operands are sliced and results written.
    begun = cost.launches + len(loop.operands) + len(loop.results)  # cut, and written
    return _WORTH * LAUNCH * begun / max(VECTORIZED.time(cost), 1.0)


_WORTH = 16  # how many times as long as to begin a chunk its lanes take at least


def _key(loop: ChunkLoop, avals: Sequence[Aval], chunk: int) -> Hashable:
    """Returns a key for loops that do the same in chunks of that size."""
    # The last chunk may have a program of another width.
    widths = {chunk} if loop.gathers else {min(chunk, loop.size), loop.size % chunk} - {0}
    programs = (value_key(loop.program(avals, width)) for width in sorted(widths))
    own = loop.size, loop.operands, loop.results, loop.progress, loop.serial
    if loop.all_at_once is not None:
        whole = loop.all_at_once
        own = *own, whole.share, value_key(whole.body.staged(loop.size, avals))
    return chunk, *own, tuple(avals), *programs


def run_flat(loop: ChunkLoop, *operands: Value) -> list[Value]:
    """Runs with each operand as an argument, for compilation."""
    return run(loop, operands)


def compute(*operands: Value, loop: ChunkLoop, program: ClosedJaxpr) -> list[Value]:
    """Compiles and runs the loop, in smaller chunks if memory runs out."""
    avals = [jax.typeof(x) for x in operands]
    chunk = loop.chunk if isinstance(loop.chunk, int) else chosen_chunk(loop, avals)

    def with_chunk(chunk: int) -> tuple[Hashable, Callable[..., list[Value]]]:
        run_in_such = functools.partial(run_flat, replace(loop, chunk=chunk))
        return _key(loop, avals, chunk), run_in_such

    # Where memory runs out the loop is run again, in smaller chunks. It must not be if that would
    # repeat an effect, or if values have an entry for each chunk: their shapes say how many.
    may_change = not (program.effects or PerChunk in map(type, (*loop.operands, *loop.results)))
    return run_eagerly(with_chunk, chunk, operands, may_change)
