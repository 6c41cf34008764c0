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
    is_row,
    linspace_of_rows,
    of_taken,
    padded_with,
    part_of_convolution,
    takes,
    with_zeros,
)


@_compat.stands_in_for("number")
def _number(original: Any, force: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    # JAX makes an int of what it will take for a size, and sizes of rows are good for that.
    if force in (int, operator.index) and _compat.is_row_size(value):
        return value
    return original(force, value, *args, **kwargs)


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


@_compat.stands_in_for("bartlett", "blackman", "hamming", "hanning", "kaiser")
def _window(original: Any, M: Any, *args: Any, **kwargs: Any) -> Any:
    # JAX asks whether there is more than one element: a window of one is 1.
    if not _compat.is_row_size(M):
        return original(M, *args, **kwargs)
    window = lax.slice_in_dim(original(max_dim(M, 2), *args, **kwargs), 0, M)
    return jnp.where(jnp.asarray(M) <= 1, 1, window)


@_compat.stands_in_for("csd", "csd of welch")
def _csd(
    original: Any,
    x: Any,
    y: Any,
    fs: Any = 1.0,
    window: Any = "hann",
    nperseg: Any = None,
    **options: Any,
) -> Any:
    # A segment that is the whole row, and so one Fourier transform.
    usual = {"noverlap": None, "nfft": None, "axis": -1, "average": "mean"}
    usual |= {"return_onesided": True, "scaling": "density", "detrend": "constant"}
    rows = [z for z in (x, y) if z is not None]
    whole = window == "hann" and all(options.get(k, v) == v for k, v in usual.items())
    whole = whole and all(map(is_row, rows)) and not any(map(jnp.iscomplexobj, rows))
    whole = whole and all(z.shape[0].is_known_to_be(nperseg) for z in rows)
    if not whole or not takes(nperseg, 1):
        return original(x, y, fs, window, nperseg, **options)
    turned = jnp.sin(jnp.linspace(0, np.pi, nperseg, endpoint=False)) ** 2
    turned = jnp.where(jnp.asarray(nperseg) == 1, 1, turned)
    rows = [jnp.asarray(z) * 1.0 for z in rows]
    turned = turned.astype(jnp.result_type(*rows))
    spectra = [jnp.fft.rfft((z - z.mean()) * turned) for z in rows]
    at, middle = jnp.arange(spectra[0].shape[0]), jnp.asarray(nperseg)
    twice = (at > 0) & (2 * at < middle)
    power = spectra[0].conj() * spectra[-1] / (fs * (turned**2).sum())
    power = jnp.where(twice, 2 * power, power)
    power = of_taken(power.real if y is None else power, nperseg, 1)
    return jnp.fft.rfftfreq(nperseg, 1 / fs), power


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
