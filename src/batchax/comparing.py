"""Whether two arrays hold the same, but for rounding: by what checks in users' tests compare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.words import Value
from batchax.rules.masking import is_inexact

_ROUNDINGS = 1000  # by which results may differ: the order of sums is not the same


def difference(got: Any, expected: Any, rtol: float | None, atol: float | None) -> str:
    """In words, the largest difference of two arrays of one shape and dtype; "" if there is none.

    Args:
      got, expected: the arrays.
      rtol: relative tolerance; by default 1,000 times the rounding of the dtype.
      atol: absolute tolerance, relative to the largest value expected; likewise.
    """
    got, expected = _comparable(got), _comparable(expected)
    if not is_inexact(got):
        close, error = np.asarray(got == expected), np.asarray(got != expected)
    else:
        rounding = _ROUNDINGS * float(jnp.finfo(got.dtype).eps)
        finite = np.abs(expected[np.isfinite(expected)])
        relative = rounding if rtol is None else rtol
        absolute = rounding if atol is None else atol
        absolute *= float(finite.max()) if finite.size else 1.0
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


def difference_of_trees(
    got: dict[str, Any], expected: dict[str, Any], rtol: float | None, atol: float | None
) -> str:
    """In words, the first leaf in which trees differ, by their names; "" if there is none."""
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
            problem = difference(g, e, rtol, atol)
            if problem:
                return path + problem
    return ""


def directions(xs: Any, seed: int) -> list[Any]:
    """For each array random numbers of its shape and dtype: tangents, or cotangents."""

    def one(x: Value) -> Any:
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
