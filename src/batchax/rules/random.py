"""Random keys and bits, and Threefry-2x32 with its rounds unrolled."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Positions, RuleOutputs, axis_to_front, move_axis
from batchax.kernel.interpreter import lane_after_lane
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.kernel.registry import (
    Rule,
    aligned,
    broadcasting,
    find_rule,
    leading_rule,
    register_rule,
    vectorized,
)

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
_GROUPS = 5  # of four rounds


def hashed(key: Sequence[Any], x: Value, y: Value) -> list[Any]:
    """Hashes a counter of two words, `x` and `y`, under a key of two words."""
    # Functions of `lax` are used, as operators take several Python calls each, a hundred times.
    shape = np.broadcast_shapes(*map(np.shape, (*key, x, y)))
    of_key = *key, lax.bitwise_xor(lax.bitwise_xor(*key), _PARITY)
    words = [_broadcast(word, shape) for word in of_key]
    x, y = (lax.add(_broadcast(z, shape), word) for z, word in zip((x, y), words, strict=False))
    for group in range(_GROUPS):
        # Threefry-2x32 (Salmon et al., 2011): a group of four rounds, then a key injection.
        for by in _ROTATIONS[group % 2]:
            x = lax.add(x, y)
            left = lax.shift_left(y, np.uint32(by))
            # A rotation to the left by `by` bits.
            right = lax.shift_right_logical(y, np.uint32(32 - by))
            y = lax.bitwise_xor(x, lax.bitwise_or(left, right))
        x = lax.add(x, words[(group + 1) % 3])
        y = lax.add(lax.add(y, words[(group + 2) % 3]), np.uint32(group + 1))
    return [x, y]


def _broadcast(x: Value, shape: Sequence[int]) -> jax.Array:
    if np.shape(x) in ((), tuple(shape)):
        return x
    return lax.broadcast_in_dim(x, shape, range(len(shape) - np.ndim(x), len(shape)))


def _counted(keys: Value, shape: Sequence[int]) -> list[Any]:
    """Hashes the counters 0, 1, 2, ... of an array of `shape`, for each of `keys`."""
    data = jax.random.key_data(keys)
    each = (*keys.shape, *(1,) * len(shape))
    place = np.uint32(0)
    for d in range(len(shape)):
        # The counter of an element is its index in row-major order.
        stride = np.uint32(math.prod(shape[d + 1 :]))
        along = lax.broadcasted_iota(np.uint32, (*keys.shape, *shape), keys.ndim + d)
        place = lax.add(place, lax.mul(along, stride))
    first, second = (lax.index_in_dim(data, i, -1, keepdims=False) for i in (0, 1))
    return hashed([lax.reshape(word, each) for word in (first, second)], np.uint32(0), place)


def _bits(keys: Value, *, bit_width: int, shape: Sequence[int]) -> list[Any]:
    high, low = _counted(keys, shape)
    dtype = np.dtype(f"uint{bit_width}")
    if bit_width == 64:
        high, low = (lax.convert_element_type(word, dtype) for word in (high, low))
        return [lax.bitwise_or(lax.shift_left(high, dtype.type(32)), low)]
    return [lax.convert_element_type(lax.bitwise_xor(high, low), dtype)]


def _split(keys: Value, *, shape: Sequence[int]) -> list[Any]:
    return [_keys_of(_counted(keys, shape))]


def _fold_in(keys: Value, data: Value) -> list[Any]:
    key = jax.random.key_data(keys)
    return [_keys_of(hashed([key[..., 0], key[..., 1]], np.uint32(0), data.astype(np.uint32)))]


def _keys_of(words: Sequence[Any]) -> jax.Array:
    return jax.random.wrap_key_data(jax.numpy.stack(words, axis=-1), impl="threefry2x32")


def _threefry(*words: Value) -> list[Any]:
    return hashed(words[:2], *words[2:])


WRITTEN_OUT: dict[str, Callable[..., list[Any]]] = {
    "random_bits": _bits,
    "random_fold_in": _fold_in,
    "random_split": _split,
    "threefry2x32": _threefry,
}
"""What a CPU runs in the place of operations of JAX on keys of threefry-2x32.

They are those operations as long as ``jax_threefry_partitionable`` is on, and no array has as many
elements as there are numbers of 32 bits.
"""


def _of_jax(*operands: Value, of: str, **params: Any) -> list[Any]:
    primitive: Any = _compat.find_primitive(of)
    out = primitive.bind(*operands, **params)
    return list(out) if primitive.multiple_results else [out]


def _on_cpu(*operands: Value, of: str, **params: Any) -> list[Any]:
    make = lambda: WRITTEN_OUT[of](*operands, **params)
    types = _types(*map(jax.typeof, operands), of=of, **params)
    if any(jax.dtypes.issubdtype(t.dtype, jax.dtypes.extended) for t in types):
        return make()  # keys, which are few
    return _computed_once(make, types)


def _computed_once(make: Callable[[], list[Any]], types: Sequence[Aval]) -> list[Any]:
    """Runs `make`, and keeps XLA from fusing its results into loops that read them."""
    # XLA for CPUs drops barriers before fusion, and what it fuses into the search for a maximum is
    # not vectorized. A loop of one step, which XLA does not know to be one, is not fused.
    one = lax.optimization_barrier(np.uint32(1))
    blank = [_compat.varying_as(_compat.filled(t, 0), t) for t in types]
    step = lambda state: (state[0] + np.uint32(1), make())
    return lax.while_loop(lambda state: state[0] < one, step, (np.uint32(0), blank))[1]


def _types(*avals: Aval, of: str, **params: Any) -> list[Any]:
    primitive: Any = _compat.find_primitive(of)
    out, _ = primitive.abstract_eval(*avals, **params)
    return list(out) if primitive.multiple_results else [out]


def drawn(axis: Axis, args: Values, axes: Positions, /, *, of: str, **params: Any) -> RuleOutputs:
    """Batches `drawn_p`, and the operation of JAX named `of` where that computes the same."""
    args, out_axis = aligned(args, axes)
    outs = drawn_p.bind(*args, of=of, **params)
    return outs, [out_axis] * len(outs)


def _jvp(primals: Values, tangents: Values, **params: Any) -> tuple[list[Value], list[Value]]:
    outs = drawn_p.bind(*primals, **params)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


drawn_p = own_primitive(
    "drawn",
    called="random bits",
    operations=_of_jax,
    on_cpu=_on_cpu,
    types=_types,
    rule=drawn,
    jvp=_jvp,
    transpose=NoDerivative("random bits are no linear function of anything."),
)


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


def _alone(
    primitive: Primitive, others: Rule | None = None, implementations: Collection[str] = ()
) -> None:
    """Registers `primitive` to run sequentially, except for keys of `implementations`.

    Those are served by the rule `others`.
    """

    @register_rule(primitive)
    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
        if others is not None:
            impl = params["impl"].name if "impl" in params else jax.random.key_impl(args[0])
            if isinstance(impl, str) and impl in implementations:
                return others(axis, args, axes, **params)
        return lane_after_lane(axis, primitive, args, axes, params)


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
def _wrap(axis: Axis, args: Values, axes: Positions, /, *, impl: Any) -> RuleOutputs:
    return leading_rule(_wrap_p, (len(impl.key_shape),), axis, args, axes, impl=impl)


@register_rule("to_edtype")
def _to_edtype(axis: Axis, args: Values, axes: Sequence[int], /, **params: Any) -> RuleOutputs:
    # The last dimensions become one element: the batch axis must not be among them.
    return _to_edtype_p.bind(move_axis(args[0], axes[0], 0), **params), 0


@register_rule(_gamma_p)
def _gamma(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    # The shape of the keys must be a prefix of that of the parameter.
    args = [axis_to_front(axis, x, a) for x, a in zip(args, axes, strict=True)]
    return _gamma_p.bind(*args, **params), 0


def _written_out(name: str) -> None:
    """Registers the operation of JAX named `name` as `drawn` where that computes the same."""
    primitive: Any = _compat.find_primitive(name)
    others: Any = find_rule(primitive)

    @register_rule(primitive)
    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
        if not _is_written_out(args, **params):
            return others(axis, args, axes, **params)
        outs, out_axes = drawn(axis, args, axes, of=name, **params)
        return (outs, out_axes) if primitive.multiple_results else (outs[0], out_axes[0])


def _is_written_out(operands: Values, *, shape: tuple[int, ...] = (), **params: Any) -> bool:
    """Returns whether the bits of threefry-2x32 keys can be computed here."""
    keys = [x for x in operands if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if any(jax.random.key_impl(x) != "threefry2x32" for x in keys):
        return False
    # Without that flag JAX counts elements differently.
    if keys and not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    sizes = [*shape, *(d for x in operands for d in jax.numpy.shape(x))]
    return all(isinstance(d, int) for d in sizes) and math.prod(shape) < 1 << 32


for _name, _implementations in TOGETHER.items():
    _primitive = _compat.find_primitive(_name)
    _alone(_primitive, find_rule(_primitive), _implementations)
for _name in WRITTEN_OUT:
    _written_out(_name)
