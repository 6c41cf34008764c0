"""Elementwise operations, reductions, products, windows, transforms, random bits and effects."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.primitive_facts import NEUTRAL, facts_of
from batchax.jaxprs.types import Params, Value
from batchax.kernel.registry import reduced_dims
from batchax.rows.padded import Operation, Results, Row, padded_rule
from batchax.rows.padded_rules.positions import is_static, pad_end, padded
from batchax.rows.sizes import Dim, Shape, has_symbols, is_symbolic
from batchax.rules.contraction import is_thin, thin_product
from batchax.rules.elementwise import UNARY
from batchax.rules.masking import is_inexact
from batchax.rules.reductions import reduce_few_or_many

_ZERO_OF_ZERO = frozenset(
    """abs asin asinh atan atanh cbrt ceil conj convert_element_type copy erf expm1 floor imag log1p
    neg real reduce_precision round sign sin sinh sqrt square stop_gradient tan tanh
    add add_any max min mul or sub xor""".split()
)


@padded_rule(*UNARY, "reduced_vary_cast", "pvary")
def _unary(op: Operation, x: Row, **params: Any) -> Row:
    name = op.eqn.primitive.name
    keeps = name in _ZERO_OF_ZERO or (name == "integer_pow" and params["y"] > 0)
    return op.keeping_zeros([x], op.bind) if keeps else op.result(op.bind(x.value))


@padded_rule(fact="elementwise")
def _nary(op: Operation, *rows: Row, **params: Any) -> Results:
    factors = _factors(op, rows)
    axes = op.sizes.padded_axes(op.out_shape)
    if not factors or any(op.sizes.padded_axes(row.shape) != axes for row in factors):
        return op.bind(*(spread(op, row) for row in rows))
    places = [k for k, row in enumerate(rows) if any(row is factor for factor in factors)]

    def compute(*values: Value) -> Value:
        given = dict(zip(places, values, strict=True))
        return op.bind(*(given.get(k, row.value) for k, row in enumerate(rows)))

    return op.keeping_zeros(factors, compute)


def _factors(op: Operation, rows: Sequence[Row]) -> list[Row]:
    """The operands whose zeros together make zeros; none where they do not."""
    name = op.eqn.primitive.name
    if name not in ("mul", "div"):
        return list(rows) if name in _ZERO_OF_ZERO else []
    number = [row.known and np.ndim(row.value) == 0 and np.isfinite(row.value) for row in rows]
    if name == "div":
        return [rows[0]] if number[1] and rows[1].value != 0 and not number[0] else []
    return [row for row, known in zip(rows, number, strict=True) if not known]


@padded_rule(
    *"""bitcast_convert_type device_put empty empty2 iota optimization_barrier random_clone
    random_fold_in random_seed random_unwrap random_wrap""".split()
)
def _as_they_are(op: Operation, *rows: Row, **params: Any) -> Results:
    return op.bind(*(row.value for row in rows))


def spread(op: Operation, row: Row) -> Value:
    """An operand's array, repeated along ragged axes where it has a single element.

    JAX would repeat those itself, but in reverse add up what padding sends back, too.
    """
    shape = op.out_shape
    if np.ndim(row.value) != len(shape):  # a scalar for all elements
        if row.known or not is_inexact(row.value) or not op.sizes.padded_axes(shape):
            return row.value
        return op.cut(lax.broadcast_in_dim(row.value, op.sizes.bounds_of(shape), ()), shape)
    repeated = [
        is_symbolic(dim) and not is_symbolic(own) for dim, own in zip(shape, row.shape, strict=True)
    ]
    if not any(repeated):
        return row.value
    whole = [
        dim if again else own for dim, own, again in zip(shape, row.shape, repeated, strict=True)
    ]
    bounds = op.sizes.bounds_of(whole)
    value = lax.broadcast_in_dim(row.value, bounds, tuple(range(len(bounds))))
    return op.cut(value, whole, [axis for axis, again in enumerate(repeated) if again])


@padded_rule(
    *"""reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin
    cumsum cumprod cummax cummin cumlogsumexp""".split()
)
def _reduce(
    op: Operation, x: Row, *, axes: tuple[int, ...] = (), axis: int = -1, **params: Any
) -> jax.Array:
    # Of equal elements the first counts for `argmax`, and padding is last. Running sums are not
    # changed by what is behind, but with `reverse` padding comes first.
    kind = re.sub("^(reduce_|arg|cum)", "", op.eqn.primitive.name)
    value = op.filled(x, NEUTRAL[kind](op.eqn.invars[0].aval.dtype), axes or (axis,))
    # Packed, a row is as long as all are.
    return reduce_few_or_many(op.eqn, value, axes) if axes else op.bind(value)


@padded_rule(fact="reduces")
def _reduce_to_neutral(op: Operation, *rows: Row, axes: tuple[int, ...], **params: Any) -> Results:
    """A third party's reduction, known by a word: `batchax.reducing`."""
    axes = reduced_dims(op.eqn.primitive, axes, len(rows[0].shape))
    if all(op.sizes.is_exact(row.shape[a]) for row in rows for a in axes):
        return op.bind(*(row.value for row in rows))
    neutral = facts_of(op.eqn.primitive).neutral
    if neutral is None:
        raise op.reject(
            "what could be in the padding of a row without changing its result is not known. "
            "Say it where the primitive is registered: batchax.reducing(primitive, neutral=...)."
        )
    values = [op.filled(row, neutral(row.value.dtype), axes) for row in rows]
    return op.bind(*values)


@padded_rule("dot_general", "ragged_dot_general")
def _dot_general(op: Operation, *rows: Row, **params: Any) -> Value:
    # Zeros not only where it is contracted: the derivative with respect to one operand is
    # contracted over the free axes of the other, where zero times NaN would be NaN. Groups beyond
    # the row have no elements.
    operands, long = [op.filled(x, 0) for x in rows], [has_symbols(x.shape) for x in rows]
    small = long.index(False) if op.eqn.primitive is lax.dot_general_p and sum(long) == 1 else None
    if small is None or not is_thin([v.aval for v in op.eqn.invars], small, **params):
        return op.cut(op.bind(*operands), op.out_shape)
    return op.cut(thin_product(operands, small, **params), op.out_shape)


@padded_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(
    op: Operation,
    x: Row,
    *,
    window_dimensions: Shape,
    window_strides: Sequence[int],
    window_dilation: tuple[int, ...],
    base_dilation: Sequence[int],
    padding: Sequence[tuple[Dim, Dim]],
) -> Value:
    for dim, count in zip(window_dimensions, op.out_shape, strict=True):
        if is_symbolic(dim) and (is_symbolic(count) or count != 1):
            raise op.reject(
                f"its windows have {dim} elements, which differs from row to row. Pass them a "
                "fixed size."
            )
    value = NEUTRAL[op.eqn.primitive.name.removeprefix("reduce_window_")](x.value.dtype)
    bounds = op.sizes.bounds_of(op.out_shape)
    extents = _extents(op, window_dimensions, window_dilation)
    needed = [
        (count - 1) * stride + extent if count else 0
        for count, stride, extent in zip(bounds, window_strides, extents, strict=True)
    ]
    config = [
        (low, high, step - 1) for (low, high), step in zip(padding, base_dilation, strict=True)
    ]
    array = padded(op, jnp.asarray(op.filled(x, value)), value, config, x.shape, needed)
    if 0 in bounds:
        return jnp.zeros(bounds, array.dtype)
    none = ((0, 0),) * len(bounds)
    return op.cut(op.bind(array, padding=none, base_dilation=(1,) * len(bounds)), op.out_shape)


def _extents(op: Operation, dimensions: Sequence[int], dilation: tuple[int, ...]) -> list[int]:
    return [
        (op.sizes.bound(dim) - 1) * int(step) + 1
        for dim, step in zip(dimensions, dilation, strict=True)
    ]


@padded_rule("conv_general_dilated")
def _conv(
    op: Operation,
    x: Row,
    kernel: Row,
    *,
    window_strides: tuple[int, ...],
    padding: Sequence[tuple[Dim, Dim]],
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
    dimension_numbers: lax.ConvDimensionNumbers,
    **params: Any,
) -> Value:
    _reject_ragged_groups(op, x.shape, kernel.shape, dimension_numbers, params)
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


def _reject_ragged_groups(
    op: Operation,
    x: Sequence[Any],
    kernel: Sequence[Any],
    dimension_numbers: lax.ConvDimensionNumbers,
    params: Params,
) -> None:
    """Raises for groups of channels or of a batch whose size differs from row to row.

    In padded arrays each group would begin elsewhere.
    """
    batch, features = (x[axis] for axis in dimension_numbers.lhs_spec[:2])
    outputs = kernel[dimension_numbers.rhs_spec[0]]
    for name, size in (("feature_group_count", features), ("batch_group_count", batch)):
        count = params[name]
        if not is_symbolic(count) and count == 1:
            continue
        if not all(map(op.sizes.is_exact, (size, outputs, count))):
            raise op.reject(
                f"{name}={count} makes groups of {size}, and how many of these are in one "
                "differs from row to row. Convolve each group by itself."
            )


_MOST = 1 << 16  # squares of less are exact in 32 bits


@padded_rule("fft")
def _fft(
    op: Operation, x: Row, *, fft_type: lax.FftType, fft_lengths: Shape, **params: Any
) -> Value:
    (out,) = (v.aval for v in op.eqn.outvars)
    axes = range(len(x.shape) - len(fft_lengths), len(x.shape))
    if not any(map(is_symbolic, fft_lengths)):
        return op.bind(x.value)
    value = jnp.asarray(op.filled(x, 0, list(axes)))
    value = value.astype(jnp.promote_types(value.dtype, np.complex64))
    name = jax.lax.FftType(fft_type).name
    sign = -1 if name in ("FFT", "RFFT") else 1
    order = list(zip(axes, fft_lengths, strict=True))
    if name == "IRFFT":
        value = _both_halves(op, value, x.shape[-1], fft_lengths[-1])
    for axis, dim in order if name == "IRFFT" else reversed(order):
        room = op.sizes.bound(out.shape[axis])
        value = _transformed(op, value, axis, dim, room, sign)
    if name == "IRFFT":
        value = value.real
    return op.cut(value.astype(out.dtype), out.shape)


def _both_halves(op: Operation, x: Value, half: Dim, dim: Dim) -> jax.Array:
    """Twice each frequency that stands for two, for a transform whose real part is wanted."""
    at = np.arange(x.shape[-1], dtype=np.int32)
    alone = (at == 0) | (2 * at == op.sizes.size(dim))
    return jnp.where(at < op.sizes.size(half), jnp.where(alone, x, 2 * x), 0)


def _transformed(op: Operation, x: Value, axis: int, dim: Dim, room: int, sign: int) -> jax.Array:
    """The transform along an axis, in which a row has `dim` elements, and zeros behind them."""
    size = jnp.maximum(op.sizes.size(dim), 1)
    scale = 1 / size.astype(x.real.dtype) if sign > 0 else None
    x = jnp.moveaxis(x, axis, -1)
    if is_symbolic(dim):
        y = _by_chirp(op, x, size, room, sign)
        y = y if scale is None else y * scale
    else:
        y = jnp.fft.fft(x, dim) if sign < 0 else jnp.fft.ifft(x, dim)
        y = y[..., :room]
    return jnp.moveaxis(y, -1, axis)


def _by_chirp(op: Operation, x: Value, size: Value, room: int, sign: int) -> jax.Array:
    """The sums of ``x[j] * exp(sign * 2 pi i * j * k / size)`` over j, for each k below `room`."""
    most = max(x.shape[-1], room)
    if most >= _MOST:
        raise op.reject(
            f"it transforms an axis of up to {most} elements, whose size differs from row to row; "
            f"it may be {_MOST - 1} at most."
        )
    return _sums(x, size, room, sign)


@functools.partial(jax.jit, static_argnums=(2, 3))  # to be one program outside of `jit`, too
def _sums(x: Value, size: Value, room: int, sign: int) -> jax.Array:
    given = x.shape[-1]
    at = np.arange(max(given, room), dtype=np.uint32)
    turns = (at * at % (2 * size.astype(np.uint32))).astype(x.real.dtype)
    angle = sign * np.pi * turns / size.astype(x.real.dtype)
    chirp = lax.complex(jnp.cos(angle), jnp.sin(angle))
    length = _convenient(given + room - 1)
    kernel = jnp.zeros(length, x.dtype).at[:room].set(chirp[:room].conj())
    if given > 1:
        kernel = kernel.at[1 - given :].set(chirp[1:given][::-1].conj())
    padded = pad_end(x * chirp[:given], x.ndim - 1, length - given)
    sums = jnp.fft.ifft(jnp.fft.fft(padded) * jnp.fft.fft(kernel))
    return sums[..., :room] * chirp[:room]


def _convenient(least: int) -> int:
    sizes = (
        part << power
        for part, power in itertools.product((1, 3, 5, 9, 15), range(least.bit_length() + 1))
    )
    return min((size for size in sizes if size >= least), default=1 << math.ceil(math.log2(least)))


@padded_rule("random_bits", "random_split")
def _drawn(op: Operation, keys: Row, *, shape: Shape, **params: Any) -> jax.Array:
    _reject_other_generators(op, keys)
    if not _padded_behind(op, shape):
        return op.bind(keys.value)
    count = functools.reduce(operator.mul, shape, 1)
    line = op.bind(keys.value, shape=(op.sizes.bound(count),))
    bounds, at = op.sizes.bounds_of(shape), jnp.asarray(0, np.int32)
    for axis, dim in enumerate(shape):
        places = lax.broadcasted_iota(np.int32, bounds, axis)
        at = at * jnp.asarray(op.sizes.size(dim), np.int32) + places
    return jnp.take(line, at, axis=len(keys.shape), mode="clip")


@padded_rule("random_gamma")
def _gamma(op: Operation, keys: Row, a: Row, **params: Any) -> jax.Array:
    _reject_other_generators(op, keys)
    if _padded_behind(op, a.shape[len(keys.shape) :]):
        raise op.reject(
            f"it draws an array of shape ({', '.join(map(str, a.shape))}), ragged behind the first "
            "axis. Draw an array whose first axis is the ragged one, and transpose it."
        )
    # It samples until a draw is accepted, which none ever is for a NaN.
    return op.bind(keys.value, op.filled(a, 1))


def _padded_behind(op: Operation, shape: Shape) -> bool:
    return any(axis > 0 for axis in op.sizes.padded_axes(shape))


def _reject_other_generators(op: Operation, keys: Row) -> None:
    name = str(jax.random.key_impl(keys.value))
    if name != "threefry2x32":
        raise op.reject(
            f"with keys of the implementation {name} what a row draws depends on how much it "
            "draws. Use keys of 'threefry2x32', the default of jax.random.key."
        )
    if not getattr(jax.config, "jax_threefry_partitionable", True):
        raise op.reject(
            "with jax_threefry_partitionable switched off what a row draws depends on how much it "
            "draws. Switch it on, as it is by default."
        )


@padded_rule("pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call")
def _callback(op: Operation, *rows: Row, **params: Any) -> NoReturn:
    raise op.reject(
        "what it hands to Python would be a row with padding. Hand over values whose shape is the "
        "same for all rows, such as a sum, or call it on the Ragged outside vmap."
    )


@padded_rule(
    *"""all_gather all_gather_invariant all_to_all pbroadcast pgather pmax pmin ppermute psum psum2
    psum_invariant psum_scatter ragged_all_to_all reduce_scatter""".split()
)
def _collective(op: Operation, *rows: Row, **params: Any) -> NoReturn:
    raise op.reject(
        "rows of different lengths cannot be added up or exchanged. Reduce over the row first, so "
        "that each row gives a value of the same shape."
    )
