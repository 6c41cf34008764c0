"""Functions of JAX that read the size of a row as a number, and need not.

JAX refuses a symbolic size there, because it stages another program for each size. What stands in
for such a function is one program for rows of all lengths, and gives each row what JAX gives it
alone. It relies on the greatest length, which batchax knows and JAX does not. Arrays without a
symbolic size go to JAX's own function.
"""

from __future__ import annotations

import bisect
import itertools
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
from batchax.rows.comparisons import agreed, greatest


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
