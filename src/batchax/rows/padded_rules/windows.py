"""Windows along a row, and convolutions: beyond the row is what changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from batchax.jaxprs.neutral import NEUTRAL, highest, lowest
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import is_static, padded
from batchax.rows.sizes import is_symbolic


@padded_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(op: Operation, x: Row, **params: Any) -> Any:
    kind = op.eqn.primitive.name.removeprefix("reduce_window_")
    return _over_windows(op, [x], [NEUTRAL[kind](x.value.dtype)], **params)


@padded_rule("reduce_window")
def _general_reduce_window(op: Operation, *rows: Row, **params: Any) -> Any:
    # Beyond the row a window sees the initial value, as it does where JAX pads the operand.
    operands, starts = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return _over_windows(op, operands, [start.value for start in starts], starts, **params)


def _over_windows(
    op: Operation,
    operands: Sequence[Row],
    neutral: Sequence[Any],
    others: Sequence[Row] = (),
    *,
    window_dimensions: Any,
    window_strides: Any,
    window_dilation: Any,
    base_dilation: Any,
    padding: Any,
    **params: Any,
) -> Any:
    _refuse_ragged_windows(op, window_dimensions, op.out_shape)
    extents = _extents(op, window_dimensions, window_dilation)
    bounds = op.sizes.bounds_of(op.out_shape)
    needed = [
        (count - 1) * stride + extent if count else 0
        for count, stride, extent in zip(bounds, window_strides, extents, strict=True)
    ]
    config = _config(padding, base_dilation)
    arrays = [
        padded(op, jnp.asarray(op.filled(row, value)), value, config, row.shape, needed)
        for row, value in zip(operands, neutral, strict=True)
    ]
    if 0 in bounds:
        outs = [jnp.zeros(bounds, x.dtype) for x in arrays]
    else:
        none = [0] * len(bounds)
        changes = {
            "padding": tuple(zip(none, none, strict=True)),
            "base_dilation": (1,) * len(bounds),
        }
        outs = op.bind(*arrays, *(row.value for row in others), **changes)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    return [op.cut(out, op.out_shape) for out in outs]


@padded_rule("select_and_scatter_add")
def _select_and_scatter_add(
    op: Operation,
    source: Row,
    x: Row,
    *,
    select_prim: Any,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
) -> Any:
    array, config = _selected_from(
        op, x, source.shape, select_prim, window_dimensions, window_strides, padding
    )
    cotangent = op.filled(source, 0)
    bounds = op.sizes.bounds_of(x.shape)
    if 0 in cotangent.shape:
        return jnp.zeros(bounds, array.dtype)
    out = op.bind(cotangent, array, padding=((0, 0),) * len(bounds))
    back = [(-low, -high, 0) for low, high, _ in config]
    return padded(op, out, 0, back, x.shape, bounds)


@padded_rule("select_and_gather_add")
def _select_and_gather_add(
    op: Operation,
    tangents: Row,
    x: Row,
    *,
    select_prim: Any,
    window_dimensions: Any,
    window_strides: Any,
    window_dilation: Any,
    base_dilation: Any,
    padding: Any,
) -> Any:
    if any(step != 1 for step in (*window_dilation, *base_dilation)):
        raise op.refuse("its windows are dilated. Take every second element, x[::2], instead.")
    array, config = _selected_from(
        op, x, op.out_shape, select_prim, window_dimensions, window_strides, padding
    )
    if 0 in op.sizes.bounds_of(op.out_shape):
        return jnp.zeros(op.sizes.bounds_of(op.out_shape), array.dtype)
    moving = padded(op, jnp.asarray(op.filled(tangents, 0)), 0, config, tangents.shape, array.shape)
    return op.cut(op.bind(moving, array, padding=((0, 0),) * array.ndim), op.out_shape)


def _selected_from(
    op: Operation,
    x: Row,
    windows: Sequence[Any],
    select_prim: Any,
    dimensions: Any,
    strides: Any,
    padding: Any,
) -> tuple[Any, list[tuple[Any, Any, int]]]:
    """What windows select from, with all that they reach beyond the row; and how it is padded."""
    _refuse_ragged_windows(op, dimensions, windows)
    value = (lowest if select_prim.name == "ge" else highest)(x.value.dtype)
    config = _config(padding, (1,) * len(dimensions))
    needed = [
        (count - 1) * stride + extent if count else 0
        for count, stride, extent in zip(
            op.sizes.bounds_of(windows), strides, op.sizes.bounds_of(dimensions), strict=True
        )
    ]
    array = padded(op, jnp.asarray(op.filled(x, value)), value, config, x.shape, needed)
    return array, config


def _config(padding: Any, dilation: Any) -> list[tuple[Any, Any, int]]:
    return [(low, high, step - 1) for (low, high), step in zip(padding, dilation, strict=True)]


def _extents(op: Operation, dimensions: Any, dilation: Any) -> list[int]:
    """Over how many elements windows reach."""
    return [
        (op.sizes.bound(dim) - 1) * int(step) + 1
        for dim, step in zip(dimensions, dilation, strict=True)
    ]


def _refuse_ragged_windows(op: Operation, dimensions: Any, windows: Any) -> None:
    """Windows whose size depends on the row may only reach over all of it.

    Raises:
      CannotPad: there are others.
    """
    for dim, count in zip(dimensions, windows, strict=True):
        if is_symbolic(dim) and (is_symbolic(count) or count != 1):
            raise op.refuse(
                f"its windows have {dim} elements, which differs from row to row. Give them a "
                "fixed size."
            )


@padded_rule("conv_general_dilated")
def _conv(
    op: Operation,
    x: Row,
    kernel: Row,
    *,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    dimension_numbers: Any,
    **params: Any,
) -> Any:
    _refuse_ragged_groups(op, x.shape, kernel.shape, dimension_numbers, params)
    # Zero in all padding, as for products of matrices: derivatives are convolutions, too.
    lhs, rhs = jnp.asarray(op.filled(x, 0)), jnp.asarray(op.filled(kernel, 0))
    spatial, kernel_dims = dimension_numbers.lhs_spec[2:], dimension_numbers.rhs_spec[2:]
    out_dims = dimension_numbers.out_spec[2:]
    extents = _extents(op, [kernel.shape[axis] for axis in kernel_dims], rhs_dilation)
    config: list[Any] = [(0, 0, 0)] * lhs.ndim
    needed, reached = list(lhs.shape), []
    dilation = list(lhs_dilation)
    for i, axis in enumerate(spatial):
        count = op.sizes.bound(op.out_shape[out_dims[i]])
        size = (count - 1) * window_strides[i] + extents[i] if count else 0
        low = op.sizes.value(padding[i][0])
        if not is_static(low):  # windows begin elsewhere in each row
            config[axis], needed[axis] = (*padding[i], dilation[i] - 1), size
            reached.append((0, 0))
            dilation[i] = 1
        else:  # the convolution itself sees zeros around an array, and copies none
            held = max((lhs.shape[axis] - 1) * dilation[i] + 1, 0)
            reached.append((int(low), int(size - low - held)))
    bounds = op.sizes.bounds_of(op.out_shape)
    if 0 in (*bounds, *rhs.shape):
        return jnp.zeros(bounds, op.eqn.outvars[0].aval.dtype)
    lhs = padded(op, lhs, 0, config, x.shape, needed)
    out = op.bind(lhs, rhs, padding=tuple(reached), lhs_dilation=tuple(dilation))
    return op.cut(out, op.out_shape)


def _refuse_ragged_groups(
    op: Operation, x: Sequence[Any], kernel: Sequence[Any], dimension_numbers: Any, params: Any
) -> None:
    """Groups of channels or of a batch may be as many as the row says, but not of as many.

    In padded arrays each group would begin elsewhere.

    Raises:
      CannotPad: the size of groups differs from row to row.
    """
    batch, features = (x[axis] for axis in dimension_numbers.lhs_spec[:2])
    outputs = kernel[dimension_numbers.rhs_spec[0]]
    for name, size in (("feature_group_count", features), ("batch_group_count", batch)):
        count = params[name]
        if not is_symbolic(count) and count == 1:
            continue
        for dim in (size, outputs):
            if op.sizes.is_exact(dim) and op.sizes.is_exact(count):
                continue
            bounds, every = (
                [op.sizes.bound(n) for n in (dim, count)],
                op.sizes.in_every_row(dim, count),
            )
            if every is None or (every[0] * bounds[1] != every[1] * bounds[0]).any():
                raise op.refuse(
                    f"{name}={count} makes groups of {dim}, and how many of these are in one "
                    "differs from row to row. Convolve each group by itself."
                )
