"""Calls of Python from a compiled program, foreign functions, and runtime checks.

A pure callback and a foreign call say themselves how they take a batch
(``vmap_method``). A callback with effects runs once for each lane, in order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify as checkify  # registers its primitive with JAX
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.spoken import name_of
from batchax.kernel.axis import Axis, axis_to_front, expand_axis, move_axis
from batchax.kernel.interpreter import one_after_another
from batchax.kernel.registry import register_rule
from batchax.rules.lane_calls import failures

enter(
    """
    endless costly: io_callback pure_callback
    library: ffi_call
    : check debug_callback debug_print inspect_sharding
    """
)

_SEQUENTIAL = ("sequential", "sequential_unrolled")
_AT_ONCE = ("expand_dims", "broadcast_all", "legacy_vectorized")


def _by_method(primitive: _compat.Primitive) -> None:
    """Registers `primitive`, which takes a ``vmap_method``."""

    @register_rule(primitive)
    def rule(
        axis: Axis, args: Any, axes: Any, /, *, vmap_method: str | None, **params: Any
    ) -> tuple[Any, Any]:
        if vmap_method in _SEQUENTIAL:

            def one_lane(*xs: Any) -> Any:
                return primitive.bind(*xs, vmap_method=vmap_method, **params)

            unroll = vmap_method == "sequential_unrolled"
            outs = one_after_another(axis, one_lane, args, axes, unroll=unroll)
            return outs, [0] * len(outs)
        if vmap_method not in _AT_ONCE:
            raise UnsupportedError(
                f"{_callee(params)} was called on batched values through {primitive}, without a "
                "vmap_method that says how it takes a batch. Pass vmap_method='sequential' to "
                "call it once for each lane, or 'broadcast_all' or 'expand_dims' if it accepts "
                "arrays with a leading batch axis."
            )
        outs = primitive.bind(
            *_with_lanes(axis, args, axes, vmap_method, params.get("input_output_aliases", ())),
            vmap_method=vmap_method,
            **{**params, **_with_lane_types(axis, axes, vmap_method, **params)},
        )
        return outs, [0] * len(outs)


def _with_lanes(axis: Axis, args: Any, axes: Any, method: str, aliases: Any) -> list[Any]:
    """Operands with the batch axis first, as `method` wants those that have none."""
    # An operand that becomes an output must have the size of that: it gets the axis in any case.
    overwritten = {operand for operand, _ in aliases}
    out = []
    for i, (x, a) in enumerate(zip(args, axes, strict=True)):
        if a is not None or method == "broadcast_all" or i in overwritten:
            x = axis_to_front(axis, x, a)
        elif method == "expand_dims":
            x = expand_axis(x, 0)
        out.append(x)
    return out


def _with_lane_types(
    axis: Axis,
    axes: Any,
    method: str,
    *,
    result_avals: Any,
    input_layouts: Any = None,
    output_layouts: Any = None,
    **_: Any,
) -> dict[str, Any]:
    """The parameters that describe operands and results, with a leading batch axis."""
    types = dict(result_avals=tuple(unmapped_aval(axis.size, 0, aval) for aval in result_avals))
    if output_layouts is not None:
        all_gain = method != "legacy_vectorized"
        types["input_layouts"] = tuple(
            _outermost(layout) if all_gain or a is not None else layout
            for layout, a in zip(input_layouts, axes, strict=True)
        )
        types["output_layouts"] = tuple(map(_outermost, output_layouts))
    return types


def _outermost(layout: Any) -> Any:
    """A minor-to-major layout with a leading batch axis, which varies slowest."""
    return None if layout is None else (*(dim + 1 for dim in layout), 0)


def _callee(params: dict[str, Any]) -> str:
    if "target_name" in params:
        return f"the foreign function {params['target_name']!r}"
    callback = getattr(params["callback"], "callback_func", params["callback"])
    return f"the callback {name_of(callback)!r}"


def _lane_by_lane(primitive: _compat.Primitive) -> None:
    """Registers `primitive`, which has effects, as running once for each lane in order."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        outs = one_after_another(axis, lambda *xs: primitive.bind(*xs, **params), args, axes)
        return outs, [0] * len(outs)


def _on_the_batch(primitive: _compat.Primitive) -> None:
    """Registers `primitive`, which looks at a value and has no results."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        primitive.bind(*args, **params)
        return [], []


def _check(primitive: _compat.Primitive) -> None:
    """Registers the primitive of ``checkify.check``: the first lane that fails is reported."""

    @register_rule(primitive)
    def rule(
        axis: Axis, args: Any, axes: Any, /, *, err_tree: Any, **params: Any
    ) -> tuple[Any, Any]:
        if axis.size == 0:
            return [], []
        args = [x if a is None else move_axis(x, a, 0) for x, a in zip(args, axes, strict=True)]
        count = failures(err_tree)
        failed = functools.reduce(jnp.logical_or, args[:count])
        first = jnp.argmax(failed) if jnp.ndim(failed) else 0
        args = [
            x if a is None else lax.dynamic_index_in_dim(x, first, 0, keepdims=False)
            for x, a in zip(args, axes, strict=True)
        ]
        primitive.bind(*args, err_tree=err_tree, **params)
        return [], []


for _names, _make in (
    ("pure_callback ffi_call", _by_method),
    ("io_callback debug_callback debug_print", _lane_by_lane),
    ("inspect_sharding", _on_the_batch),
    ("check", _check),
):
    for _name in _names.split():
        if (_primitive := _compat.find_primitive(_name)) is not None:
            _make(_primitive)
