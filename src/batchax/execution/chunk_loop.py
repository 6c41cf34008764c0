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
from batchax.jaxprs.neutral import accumulator, highest, lowest
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.own_primitive import declare


@dataclass(frozen=True)
class Whole:
    """An operand that each chunk sees as it is."""


@dataclass(frozen=True)
class Lanes:
    """A value with all lanes along `axis`, of which each chunk has its own."""

    axis: int


@dataclass(frozen=True)
class PerChunk:
    """A value with one entry for each chunk along `axis`."""

    axis: int


@dataclass(frozen=True)
class Sum:
    """A result added up over the chunks. Floats of fewer than 32 bits are added up in float32."""


@dataclass(frozen=True)
class Extreme:
    """The "max" or "min" over all lanes. Each chunk returns its lanes along `axis`."""

    kind: str
    axis: int


@dataclass(frozen=True)
class Combined:
    """An array of the state of a reduction, which is combined with that of each chunk in turn.

    The arrays of a state are results one after another.

    Attributes:
      reduction: which one.
      structure: of a state.
      number: of this array in it.
      neutral: what it is before the first chunk.
      outer: how many axes of outer vmaps come first.
    """

    reduction: Reduction
    structure: Any
    number: int
    neutral: Any
    outer: int = 0

    def combined(self, one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        return self._arrays(functools.partial(reductions.combined, self.reduction), 0, one, other)

    def folded(self, parts: Sequence[Any]) -> list[Any]:
        return self._arrays(functools.partial(reductions.folded, self.reduction), 1, parts)

    def _arrays(self, function: Callable[..., Any], axis: int, *states: Sequence[Any]) -> list[Any]:
        for _ in range(self.outer):
            function = jax.vmap(function, axis)
        state = function(*(jax.tree.unflatten(self.structure, x) for x in states))
        types = [x.dtype for x in states[0]]
        return list(map(lax.convert_element_type, jax.tree.leaves(state), types))


def of_states(
    specs: Sequence[Any], xs: Sequence[Value], function: Callable[[Combined, slice], Sequence[Any]]
) -> list[Any]:
    """`xs`, with what `function` makes of those that are arrays of a state, given their places."""
    xs = list(xs)
    for k, spec in enumerate(specs):
        if isinstance(spec, Combined) and not spec.number:
            places = slice(k, k + spec.structure.num_leaves)
            xs[places] = function(spec, places)
    return xs


@dataclass(frozen=True)
class ActiveMask:
    """A mask: for each lane, whether the loop runs for it. Always the first operand.

    It may be of integers, which say how long a lane takes: lanes that take about as long are in
    the same chunk, those of 0 in none.

    A chunk sees which of its lanes count. The last chunk may not be full: in place of each lane
    that it lacks it runs its first lane again, which does not count there.

    Attributes:
      most: the width of a chunk where there are many lanes. The loop's `chunk` was chosen from
        it, and may be narrower. Under an outer vmap there are more lanes, and it is chosen
        again. None: `chunk` stays as it is, however many lanes there are.
      first: whether it is known that the lanes which the loop runs for come before all others, so
        that nothing has to find them. A mask of both axes under an outer vmap is not such a one.
    """

    most: int | None = None
    first: bool = False


@dataclass(frozen=True)
class Gathered:
    """A value with all lanes along `axis`, of which a chunk sees those that are gathered for it.

    In a result, the entries of lanes that the mask leaves out are zero.
    """

    axis: int


@dataclass(frozen=True)
class GatheredOrZero:
    """An operand as `Gathered`, but zero in the lanes of a chunk that do not count.

    Cotangents have this spec: a lane that stands in for a missing one adds nothing.
    """

    axis: int


Operand = Whole | Lanes | PerChunk | ActiveMask | Gathered | GatheredOrZero
Result = Lanes | PerChunk | Sum | Extreme | Combined | Gathered

WHOLE, SUM = Whole(), Sum()


def cotangent_spec(spec: Operand) -> Result:
    """The spec of the cotangent of an operand, as a result of the loop in reverse mode."""
    match spec:
        case Whole():
            return SUM
        case GatheredOrZero(axis):
            return Gathered(axis)
        case _:
            assert not isinstance(spec, ActiveMask)
            return spec


def resized(aval: Aval, axis: int, size: int) -> Any:
    """An array type with another size along `axis`. That axis is not sharded any more."""
    return unmapped_aval(size, axis, mapped_aval(aval.shape[axis], axis, aval))


OfWidth = Callable[[int], Callable[..., list[Any]]]
"""From a number of lanes to what is done for these."""


class ChunkBody:
    """What is done for one chunk, whatever its width.

    ``function(width)`` is a function of the index of the chunk's first lane and of the
    operands, which returns a list of results. It is kept as a function and staged for
    each use: derivative rules inside it may close over values of the trace they are in.
    That may be long after it was made, and elsewhere; the named axes and the mesh in scope
    are then those it was made under, or those of the body it is made `of`.
    """

    def __init__(self, function: OfWidth, of: ChunkBody | None = None) -> None:
        self.function = function
        self._names = _compat.names_in_scope() if of is None else of._names
        self._mesh = jax.sharding.get_abstract_mesh() if of is None else of._mesh
        # In no memo, as what derivative rules close over may be of a trace: it goes with the loop.
        self._staged: dict[Any, ClosedJaxpr] = {}

    def staged(self, width: int, operands: Sequence[Value]) -> ClosedJaxpr:
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


@dataclass(frozen=True)
class AllAtOnce:
    """What is done for all lanes at once where a mask picks most of them.

    Attributes:
      body: what is done, as for one chunk of all lanes; its first operand is the mask. What it
        returns for lanes that are not picked is not looked at.
      share: the share of the lanes from which on they are most.
      of_derivatives: that of derivatives, in which all lanes compute their values again; None:
        derivatives run in chunks, however many are picked.
    """

    body: ChunkBody
    share: float
    of_derivatives: float | None = None


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
      all_at_once: what is done where its mask picks most lanes; None: chunks of those, as ever.
      serial: on a CPU, of lanes that a mask picks so many at most run one after another, as
        one function; more run all at once, and with them those that are not picked. If not zero,
        a chunk holds all lanes, and results of lanes that are not picked are anything.
      masked: what is done for all lanes at once, of which its mask may pick none, where a program
        is compiled for another platform than the one that it was decided for; None: the same.
    """

    body: ChunkBody
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    size: int
    chunk: int | Auto
    progress: LoopProgress | None = None
    all_at_once: AllAtOnce | None = None
    serial: int = 0
    masked: ChunkBody | None = None

    def derivative(
        self, name: str, differentiate: Callable[[OfWidth], OfWidth], **changes: Any
    ) -> ChunkLoop:
        """A loop over the same lanes that computes a derivative of this one.

        Args:
          name: what it computes.
          differentiate: from what is done for lanes to its derivative.
          **changes: its attributes that differ.
        """
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
        """A loop of which `change` makes what is done, for a chunk and for all lanes."""
        whole, masked = self.all_at_once, self.masked
        if whole is not None:
            whole = replace(whole, body=change(whole.body))
        masked = None if masked is None else change(masked)
        return replace(self, body=change(self.body), all_at_once=whole, masked=masked, **others)

    @property
    def gathers(self) -> bool:
        """Whether its first operand is a mask that says which lanes it runs for."""
        return isinstance(next(iter(self.operands), None), ActiveMask)

    @property
    def width(self) -> int:
        """A width for which to look at the program: 1 where the chunk size is still open."""
        return self.chunk if isinstance(self.chunk, int) else 1

    def program(self, avals: Sequence[Aval], width: int) -> ClosedJaxpr:
        return self.body.staged(width, self.of_chunk(avals, width))

    def of_chunk(self, avals: Sequence[Aval], width: int) -> list[Any]:
        """The types of the operands as a chunk of `width` lanes sees them."""

        def seen(aval: Aval, spec: Operand) -> Any:
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

    def result_aval(self, aval: Aval, spec: Result) -> Any:
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
            case Sum() | Combined():
                return aval


chunk_loop_p = declare("chunk_loop")


def chunk_loop(loop: ChunkLoop, operands: Sequence[Value]) -> list[Any]:
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
    """`loop` with the constants of its program as more operands, the same for each chunk."""

    def of_width(width: int) -> Callable[..., list[Any]]:
        def run(start: Any, *xs: Any) -> list[Any]:
            own, consts = xs[:-count], xs[-count:]
            program = loop.body.staged(width, list(map(jax.typeof, own)))
            return eval_jaxpr(program.jaxpr, consts, start, *own)

        return run

    operands = (*loop.operands, *[WHOLE] * count)
    body = ChunkBody(of_width, of=loop.body)
    return replace(loop, body=body, operands=operands, all_at_once=None, masked=None)


def result_types(loop: ChunkLoop, program: Any) -> list[Any]:
    return [loop.result_aval(a, k) for a, k in zip(program.out_avals, loop.results, strict=True)]


def results_before(loop: ChunkLoop, program: ClosedJaxpr) -> list[Any]:
    """What the results are before the first chunk, in a loop whose chunks do `program`."""
    # `blank` wants another number for each array, in other loops as well: their programs mostly
    # differ in length.
    first = len(program.jaxpr.eqns)
    return [
        _before(loop, aval, spec, first + k)
        for k, (aval, spec) in enumerate(zip(program.out_avals, loop.results, strict=True))
    ]


def _before(loop: ChunkLoop, aval: Aval, spec: Result, number: int) -> Any:
    whole = loop.result_aval(aval, spec)
    match spec:
        case Sum():
            return _compat.filled(whole, 0, accumulator(whole.dtype))
        case Combined():
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
    results: Sequence[Value],
    outs: Sequence[Value],
    index: Any,
    gathered: GatheredLanes | None = None,
) -> list[Any]:
    """The results so far, with what one more chunk, number `index`, returned: `outs`."""
    assert isinstance(loop.chunk, int)
    start = index * np.int32(loop.chunk)
    collected = [
        _collect(spec, result, out, start, index, gathered)
        for spec, result, out in zip(loop.results, results, outs, strict=True)
    ]
    both = lambda spec, places: spec.combined(results[places], outs[places])
    return of_states(loop.results, collected, both)


def _collect(
    spec: Result,
    result: Any,
    out: Any,
    start: Any,
    index: Any,
    gathered: GatheredLanes | None,
) -> Any:
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


def _write(result: Any, out: Any, start: Any, axis: int) -> Any:
    if jax.typeof(out).sharding.mesh.empty and not jax.typeof(result).sharding.mesh.empty:
        # Under `jax.set_mesh` the type of whatever is made tells of the mesh, as that of `result`
        # does. Arrays from before have types that do not, nor does what is computed of them alone;
        # and JAX writes into an array only what tells of the same mesh.
        out = jax.sharding.reshard(out, PartitionSpec(*[None] * out.ndim))
    return put_part(result, out, start, axis)


def of_only_chunk(out: Any, spec: Result) -> Any:
    """A result for all lanes if this chunk were the only one."""
    if isinstance(spec, Extreme):
        return _REDUCE[spec.kind](out, axis=spec.axis)
    return out


_COMPARE = {"max": lax.max, "min": lax.min}
_REDUCE = {"max": jnp.max, "min": jnp.min}
