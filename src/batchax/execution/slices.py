"""Reads and writes entries of arrays along any axis, inside loops.

``lax.scan`` slices its operands along axis 0 only, and transposing an array to move another axis
there copies it. Here the body reads its slice from the array itself (`entry`). Left at that,
reverse mode would add up one full array in each step. So derivatives take another *way*: the array
is passed on from step to step, and each step *takes* its slice out of it. No other step reads that
slice. In reverse mode the cotangent is passed on likewise, and each step writes its slice into it.
No primal value depends on ways, so XLA removes them unless something is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.jaxprs.types import Aval, Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, match_axis
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.masking import is_inexact


def part_of(x: Value, start: Value, axis: int, width: int) -> Value:
    sizes = list(x.shape)
    sizes[axis] = width
    part = lax.dynamic_slice(x, _places(x, start, axis), sizes, allow_negative_indices=False)
    return _compat.unconsumed(part)  # of keys, no step reads those of another


def put_part(array: Value, part: Value, start: Value, axis: int = 0) -> Value:
    places = _places(array, start, axis)
    return lax.dynamic_update_slice(array, part, places, allow_negative_indices=False)


def entry_of(x: Value, t: Value, axis: int = 0) -> Value:
    return lax.squeeze(part_of(x, t, axis, 1), [axis])


def put_entry(array: Value, entry: Value, t: Value, axis: int = 0) -> Value:
    return put_part(array, lax.expand_dims(entry, [axis]), t, axis)


def _places(x: Value, start: Value, axis: int) -> list[Any]:
    start = np.int32(start) if isinstance(start, int) else start
    places: list[Any] = [np.zeros((), start.dtype)] * x.ndim
    places[axis] = start
    return places


def blank(aval: Aval, number: int) -> Value:
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


def scan_slices(
    step: Callable[[Value, list[Value], list[Value]], list[Value]],
    carry: list[Value],
    xs: Values,
    axes: Sequence[int | None],
    width: int,
    count: int,
) -> list[Value]:
    """Runs `step` for each of `count` slices of `width` entries, and returns the last carry.

    `step` maps (index, carry, parts) to the carry; `axes` are those sliced, None for a whole array.
    """
    if count == 0:
        return carry
    # Slices along the whole first axis are left to ``lax.scan``. Others are cut from the whole
    # array, and their derivative goes through the array that is handed from step to step, so that
    # reverse mode writes in place instead of adding arrays of zeros.
    rows = [
        x.reshape(count, width, *x.shape[1:]) if a == 0 and x.shape[0] == count * width else None
        for x, a in zip(xs, axes, strict=True)
    ]
    handed = [
        x if a is not None and row is None and is_inexact(x) else None
        for x, a, row in zip(xs, axes, rows, strict=True)
    ]
    fixed = [x if way is None else lax.stop_gradient(x) for x, way in zip(xs, handed, strict=True)]

    def body(state: Tree, scanned: Tree) -> tuple[Tree, None]:
        (carry, handed), (index, rows) = state, scanned
        start, parts, left = index * np.int32(width), [], []
        for x, axis, part, way in zip(fixed, axes, rows, handed, strict=True):
            if axis is None:
                part = x
            elif part is None:
                part = part_of(x, start, axis, width)
                if way is not None:
                    own, way = take(way, start, axis, width)
                    part = with_derivative_of(part, own)
            parts.append(part)
            left.append(way)
        return (step(index, carry, parts), left), None

    scanned = lax.iota(np.int32, count), rows
    ((carry, _), _) = lax.scan(body, (carry, handed), scanned, length=count)
    return carry


def take(array: Value, start: Value, axis: int, width: int) -> list[Any]:
    """Returns a slice of an array that is handed on, and the array.

    The slice may not be read from it again, so that its cotangent is written and not added.
    """

    def ahead(at: Sequence[Any], arrays: Values) -> list[Value]:
        return [part_of(arrays[0], at[0], axis, width), arrays[0]]

    def back(at: Sequence[Any], cts: Values) -> list[Value]:
        return [put_part(cts[1], cts[0], at[0], axis)]

    return linear_with_transpose(ahead, back, [start], [array], key=("take", axis, width))


def with_derivative_of(value: Value, other: Value) -> Value:
    """Returns `value`, which equals `other`, with the derivatives of `other`, to all orders."""
    # A ``jax.custom_jvp`` function loses second derivatives: JAX drops its rule after one use.
    return follow_p.bind(value, other)


def _jvp(primals: Values, tangents: Values) -> tuple[Any, Any]:
    return follow_p.bind(*primals), tangents[1]


def _transpose(cotangent: Value, value: Value, other: Value) -> list[Value]:
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
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)
