"""Random keys and bits.

Each lane gets exactly what it would get alone. For counter-based generators
(threefry, philox) that is one call over all keys. The generators that XLA
provides (`rbg`, `unsafe_rbg`, `jax.lax.rng_bit_generator`) take one key:
``jax.vmap`` draws for all lanes from the first key, which gives other bits than
each key gives alone. Here their lanes run one after another.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, axis_to_front, move_axis
from batchax.kernel.interpreter import one_after_another
from batchax.kernel.registry import (
    Rule,
    broadcasting,
    find_rule,
    leading_rule,
    register_rule,
    vectorized,
)
from batchax.rules.threefry import WRITTEN_OUT, drawn

enter(
    """
    : philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed
      random_split random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32
      threefry4x32 to_edtype
    """
)

COUNTER_BASED = {"philox2x32", "philox4x32", "threefry2x32", "threefry4x32"}

# The key implementations for which a primitive, given many keys, does for each
# what it does for one. A user's own implementation may be anything.
TOGETHER = {
    "random_bits": COUNTER_BASED,
    "random_fold_in": COUNTER_BASED | {"rbg"},
    "random_gamma": COUNTER_BASED | {"rbg"},
    "random_seed": COUNTER_BASED | {"rbg", "unsafe_rbg"},
    "random_split": COUNTER_BASED | {"rbg"},
}


def _alone(primitive: Any, others: Rule | None = None, implementations: Any = ()) -> None:
    """Registers `primitive` as run one lane after another.

    Keys of `implementations` are served by the rule `others` instead.
    """

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        if others is not None:
            impl = params["impl"].name if "impl" in params else jax.random.key_impl(args[0])
            if isinstance(impl, str) and impl in implementations:
                return others(axis, args, axes, **params)

        def one_lane(*xs: Any) -> list[Any]:
            out = primitive.bind(*xs, **params)
            return out if primitive.multiple_results else [out]

        outs = one_after_another(axis, one_lane, args, axes)
        return (outs, [0] * len(outs)) if primitive.multiple_results else (outs[0], 0)


for _name in ("random_bits", "random_clone", "random_seed", "random_split", "random_unwrap"):
    _primitive: Any = _compat.find_primitive(_name)
    vectorized(_primitive)
for _name in ("random_fold_in", *COUNTER_BASED):
    _primitive = _compat.find_primitive(_name)
    broadcasting(_primitive)
for _primitive in (lax.rng_bit_generator_p, lax.rng_uniform_p):
    _alone(_primitive)


_wrap_p: Any = _compat.find_primitive("random_wrap")
_gamma_p: Any = _compat.find_primitive("random_gamma")
_to_edtype_p: Any = _compat.find_primitive("to_edtype")


@register_rule(_wrap_p)
def _wrap(axis: Axis, args: Any, axes: Any, /, *, impl: Any) -> tuple[Any, Any]:
    return leading_rule(_wrap_p, (len(impl.key_shape),), axis, args, axes, impl=impl)


@register_rule("to_edtype")
def _to_edtype(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
    # The last dimensions become one element: the batch axis must not be among them.
    return _to_edtype_p.bind(move_axis(args[0], axes[0], 0), **params), 0


@register_rule(_gamma_p)
def _gamma(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
    # The shape of the keys must be a prefix of that of the parameter.
    args = [axis_to_front(axis, x, a) for x, a in zip(args, axes, strict=True)]
    return _gamma_p.bind(*args, **params), 0


def _written_out(name: str) -> None:
    """Registers the operation of JAX named `name` as `drawn` where that does the same."""
    primitive: Any = _compat.find_primitive(name)
    others: Any = find_rule(primitive)

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        if not _is_written_out(args, **params):
            return others(axis, args, axes, **params)
        outs, out_axes = drawn(axis, args, axes, of=name, **params)
        return (outs, out_axes) if primitive.multiple_results else (outs[0], out_axes[0])


def _is_written_out(operands: Any, *, shape: Any = (), **params: Any) -> bool:
    """Whether what a key of threefry-2x32 gives is known here, and of such an array."""
    keys = [x for x in operands if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if any(jax.random.key_impl(x) != "threefry2x32" for x in keys):
        return False
    if keys and not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    sizes = [*shape, *(d for x in operands for d in jax.numpy.shape(x))]
    return all(isinstance(d, int) for d in sizes) and math.prod(shape) < 1 << 32


for _name, _implementations in TOGETHER.items():
    _primitive = _compat.find_primitive(_name)
    _alone(_primitive, find_rule(_primitive), _implementations)
for _name in WRITTEN_OUT:
    _written_out(_name)
