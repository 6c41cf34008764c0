"""Blocks of lanes, so that what is computed of them stays in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Aval, Value

_SIZE = 112  # an odd multiple of a vector's: rows that lie powers of two apart evict each other


def in_blocks(
    run: Callable[..., Sequence[Any]], first: bool, types: Sequence[Aval], *arrays: Value
) -> list[Any]:
    """`run`, which has lanes last, of some lanes of `arrays` at a time.

    Args:
      run: what is computed of a block.
      first: whether lanes come first in arrays and results; else they come last.
      types: those of all results.
      *arrays: of all lanes.
    """
    at = lambda x: 0 if first else x.ndim - 1
    lanes = arrays[0].shape[at(arrays[0])]

    placed = lambda *arrays: as_blocks_are(run, first, arrays)
    if lanes <= _SIZE:
        return placed(*arrays)

    # Lanes of the last block that there are too few of are computed by the last two.
    def block(i: Any, outs: Any) -> Any:
        start = lax.min(i * _SIZE, lanes - _SIZE)
        parts = [lax.dynamic_slice_in_dim(x, start, _SIZE, at(x)) for x in arrays]
        written = zip(outs, placed(*parts), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, at(x)) for x, y in written]

    outs = [jnp.zeros(x.shape, x.dtype) for x in types]
    return lax.fori_loop(0, -(-lanes // _SIZE), block, outs)


def as_blocks_are(
    run: Callable[..., Sequence[Any]], first: bool, arrays: Sequence[Value]
) -> list[Any]:
    """`run`, which has lanes last, of arrays that have them first or last, as the results do."""
    if not first:
        return list(run(*arrays))
    return [jnp.moveaxis(x, -1, 0) for x in run(*(jnp.moveaxis(x, 0, -1) for x in arrays))]
