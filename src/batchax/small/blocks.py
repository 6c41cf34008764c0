"""Blocks of lanes, so that what is computed of them stays in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value

_CACHE = 2**19  # bytes that one block works on
_VECTOR = 16  # a block is an odd multiple of it: rows that lie powers of two apart evict each other


def in_blocks(
    run: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Value], numbers: int
) -> list[Any]:
    """`run` of some lanes of `arrays` at a time; lanes come last in arrays and results.

    Args:
      run: of arrays with the lanes of a block, what it makes of them.
      arrays: of all lanes.
      numbers: how many numbers `run` works on, for each lane.
    """
    lanes = arrays[0].shape[-1]
    most = max(1, _CACHE // (numbers * arrays[0].dtype.itemsize * _VECTOR))
    size = _VECTOR * (most - 1 + most % 2)
    blocks = -(-lanes // size)
    if blocks == 1:
        return list(run(arrays))
    size = -(-lanes // blocks)
    size = _VECTOR * (-(-size // _VECTOR) // 2 * 2 + 1)
    blocks = -(-lanes // size)

    # Lanes of the last block that there are too few of are computed by the last two.
    def block(i: Any, outs: Any) -> Any:
        start = jnp.minimum(i * size, lanes - size)
        parts = [lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1) for x in arrays]
        written = zip(outs, run(parts), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, x.ndim - 1) for x, y in written]

    like = [jax.ShapeDtypeStruct((*x.shape[:-1], size), x.dtype) for x in arrays]
    types = jax.eval_shape(run, like)
    outs = [jnp.zeros((*x.shape[:-1], lanes), x.dtype) for x in types]
    return lax.fori_loop(0, blocks, block, outs)
