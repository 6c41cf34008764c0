"""Fourier transforms of axes whose size differs from row to row.

A transform of n elements for any n is a convolution with a chirp, exp(i pi k^2 / n), and a product
with another one before and after (Bluestein, "A linear filtering approach to the computation of
discrete Fourier transform", 1970). The convolution is made of transforms of a
size that all rows share: the least convenient one in which the longest row's has room.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import pad_end
from batchax.rows.sizes import is_symbolic

_MOST = 1 << 16  # squares of less are exact in 32 bits


@padded_rule("fft")
def _fft(op: Operation, x: Row, *, fft_type: Any, fft_lengths: Any, **params: Any) -> Any:
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


def _both_halves(op: Operation, x: Any, half: Any, dim: Any) -> Any:
    """Twice each frequency that stands for two, for a transform whose real part is wanted."""
    at = np.arange(x.shape[-1], dtype=np.int32)
    alone = (at == 0) | (2 * at == op.sizes.size(dim))
    return jnp.where(at < op.sizes.size(half), jnp.where(alone, x, 2 * x), 0)


def _transformed(op: Operation, x: Any, axis: int, dim: Any, room: int, sign: int) -> Any:
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


def _by_chirp(op: Operation, x: Any, size: Any, room: int, sign: int) -> Any:
    """The sums of ``x[j] * exp(sign * 2 pi i * j * k / size)`` over j, for each k below `room`."""
    most = max(x.shape[-1], room)
    if most >= _MOST:
        raise op.refuse(
            f"it transforms an axis of up to {most} elements, whose size differs from row to row; "
            f"it may be {_MOST - 1} at most."
        )
    return _sums(x, size, room, sign)


@functools.partial(jax.jit, static_argnums=(2, 3))  # to be one program outside of `jit`, too
def _sums(x: Any, size: Any, room: int, sign: int) -> Any:
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
    """The least number from there on that is a power of two, or 3, 5, 9 or 15 times one."""
    sizes = (
        part << power
        for part, power in itertools.product((1, 3, 5, 9, 15), range(least.bit_length() + 1))
    )
    return min((size for size in sizes if size >= least), default=1 << math.ceil(math.log2(least)))
