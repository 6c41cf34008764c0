"""Primitives that slide a window over their operands, as pooling and its derivatives do.

The window has size one along the batch axis, wherever that axis is.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, inserted
from batchax.kernel.interpreter import one_after_another
from batchax.kernel.registry import matched, register_rule

enter(
    """
    linear: reduce_window_sum
    : reduce_window_max reduce_window_min
    combines: reduce_window select_and_gather_add select_and_scatter select_and_scatter_add
    """
)

# What each parameter that has an entry per dimension says for the batch axis.
ALONG_BATCH = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}

# Each with the number of its operands that have the shape of the array; those
# that follow are initial values, one number for the whole array.
WINDOWED = {
    "reduce_window_max": 1,
    "reduce_window_min": 1,
    "reduce_window_sum": 1,
    "select_and_gather_add": 2,
    "select_and_scatter": 2,
    "select_and_scatter_add": 2,
}


def _windowed(primitive: _compat.Primitive, n_arrays: int | None = None) -> None:
    """Registers `primitive`; `n_arrays` None stands for half of its operands."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        n = len(args) // 2 if n_arrays is None else n_arrays
        if any(a is not None for a in axes[n:]):
            return _lane_after_lane(primitive, axis, args, axes, params)
        arrays, position = matched(axis, args[:n], axes[:n])
        for name, entry in ALONG_BATCH.items():
            if name in params:
                params[name] = inserted(params[name], position, entry)
        out = primitive.bind(*arrays, *args[n:], **params)
        if primitive.multiple_results:
            return out, [position] * len(out)
        return out, position


def _lane_after_lane(
    primitive: _compat.Primitive, axis: Axis, args: Any, axes: Any, params: dict[str, Any]
) -> tuple[Any, Any]:
    """For initial values that differ from lane to lane.

    The primitives take one initial value, which also fills the padding and
    enters any number of windows, so lanes cannot share a call.
    """

    def one_lane(*xs: Any) -> list[Any]:
        out = primitive.bind(*xs, **params)
        return list(out) if primitive.multiple_results else [out]

    outs = one_after_another(axis, one_lane, args, axes)
    return (outs, [0] * len(outs)) if primitive.multiple_results else (outs[0], 0)


for _name, _n_arrays in WINDOWED.items():
    _primitive = _compat.find_primitive(_name)
    assert _primitive is not None
    _windowed(_primitive, _n_arrays)
_windowed(lax.reduce_window_p)
