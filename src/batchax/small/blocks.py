"""Blocks of lanes, so that what is computed of them stays in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Aval, Value

_SIZE = 112  # an odd multiple of a vector's: rows that lie powers of two apart evict each other


def in_blocks(
    run: Callable[..., Sequence[Any]], types: Sequence[Aval], *arrays: Value
) -> list[Any]:
    """`run` of some lanes of `arrays` at a time; lanes come last in arrays and results.

    `types` are those of all results.
    """
    lanes = arrays[0].shape[-1]
    if lanes <= _SIZE:
        return list(run(*arrays))

    # Lanes of the last block that there are too few of are computed by the last two.
    def block(i: Any, outs: Any) -> Any:
        start = lax.min(i * _SIZE, lanes - _SIZE)
        parts = [lax.dynamic_slice_in_dim(x, start, _SIZE, x.ndim - 1) for x in arrays]
        written = zip(outs, run(*parts), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, x.ndim - 1) for x, y in written]

    outs = [jnp.zeros(x.shape, x.dtype) for x in types]
    return lax.fori_loop(0, -(-lanes // _SIZE), block, outs)
