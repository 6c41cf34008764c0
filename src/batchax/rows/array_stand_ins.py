"""Stand-ins for functions of JAX that choose elements, put them in places, and ask of matrices.

As those of `stand_ins`: what they do for sizes of rows is what JAX does for numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import max_dim

from batchax import _compat
from batchax.rows.stand_ins import is_row, of_taken, takes


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
