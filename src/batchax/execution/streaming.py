"""Reducing over the batch chunk by chunk, without a result for each lane.

Sums, and the means made of them, add one partial sum for each chunk. Floats of less
than 32 bits are added up in float32; a mean is the sum over all lanes divided once,
so that a last chunk with fewer lanes counts for what it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax.execution.chunk_loop import accumulator
from batchax.execution.operand_specs import SUM, Extreme, PerChunk, Result
from batchax.frontend.outputs import reduce_batch
from batchax.memo import memoized
from batchax.rules.neutral import NEUTRAL


def partial_result(kind: str, x: Any, axis: int) -> tuple[Any, Result]:
    """What one chunk adds to a reduction of `x`, whose lanes are along `axis`."""
    match kind:
        case "sum" | "mean":
            return jnp.sum(x, axis=axis, dtype=_dtype(kind, x)), SUM
        case "prod":
            # The derivative of a product needs, for each chunk, the product of the others. So the
            # product of each chunk is kept.
            return jnp.prod(x, axis=axis, dtype=_dtype(kind, x))[None], PerChunk(0)
        case _:
            return x, Extreme(kind, axis)


def where_real(real: Any, x: Any, axis: int, kind: str) -> Any:
    """`x` with what changes no reduction of that kind in lanes that are not `real`."""
    neutral = NEUTRAL["sum" if kind == "mean" else kind](x.dtype)
    return lax.select(lax.broadcast_in_dim(real, x.shape, (axis,)), x, lax.full_like(x, neutral))


def finish(kind: str, result: Any, size: int, like: Any) -> Any:
    """The reduction over all lanes, from what a chunk loop collected.

    `like` is the type that the reduction has when done all at once.
    """
    if kind == "mean":
        result = result / size
    elif kind == "prod":
        result = jnp.prod(result, axis=0)
    return result.astype(like.dtype)


def reduced_type(kind: str, lanes: Any) -> Any:
    """A type of the dtype, weak or not, that a reduction of such lanes has."""
    return _reduced_type(kind, lanes.dtype, lanes.weak_type)


@memoized("types of reductions", most=256)
def _reduced_type(kind: str, dtype: Any, weak_type: bool) -> Any:
    one = jax.ShapeDtypeStruct((1,), dtype, weak_type=weak_type)
    return jax.eval_shape(lambda x: reduce_batch(kind, x, 0), one)


def _dtype(kind: str, x: Any) -> Any:
    """The dtype in which a reduction is added up or multiplied."""
    return accumulator(reduced_type(kind, jax.typeof(x)).dtype)
