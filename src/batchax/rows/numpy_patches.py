"""Functions of JAX that read the size of a row as a number, and need not.

JAX raises for a symbolic size there, because it stages another program for each size. What stands
in for such a function is one program for rows of all lengths, and gives each row what JAX gives it
alone. It relies on the greatest length, which batchax knows and JAX does not. Arrays without a
symbolic size go to JAX's own function.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim, min_dim
from jax.typing import DTypeLike

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.types import Tree, Value
from batchax.rows.padded_rules.positions import greatest_of
from batchax.rows.sizes import Dim, agreed, greatest


@_compat.patches("psum")
def _psum(original: Callable[..., Any], x: Value, names: Sequence[Hashable], **kwargs: Any) -> Tree:
    # JAX multiplies a constant that is not an array by the number of lanes. The length of a row is
    # not a constant: a symbolic one becomes an array. A number that may be a length, where rows are
    # grouped by length, raises.
    grouped = _grouped.get()
    if grouped is not None and grouped in names:
        for leaf in jax.tree.leaves(x):
            if isinstance(leaf, int) and leaf != 1:
                raise UnsupportedError(
                    f"the function sums up {leaf} over the axis {grouped!r}, whose lanes are all "
                    "rows. That may be the length of the row at hand, where only rows of one "
                    "length run together. Sum up an array, or multiply by "
                    f"jax.lax.axis_size({grouped!r})."
                )
    sized = jax.tree.map(lambda leaf: jnp.asarray(leaf) if _compat.is_row_size(leaf) else leaf, x)
    return original(sized, names, **kwargs)


@contextmanager
def rows_of_one_length(axis_name: Hashable | None) -> Iterator[None]:
    """While a function is staged for rows of one length, of all those along an axis."""
    before = _grouped.set(axis_name)
    try:
        yield
    finally:
        _grouped.reset(before)


_grouped: ContextVar[Hashable | None] = ContextVar("grouped", default=None)


@_compat.patches("indices")
def _parse_indices(original: Callable[..., Any], indices: Sequence[Value], *args: Any) -> object:
    # JAX takes an int or an array for an index, and a symbolic size is neither.
    of_arrays = (jnp.asarray(i) if _compat.is_row_size(i) else i for i in indices)
    return original(tuple(of_arrays), *args)


@_compat.patches("jax.lax.fori_loop")
def _fori_loop(
    original: Callable[..., Any],
    lower: Value,
    upper: Value,
    body_fun: Callable[..., Any],
    init_val: Tree,
    **options: Any,
) -> Tree:
    # JAX makes a scan, which has a reverse mode, if it knows the number of steps as an int, and
    # else a `while_loop`, which has none. This makes a scan for a symbolic one, too.
    bounds = lower, upper
    if not any(map(_compat.is_row_size, bounds)) or not all(
        isinstance(x, int) or _compat.is_row_size(x) for x in bounds
    ):
        return original(lower, upper, body_fun, init_val, **options)
    step = lambda carry, _: ((carry[0] + 1, body_fun(*carry)), None)
    return lax.scan(step, (lower, init_val), length=max_dim(upper - lower, 0))[0][1]


@_compat.patches("jax.lax.scan")
def _scan(
    original: Callable[..., Any],
    f: Callable[..., Any],
    init: Tree,
    xs: Tree = None,
    length: Dim | None = None,
    *args: Any,
    **options: Any,
) -> Tree:
    # JAX takes an int for the number of steps. The size of one more array gives a symbolic one.
    if not _compat.is_row_size(length):
        return original(f, init, xs, length, *args, **options)
    step = lambda carry, x: f(carry, x[0])
    return original(step, init, (xs, jnp.arange(length)), None, *args, **options)


@_compat.patches("jax.random.permutation")
def _permutation(
    original: Callable[..., Value],
    key: jax.Array,
    x: Value,
    axis: int = 0,
    independent: bool = False,
    **options: Any,
) -> jax.Array:
    x = jnp.arange(x) if _compat.is_row_size(x) else x
    shape, whole = np.shape(x), independent or np.ndim(x) == 1
    ragged = any(map(_compat.is_row_size, shape)) and not options
    most = greatest(math.prod(shape) if whole else shape[axis]) if ragged else None
    if most is None:
        return original(key, x, axis, independent, **options)
    if whole:
        return _shuffled(key, x, axis, most)
    order = _shuffled(key, jnp.arange(shape[axis]), 0, most)
    return jnp.take(x, order, axis, unique_indices=True)


def _shuffled(key: jax.Array, x: Value, axis: int, most: int) -> jax.Array:
    # JAX sorts by random keys, in so many rounds that no two elements are likely to have had equal
    # keys in each. That number grows with the size. Here there are the rounds of the longest row,
    # and a row that takes fewer keeps what it has in the others.
    for count in range(1, _rounds(most) + 1):
        key, own = jax.random.split(key)
        _, again = lax.sort_key_val(jax.random.bits(own, x.shape, np.uint32), x, axis)
        if count > 1:
            least = bisect.bisect_left(range(most + 1), count, key=_rounds)
            again = jnp.where(jnp.asarray(x.size) >= least, again, x)
        x = again
    return x


def _rounds(size: int) -> int:
    return int(np.ceil(3 * np.log(max(1, size)) / np.log(np.iinfo(np.uint32).max)))


@_compat.patches("jax.numpy.convolve")
def _convolve(
    original: Callable[..., Value], a: Value, v: Value, mode: str = "full", **options: Any
) -> jax.Array:
    # JAX swaps the two if the second is longer, so it has to know. Here zeros follow both, up to
    # sizes that all rows share, and the wanted part of the result begins at a place that depends
    # on the row.
    ragged = [x for x in (a, v) if np.ndim(x) == 1 and _compat.is_row_size(np.shape(x)[0])]
    if not ragged or np.ndim(a) != np.ndim(v) or mode not in ("full", "same", "valid"):
        return original(a, v, mode, **options)
    n, m = np.shape(a)[0], np.shape(v)[0]
    most, most_of_v = greatest(n), greatest(m)
    if most is None or most_of_v is None:
        return original(a, v, mode, **options)
    whole = original(_resized(a, most), _resized(v, most_of_v), "full", **options)
    is_longer = agreed(n, m)
    shorter = min_dim(n, m) if is_longer is None else m if is_longer else n
    start, size = {
        "full": (0, n + m - 1),
        "same": ((shorter - 1) // 2, n + m - shorter),
        "valid": (shorter - 1, n + m - 2 * shorter + 1),
    }[mode]
    return jnp.take(whole, jnp.arange(size) + start, mode="clip")


@_compat.patches("jax.numpy.linspace")
def _linspace(
    original: Callable[..., Any],
    start: Value,
    stop: Value,
    num: Dim = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: DTypeLike | None = None,
    axis: int = 0,
    **kwargs: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """As `jnp.linspace`: JAX computes the number of steps as a number, and puts the end behind."""
    if not _compat.is_row_size(num) or kwargs or axis != 0:
        return original(start, stop, num, endpoint, retstep, dtype, axis, **kwargs)
    start, stop = jnp.asarray(start), jnp.asarray(stop)
    inexact = jnp.promote_types(jnp.result_type(start, stop), np.float16)
    of_result = jnp.result_type(float) if inexact == np.float16 else inexact
    of_result = jax.dtypes.canonicalize_dtype(of_result if dtype is None else dtype)
    floats = of_result if jnp.issubdtype(of_result, jnp.inexact) else jnp.result_type(float)
    start, stop = start.astype(floats), stop.astype(floats)
    count = jnp.asarray(num, floats) - (1 if endpoint else 0)
    at = jnp.arange(num).astype(floats).reshape(-1, *[1] * max(start.ndim, stop.ndim))
    part = at / jnp.maximum(count, 1)
    out = start * (1 - part) + stop * part
    if endpoint:
        out = jnp.where((at == count) & (at > 0), stop, out)
    out = out if floats == of_result else jnp.floor(out)
    step = jnp.where(count > 0, (stop - start) / jnp.maximum(count, 1), jnp.nan)
    return (out.astype(of_result), step) if retstep else out.astype(of_result)


@_compat.patches("jax.numpy.searchsorted")
def _searchsorted(
    original: Callable[..., Any],
    a: Value,
    v: Value,
    side: str = "left",
    sorter: Value = None,
    **kwargs: Any,
) -> jax.Array:
    # JAX halves as often as the size says. The table is as long as that of the longest row here,
    # and ends with what no value sorts after.
    size = np.shape(a)[0] if np.ndim(a) == 1 else None
    most = greatest(size) if _compat.is_row_size(size) else None
    if most is None:
        return original(a, v, side, sorter, **kwargs)
    a = jnp.asarray(a) if sorter is None else jnp.asarray(a)[sorter]
    own = jnp.arange(most) < jnp.asarray(size)
    table = jnp.where(own, _resized(a, most), jnp.asarray(greatest_of(a.dtype), a.dtype))
    return jnp.minimum(original(table, v, side, **kwargs), jnp.asarray(size, np.int32))


@_compat.patches("searchsorted", "nonzero")
def _without_derivative(original: Callable[..., Any], *operands: Value, **options: Any) -> Tree:
    # The results are integers. JAX's derivative of them allocates zeros with NumPy, which requires
    # sizes as numbers. It is not called for operands without a derivative.
    return original(*map(lax.stop_gradient, operands), **options)


@_compat.patches("jax.numpy.fft.rfftfreq")
def _rfftfreq(original: Callable[..., Value], n: Dim, d: Value = 1.0, **kwargs: Any) -> jax.Array:
    # JAX asks whether the size is even, and takes it to be odd where it cannot tell. There are as
    # many either way.
    if not _compat.is_row_size(n):
        return original(n, d, **kwargs)
    dtype = kwargs.get("dtype") or jnp.result_type(float, d)
    return jnp.arange(n // 2 + 1).astype(dtype) / (jnp.asarray(d, dtype) * jnp.asarray(n, dtype))


@_compat.patches("jax.numpy.interp")
def _interp(
    original: Callable[..., Value],
    x: Value,
    xp: Value,
    fp: Value,
    left: Value = None,
    right: Value = None,
    period: Value = None,
) -> jax.Array:
    # JAX asks for the length of the table as a number.
    size = np.shape(xp)[0] if np.ndim(xp) == 1 else None
    if not _compat.is_row_size(size) or period is not None or isinstance(left or right, str):
        return original(x, xp, fp, left, right, period)
    floats = jnp.promote_types(jnp.result_type(x, xp), jnp.result_type(float, x, xp))
    x, xp = jnp.asarray(x).astype(floats), jnp.asarray(xp).astype(floats)
    fp = jnp.asarray(fp) * 1.0
    at = jnp.clip(jnp.searchsorted(xp, x, side="right"), 1, jnp.asarray(size) - 1)
    low, high = (
        (lambda y: jnp.take(y, at - 1, mode="clip")),
        (lambda y: jnp.take(y, at, mode="clip")),
    )
    dx = high(xp) - low(xp)
    flat = jnp.abs(dx) <= np.spacing(np.finfo(floats).eps)  # as JAX has it: no NaN in derivatives
    between = low(fp) + (x - low(xp)) / jnp.where(flat, 1, dx) * (high(fp) - low(fp))
    out = jnp.where(flat, low(fp), between)
    out = jnp.where(x < xp[0], fp[0] if left is None else left, out)
    return jnp.where(x > xp[-1], fp[-1] if right is None else right, out)


@_compat.patches("jax.numpy.linalg.lstsq")
def _lstsq(
    original: Callable[..., Any],
    a: Value,
    b: Value,
    rcond: Any = None,
    *,
    numpy_resid: bool = False,
) -> Tree:
    # JAX makes a number of the larger size, for the least singular value that is not zero, and so
    # needs a decomposition for each answer. Here it is an array, and one decomposition will do.
    sizes = np.shape(a)
    of_rows = len(sizes) == 2 and any(map(_compat.is_row_size, sizes))
    if of_rows and rcond is None and not numpy_resid:
        dtype = jnp.result_type(a, b)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
        rcond = jnp.asarray(max_dim(*sizes)) * float(jnp.finfo(dtype).eps)
    return original(a, b, rcond, numpy_resid=numpy_resid)


@_compat.patches("jax.numpy.polyfit")
def _polyfit(
    original: Callable[..., Any],
    x: Value,
    y: Value,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: Value = None,
    cov: bool | str = False,
) -> Tree:
    # JAX makes a number of the size, for the least singular value that is not zero. Here it is an
    # array. Otherwise this is JAX's function.
    size = np.shape(x)[0] if np.ndim(x) == 1 else None
    alike = np.ndim(y) in (1, 2) and np.shape(y)[0] == size
    alike = alike and (w is None or (np.ndim(w) == 1 and np.shape(w)[0] == size))
    serves = _compat.is_row_size(size) and alike and rcond is None and not cov and deg >= 0
    # Where rows may be empty, lengths are divided by the answer.
    if size is None or not serves or size < 1:
        return original(x, y, deg, rcond, full, w, cov)
    x, y = jnp.asarray(x), jnp.asarray(y)
    tolerance: Any = jnp.asarray(size) * float(jnp.finfo(x.dtype).eps)
    powers = jnp.vander(x, deg + 1)
    if w is not None:
        w = jnp.asarray(w)
        powers = powers * w[:, None]
        y = y * (w[:, None] if y.ndim == 2 else w)
    scale = jnp.sqrt((powers * powers).sum(0))
    c, *others = jnp.linalg.lstsq(powers / scale, y, tolerance)
    c = (c.T / scale).T
    return (c, *others, tolerance) if full else c


@_compat.patches("jax.lax.associative_scan", "derivative of cumprod")
def _associative_scan(
    original: Callable[..., Value],
    fn: Callable[..., Any],
    elems: Tree,
    reverse: bool = False,
    axis: int = 0,
) -> Tree:
    # No result depends on later elements: a scan over as many as the longest row has gives the
    # same. Pairs that a row has not got are replaced by its first pair, or they could make a NaN
    # that reaches the gradient of what all pairs share.
    leaves = jax.tree.leaves(elems)
    sizes = [np.shape(x)[axis] for x in leaves if -np.ndim(x) <= axis < np.ndim(x)]
    if not sizes or len(sizes) < len(leaves) or any(size != sizes[0] for size in sizes):
        return original(fn, elems, reverse, axis)
    most = greatest(sizes[0]) if _compat.is_row_size(sizes[0]) else None
    if most is None:
        return original(fn, elems, reverse, axis)
    axis = axis % np.ndim(leaves[0])
    if reverse:
        elems = jax.tree.map(lambda x: jnp.flip(x, axis), elems)
    pair = _first_pair(elems, axis)

    def combine(before: Tree, after: Tree) -> Tree:
        own = after[1]
        given = zip((before[0], after[0]), pair, strict=True)
        return fn(*(_where(own, xs, safe, axis) for xs, safe in given)), own

    wide = jax.tree.map(lambda x: _resized(x, most, axis), elems)
    own = jnp.arange(most) < jnp.asarray(sizes[0])
    own = own.reshape([*[1] * axis, most])
    out, _ = original(combine, (wide, own), axis=axis)
    out = jax.tree.map(lambda x: _resized(x, sizes[0], axis), out)
    return jax.tree.map(lambda x: jnp.flip(x, axis), out) if reverse else out


def _resized(x: Value, size: Dim, axis: int = 0) -> jax.Array:
    """`x` with so many elements along an axis: zeros are added, or the last ones cut off."""
    x = jnp.asarray(x)
    config = [(0, size - n if i == axis else 0, 0) for i, n in enumerate(x.shape)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _first_pair(xs: Tree, axis: int) -> list[Any]:
    """The first two elements along an axis, with it, and without a derivative."""
    take = lambda i: lambda x: jnp.take(x, np.array([i]), axis, mode="clip")
    return [lax.stop_gradient(jax.tree.map(take(i), xs)) for i in (0, 1)]


def _where(mask: jax.Array, xs: Tree, others: Tree, axis: int) -> Tree:
    def pick(x: Value, other: Value) -> jax.Array:
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        return jnp.where(mask.reshape(shape), x, other)

    return jax.tree.map(pick, xs, others)


@_compat.patches("jax.numpy.cov")
def _cov(
    original: Callable[..., Value],
    m: Value,
    y: Value = None,
    rowvar: bool = True,
    *args: Any,
    **more: Any,
) -> jax.Array:
    # JAX returns early where there is no observation, which may be said of some rows.
    shape = np.shape(m)
    count = shape[-1 if rowvar or len(shape) == 1 else 0] if len(shape) else 1
    out = original(m, y, rowvar, *args, **more)
    return jnp.where(jnp.asarray(count) == 0, jnp.nan, out) if _compat.is_row_size(count) else out


@_compat.patches(*(f"jax.numpy.fft.{name}" for name in ("fft", "ifft", "rfft", "irfft")))
def _fft(
    original: Callable[..., Any],
    a: Value,
    n: Dim | None = None,
    axis: int = -1,
    norm: str | None = None,
) -> jax.Array:
    # JAX asks for the wanted size as an int, and crops and pads to it.
    a = jnp.asarray(a)
    halved = original is _irfft
    if n is None and halved and a.ndim and _compat.is_row_size(a.shape[axis]):
        n = 2 * (a.shape[axis] - 1)
    if not _compat.is_row_size(n):
        return original(a, n, axis, norm)
    size: Any = n
    a = jnp.moveaxis(a, axis, -1)
    a = _cropped(a, a.ndim - 1, size // 2 + 1 if halved else size)
    if not halved:
        return jnp.moveaxis(original(a, None, -1, norm), -1, axis)
    out = lax.fft(a.astype(jnp.result_type(a, np.complex64)), "IRFFT", (n,))
    if norm in ("ortho", "forward"):
        count = jnp.asarray(n, out.dtype)
        out = out * (count if norm == "forward" else jnp.sqrt(count))
    return jnp.moveaxis(out, -1, axis)


_irfft = jnp.fft.irfft


def _cropped(x: Value, axis: int, size: Dim) -> jax.Array:
    """`x` with so many elements along an axis, the first ones, and zeros behind them."""
    own = np.shape(x)[axis]
    if own is size or (_compat.is_row_size(own) and own.is_known_to_be(size)):
        return x
    least = min_dim(own, size)
    return _resized(lax.slice_in_dim(x, 0, least, axis=axis), size, axis)
