"""Functions of JAX that read the size of a row as a number, and need not.

JAX raises for a symbolic size there, because it stages another program for each size. What stands
in for such a function is one program for rows of all lengths, and gives each row what JAX gives it
alone. It relies on the greatest length, which batchax knows and JAX does not. Arrays without a
symbolic size go to JAX's own function.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim, min_dim

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import Value
from batchax.rows.sizes import agreed, greatest


@_compat.stands_in_for("psum")
def _psum(original: Any, x: Value, names: Any, **kwargs: Any) -> Any:
    # JAX takes what is no array for a constant, and multiplies it by the number of lanes. The
    # length of a row is no constant: a symbolic one is made an array; a number that may be one,
    # where rows are grouped by length, is refused.
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


@_compat.stands_in_for("indices")
def _parse_indices(original: Any, indices: Any, *args: Any) -> Any:
    # JAX takes an int or an array for an index, and a symbolic size is neither.
    indices = (jnp.asarray(i) if _compat.is_row_size(i) else i for i in indices)
    return original(tuple(indices), *args)


@_compat.stands_in_for("loop of fori_loop")
def _fori_loop(original: Any, cond: Any, body: Any, init: Any) -> Any:
    # Of a `fori_loop` JAX makes a scan, which has a reverse mode, if it knows the number of steps
    # as an int, and else a `while_loop`, which has none. This makes a scan for a symbolic one, too.
    if getattr(cond, "__name__", "") != "_fori_cond_fun":
        return original(cond, body, init)
    start, stop, values = init
    if not all(isinstance(x, int) or _compat.is_row_size(x) for x in (start, stop)):
        return original(cond, body, init)
    stop_as_array = jnp.asarray(stop)

    def step(carry: Any, _: Any) -> Any:
        i, _, values = body((carry[0], stop_as_array, carry[1]))
        return (i, values), None

    # `length=` would have to be an int, so the number of steps is given as the size of an array.
    steps = jnp.arange(max_dim(stop - start, 0))
    (last, values), _ = lax.scan(step, (start, values), steps)
    return last, stop, values


@_compat.stands_in_for("permutation")
def _permutation(original: Any, key: Any, x: Value, *args: Any, **kwargs: Any) -> Any:
    # JAX does the same with an int: it permutes `jnp.arange` of it.
    return original(key, jnp.arange(x) if _compat.is_row_size(x) else x, *args, **kwargs)


@_compat.stands_in_for("shuffle")
def _shuffle(original: Any, key: Any, x: Value, axis: Any) -> Any:
    # JAX sorts by random keys, in so many rounds that no two elements are likely to have had equal
    # keys in each. That number grows with the size. Here there are the rounds of the longest row,
    # and a row that takes fewer keeps what it has in the others.
    most = greatest(x.size) if _compat.is_row_size(x.size) else None
    if most is None:
        return original(key, x, axis)
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


@_compat.stands_in_for("convolution")
def _convolution(
    original: Any, x: Value, y: Value, mode: str, op: str, *args: Any, **more: Any
) -> Any:
    # JAX swaps the two if the second is longer, so it has to know. Here zeros follow both, up to
    # sizes that all rows share, and the wanted part of the result begins at a place that depends
    # on the row.
    ragged = [x for x in (x, y) if np.ndim(x) == 1 and _compat.is_row_size(np.shape(x)[0])]
    if not ragged or np.ndim(x) != np.ndim(y) or mode not in ("full", "same", "valid"):
        return original(x, y, mode, op, *args, **more)
    n, m = np.shape(x)[0], np.shape(y)[0]
    x, y = with_zeros(x, greatest(n)), with_zeros(y, greatest(m))
    whole = original(x, y, "full", op, *args, **more)
    first = y.shape[0] - m if op == "correlate" else 0
    start, size = part_of_convolution(mode, n, m)
    if mode == "same" and op == "correlate" and not agreed(n, m):  # JAX turns the result round
        start = jnp.where(jnp.asarray(n) >= jnp.asarray(m), start, n // 2)
    return jnp.take(whole, jnp.arange(size) + (start + first), mode="clip")


def part_of_convolution(mode: str, n: Any, m: Any) -> tuple[Any, Any]:
    """Where the part that NumPy's mode asks for begins in the whole, and its size."""
    if mode == "full":
        return 0, n + m - 1
    is_longer = agreed(n, m)
    shorter = min_dim(n, m) if is_longer is None else m if is_longer else n
    if mode == "valid":
        return shorter - 1, n + m - 2 * shorter + 1
    return (shorter - 1) // 2, n + m - shorter


@_compat.stands_in_for("linspace")
def linspace_of_rows(
    original: Any,
    start: Any,
    stop: Any,
    num: Any = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
    **kwargs: Any,
) -> Any:
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


@_compat.stands_in_for("searchsorted")
def _searchsorted(
    original: Any, a: Any, v: Any, side: str = "left", sorter: Any = None, **kwargs: Any
) -> Any:
    # JAX halves as often as the size says. Here it is as often as the longest row needs.
    size = np.shape(a)[0] if np.ndim(a) == 1 else None
    most = greatest(size) if _compat.is_row_size(size) else None
    if most is None or side not in ("left", "right"):
        return original(a, v, side, sorter, **kwargs)
    a, v = jnp.asarray(a), jnp.asarray(v)
    a = a if sorter is None else a[sorter]
    a, v = (x.astype(jnp.promote_types(a.dtype, v.dtype)) for x in (a, v))
    before = lambda x, y: (x < y) | ((y != y) & (x == x))  # NaN is last
    low = jnp.zeros(v.shape, np.int32)
    high = jnp.zeros(v.shape, np.int32) + jnp.asarray(size, np.int32)
    for _ in range(most.bit_length()):
        middle = (low + high) // 2
        there = jnp.take(a, middle, mode="clip")
        after = before(there, v) if side == "left" else ~before(v, there)
        going = low < high
        low = jnp.where(going & after, middle + 1, low)
        high = jnp.where(going & ~after, middle, high)
    return low


@_compat.stands_in_for("rfftfreq")
def _rfftfreq(original: Any, n: Any, d: Any = 1.0, **kwargs: Any) -> Any:
    # JAX asks whether the size is even, and takes it to be odd where it cannot tell. There are as
    # many either way.
    if not _compat.is_row_size(n):
        return original(n, d, **kwargs)
    dtype = kwargs.get("dtype") or jnp.result_type(float, d)
    return jnp.arange(n // 2 + 1).astype(dtype) / (jnp.asarray(d, dtype) * jnp.asarray(n, dtype))


@_compat.stands_in_for("interp")
def _interp(
    original: Any, x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
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


@_compat.stands_in_for("associative_scan", "associative_scan of cumprod")
def _associative_scan(
    original: Any, fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
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

    def combine(before: Any, after: Any) -> Any:
        own = after[1]
        given = zip((before[0], after[0]), pair, strict=True)
        return fn(*(_where(own, xs, safe, axis) for xs, safe in given)), own

    wide = jax.tree.map(lambda x: with_zeros(x, most, axis), elems)
    own = jnp.arange(most) < jnp.asarray(sizes[0])
    own = own.reshape([*[1] * axis, most])
    out, _ = original(combine, (wide, own), axis=axis)
    out = jax.tree.map(lambda x: _padded(x, sizes[0] - most, axis), out)
    return jax.tree.map(lambda x: jnp.flip(x, axis), out) if reverse else out


@_compat.stands_in_for("derivative of a reduction")  # by a product, or by any function
def _reduce_jvp(
    original: Any, fn: Any, starts: Any, primals: Any, tangents: Any, axes: Sequence[int]
) -> Any:
    # JAX combines the two halves of all that is reduced, and their halves, so it wants to know how
    # much that is. Here it is as much as the longest row has, and pairs are as in a scan.
    shape = np.shape(primals[0])
    room = {i: _room(shape[i]) for i in axes} if any(map(_compat.is_row_size, shape)) else {}
    if not room or None in room.values():
        return original(fn, starts, primals, tangents, axes)
    of_each = fn
    for _ in shape:
        of_each = jax.vmap(of_each)

    def reduce(*xs: Any) -> Any:
        for axis in axes:
            most = room[axis]
            ends: Any = [padded_with(s, x, most, axis) for x, s in zip(xs, starts, strict=True)]
            pair, own = _first_pair(ends, axis), jnp.arange(most) < jnp.asarray(shape[axis])
            while len(own) > 1:
                halves, (own, both) = _halves(ends, axis), _halves(own, 0)
                given = (_where(both, *each, axis) for each in zip(halves, pair, strict=True))
                ends = _where(both, of_each(*itertools.chain(*given)), halves[0], axis)
            xs = tuple(ends)
        return tuple(lax.squeeze(x, axes) for x in xs)

    return jax.jvp(reduce, tuple(primals), tuple(tangents))


def _halves(xs: Any, axis: int) -> tuple[Any, Any]:
    """Two halves of arrays along an axis, as long as each other: the second may end with a zero."""
    half = (jax.tree.leaves(xs)[0].shape[axis] + 1) // 2
    cut = lambda *at: jax.tree.map(lambda x: lax.slice_in_dim(x, *at, axis=axis), xs)
    return cut(0, half), jax.tree.map(lambda x: with_zeros(x, half, axis), cut(half, None))


def is_row(x: Any) -> bool:
    """Whether an array has one axis, of the size of a row."""
    return np.ndim(x) == 1 and _compat.is_row_size(np.shape(x)[0])


def takes(size: Any, least: Any) -> bool:
    """Whether what takes rows of a least size takes all that there are, if their lengths are known.

    If not, JAX tells why, of that row alone. Of traced lengths nothing is known (`of_taken`).
    """
    if not _compat.is_row_size(size):
        return size >= least
    return not size.scope.lengths.aligned or agreed(size, least) is True


def of_taken(x: Any, size: Any, least: Any) -> Any:
    """Results of rows of a least size; shorter ones have what `jnp.take` gives out of bounds."""
    none = jnp.take(jnp.zeros(1, x.dtype), 1, mode="fill")
    return jnp.where(jnp.asarray(size) >= least, x, none)


def _room(size: Any) -> int | None:
    """The most that a size may be, and room for what an empty row comes to."""
    most = greatest(size)
    return None if most is None else max(most, 1)


def with_zeros(x: Value, size: Any, axis: int = 0) -> Any:
    """`x` with zeros after its elements along an axis, which is of that size then."""
    return padded_with(0, x, size, axis)


def padded_with(value: Value, x: Value, size: Any, axis: int) -> Any:
    """As `with_zeros`, with that value in place of zero."""
    return _padded(x, size - np.shape(x)[axis], axis, value)


def _padded(x: Value, by: Any, axis: int, value: Value = 0) -> Any:
    x = jnp.asarray(x)
    config = [(0, by if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _first_pair(xs: Any, axis: int) -> list[Any]:
    """The first two elements along an axis, with it, and without a derivative."""
    take = lambda i: lambda x: jnp.take(x, np.array([i]), axis, mode="clip")
    return [lax.stop_gradient(jax.tree.map(take(i), xs)) for i in (0, 1)]


def _where(mask: Any, xs: Any, others: Any, axis: int) -> Any:
    """`xs` where `mask`, which is along that axis, is true, and `others` where not."""

    def pick(x: Value, other: Any) -> Any:
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        return jnp.where(mask.reshape(shape), x, other)

    return jax.tree.map(pick, xs, others)


@_compat.stands_in_for("diagflat")
def _diagflat(original: Any, v: Any, k: int = 0) -> Any:
    rows = any(map(_compat.is_row_size, np.shape(v)))
    return jnp.diag(jnp.ravel(v), k) if rows else original(v, k)


@_compat.stands_in_for("array_split")
def _array_split(original: Any, ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    parts, shape = indices_or_sections, np.shape(ary)
    n: Any = shape[axis] if isinstance(axis, int) and -len(shape) <= axis < len(shape) else None
    if not (_compat.is_row_size(n) and isinstance(parts, int) and parts > 0):
        return original(ary, parts, axis)
    sizes = [(n + parts - 1 - i) // parts for i in range(parts)]
    return jnp.split(ary, list(itertools.accumulate(sizes[:-1])), axis)


@_compat.stands_in_for("setxor1d")
def _setxor1d(
    original: Any,
    ar1: Any,
    ar2: Any,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: Any = None,
) -> Any:
    # Elements in order, equal ones together. Those that are in one array alone are wanted; NaN of
    # one is never that of the other.
    rows = (is_row(ar1) or is_row(ar2)) and np.ndim(ar1) == np.ndim(ar2) == 1
    if size is None or assume_unique or not rows:
        return original(ar1, ar2, assume_unique, size=size, fill_value=fill_value)
    x = jnp.concatenate([jnp.asarray(ar1), jnp.asarray(ar2)])
    order, at = jnp.argsort(x), jnp.arange(x.shape[0])
    x, of_second = x[order], order >= jnp.asarray(np.shape(ar1)[0])
    before, side_before = jnp.roll(x, 1), jnp.roll(of_second, 1)
    equal = (x == before) | ((x != x) & (before != before) & (of_second == side_before))
    new = (at == 0) | ~equal
    group = jnp.cumsum(new) - 1
    of_both = jax.ops.segment_max(of_second.astype(int), group, x.shape[0])[group] > 0
    alone = new & (of_second | ~of_both)
    places = jnp.nonzero(alone, size=size, fill_value=np.iinfo(np.int32).max)[0]
    values, there = x.at[places].get(mode="fill", fill_value=0), jnp.arange(size) < alone.sum()
    if fill_value is not None or not size:
        return jnp.where(there, values, 0 if fill_value is None else fill_value)
    values = jnp.where(there, values, values.max())
    return jnp.where(there, values, values.min())


@_compat.stands_in_for("iterable")
def _iterable(original: Any, y: Any) -> bool:
    return (np.ndim(y) > 0 and _compat.is_row_size(np.shape(y)[0])) or original(y)


@_compat.stands_in_for("cov", "cov of corrcoef")
def _cov(original: Any, m: Any, y: Any = None, rowvar: bool = True, *args: Any, **more: Any) -> Any:
    # JAX returns early where there is no observation, which may be said of some rows.
    shape = np.shape(m)
    count = shape[-1 if rowvar or len(shape) == 1 else 0] if len(shape) else 1
    out = original(m, y, rowvar, *args, **more)
    return jnp.where(jnp.asarray(count) == 0, jnp.nan, out) if _compat.is_row_size(count) else out


@_compat.stands_in_for("partition")
def _partition(original: Any, a: Any, kth: Any, axis: int = -1) -> Any:
    # The least elements in order, and then the others from the greatest one on, as JAX has them.
    parted = _parted(a, kth)
    if parted is None:
        return original(a, kth, axis)
    a, at, kth, size, least = parted
    rising = a[_rising(a)]
    falling = a[jnp.argsort(a, descending=True)]
    after = jnp.take(falling, at - kth - 1, mode="clip")
    return of_taken(jnp.where(at <= kth, rising, after), size, least)


@_compat.stands_in_for("argpartition")
def _argpartition(original: Any, a: Any, kth: Any, axis: int = -1) -> Any:
    # Places of the least elements in order, and then the others as they come.
    parted = _parted(a, kth)
    if parted is None:
        return original(a, kth, axis)
    a, at, kth, size, least = parted
    rank = jnp.zeros_like(at).at[_rising(a)].set(at)
    places = jnp.argsort(jnp.minimum(rank, kth + 1), stable=True)
    return of_taken(places.astype(np.int32), size, least)


def _parted(a: Any, kth: Any) -> tuple[Any, Any, Any, Any, int] | None:
    """A row that is parted at `kth`, the places in it, `kth` from the front, and its size.

    Last, the least size that a row has with an element there. None where JAX's function serves.
    """
    if not is_row(a) or jnp.iscomplexobj(a) or not isinstance(kth, (int, np.integer)):
        return None
    least = int(kth) + 1 if kth >= 0 else -int(kth)
    if not takes(np.shape(a)[0], least):
        return None
    a = jnp.asarray(a)
    size = jnp.asarray(a.shape[0])
    return a, jnp.arange(a.shape[0]), kth + size if kth < 0 else kth, size, least


def _rising(a: Any) -> Any:
    """Places of elements in ascending order; NaN comes first, as of the greatest of `-a`."""
    floats = jnp.issubdtype(a.dtype, jnp.floating)
    return jnp.argsort(-a, descending=True) if floats else jnp.argsort(a)


@_compat.stands_in_for("place")
def _place(original: Any, arr: Any, mask: Any, vals: Any, *, inplace: bool = True) -> Any:
    sizes = *np.shape(arr), *np.shape(mask), *np.shape(vals)
    rows = any(map(_compat.is_row_size, sizes))
    if inplace or not rows or np.size(arr) != np.size(mask) or not takes(np.size(vals), 1):
        return original(arr, mask, vals, inplace=inplace)
    arr, there = jnp.asarray(arr), jnp.ravel(mask) != 0
    given, count = jnp.append(vals, jnp.zeros(1, arr.dtype)), np.size(vals)
    at = (jnp.cumsum(there) - 1) % jnp.maximum(jnp.asarray(count), 1)
    chosen = jnp.take(given, at, mode="clip").astype(arr.dtype)
    return of_taken(jnp.where(there, chosen, arr.ravel()).reshape(arr.shape), count, 1)


@_compat.stands_in_for("resize")
def _resize(original: Any, a: Any, new_shape: Any) -> Any:
    # As often as it takes, one after another.
    shape = new_shape if isinstance(new_shape, (tuple, list)) else (new_shape,)
    if not any(map(_compat.is_row_size, (*np.shape(a), *shape))):
        return original(a, new_shape)
    flat = jnp.ravel(a)
    size = jnp.asarray(flat.shape[0])
    at = jnp.arange(math.prod(shape)) % jnp.maximum(size, 1)
    return jnp.where(size > 0, jnp.take(flat, at, mode="clip"), 0).reshape(shape)


@_compat.stands_in_for("matrix_rank")
def _matrix_rank(
    original: Any, M: Any, rtol: Any = None, *, hermitian: bool = False, tol: Any = None
) -> Any:
    # JAX compares the two sizes of a matrix, for the greater one.
    sizes = np.shape(M)[-2:]
    if len(sizes) < 2 or not any(map(_compat.is_row_size, sizes)) or (rtol, tol) != (None, None):
        return original(M, rtol, hermitian=hermitian, tol=tol)
    values = jnp.linalg.svd(M, full_matrices=False, compute_uv=False, hermitian=hermitian)
    least = jnp.asarray(max_dim(*sizes), values.dtype) * np.finfo(values.dtype).eps
    return jnp.sum(values > values.max(-1, keepdims=True, initial=0) * least, axis=-1)


@_compat.stands_in_for("eigh_tridiagonal")
def _eigh_tridiagonal(original: Any, d: Any, e: Any, **options: Any) -> Any:
    # JAX halves intervals, as often as it takes, with loops that it writes out by the size.
    alone = {"eigvals_only": True, "select": "a", "select_range": None, "tol": None, "key": None}
    if not is_row(d) or any(options.get(k, alone[k]) != alone[k] for k in alone):
        return original(d, e, **options)
    if not options.get("eigvals_only"):
        return original(d, e, **options)
    d, e = jnp.asarray(d), jnp.asarray(e)
    return jnp.linalg.eigvalsh(jnp.diag(d) + jnp.diag(e, 1) + jnp.diag(e.conj(), -1))


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


@_compat.stands_in_for("polyval")
def _polyval(original: Any, p: Any, x: Any, *, unroll: int = 16) -> Any:
    # Since 0.12 JAX makes a list of coefficients, for which it needs their number.
    if not (np.ndim(p) and _compat.is_row_size(np.shape(p)[0])):
        return original(p, x, unroll=unroll)
    p, x = jnp.asarray(p), jnp.asarray(x)
    dtype = jnp.result_type(p, x)
    p, x = p.astype(dtype), x.astype(dtype)
    start = jnp.zeros(jnp.broadcast_shapes(p.shape[1:], x.shape), dtype)
    return lax.scan(lambda y, c: (y * x + c, None), start, p)[0]


@_compat.stands_in_for("polymul")
def _polymul(original: Any, a: Any, b: Any, *, trim_leading_zeros: bool = False) -> Any:
    if trim_leading_zeros or not (is_row(a) or is_row(b)):
        return original(a, b, trim_leading_zeros=trim_leading_zeros)
    return jnp.convolve(jnp.asarray(a) * 1.0, jnp.asarray(b) * 1.0)


@_compat.stands_in_for("polyder")
def _polyder(original: Any, p: Any, m: int = 1) -> Any:
    if not is_row(p) or not isinstance(m, int) or m < 1:
        return original(p, m)
    p = jnp.asarray(p) * 1.0
    return (p * _factors(p, range(m)))[: max_dim(p.shape[0] - m, 0)]


@_compat.stands_in_for("polyint")
def _polyint(original: Any, p: Any, m: int = 1, k: Any = None) -> Any:
    if not is_row(p) or not isinstance(m, int) or m < 1 or k is not None:
        return original(p, m, k)
    p = jnp.asarray(p) * 1.0
    return padded_with(0, p / _factors(p, range(-m, 0)), p.shape[0] + m, 0)


def _factors(p: Any, less: range) -> Any:
    """The product of the power that each coefficient stands beside, less each of these numbers."""
    power = jnp.asarray(p.shape[0]) - 1 - jnp.arange(p.shape[0])
    return math.prod((power - k).astype(p.dtype) for k in less)


@_compat.stands_in_for("vander")
def _vander(original: Any, x: Any, N: Any = None, increasing: bool = False) -> Any:
    size = np.shape(x)[0] if N is None and np.ndim(x) == 1 else N
    if not _compat.is_row_size(size):
        return original(x, N, increasing)
    x = jnp.asarray(x)
    powers = jnp.arange(size).astype(x.dtype)
    powers = powers if increasing else jnp.asarray(size, x.dtype) - 1 - powers
    return jnp.power(x[:, None], powers[None])


@_compat.stands_in_for("poly")
def _poly(original: Any, seq_of_zeros: Any) -> Any:
    # A product of as many factors as there are roots, one after another.
    shape = np.shape(seq_of_zeros)
    if len(shape) == 2 and _compat.is_row_size(shape[0]) and shape[0].is_known_to_be(shape[1]):
        seq_of_zeros = jnp.linalg.eigvals(seq_of_zeros)
    if not is_row(seq_of_zeros):
        return original(seq_of_zeros)
    roots = jnp.asarray(seq_of_zeros) * 1.0
    at = jnp.arange(roots.shape[0] + 1)

    def times(coefficients: Any, factor: Any) -> Any:
        root, degree = factor
        there = (at > 0) & (at <= degree + 1)
        before = jnp.where(there, jnp.roll(coefficients, 1), 0)
        return coefficients - jnp.where(there, root * before, 0), None

    return lax.scan(times, (at == 0).astype(roots.dtype), (roots, jnp.arange(roots.shape[0])))[0]


@_compat.stands_in_for("polydiv")
def _polydiv(original: Any, u: Any, v: Any, *, trim_leading_zeros: bool = False) -> Any:
    rows = (is_row(u) or is_row(v)) and np.ndim(u) == np.ndim(v) == 1
    if trim_leading_zeros or not rows or not takes(np.size(v), 1):
        return original(u, v, trim_leading_zeros=trim_leading_zeros)
    u, v = (jnp.asarray(x) * 1.0 for x in (u, v))
    u, v = (x.astype(jnp.promote_types(u.dtype, v.dtype)) for x in (u, v))
    steps, along = max_dim(u.shape[0] - v.shape[0] + 1, 0), jnp.arange(v.shape[0])

    def step(rest: Any, k: Any) -> Any:
        factor = jnp.take(rest, k, mode="clip") / v[0]
        return rest.at[k + along].add(-factor * v), factor

    rest, quotient = lax.scan(step, u, jnp.arange(steps))
    quotient = with_zeros(quotient, max_dim(steps, 1))
    return of_taken(quotient, v.shape[0], 1), of_taken(rest, v.shape[0], 1)


@_compat.stands_in_for("polyfit")
def _polyfit(
    original: Any,
    x: Any,
    y: Any,
    deg: int,
    rcond: Any = None,
    full: bool = False,
    w: Any = None,
    cov: Any = False,
) -> Any:
    # JAX makes a number of the cutoff, which depends on how many points there are.
    if not is_row(x) or rcond is not None or full or cov or not takes(x.shape[0], 1):
        return original(x, y, deg, rcond, full, w, cov)
    x, y = jnp.asarray(x) * 1.0, jnp.asarray(y) * 1.0
    powers = jnp.vander(x, deg + 1)
    weights = jnp.ones_like(x) if w is None else jnp.asarray(w)
    powers, y = powers * weights[:, None], (y.T * weights).T
    scale = jnp.sqrt((powers * powers).sum(0))
    cutoff = jnp.asarray(x.shape[0], x.dtype) * np.finfo(x.dtype).eps
    scaled, *_ = jnp.linalg.lstsq(powers / scale, y, cutoff)
    return of_taken((scaled.T / scale).T, x.shape[0], 1)


@_compat.stands_in_for("roots")
def _roots(original: Any, p: Any, *, strip_zeros: bool = True) -> Any:
    # The eigenvalues of a companion matrix. JAX asks whether there is more than one coefficient:
    # here a row has two at least, and roots that it has not got are cut off.
    if strip_zeros or not is_row(p):
        return original(p, strip_zeros=strip_zeros)
    p = jnp.asarray(p) * 1.0
    own = p.shape[0]
    size, count = jnp.asarray(own), max_dim(own - 1, 0)
    leading = jnp.where(jnp.all(p == 0), size, jnp.argmin(jnp.append(p == 0, False)))
    p = with_zeros(jnp.where(leading == size, 1, p), max_dim(own, 2))
    at = jnp.arange(p.shape[0])
    p = jnp.where(at + leading < size, jnp.take(p, at + leading, mode="clip"), 0)
    matrix = jnp.eye(p.shape[0] - 1, k=-1, dtype=p.dtype).at[0].set(-p[1:] / p[0])
    roots = lax.slice_in_dim(jnp.linalg.eigvals(matrix), 0, count)
    roots = lax.sort_key_val(roots == 0, roots)[1]
    none = jnp.asarray(complex(np.nan, np.nan), roots.dtype)
    return jnp.where(jnp.arange(count) < size - 1 - leading, roots, none)
