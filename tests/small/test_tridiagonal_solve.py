"""Tridiagonal systems with lanes last, against the library's solutions of the same systems."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg as ll

from batchax.small.tridiagonal_solve import tridiagonal_solve

from support.matrices import product


@functools.cache
def _both():
    def run(*operands):
        (ours,) = tridiagonal_solve(*(jnp.moveaxis(x, 0, -1) for x in operands))
        return jnp.moveaxis(ours, -1, 0), ll.tridiagonal_solve(*operands)

    return jax.jit(run)


def both(*operands):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in _both()(*operands)]


def systems(n, dtype, lanes=24):
    """Of each kind some, one after another; two thirds of them need pivots."""
    rng = np.random.default_rng(n)
    below, on, above = rng.standard_normal((3, lanes, n))
    on[::6] += 4
    on[1::6] = 0 if n % 2 == 0 else rng.integers(0, 2, on[1::6].shape)
    below[2::6] *= 1e3
    grades = 10.0 ** -np.linspace(0, 6, n)
    for x in (below, on, above):
        x[3::6] *= grades
        x[4::6] *= float(np.finfo(dtype).max) * 2.0**-20
        x[5::6] = rng.integers(-1, 2, x[5::6].shape)
    right = rng.standard_normal((lanes, n, 2))
    return [x.astype(dtype) for x in (below, on, above, right)]


@pytest.mark.parametrize("n", [1, 2, 6, 9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.each_commit(4)
def test_solutions_are_as_near_as_the_librarys(dtype, n):
    below, on, above, right = operands = systems(n, dtype)
    ours, theirs = both(*operands)
    assert ours.dtype == theirs.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    fine = np.isfinite(theirs).all((1, 2))
    assert fine.any()
    whole = np.zeros((len(on), n, n), dtype)
    at = np.arange(n)
    whole[:, at, at] = on
    whole[:, at[1:], at[:-1]] = below[:, 1:]
    whole[:, at[:-1], at[1:]] = above[:, :-1]

    def residual(x):
        x = np.where(fine[:, None, None], x, 0)
        size = product(np.abs(whole), np.abs(x)).max((1, 2)) + np.abs(right).max((1, 2))
        apart = np.abs(product(whole, x) - right).max((1, 2))
        return (apart / size / float(np.finfo(dtype).eps))[fine].max()

    assert residual(ours) <= 4 * max(residual(theirs), 0.5)


def test_singular_systems_are_nan_and_what_lies_outside_is_not_read():
    below, on, above, right = systems(6, "float32", 6)
    below[:, 0] = above[:, -1] = np.nan
    on[3] = below[3] = above[3] = 0
    right[4, 2, 0] = np.nan
    ours, theirs = both(below, on, above, right)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.isnan(ours[3]).all()
    assert np.isfinite(ours[0]).all()
