"""Reductions over each of many rows that are packed, one after another, along the first axis.

XLA for CPU adds elements to their rows one by one, by index. A loop over rows, which XLA compiles
as one function, reads a few adjacent elements at once, and finds no row of an element: maxima of
rows of some hundred numbers take 0.2x of the time, and sums 0.3x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.execution.slices import entry_of, part_of, put_part
from batchax.jaxprs.primitive_facts import NEUTRAL
from batchax.jaxprs.types import Aval, Tree, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_function, repeat
from batchax.kernel.own_primitive import declare, own_primitive
from batchax.rows.index import WINDOW, RowIndex

REDUCTIONS = {
    "reduce_sum": jax.ops.segment_sum,
    "reduce_max": jax.ops.segment_max,
    "reduce_min": jax.ops.segment_min,
}
"""The reductions over rows; JAX cannot differentiate its product over segments."""


def reduce_rows(kind: str, x: Value, index: RowIndex, lengths: Value | None = None) -> jax.Array:
    """`x`, packed along axis 0, reduced over each row by one of `REDUCTIONS`.

    With `lengths`, only the first elements of each row are: so many.
    """
    first = index.lengths if lengths is None else lengths
    where = [jnp.asarray(each) for each in (index.starts, first, index.rows)]
    in_full = lengths is None
    if kind in ("reduce_max", "reduce_min") and jnp.issubdtype(x.dtype, jnp.inexact):
        return _extreme(kind, x, where, in_full)
    return _reduce(kind, x, where, in_full)


def _reduce(kind: str, x: Value, where: Sequence[Value], in_full: bool) -> jax.Array:
    is_bool = x.dtype == jnp.bool_
    x = x.astype(jnp.int32) if is_bool else x
    operands = _compat.varying_alike([x, *where])
    out = reduced_rows_p.bind(*operands, kind=kind, in_full=in_full)
    return out > 0 if is_bool else out


def _extreme(kind: str, x: Value, where: Sequence[Value], in_full: bool) -> jax.Array:
    """The greatest or least of each row, with a derivative: JAX has none of it over segments."""

    @jax.custom_jvp
    def extreme(x: Value, *where: Value) -> jax.Array:
        return _reduce(kind, x, where, in_full)

    @extreme.defjvp
    def _(primals: Values, tangents: Values) -> tuple[jax.Array, jax.Array]:
        # As that of `reduce_max`: elements equal to the extreme share its derivative evenly.
        x, *where = primals
        # A compiler may compute `x` again where it is compared, and round it otherwise: then no
        # element would equal the extreme.
        x = lax.optimization_barrier(x)
        best = extreme(x, *where)
        at_best = jnp.equal(x, best.at[where[-1]].get(mode="fill", fill_value=0))
        dot = _reduce("reduce_sum", jnp.where(at_best, tangents[0], 0), where, in_full)
        ties = _reduce("reduce_sum", at_best.astype(x.dtype), where, in_full)
        return best, jnp.where(ties > 0, dot / jnp.maximum(ties, 1), 0)

    return extreme(x, *where)


def _operations(
    x: Value, starts: Value, lengths: Value, rows: Value, *, kind: str, in_full: bool
) -> jax.Array:
    count = starts.shape[0]
    if not in_full and count:
        row = jnp.minimum(rows, count - 1)
        own = jnp.arange(len(rows), dtype=np.int32) - starts[row] < lengths[row]
        mask = lax.broadcast_in_dim(own, x.shape, (0,))
        neutral = NEUTRAL[kind.removeprefix("reduce_")](x.dtype)
        x = lax.select(mask, x, lax.full_like(x, neutral))
    return REDUCTIONS[kind](x, rows, count, indices_are_sorted=True, mode="drop")


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
}
_DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64")))


def _on_cpu(
    x: Value, starts: Value, lengths: Value, rows: Value, *, kind: str, in_full: bool
) -> jax.Array:
    each, count = math.prod(x.shape[1:]), starts.shape[0]
    fits = 0 < each <= WINDOW <= x.size <= np.iinfo(np.int32).max
    if not fits or not count or x.dtype not in _DTYPES:
        return _operations(x, starts, lengths, rows, kind=kind, in_full=in_full)
    wide = 1 << (WINDOW // each).bit_length() - 1  # elements in a window
    numbers, size_of_each = np.int32(wide * each), np.int32(each)
    combine = _COMBINE[kind]
    neutral = np.asarray(NEUTRAL[kind.removeprefix("reduce_")](x.dtype), x.dtype)
    most = np.int32(x.size - wide * each)
    spread = lambda x: lax.broadcast(x, (wide * each,))

    flat = x.reshape(-1)
    first, within = spread(neutral), np.arange(wide * each, dtype=np.int32)

    def row(r: Value, out: Value) -> Value:
        begin = lax.mul(entry_of(starts, r), size_of_each)
        size = lax.mul(entry_of(lengths, r), size_of_each)
        whole = lax.div(size, numbers)

        def window(k: Value, total: Value) -> Value:
            return combine(
                total, part_of(flat, lax.add(begin, lax.mul(k, numbers)), 0, wide * each)
            )

        total = repeat(whole, window, first)
        # The last window holds what is left of the row. At the end of the array it reaches
        # back.
        last = lax.add(begin, lax.mul(whole, numbers))
        at = lax.min(last, most)
        ends = lax.sub(lax.add(begin, size), at)
        own = lax.bitwise_and(
            lax.ge(within, spread(lax.sub(last, at))), lax.lt(within, spread(ends))
        )
        total = combine(total, lax.select(own, part_of(flat, at, 0, wide * each), first))
        while total.shape[0] > each:
            total = combine(*lax.split(total, (total.shape[0] // 2,) * 2))
        return put_part(out, total, lax.mul(r, size_of_each))

    out = repeat(count, row, lax.full((count * each,), neutral, x.dtype))
    return out.reshape(count, *x.shape[1:])


def _types(x: Aval, starts: Aval, *where: Aval, kind: str, in_full: bool) -> Aval:
    return x.update(shape=(starts.shape[0], *x.shape[1:]))


def _jvp(primals: Values, tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    assert params["kind"] == "reduce_sum"  # of extremes `_extreme` has the derivative
    out, dx = reduced_rows_p.bind(*primals, **params), tangents[0]
    if isinstance(dx, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, reduced_rows_p.bind(dx, *primals[1:], **params)


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> Tree:
    operations = lambda *xs: [_operations(*xs, **params)]
    (out,), (position,) = batch_function(axis, operations, args, axes)
    return out, position


reduced_rows_p = declare("reduced_rows", several=False)
own_primitive(
    reduced_rows_p,
    called="a reduction over each row",
    operations=_operations,
    compute=jax.jit(_operations, static_argnames=("kind", "in_full")),
    on_cpu=_on_cpu,
    types=_types,
    facts="moderate",
    rule=_batched,
    jvp=_jvp,
    several=False,
)
