"""Products of two small matrices, or of one with a vector, as sums of outer products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.analysis.one_function import from_zero
from batchax.jaxprs.types import Aval, Value
from batchax.linalg.pays import pays_back


def serves(lane: Sequence[Aval], params: dict[str, Any]) -> bool:
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


def product(a: Value, b: Value, *, dimension_numbers: tuple[Any, Any], **_: Any) -> list[Any]:
    """Returns what `lax.dot_general` returns, for the matrices of each lane, which come last."""
    ((i,), (j,)), _ = dimension_numbers
    a, b = jnp.moveaxis(a, i, 0), jnp.moveaxis(b, j, 0)
    if a.ndim == b.ndim:
        a, b = a[:, :, None], b[:, None]
    out = a[0] * b[0]
    for k in range(1, a.shape[0]):
        out = out + a[k] * b[k]
    # Stored for all its users: else each recomputes it.
    return [lax.optimization_barrier(out if a.shape[0] == 1 else from_zero(out))]


def pays(lane: Sequence[Aval], lanes: int, params: dict[str, Any], in_loop: int) -> bool:
    """Whether so many products take less time than those of XLA, on a CPU."""
    ((i,), _), _ = params["dimension_numbers"]
    inner = lane[0].shape[i]
    # A vector has one row, or column.
    outer = sorted(x.size // inner for x in lane) if inner else [0, 0]
    # XLA calls a library for each product of complex matrices, and of real ones of 4 to 7 rows and
    # columns, some of 2 or 3, which takes 10 to 20 times as long as these. What is smaller, or
    # larger, XLA computes itself: real ones of 10 rows 2.5 times as fast as these, and in a loop,
    # where these are transposed in each step, 20 times as fast.
    if lane[0].dtype.kind == "c":
        most = 4 if in_loop else 8
        calls = 2 <= inner <= most and outer[1] <= most and inner * outer[0] * outer[1] >= 8
    else:
        calls = 4 <= inner <= 7 and outer[0] >= 2 and 4 <= outer[1] <= 7
    gain = _GAIN if lane[0].dtype.name in _SERVED else 0.0
    return calls and pays_back(gain, _COMPILING, lanes, in_loop)


_SERVED = "float32", "float64", "complex64", "complex128"
_GAIN = 0.2  # microseconds for each product: 0.2 to 0.5
_COMPILING = 0.03  # seconds longer
