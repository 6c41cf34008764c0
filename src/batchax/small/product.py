"""Products of two small matrices, or of one with a vector, as sums of outer products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Aval, Value


def serves(lane: Sequence[Aval], params: Any) -> bool:
    """Whether it is a matrix times another, or a vector, in the dtype that both have."""
    (contracted, _), (batch, _) = params["dimension_numbers"]
    dtypes = {x.dtype for x in lane} | {params["preferred_element_type"] or lane[0].dtype}
    precision = params["precision"]
    return (
        len(contracted) == 1
        and not batch
        and sorted(x.ndim for x in lane) in ([1, 2], [2, 2])
        and len(dtypes) == 1
        # An algorithm may ask for less, or more, than the products of this dtype.
        and (precision is None or isinstance(precision, (lax.Precision, tuple)))
        and params["out_sharding"] is None
    )


def product(a: Value, b: Value, *, dimension_numbers: Any, **_: Any) -> list[Any]:
    """What `lax.dot_general` returns, for the matrices of each lane.

    Args:
      a, b: ``[rows, columns, lanes]``, one of them perhaps ``[elements, lanes]``.
      dimension_numbers: of one lane.
    """
    ((i,), (j,)), _ = dimension_numbers
    a, b = jnp.moveaxis(a, i, 0), jnp.moveaxis(b, j, 0)
    if a.ndim == b.ndim:
        a, b = a[:, :, None], b[:, None]
    out = a[0] * b[0]
    for k in range(1, a.shape[0]):
        out = out + a[k] * b[k]
    # Kept, for whoever needs it: else each computes it again.
    return [lax.optimization_barrier(out)]


def pays(lane: Sequence[Aval], lanes: int, params: Any) -> bool:
    """Whether so many products take less time than those of XLA, on a CPU.

    That has a call of a library for each product of 4 to 7 rows, which takes 10 to 20 times as long
    as these. Compiling takes 0.03 s longer, which some hundred calls make up for.
    """
    ((i,), _), _ = params["dimension_numbers"]
    inner = lane[0].shape[i]
    # A vector has one row, or column.
    outer = [x.size // inner for x in lane] if inner else [0]
    most, least, multiplications = _SERVED.get(lane[0].dtype.name, (0, 0, 0))
    sizes = [inner, *outer]
    if max(sizes) > most or inner < 2 or min(outer) < least:
        return False
    usual = 4 <= max(sizes) <= 7
    return math.prod(sizes) >= multiplications and (usual or lanes >= 4 * LEAST_LANES)


LEAST_LANES = 512
"""What fewer lanes gain does not make up for what compiling takes longer."""

_SERVED = {
    "float32": (12, 3, 32),
    "float64": (7, 3, 32),
    "complex64": (8, 1, 8),
    "complex128": (8, 1, 8),
}
"""For each dtype the most rows, and the least rows of a result and the least multiplications.

By measurements of 512 and 10,000 products on two cores. What is smaller, and products of real
matrices with vectors, XLA computes without a library, as fast as these.
"""
