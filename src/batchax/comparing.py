"""Whether two arrays hold the same, except for rounding: by what checks in users' tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.types import Tree, Value
from batchax.rules.masking import is_inexact

_ROUNDINGS = 1000  # by which results may differ: the order of sums is not the same


def difference(
    got: Value, expected: Value, rtol: float | None, atol: float | None, scale: float = 0.0
) -> str:
    """In words, the largest difference of two arrays of one shape and dtype; "" if there is none.

    Args:
      got, expected: the arrays.
      rtol: relative tolerance; by default 1,000 times the rounding of the dtype.
      atol: absolute tolerance, relative to the largest value expected; likewise.
      scale: how large entries are nearby, if that may be larger than all that is expected.
    """
    got, expected = _comparable(got), _comparable(expected)
    if not is_inexact(got):
        close, error = np.asarray(got == expected), np.asarray(got != expected)
    else:
        rounding = _ROUNDINGS * float(jnp.finfo(got.dtype).eps)
        finite = np.abs(expected[np.isfinite(expected)])
        relative = rounding if rtol is None else rtol
        absolute = rounding if atol is None else atol
        absolute *= max(float(finite.max()) if finite.size else 1.0, scale)
        close = np.isclose(got, expected, relative, absolute, equal_nan=True)
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(got - expected), nan=np.inf)
    if close.all():
        return ""
    index = np.unravel_index(np.argmax(np.where(close, -1.0, error)), close.shape)
    entry = f", entry {tuple(map(int, index))}" if index else ""
    return (
        f"{entry}: {got[index]}, expected {expected[index]} "
        f"({close.size - np.count_nonzero(close)} of {close.size} entries differ)"
    )


def lanes_that_differ(
    got: Tree, expected: Tree, rtol: float | None, atol: float | None
) -> np.ndarray:
    """Returns for each lane, the first axis of all arrays, whether `difference` may find one."""
    different: Any = False
    for g, e in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        if g.shape != e.shape:
            return np.ones(len(g), bool)
        g, e = (_comparable(x).reshape(len(x), -1) for x in (g, e))
        if not is_inexact(g):
            different |= (g != e).any(1)
            continue
        rounding = _ROUNDINGS * float(jnp.finfo(g.dtype).eps)
        finite = np.where(np.isfinite(e), np.abs(e), 0).max(1, initial=0, keepdims=True)
        absolute = (rounding if atol is None else atol) * finite
        close = np.isclose(g, e, rounding if rtol is None else rtol, absolute, equal_nan=True)
        different |= ~close.all(1)
    return different


def difference_of_trees(
    got: dict[str, Any],
    expected: dict[str, Any],
    rtol: float | None,
    atol: float | None,
    scales: Sequence[float] = (),
) -> str:
    """In words, the first leaf in which trees differ, by their names; "" if there is none.

    `scales` are for the leaves of `expected`, as in `difference`; none are known if it is empty.
    """
    of_leaves = dict(zip(_places(expected), scales, strict=True)) if scales else {}
    for name, tree in got.items():
        structures = [jax.tree.structure(x) for x in (tree, expected[name])]
        if structures[0] != structures[1]:
            return f"{name} has the structure {structures[0]}, expected {structures[1]}"
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        for (keys, g), e in zip(leaves, jax.tree.leaves(expected[name]), strict=True):
            g, e = jnp.asarray(g), jnp.asarray(e)
            path = name + jax.tree_util.keystr(keys)
            if (g.shape, g.dtype) != (e.shape, e.dtype):
                return f"{path} is {g.dtype}{list(g.shape)}, expected {e.dtype}{list(e.shape)}"
            problem = difference(g, e, rtol, atol, of_leaves.get(path, 0.0))
            if problem:
                return path + problem
    return ""


def _places(trees: dict[str, Any]) -> list[str]:
    return [
        name + jax.tree_util.keystr(keys)
        for name in sorted(trees)  # the order in which a dict is flattened
        for keys, _ in jax.tree_util.tree_flatten_with_path(trees[name])[0]
    ]


def scales_nearby(fun: Callable[..., Any], xs: Sequence[Any]) -> list[float]:
    """How large each leaf of the results of `fun` is nearby, where no terms cancel by chance.

    Terms that cancel leave rounding behind, where exactly 0 may be expected: a derivative of
    `softmax` of equal rows is 0 to second order. So arguments change by up to half of themselves.
    """

    def changed(k: int, x: Value) -> Value:
        if not is_inexact(x):
            return x
        change = 1 + np.random.default_rng(k).uniform(-0.5, 0.5, x.shape)
        return x * jnp.asarray(change, x.dtype)

    return [_largest(x) for x in jax.tree.leaves(fun(*map(changed, range(len(xs)), xs)))]


def _largest(x: Value) -> float:
    x = jnp.asarray(x)
    if not is_inexact(x):
        return 0.0
    sizes = np.abs(_comparable(x))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def directions(xs: Iterable[Value], seed: int) -> list[Value]:
    """For each array random numbers of its shape and dtype: tangents, or cotangents."""

    def one(x: Value) -> Value:
        values = np.random.default_rng(seed).normal(size=np.shape(x))
        return jnp.asarray(values).astype(jnp.result_type(x))

    return [one(x) for x in xs]


def _comparable(x: Value) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return np.asarray(x.astype(jnp.float32) if small else x)
