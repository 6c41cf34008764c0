"""LU factors with lanes last, against the library's of the same matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg as ll

from support.matrices import DTYPES, error, general, lanes_last, product, with_wrong_elements

lu = functools.partial(lanes_last, "lu")


@functools.cache
def _both():
    def run(a):
        ours = [jnp.moveaxis(x, -1, 0) for x in lu(jnp.moveaxis(a, 0, -1))]
        return ours, ll.lu(a)

    return jax.jit(run)


def both(x):
    with jax.enable_x64(True):
        return [[np.asarray(y) for y in of] for of in _both()(x)]


def errors(x, factors):
    both, _, order = factors
    m, n = x.shape[1:]
    k = min(m, n)
    lower = np.tril(both, -1)[..., :k] + np.eye(m, k, dtype=x.dtype)
    upper = np.triu(both)[..., :k, :]
    return error(np.take_along_axis(x, order[..., None], 1), product(lower, upper))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(5, "float32-5", "complex128-5")
def test_factors_are_as_near_as_the_librarys(dtype, n):
    kinds = general(n, dtype)
    x = np.concatenate([*kinds.values()])
    names = np.repeat([*kinds], [*map(len, kinds.values())])
    ours, theirs = both(x)
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    mine, library = errors(x, ours), errors(x, theirs)
    for kind in kinds:
        these = names == kind
        assert mine[these].max() <= 4 * max(library[these].max(), 0.5), kind
        if kind not in ("integers", "rank-deficient", "near-singular", "orthogonal"):
            # Elsewhere which of two is the larger is decided by what was rounded.
            np.testing.assert_array_equal(ours[1][these], theirs[1][these], err_msg=kind)
            np.testing.assert_array_equal(ours[2][these], theirs[2][these], err_msg=kind)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_wrong_elements_stay_in_their_lane(dtype):
    x = with_wrong_elements(general(3, dtype)["random"])
    ours, theirs = both(x)
    np.testing.assert_array_equal(np.isfinite(ours[0]).all((1, 2)), np.arange(len(x)) % 2 == 1)
    diagonals = [np.diagonal(y[0], axis1=1, axis2=2) for y in (ours, theirs)]
    with np.errstate(invalid="ignore", over="ignore"):
        finite = [np.isfinite(d.prod(-1)) for d in diagonals]  # the determinants
    np.testing.assert_array_equal(*finite)


def test_matrices_that_are_not_square_and_ties():
    for shape in [(2, 4), (4, 2)]:
        x = np.random.default_rng(0).integers(-3, 4, (40, *shape)).astype("float32")
        ours, theirs = both(x)
        np.testing.assert_array_equal(ours[2][:, 0], theirs[2][:, 0])
        assert errors(x, ours).max() <= 4 * max(errors(x, theirs).max(), 0.5)
