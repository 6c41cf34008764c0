"""The results of a chunk loop: what they are before the first chunk, and what each chunk adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.execution.buffers import blank
from batchax.execution.chunk_loop import ChunkLoop
from batchax.execution.entries import put_part
from batchax.execution.gathered_lanes import GatheredLanes, put
from batchax.execution.operand_specs import (
    Combined,
    Extreme,
    Gathered,
    Lanes,
    PerChunk,
    Result,
    Sum,
    of_states,
)
from batchax.jaxprs.neutral import accumulator, highest, lowest
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value


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
