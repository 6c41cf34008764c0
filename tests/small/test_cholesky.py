"""Cholesky factors with lanes last, against the library's of the same matrices."""

import functools

import jax
import numpy as np
import pytest
from jax.lax import linalg as ll

from support.matrices import DTYPES, error, lanes_last, positive, product, with_wrong_elements

cholesky = functools.partial(lanes_last, "cholesky")


@functools.cache
def _both():
    def run(a):
        ours = cholesky(a.transpose(1, 2, 0))[0].transpose(2, 0, 1)
        return ours, jax.numpy.tril(ll.cholesky_p.bind(a))

    return jax.jit(run)


def both(x):
    with jax.enable_x64(True):
        return [np.asarray(y) for y in _both()(x)]


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(5, "float32-5", "complex128-5")
def test_factors_are_as_near_as_the_librarys(dtype, n):
    kinds = positive(n, dtype)
    x = np.concatenate([*kinds.values(), with_wrong_elements(kinds["random"])])
    names = np.repeat([*kinds, "wrong"], [*map(len, kinds.values()), 6 * n * n])
    assert len(names) == len(x)
    # What is above the diagonal is not read.
    x = np.where(np.tri(n, dtype=bool), x, x.dtype.type(np.nan))
    ours, theirs = both(x)
    assert ours.dtype == x.dtype
    fails = [np.isnan(y).any((-2, -1)) for y in (ours, theirs)]
    assert fails[1].any()
    assert not fails[1].all()
    lower = np.where(np.tri(n, dtype=bool), x, 0)
    full = lower + np.tril(lower, -1).conj().swapaxes(-1, -2)
    full[..., range(n), range(n)] = full[..., range(n), range(n)].real
    errors = [error(full, product(y, y.conj().swapaxes(-1, -2))) for y in (ours, theirs)]
    for kind in dict.fromkeys(names):
        mine = names == kind
        near = kind in ("rank-deficient", "near-singular", "ones", "integers", "triangular")
        if not near:  # where a pivot is about zero, its sign is that of what was rounded
            assert (fails[0] == fails[1])[mine].all(), kind
        good = mine & ~fails[0] & ~fails[1] & np.isfinite(full).all((-2, -1))
        if good.any():
            assert errors[0][good].max() <= 4 * max(errors[1][good].max(), 0.5), kind


def test_a_matrix_that_fails_is_nan_below_the_diagonal_and_others_are_not():
    x = np.stack([np.eye(2), [[1, 2], [2, 1]], [[-1, 0], [0, 1]], 4 * np.eye(2)]).astype("float32")
    ours = jax.jit(lambda a: cholesky(a.transpose(1, 2, 0))[0])(x).transpose(2, 0, 1)
    np.testing.assert_array_equal(np.isnan(ours).all((1, 2)), [False, True, True, False])
    np.testing.assert_array_equal(ours[::3], [np.eye(2), 2 * np.eye(2)])
