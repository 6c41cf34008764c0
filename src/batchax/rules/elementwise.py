"""Primitives that act on each element alone, and those that combine elements along dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    batch_sharding,
    inserted,
    match_axis,
    move_axis,
    shift_dims,
)
from batchax.kernel.registry import (
    broadcasting,
    common_position,
    example_shape,
    reducing,
    register_rule,
    vectorized,
)
from batchax.rules.reductions import SHORT, reducing_few_or_many

UNARY = enter(
    """
    linear moderate alias: convert_element_type copy name stop_gradient
    linear moderate: neg
    linear: conj imag real reduce_precision
    moderate: atan cos erf is_finite logistic not sign sin tanh
    : abs acos acosh asin asinh atanh bessel_i0e bessel_i1e cbrt ceil clz cosh digamma erf_inv erfc
      exp exp2 expm1 floor from_edtype integer_pow lgamma log log1p log2 one_minus_square
      population_count round rsqrt sinh sqrt square tan
    """,
    elementwise=True,
)
NARY = enter(
    """
    linear moderate: add max min sub
    linear: complex
    moderate: and eq eq_to ge gt le le_to lt lt_to mul ne or
    : atan2 div igamma igamma_grad_a igammac mulhi nextafter polygamma polynomial pow
      regularized_incomplete_beta rem shift_left shift_right_arithmetic shift_right_logical
      xor zeta
    """,
    elementwise=True,
)
enter("linear moderate: add_any clamp select_n", elementwise=True)
enter("additive: add add_any convert_element_type neg sub")
enter(": bitcast_convert_type")

for _names, _make in ((UNARY, vectorized), (NARY, broadcasting)):
    for _name in _names:
        _primitive = _compat.find_primitive(_name)
        if _primitive is not None:  # a few exist in newer JAX only
            (reducing_few_or_many if _name in SHORT else _make)(_primitive)


_add_any_p: Any = _compat.find_primitive("add_any")


@register_rule(_add_any_p)
def _add_any(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    # The sum of cotangents: unlike `add` it does not broadcast.
    target = common_position(args, axes)
    args = [match_axis(axis, x, a, target) for x, a in zip(args, axes, strict=True)]
    return _add_any_p.bind(*args), target


@register_rule(lax.clamp_p)
def _clamp(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    return _with_scalars(lax.clamp_p, axis, args, axes, scalars=(0, 2))


@register_rule(lax.select_n_p)
def _select_n(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    return _with_scalars(lax.select_n_p, axis, args, axes, scalars=(0,))


def _with_scalars(
    primitive: _compat.Primitive,
    axis: Axis,
    args: Values,
    axes: Positions,
    scalars: tuple[int, ...],
) -> tuple[Any, Any]:
    """Binds a primitive whose operands have one shape; those in `scalars` may be scalars."""
    target = common_position(args, axes)
    whole, position = max(zip(args, axes, strict=True), key=lambda pair: len(example_shape(*pair)))
    shape = inserted(example_shape(whole, position), target, axis.size)
    sharding = batch_sharding(axis, whole, position, target)
    args = [
        x
        if i in scalars and a is None and np.ndim(x) == 0
        else _filled(x, a, target, shape, sharding)
        for i, (x, a) in enumerate(zip(args, axes, strict=True))
    ]
    return primitive.bind(*args), target


def _filled(
    x: Value, position: Position, target: int, shape: tuple[int, ...], sharding: Sharding | None
) -> jax.Array:
    """Repeats `x` to `shape`, with its batch axis at `target`."""
    ndim = len(shape)
    if position is not None and x.ndim == ndim:
        return move_axis(x, position, target)
    kept = [d for d in range(ndim) if d != target]
    if position is not None or np.ndim(x) == 0:  # a number, for each lane or for all
        kept = [target] * np.ndim(x)
    return lax.broadcast_in_dim(x, shape, kept, out_sharding=sharding)


@register_rule(lax.bitcast_convert_type_p)
def _bitcast_convert_type(
    axis: Axis, args: Values, axes: Sequence[int], /, **params: Any
) -> RuleOutputs:
    (x,), (position,) = args, axes
    cast = partial(lax.bitcast_convert_type_p.bind, **params)
    if position == x.ndim - 1 > 0:
        example = jax.ShapeDtypeStruct(example_shape(x, position), x.dtype)
        if len(jax.eval_shape(cast, example).shape) < len(example.shape):
            # A cast to a wider type consumes the last dimension, which must not be the batch.
            x, position = move_axis(x, position, 0), 0
    return cast(x), position


REDUCTIONS = enter(
    """
    linear moderate: reduce_sum
    moderate: argmax argmin reduce_max reduce_min
    : reduce_and reduce_or reduce_prod reduce_xor
    """
)
CUMULATIVE = enter(
    """
    linear: cumsum
    : cumlogsumexp cummax cummin cumprod
    """
)
enter("additive: reduce_sum")
enter("combines: reduce")


def _cumulative(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(
        batch: Axis, args: Values, positions: Sequence[int], /, *, axis: int, reverse: bool
    ) -> RuleOutputs:
        (x,), (position,) = args, positions
        (dim,) = shift_dims((axis,), position)
        return primitive.bind(x, axis=dim, reverse=reverse), position


for _names, _make in ((REDUCTIONS, reducing), (CUMULATIVE, _cumulative)):
    for _name in _names:
        _primitive = _compat.find_primitive(_name)
        assert _primitive is not None
        (reducing_few_or_many if _name in SHORT else _make)(_primitive)
