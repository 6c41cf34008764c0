"""The chunk loop: a function of a few lanes, applied to all lanes chunk by chunk.

An operand is whole, the same for each chunk, or has lanes along one of its axes, of which each
chunk reads its own slice. A result has lanes along an axis, or is a sum over the chunks, or the
maximum or minimum of all. That set is closed under differentiation: a tangent has the spec of its
value, and in reverse mode whole operands turn into sums, sums into whole operands, and lanes stay
lanes. So the loop is one primitive whose derivatives are chunk loops again, each of which holds the
intermediate values of one chunk only: residuals are recomputed chunk by chunk (Griewank and
Walther, "Revolve", 2000).

The lanes may be those that a mask selects. Then there are only as many chunks as those lanes fill;
operands are gathered, and results are scattered. Derivatives select the same lanes. If most lanes
are selected all may run at once instead, without a gather, if a function of all lanes is given.

Written with ``lax.scan`` and ``jax.checkpoint`` instead, the gradient of an array that is sliced in
the loop would be added up as one full array for each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import mapped_aval, unmapped_aval
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.execution.gathered_lanes import GatheredLanes, put
from batchax.execution.memory import Auto
from batchax.execution.progress import LoopProgress
from batchax.execution.slices import blank, put_part
from batchax.frontend import reductions
from batchax.frontend.reductions import Reduction
from batchax.jaxprs.primitive_facts import accumulator, highest, lowest
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.own_primitive import declare


@dataclass(frozen=True)
class Whole:
    """Marks an operand that each chunk sees whole."""


@dataclass(frozen=True)
class Lanes:
    """Marks a value with all lanes along `axis`, of which each chunk has its own."""

    axis: int


@dataclass(frozen=True)
class PerChunk:
    """Marks a value with one entry for each chunk along `axis`."""

    axis: int


@dataclass(frozen=True)
class Sum:
    """Marks a result that is summed over chunks, narrow floats in float32."""


@dataclass(frozen=True)
class Extreme:
    """Marks the "max" or "min" over all lanes, of a chunk's lanes along `axis`."""

    kind: str
    axis: int


@dataclass(frozen=True)
class Combined:
    """Marks an array of a reduction's state. Arrays of one state are consecutive results."""

    reduction: Reduction
    structure: Any  # of a state
    number: int  # index of this array in it
    neutral: Any  # before the first chunk
    outer: int = 0  # how many axes of outer vmaps come first

    def combined(self, one: Sequence[Any], other: Sequence[Any]) -> list[Value]:
        return self._arrays(functools.partial(reductions.combined, self.reduction), 0, one, other)

    def folded(self, parts: Sequence[Any]) -> list[Value]:
        return self._arrays(functools.partial(reductions.folded, self.reduction), 1, parts)

    def _arrays(
        self, function: Callable[..., Any], axis: int, *states: Sequence[Any]
    ) -> list[Value]:
        for _ in range(self.outer):
            # The reduction knows nothing of outer axes, so each is mapped.
            function = jax.vmap(function, axis)
        state = function(*(jax.tree.unflatten(self.structure, x) for x in states))
        types = [x.dtype for x in states[0]]
        return list(map(lax.convert_element_type, jax.tree.leaves(state), types))


def of_states(
    specs: Sequence[Any], xs: Values, function: Callable[[Combined, slice], Sequence[Any]]
) -> list[Value]:
    """Replaces the arrays of each state in `xs` by `function(spec, places)`."""
    xs = list(xs)
    for k, spec in enumerate(specs):
        if isinstance(spec, Combined) and not spec.number:
            places = slice(k, k + spec.structure.num_leaves)
            xs[places] = function(spec, places)
    return xs


@dataclass(frozen=True)
class ActiveMask:
    """Marks the first operand as a mask that selects lanes.

    Integers estimate how long a lane takes: similar lanes share a chunk, and lanes of 0 do not run.
    """

    first: bool = False  # whether selected lanes come first


@dataclass(frozen=True)
class Gathered:
    """Marks a value with all lanes along `axis`, gathered for each chunk.

    Results of lanes that the mask leaves out are zero.
    """

    axis: int


@dataclass(frozen=True)
class GatheredOrZero:
    """Marks an operand that is gathered, but zero for lanes of a chunk that do not count."""

    # For cotangents: a lane that stands in for a missing one adds nothing.
    axis: int


Operand = Whole | Lanes | PerChunk | ActiveMask | Gathered | GatheredOrZero
Result = Lanes | PerChunk | Sum | Extreme | Combined | Gathered

WHOLE, SUM = Whole(), Sum()


def cotangent_spec(spec: Operand) -> Result:
    """Returns the spec of an operand's cotangent, a result in reverse mode."""
    match spec:
        case Whole():
            return SUM
        case GatheredOrZero(axis):
            return Gathered(axis)
        case _:
            assert not isinstance(spec, ActiveMask)
            return spec


def resized(aval: Aval, axis: int, size: int) -> Aval:
    """Resizes an array type along `axis`, which is not sharded afterwards."""
    return unmapped_aval(size, axis, mapped_aval(aval.shape[axis], axis, aval))


OfWidth = Callable[[int], Callable[..., list[Any]]]
"""From a number of lanes to what is done for these."""


class ChunkBody:
    """Holds what is done for one chunk of any width.

    ``function(width)`` is a function of the first lane's index and the operands, to a list of
    results.
    """

    def __init__(self, function: OfWidth, of: ChunkBody | None = None) -> None:
        # Kept as a function and traced for each use, as derivative rules inside may close over
        # values of the trace they are in. Later uses are elsewhere: restore the named axes and mesh
        # of now.
        self.function = function
        self._names = _compat.names_in_scope() if of is None else of._names
        self._mesh = jax.sharding.get_abstract_mesh() if of is None else of._mesh
        # Not in a cache: derivative rules may close over values of a trace. Lives with the loop.
        self._staged: dict[Any, ClosedJaxpr] = {}

    def staged(self, width: int, operands: Values) -> ClosedJaxpr:
        """Returns its program for `width` lanes and these operand types."""
        key = (width, tuple(operands))
        if key not in self._staged:
            start = jax.typeof(np.int32(0))
            if operands:  # inside `shard_map`, what meets in an operation must vary alike
                start = _compat.scalar_like(operands[0], start.dtype)
            avals = [start, *operands]
            with jax.sharding.use_abstract_mesh(self._mesh):
                self._staged[key] = _compat.stage(self.function(width), avals, self._names)
        return self._staged[key]


@dataclass(frozen=True)
class AllAtOnce:
    """Holds what runs for all lanes at once if a mask selects at least `share` of them."""

    # As for one chunk of all lanes, with the mask as first operand. Results of other lanes are not
    # read.
    body: ChunkBody
    share: float
    # The share for derivatives, which recompute values of all lanes. None: always in chunks.
    of_derivatives: float | None = None


@_compat.held_weakly
@dataclass(frozen=True)
class ChunkLoop:
    body: ChunkBody  # for one chunk
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    size: int
    chunk: int | Auto  # lanes of a chunk (the last may have fewer), or `Auto`
    progress: LoopProgress | None = None
    all_at_once: AllAtOnce | None = None  # if the mask selects most lanes; None: in chunks
    # On a CPU, up to so many selected lanes run sequentially in a single kernel. More run all at
    # once. If not zero, a chunk holds all lanes, and other lanes have arbitrary results.
    serial: int = 0
    # Runs for all lanes when compiled for another platform than the one the loop was planned for.
    masked: ChunkBody | None = None

    def derivative(
        self, name: str, differentiate: Callable[[OfWidth], OfWidth], **changes: Any
    ) -> ChunkLoop:
        """Builds a loop over the same lanes that computes the derivative `name` of this one."""
        chunk = self.chunk
        if isinstance(chunk, Auto):
            # A derivative needs other memory, so its chunk size is another choice, with a name of
            # its own. Cotangents are those of a loop of tangents: the name leaves that out.
            program = chunk.program
            if name == "cotangents":
                program = program.removeprefix("tangents of ")
            chunk = replace(chunk, program=f"{name} of {program}")
        callback = None if self.progress is None else self.progress.derivative(name)
        whole = self.all_at_once
        if whole is not None:
            share = whole.of_derivatives
            whole = None if share is None else replace(whole, share=share)
        once = replace(self, all_at_once=whole, serial=0)
        of = lambda body: ChunkBody(differentiate(body.function), of=body)
        return once.changed(of, chunk=chunk, progress=callback, **changes)

    def changed(self, change: Callable[[ChunkBody], ChunkBody], **others: Any) -> ChunkLoop:
        whole, masked = self.all_at_once, self.masked
        if whole is not None:
            whole = replace(whole, body=change(whole.body))
        masked = None if masked is None else change(masked)
        return replace(self, body=change(self.body), all_at_once=whole, masked=masked, **others)

    @property
    def gathers(self) -> bool:
        """Returns whether the first operand is a mask."""
        return isinstance(next(iter(self.operands), None), ActiveMask)

    @property
    def width(self) -> int:
        """Returns a width to look at the program with: 1 while the chunk size is open."""
        return self.chunk if isinstance(self.chunk, int) else 1

    def program(self, avals: Sequence[Aval], width: int) -> ClosedJaxpr:
        return self.body.staged(width, self.of_chunk(avals, width))

    def of_chunk(self, avals: Sequence[Aval], width: int) -> list[Aval]:
        """Returns operand types as a chunk of `width` lanes sees them."""

        def seen(aval: Aval, spec: Operand) -> Aval:
            match spec:
                case Whole():
                    return aval
                case ActiveMask():
                    return resized(aval, 0, width).update(dtype=np.dtype(bool))
                case PerChunk(axis):
                    return resized(aval, axis, 1)
                case Lanes(axis) | Gathered(axis) | GatheredOrZero(axis):
                    return resized(aval, axis, width)

        return list(map(seen, avals, self.operands))

    def result_aval(self, aval: Aval, spec: Result) -> Aval:
        aval = aval.strip_weak_type()
        match spec:
            case Lanes(axis) | Gathered(axis):
                return resized(aval, axis, self.size)
            case PerChunk(axis):
                assert isinstance(self.chunk, int)
                return resized(aval, axis, -(-self.size // self.chunk))
            case Extreme(_, axis):
                return mapped_aval(aval.shape[axis], axis, aval)
            case Sum() | Combined():
                return aval


chunk_loop_p = declare("chunk_loop")


def chunk_loop(loop: ChunkLoop, operands: Values) -> list[Value]:
    """Runs a chunk loop, which can be differentiated and batched. Results are not weakly typed."""
    operands = _compat.varying_alike(operands)
    avals = [jax.typeof(x) for x in operands]
    if isinstance(loop.chunk, int) and loop.size % loop.chunk and not loop.gathers:
        # The last chunk has another width, and so another program. It is traced now and stored:
        # a derivative rule in it may close over values of a trace that is over later.
        loop.program(avals, loop.size % loop.chunk)
    if loop.all_at_once is not None:
        loop.all_at_once.body.staged(loop.size, avals)
    if loop.serial:
        loop.program(avals, 1)
    program = loop.program(avals, loop.width)
    if any(isinstance(c, Tracer) for c in program.consts):
        # A derivative rule in the body closes over these. The primitive is differentiated and
        # batched with respect to its operands only, so they become operands.
        return chunk_loop(_with_constants(loop, len(program.consts)), [*operands, *program.consts])
    return chunk_loop_p.bind(*operands, loop=loop, program=program)


def _with_constants(loop: ChunkLoop, count: int) -> ChunkLoop:
    """Turns constants of the program into operands that all chunks share."""

    def of_width(width: int) -> Callable[..., list[Value]]:
        def run(start: Value, *xs: Value) -> list[Value]:
            own, consts = xs[:-count], xs[-count:]
            program = loop.body.staged(width, list(map(jax.typeof, own)))
            return eval_jaxpr(program.jaxpr, consts, start, *own)

        return run

    operands = (*loop.operands, *[WHOLE] * count)
    body = ChunkBody(of_width, of=loop.body)
    return replace(loop, body=body, operands=operands, all_at_once=None, masked=None)


def result_types(loop: ChunkLoop, program: ClosedJaxpr) -> list[Aval]:
    return [loop.result_aval(a, k) for a, k in zip(program.out_avals, loop.results, strict=True)]


def results_before(loop: ChunkLoop, program: ClosedJaxpr) -> list[Value]:
    # `blank` wants another number for each array, in other loops as well: their programs mostly
    # differ in length.
    first = len(program.jaxpr.eqns)
    return [
        _before(loop, aval, spec, first + k)
        for k, (aval, spec) in enumerate(zip(program.out_avals, loop.results, strict=True))
    ]


def _before(loop: ChunkLoop, aval: Aval, spec: Result, number: int) -> Value:
    whole = loop.result_aval(aval, spec)
    match spec:
        case Sum():
            return _compat.filled(whole, 0, accumulator(whole.dtype))
        case Combined():
            # The neutral state leaves the first chunk's state as it is.
            return _compat.filled(whole, spec.neutral)
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
    results: Values,
    outs: Values,
    index: Value,
    gathered: GatheredLanes | None = None,
) -> list[Value]:
    """Adds the results `outs` of chunk `index` to the results so far."""
    assert isinstance(loop.chunk, int)
    start = index * np.int32(loop.chunk)
    collected = [
        _collect(spec, result, out, start, index, gathered)
        for spec, result, out in zip(loop.results, results, outs, strict=True)
    ]
    # Arrays of a state are combined together, after the others.
    both = lambda spec, places: spec.combined(results[places], outs[places])
    return of_states(loop.results, collected, both)


def _collect(
    spec: Result,
    result: Value,
    out: Value,
    start: Value,
    index: Value,
    gathered: GatheredLanes | None,
) -> Value:
    match spec:
        case Gathered(axis):
            assert gathered is not None
            if gathered.alone is not None:
                return _write(result, out, gathered.alone, axis)
            return put(result, out, gathered.places, axis)
        case Lanes(axis):
            return _write(result, out, start, axis)
        case PerChunk(axis):
            return _write(result, out, index, axis)
        case Sum():
            return lax.add(result, lax.convert_element_type(out, result.dtype))
        case Extreme():
            return _COMPARE[spec.kind](result, of_only_chunk(out, spec))
        case Combined():  # with others, of the same state
            return out


def _write(result: Value, out: Value, start: Value, axis: int) -> Value:
    if jax.typeof(out).sharding.mesh.empty and not jax.typeof(result).sharding.mesh.empty:
        # Under `jax.set_mesh` the type of whatever is made tells of the mesh, as that of `result`
        # does. Arrays from before have types that do not, nor does what is computed of them alone;
        # and JAX writes into an array only what tells of the same mesh.
        out = jax.sharding.reshard(out, PartitionSpec(*[None] * out.ndim))
    return put_part(result, out, start, axis)


def of_only_chunk(out: Value, spec: Result) -> Value:
    if isinstance(spec, Extreme):
        return _REDUCE[spec.kind](out, axis=spec.axis)
    return out


_COMPARE = {"max": lax.max, "min": lax.min}
_REDUCE = {"max": jnp.max, "min": jnp.min}
