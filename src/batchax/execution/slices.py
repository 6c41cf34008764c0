"""Reads and writes entries of arrays along any axis, inside loops.

``lax.scan`` slices its operands along axis 0 only, and transposing an array to move another axis
there copies it. Here the body reads its slice from the array itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, match_axis
from batchax.kernel.own_primitive import own_primitive


def part_of(x: Value, start: Value, axis: int, width: int) -> Any:
    sizes = list(x.shape)
    sizes[axis] = width
    return lax.dynamic_slice(x, _places(x, start, axis), sizes, allow_negative_indices=False)


def put_part(array: Value, part: Value, start: Any, axis: int = 0) -> Any:
    places = _places(array, start, axis)
    return lax.dynamic_update_slice(array, part, places, allow_negative_indices=False)


def entry_of(x: Value, t: Any, axis: int = 0) -> Any:
    return lax.squeeze(part_of(x, t, axis, 1), [axis])


def put_entry(array: Value, entry: Any, t: Any, axis: int = 0) -> Any:
    return put_part(array, lax.expand_dims(entry, [axis]), t, axis)


def _places(x: Value, start: Any, axis: int) -> list[Any]:
    start = np.int32(start) if isinstance(start, int) else start
    places: list[Any] = [np.zeros((), start.dtype)] * x.ndim
    places[axis] = start
    return places


def blank(aval: Aval, number: int) -> Any:
    """Returns an array of type `aval` whose entries will all be written.

    Its values depend on `number`, which should differ between arrays.
    """
    # XLA merges arrays of equal constants into one, and then copies it for each loop that writes to
    # it.
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # random keys: they cannot hold a number
        sharding = None if aval.sharding.mesh.empty else aval.sharding
        return lax.empty(aval.shape, aval.dtype, out_sharding=sharding)
    # Small numbers differ in narrow dtypes too: in bfloat16, 300 and 301 are the same.
    value = number % 2 == 0 if aval.dtype == bool else number % 100
    return _compat.filled(aval, value)


def slices_first(x: Value, axis: int, width: int, count: int) -> Any:
    """Returns `count` slices of `width` entries along `axis`, stacked along axis 0."""
    x = lax.slice_in_dim(x, 0, width * count, axis=axis)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, width, *x.shape[axis + 1 :]), axis, 0)


def with_derivative_of(value: Value, other: Any) -> Any:
    """Returns `value`, which equals `other`, with the derivatives of `other`, to all orders."""
    # A ``jax.custom_jvp`` function loses second derivatives: JAX drops its rule after one use.
    return follow_p.bind(value, other)


def _jvp(primals: Values, tangents: Values) -> tuple[Any, Any]:
    return follow_p.bind(*primals), tangents[1]


def _transpose(cotangent: Any, value: Value, other: Any) -> list[Any]:
    # In a derivative only `other` is linear, as `value` has no tangent. Both are where a program
    # is transposed that was not differentiated before (`jax.linear_transpose`).
    return [ad.Zero(value.aval) if ad.is_undefined_primal(value) else None, cotangent]


def _batched(axis: Axis, args: Values, axes: Positions, /) -> tuple[Any, Position]:
    position = next(a for a in axes if a is not None)
    return follow_p.bind(
        *(match_axis(axis, x, a, position) for x, a in zip(args, axes, strict=True))
    ), position


follow_p = own_primitive(
    "follow",
    called="value with another's derivative",
    operations=lambda value, other: value,
    types=lambda value, other: value,
    programs=(),
    facts="",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)
