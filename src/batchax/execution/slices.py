"""Scanning over slices of arrays along any of their axes, without moving the axis.

``lax.scan`` slices its operands along axis 0 only, and transposing an array to have
another axis there copies it. Here the body cuts its slice from the array itself. Left
at that, reverse mode would add up one full array for each step, so derivatives take
another way: through a scanned operand, whose values nobody looks at, and which is
therefore not made unless something is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from batchax import _compat
from batchax.engine.axis import Axis, AxisPosition, match_axis
from batchax.engine.registry import register_rule


def scan_slices(
    step: Callable[[Any, Any, list[Any]], Any],
    carry: Any,
    xs: Sequence[Any],
    axes: Sequence[int | None],
    width: int,
    count: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> Any:
    """Runs `step` for each of `count` slices of `width` entries.

    Args:
      step: ``(index, carry, parts) -> (carry, ys)``, where `parts` are the slices.
      carry: what it starts from.
      xs: the arrays.
      axes: along which axis each is sliced; None for "the same at each step".
      width: how many entries a slice has.
      count: how many slices are taken, from the first entry on.
      reverse: whether the last slice comes first.
      unroll: as for ``lax.scan``.

    Returns:
      The last carry, and the stacked `ys`.
    """
    followed = [a is not None and jnp.issubdtype(x.dtype, jnp.inexact) for x, a in zip(xs, axes, strict=True)]
    fixed = [lax.stop_gradient(x) if f else x for x, f in zip(xs, followed, strict=True)]
    ways = [_slices_first(x, a, width, count) if f else None for x, a, f in zip(xs, axes, followed, strict=True)]

    def body(carry: Any, scanned: Any) -> Any:
        index, ways = scanned
        parts = []
        for x, a, way in zip(fixed, axes, ways, strict=True):
            if a is not None:
                start = index * np.int32(width)
                x = lax.dynamic_slice_in_dim(x, start, width, a, allow_negative_indices=False)
            parts.append(x if way is None else _with_derivative_of(x, jnp.moveaxis(way, 0, a)))
        return step(index, carry, parts)

    indices = lax.iota(np.int32, count)
    return lax.scan(body, carry, (indices, ways), length=count, reverse=reverse, unroll=unroll)


def _slices_first(x: Any, axis: int, width: int, count: int) -> Any:
    """The slices of `x` stacked, with the sliced axis first in each."""
    x = jnp.moveaxis(lax.slice_in_dim(x, 0, width * count, axis=axis), axis, 0)
    return x.reshape(count, width, *x.shape[1:])


def _with_derivative_of(value: Any, other: Any) -> Any:
    """`value`, which equals `other`, with the derivatives of `other`, to all orders.

    A ``jax.custom_jvp`` function would lose those of second order: JAX drops its rule
    once it has been used.
    """
    return follow_p.bind(value, other)


follow_p = _compat.Primitive("follow")
follow_p.def_impl(lambda value, other: value)
follow_p.def_abstract_eval(lambda value, other: value)
mlir.register_lowering(follow_p, lambda ctx, value, other: [value])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return follow_p.bind(*primals), tangents[1]


@register_rule(follow_p)
def _batched(axis: Axis, args: Any, axes: Any, /) -> tuple[Any, AxisPosition]:
    position = next(a for a in axes if a is not None)
    return follow_p.bind(
        *(match_axis(axis, x, a, position) for x, a in zip(args, axes, strict=True))
    ), position


def _batched_by_jax(args: Any, axes: Any) -> tuple[Any, AxisPosition]:
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    return _batched(Axis(size), args, axes)


ad.primitive_jvps[follow_p] = _jvp
batching.primitive_batchers[follow_p] = _batched_by_jax
