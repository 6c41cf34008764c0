"""The chunk loop: a function of a few lanes, applied to all lanes chunk by chunk.

An operand is whole, the same for each chunk, or has lanes along one of its axes, of
which each chunk sees its own slice. A result has lanes along an axis, written where
they belong, or is a sum over the chunks, or the largest or smallest of all. That set
is closed under differentiation: a tangent has the spec of its value, and in reverse
whole operands turn into sums, sums into whole operands, and lanes stay lanes. So the
loop is one primitive whose derivatives are chunk loops again, each of which holds the
intermediate values of one chunk only: what reverse mode needs is computed again,
chunk by chunk (Griewank and Walther, "Revolve", 2000, call it checkpointing).

The lanes may be those that a mask picks. Then there are only as many chunks as those lanes
fill; what a chunk sees is gathered, and what it returns is scattered. Derivatives pick the
same lanes.

Written with ``lax.scan`` and ``jax.checkpoint`` instead, the gradient of an array
that is sliced in the loop would be added up as one full array for each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import mapped_aval
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.execution import gathered_lanes
from batchax.execution.buffers import blank
from batchax.execution.eager import compile_for_account, run_eagerly, whatever_jit
from batchax.execution.loop_progress import LoopProgress
from batchax.execution.memory import Auto, fitting_chunk
from batchax.execution.operand_specs import (
    WHOLE,
    ActiveMask,
    Extreme,
    Gathered,
    GatheredOrZero,
    Lanes,
    Operand,
    PerChunk,
    Result,
    Sum,
    Whole,
    resized,
)
from batchax.execution.watched import Steps
from batchax.jaxprs.neutral import accumulator, highest, lowest
from batchax.jaxprs.program_key import value_key
from batchax.kernel.own_primitive import declare
from batchax.rules.in_turn import zero_after


class ChunkBody:
    """What is done for one chunk, whatever its width.

    ``function(width)`` is a function of the index of the chunk's first lane and of the
    operands, which returns a list of results. It is kept as a function and staged for
    each use: derivative rules inside it may close over values of the trace they are in.
    That may be long after it was made, and elsewhere; the named axes and the mesh in scope
    are then those it was made under, or those of the body it is made `of`.
    """

    def __init__(
        self, function: Callable[[int], Callable[..., list[Any]]], of: ChunkBody | None = None
    ) -> None:
        self.function = function
        self._names = _compat.names_in_scope() if of is None else of._names
        self._mesh = jax.sharding.get_abstract_mesh() if of is None else of._mesh
        # In no memo, as what derivative rules close over may be of a trace: it goes with the loop.
        self._staged: dict[Any, _compat.ClosedJaxpr] = {}

    def staged(self, width: int, operands: Sequence[Any]) -> _compat.ClosedJaxpr:
        """Its program for a chunk of `width` lanes and operands of these types."""
        key = (width, tuple(operands))
        if key not in self._staged:
            start = jax.typeof(np.int32(0))
            if operands:  # inside `shard_map`, what meets in an operation must vary alike
                start = _compat.scalar_like(operands[0], start.dtype)
            avals = [start, *operands]
            with jax.sharding.use_abstract_mesh(self._mesh):
                self._staged[key] = _compat.stage(self.function(width), avals, self._names)
        return self._staged[key]


@_compat.held_weakly
@dataclass(frozen=True)
class ChunkLoop:
    """What a chunk loop does.

    Attributes:
      body: what is done for one chunk.
      operands: the spec of each operand.
      results: the spec of each result.
      size: number of lanes.
      chunk: number of lanes in a chunk (the last may have fewer), or `Auto`.
      progress: who is told how far it is.
    """

    body: ChunkBody
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    size: int
    chunk: int | Auto
    progress: LoopProgress | None = None

    def derivative(self, name: str, **changes: Any) -> ChunkLoop:
        """A loop over the same lanes that computes a derivative of this one."""
        chunk = self.chunk
        if isinstance(chunk, Auto):
            # A derivative needs other memory, so its chunk size is another choice, with a name of
            # its own. Cotangents are those of a loop of tangents: the name leaves that out.
            program = chunk.program
            if name == "cotangents":
                program = program.removeprefix("tangents of ")
            chunk = replace(chunk, program=f"{name} of {program}")
        told = None if self.progress is None else self.progress.derivative(name)
        return replace(self, chunk=chunk, progress=told, **changes)

    @property
    def gathers(self) -> bool:
        """Whether its first operand is a mask that says which lanes it runs for."""
        return isinstance(next(iter(self.operands), None), ActiveMask)

    @property
    def width(self) -> int:
        """A width for which to look at the program: 1 where the chunk size is still open."""
        return self.chunk if isinstance(self.chunk, int) else 1

    def program(self, avals: Sequence[Any], width: int) -> _compat.ClosedJaxpr:
        """The program of a chunk of `width` lanes, from the types of the operands."""
        return self.body.staged(width, self.of_chunk(avals, width))

    def of_chunk(self, avals: Sequence[Any], width: int) -> list[Any]:
        """The types of the operands as a chunk of `width` lanes sees them."""

        def seen(aval: Any, spec: Operand) -> Any:
            match spec:
                case Whole():
                    return aval
                case ActiveMask():
                    return resized(aval, 0, width)
                case PerChunk(axis):
                    return resized(aval, axis, 1)
                case Lanes(axis) | Gathered(axis) | GatheredOrZero(axis):
                    return resized(aval, axis, width)

        return list(map(seen, avals, self.operands))

    def result_aval(self, aval: Any, spec: Result) -> Any:
        """The type of a result, from that of a chunk's."""
        aval = aval.strip_weak_type()
        match spec:
            case Lanes(axis) | Gathered(axis):
                return resized(aval, axis, self.size)
            case PerChunk(axis):
                assert isinstance(self.chunk, int)
                return resized(aval, axis, -(-self.size // self.chunk))
            case Extreme(_, axis):
                return mapped_aval(aval.shape[axis], axis, aval)
            case Sum():
                return aval


chunk_loop_p = declare("chunk_loop")


def chunk_loop(loop: ChunkLoop, operands: Sequence[Any]) -> list[Any]:
    """Runs a chunk loop; it may be differentiated and batched.

    Returns:
      A result for each spec of `loop.results`, none of them weakly typed.
    """
    operands = _compat.varying_alike(operands)
    avals = [jax.typeof(x) for x in operands]
    if isinstance(loop.chunk, int) and loop.size % loop.chunk and not loop.gathers:
        # The last chunk has another width, and so a program of its own. It is staged now and kept:
        # a derivative rule in it may close over values of a trace that is over later.
        loop.program(avals, loop.size % loop.chunk)
    program = loop.program(avals, loop.width)
    if any(isinstance(c, Tracer) for c in program.consts):
        # A derivative rule in the body closes over these. The primitive is differentiated and
        # batched with respect to its operands only, so they become operands.
        return chunk_loop(_with_constants(loop, len(program.consts)), [*operands, *program.consts])
    return chunk_loop_p.bind(*operands, loop=loop, program=program)


def _with_constants(loop: ChunkLoop, count: int) -> ChunkLoop:
    """`loop` with the constants of its program as more operands, the same for each chunk."""

    def of_width(width: int) -> Callable[..., list[Any]]:
        def run(start: Any, *xs: Any) -> list[Any]:
            own, consts = xs[:-count], xs[-count:]
            program = loop.body.staged(width, list(map(jax.typeof, own)))
            return eval_jaxpr(program.jaxpr, consts, start, *own)

        return run

    operands = (*loop.operands, *[WHOLE] * count)
    return replace(loop, body=ChunkBody(of_width, of=loop.body), operands=operands)


def run(loop: ChunkLoop, operands: Sequence[Any]) -> list[Any]:
    """The chunk loop as ordinary operations of JAX."""
    avals = [jax.typeof(x) for x in operands]
    chunk = loop.chunk
    if isinstance(chunk, Auto):
        chunk = chosen_chunk(loop, avals)
        loop = replace(loop, chunk=chunk)

    found = gathered_lanes.in_order(operands[0], chunk) if loop.gathers else None
    steps = Steps(-(-loop.size // chunk), loop.progress)

    def run_chunk(index: Any, width: int) -> tuple[list[Any], gathered_lanes.GatheredLanes | None]:
        steps.begin(index)
        program = loop.program(avals, width)
        (start,) = _compat.varying_alike([index * np.int32(chunk)], like=operands)
        gathered = None if found is None else gathered_lanes.of_chunk(*found, start, width)
        parts = [
            _part(x, spec, start, index, width, gathered)
            for x, spec in zip(operands, loop.operands, strict=True)
        ]
        return eval_jaxpr(program.jaxpr, program.consts, start, *parts), gathered

    if loop.size <= chunk and not loop.gathers:
        results = list(map(of_only_chunk, run_chunk(np.int32(0), loop.size)[0], loop.results))
        steps.end(1, results=results)
        return results

    def step(index: Any, width: int, results: Sequence[Any]) -> list[Any]:
        outs, gathered = run_chunk(index, width)
        return collect(loop, results, outs, index, gathered)

    program = loop.program(avals, chunk)
    types, results = program.out_avals, results_before(loop, program)
    results = _compat.varying_alike(results, like=operands)
    full, rest = divmod(loop.size, chunk)
    if found is not None:
        _, count = found
        chunks = lax.div(count + np.int32(chunk - 1), np.int32(chunk))
        (first,) = _compat.varying_alike([jnp.int32(0)], like=operands)
        results = lax.fori_loop(first, chunks, lambda i, results: step(i, chunk, results), results)
    elif rest and (loop.progress is not None or _compat.calls_back(program.effects)):
        # The last chunk is a step of the loop, too. After the loop it would be a program that does
        # not depend on it, and nothing would keep its calls of the host from being made first.
        def either(i: Any, results: list[Any]) -> list[Any]:
            def last(results: list[Any]) -> list[Any]:
                return step(i, rest, results)

            return lax.cond(i < full, lambda results: step(i, chunk, results), last, results)

        results = lax.fori_loop(np.int32(0), np.int32(full + 1), either, results)
    elif rest:
        # The last chunk must not run at the same time as the others (`rules/in_turn.py` says why).
        # So its index is how many are done, counted in the loop with a zero that no compiler knows
        # and that depends on what each chunk computed. Read from the results, which the last chunk
        # writes into, the zero would have them copied.
        def counted(i: Any, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            done, results = carry
            outs, gathered = run_chunk(i, chunk)
            (done,) = _compat.varying_alike(
                [lax.add(done, lax.add(np.int32(1), zero_after(outs)))], like=operands
            )
            return done, collect(loop, results, outs, i, gathered)

        (none,) = _compat.varying_alike([jnp.int32(0)], like=operands)
        carry = lax.fori_loop(np.int32(0), np.int32(full), counted, (none, results))
        results = step(carry[0], rest, carry[1])
    else:
        results = lax.fori_loop(
            np.int32(0), np.int32(full), lambda i, results: step(i, chunk, results), results
        )
    steps.end(steps.most, results=results)
    return [
        lax.convert_element_type(x, t.dtype) if isinstance(spec, Sum) else x
        for x, t, spec in zip(results, types, loop.results, strict=True)
    ]


@whatever_jit
def chosen_chunk(loop: ChunkLoop, avals: Sequence[Any]) -> int:
    """The size of the chunks that `batch_size="auto"` means for this loop."""
    assert isinstance(loop.chunk, Auto)
    auto, loop = loop.chunk, replace(loop, progress=None)  # which needs no memory

    def compiled(chunk: int) -> Any:
        candidate = functools.partial(run_flat, replace(loop, chunk=chunk))
        return compile_for_account(candidate, avals)

    return fitting_chunk(auto, loop.size, _key(loop, avals, 1), compiled)


def _key(loop: ChunkLoop, avals: Sequence[Any], chunk: int) -> Hashable:
    """A key: equal for loops that do the same in chunks of that size."""
    widths = {chunk} if loop.gathers else {min(chunk, loop.size), loop.size % chunk} - {0}
    programs = (value_key(loop.program(avals, width)) for width in sorted(widths))
    own = loop.size, loop.operands, loop.results, loop.progress
    return chunk, *own, tuple(avals), *programs


def run_flat(loop: ChunkLoop, *operands: Any) -> list[Any]:
    """`run` with each operand an argument, as what is compiled wants them."""
    return run(loop, operands)


def _part(
    x: Any,
    spec: Operand,
    start: Any,
    index: Any,
    width: int,
    gathered: gathered_lanes.GatheredLanes | None,
) -> Any:
    """What one chunk sees of an operand."""
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
            return lax.dynamic_slice_in_dim(x, start, width, axis, allow_negative_indices=False)
        case PerChunk(axis):
            return lax.dynamic_slice_in_dim(x, index, 1, axis, allow_negative_indices=False)


def results_before(loop: ChunkLoop, program: _compat.ClosedJaxpr) -> list[Any]:
    """What the results are before the first chunk, in a loop whose chunks do `program`."""
    # `blank` wants another number for each array, in other loops as well: their programs mostly
    # differ in length.
    first = len(program.jaxpr.eqns)
    return [
        _before(loop, aval, spec, first + k)
        for k, (aval, spec) in enumerate(zip(program.out_avals, loop.results, strict=True))
    ]


def _before(loop: ChunkLoop, aval: Any, spec: Result, number: int) -> Any:
    whole = loop.result_aval(aval, spec)
    match spec:
        case Sum():
            return _compat.filled(whole, 0, accumulator(whole.dtype))
        case Extreme("max"):
            return _compat.filled(whole, lowest(whole.dtype))
        case Extreme():
            return _compat.filled(whole, highest(whole.dtype))
        # Lanes that are not gathered stay zero. Extended dtypes (random keys) have no zero.
        case Gathered() if not jnp.issubdtype(whole.dtype, jax.dtypes.extended):
            return _compat.filled(whole, 0)
        case _:
            return blank(whole, number)


def collect(
    loop: ChunkLoop,
    results: Sequence[Any],
    outs: Sequence[Any],
    index: Any,
    gathered: gathered_lanes.GatheredLanes | None = None,
) -> list[Any]:
    """The results so far, with what one more chunk, number `index`, returned: `outs`."""
    assert isinstance(loop.chunk, int)
    start = index * np.int32(loop.chunk)
    return [
        _collect(spec, result, out, start, index, gathered)
        for spec, result, out in zip(loop.results, results, outs, strict=True)
    ]


def _collect(
    spec: Result,
    result: Any,
    out: Any,
    start: Any,
    index: Any,
    gathered: gathered_lanes.GatheredLanes | None,
) -> Any:
    match spec:
        case Gathered(axis):
            assert gathered is not None
            return gathered_lanes.put(result, out, gathered.places, axis)
        case Lanes(axis):
            return _write(result, out, start, axis)
        case PerChunk(axis):
            return _write(result, out, index, axis)
        case Sum():
            return lax.add(result, lax.convert_element_type(out, result.dtype))
        case Extreme():
            return _COMPARE[spec.kind](result, of_only_chunk(out, spec))


def _write(result: Any, out: Any, start: Any, axis: int) -> Any:
    if jax.typeof(out).sharding.mesh.empty and not jax.typeof(result).sharding.mesh.empty:
        # Of an array from before `jax.set_mesh`, whose type tells of no mesh.
        out = jax.sharding.reshard(out, PartitionSpec(*[None] * out.ndim))
    return lax.dynamic_update_slice_in_dim(result, out, start, axis, allow_negative_indices=False)


def of_only_chunk(out: Any, spec: Result) -> Any:
    """A result for all lanes if this chunk were the only one."""
    if isinstance(spec, Extreme):
        return _REDUCE[spec.kind](out, axis=spec.axis)
    return out


_COMPARE = {"max": lax.max, "min": lax.min}
_REDUCE = {"max": jnp.max, "min": jnp.min}


def compute(*operands: Any, loop: ChunkLoop, program: Any) -> list[Any]:
    """What `run` computes, compiled; in smaller chunks where memory runs out."""
    avals = [jax.typeof(x) for x in operands]
    chunk = loop.chunk if isinstance(loop.chunk, int) else chosen_chunk(loop, avals)

    def with_chunk(chunk: int) -> tuple[Hashable, Callable[..., list[Any]]]:
        run_in_such = functools.partial(run_flat, replace(loop, chunk=chunk))
        return _key(loop, avals, chunk), run_in_such

    # Where memory runs out the loop is run again, in smaller chunks. It must not be if that would
    # repeat an effect, or if values have an entry for each chunk: their shapes say how many.
    may_change = not (program.effects or PerChunk in map(type, (*loop.operands, *loop.results)))
    return run_eagerly(with_chunk, chunk, operands, may_change)


def result_types(loop: ChunkLoop, program: Any) -> list[Any]:
    """The types of what a chunk loop returns whose chunks do `program`."""
    return [loop.result_aval(a, k) for a, k in zip(program.out_avals, loop.results, strict=True)]
