"""Stand-ins for functions of JAX that make arrays of a size, and for transforms and convolutions.

As those of `stand_ins`: what they do for sizes of rows is what JAX does for numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim, min_dim

from batchax import _compat
from batchax.jaxprs.words import Value
from batchax.rows.comparisons import greatest
from batchax.rows.stand_ins import (
    linspace_of_rows,
    padded_with,
    part_of_convolution,
    with_zeros,
)


@_compat.stands_in_for("number")
def _number(original: Any, force: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    # JAX makes an int of what it will take for a size, and sizes of rows are good for that.
    if force in (int, operator.index) and _compat.is_row_size(value):
        return value
    return original(force, value, *args, **kwargs)


def _is_row(x: Any) -> bool:
    return np.ndim(x) == 1 and _compat.is_row_size(np.shape(x)[0])


@_compat.stands_in_for("polymul")
def _polymul(original: Any, a: Any, b: Any, *, trim_leading_zeros: bool = False) -> Any:
    if trim_leading_zeros or not (_is_row(a) or _is_row(b)):
        return original(a, b, trim_leading_zeros=trim_leading_zeros)
    return jnp.convolve(jnp.asarray(a) * 1.0, jnp.asarray(b) * 1.0)


@_compat.stands_in_for("polyder")
def _polyder(original: Any, p: Any, m: int = 1) -> Any:
    if not _is_row(p) or not isinstance(m, int) or m < 1:
        return original(p, m)
    p = jnp.asarray(p) * 1.0
    return (p * _factors(p, range(m)))[: max_dim(p.shape[0] - m, 0)]


@_compat.stands_in_for("polyint")
def _polyint(original: Any, p: Any, m: int = 1, k: Any = None) -> Any:
    if not _is_row(p) or not isinstance(m, int) or m < 1 or k is not None:
        return original(p, m, k)
    p = jnp.asarray(p) * 1.0
    return padded_with(0, p / _factors(p, range(-m, 0)), p.shape[0] + m, 0)


def _factors(p: Any, less: range) -> Any:
    """The product of the power that each coefficient stands beside, less each of these numbers."""
    power = jnp.asarray(p.shape[0]) - 1 - jnp.arange(p.shape[0])
    return math.prod((power - k).astype(p.dtype) for k in less)


@_compat.stands_in_for(
    *(
        f"matrix of a size, {name}"
        for name in ("dft", "helmert", "hilbert", "invhilbert", "invpascal", "pascal")
    )
)
def _matrix_of_size(original: Any, n: Any, *args: Any, **kwargs: Any) -> Any:
    # JAX compiles another program for each size, and looks it up by that.
    return (original.__wrapped__ if _compat.is_row_size(n) else original)(n, *args, **kwargs)


_compat.stands_in_for("steps of geomspace and logspace")(linspace_of_rows)


@_compat.stands_in_for("vander")
def _vander(original: Any, x: Any, N: Any = None, increasing: bool = False) -> Any:
    size = np.shape(x)[0] if N is None and np.ndim(x) == 1 else N
    if not _compat.is_row_size(size):
        return original(x, N, increasing)
    x = jnp.asarray(x)
    powers = jnp.arange(size).astype(x.dtype)
    powers = powers if increasing else jnp.asarray(size, x.dtype) - 1 - powers
    return jnp.power(x[:, None], powers[None])


@_compat.stands_in_for("fourier transform")
def _fft_core(
    original: Any, name: str, kind: Any, a: Value, s: Any, axes: Any, norm: str | None
) -> Any:
    # JAX asks for the wanted sizes as ints, and crops and pads to them.
    a = jnp.asarray(a)
    along = range(a.ndim) if axes is None else axes
    halved = _kind(kind) == "IRFFT"
    last = np.shape(a)[along[-1]] if len(along) else 0
    if s is None and halved and _compat.is_row_size(last):
        s = [*(a.shape[axis] for axis in along[:-1]), 2 * (last - 1)]
    if s is None or not any(map(_compat.is_row_size, s)) or len(set(along)) < len(along):
        return original(name, kind, a, s, axes, norm)
    if axes is None:
        along = range(a.ndim - len(s), a.ndim)
    if len(s) != len(along):
        return original(name, kind, a, s, axes, norm)
    ends = range(a.ndim - len(s), a.ndim)
    a = jnp.moveaxis(a, along, ends)
    for axis, size in zip(ends, s, strict=True):
        size = size // 2 + 1 if halved and axis == a.ndim - 1 else size
        a = _cropped(a, axis, size)
    out = lax.fft(a, _kind(kind), tuple(s))
    if norm not in (None, "backward"):
        count = jnp.asarray(math.prod(s), out.real.dtype)
        count = jnp.sqrt(count) if norm == "ortho" else count
        out = out * count if name.startswith("i") else out / count
    return jnp.moveaxis(out, ends, along)


def _kind(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.name


def _cropped(x: Value, axis: int, size: Any) -> Any:
    """`x` with so many elements along an axis, the first ones, and zeros behind them."""
    own = np.shape(x)[axis]
    if own is size or (_compat.is_row_size(own) and own.is_known_to_be(size)):
        return x
    least = min_dim(own, size)
    return padded_with(0, lax.slice_in_dim(x, 0, least, axis=axis), size, axis)


@_compat.stands_in_for("convolution of scipy")
def _convolve_nd(original: Any, x: Value, y: Value, mode: str, **kwargs: Any) -> Any:
    # As that of `jax.numpy`, along each axis.
    shapes = np.shape(x), np.shape(y)
    ragged = [axis for axis, sizes in enumerate(zip(*shapes, strict=False)) if _of_rows(sizes)]
    if not ragged or np.ndim(x) != np.ndim(y) or mode not in ("full", "same", "valid"):
        return original(x, y, mode, **kwargs)
    for axis in range(np.ndim(x)):
        x, y = (with_zeros(z, greatest(np.shape(z)[axis]), axis) for z in (x, y))
    whole = original(x, y, "full", **kwargs)
    for axis, (n, m) in enumerate(zip(*shapes, strict=True)):
        of_first = (m - 1) // 2, n  # for "same", which NumPy has of the longer one
        start, size = of_first if mode == "same" else part_of_convolution(mode, n, m)
        at = jnp.arange(max_dim(size, 0)) + start
        whole = jnp.take(whole, at, axis, mode="clip")
    return whole


def _of_rows(sizes: Sequence[Any]) -> bool:
    return any(map(_compat.is_row_size, sizes))
