"""Singular values and vectors with lanes last, against the library's of the same matrices."""

import functools

import jax
import numpy as np
import pytest
from jax.lax import linalg as ll

from support.matrices import DTYPES, error, general, lanes_last, product

svd = functools.partial(lanes_last, "svd")


@functools.cache
def _both(full):
    def run(a):
        s, u, v = svd(a.transpose(1, 2, 0), full_matrices=full, compute_uv=True)
        u0, s0, v0 = ll.svd(a, full_matrices=full)
        return (u.transpose(2, 0, 1), s.T, v.transpose(2, 0, 1)), (u0, s0, v0)

    return jax.jit(run)


def both(x, full):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _both(full)(x))


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (1, 1), (1, 3)])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(3, "float32-True-shape1", "complex128-False-shape2")
def test_matrices_are_what_they_are_decomposed_into_as_the_librarys_are(dtype, full, shape):
    m, n = shape
    kinds = general(max(shape), dtype)
    x = np.concatenate([y[:, :m, :n] for y in kinds.values()])
    names = np.repeat([*kinds], 4)
    results = both(x, full)
    size = lambda y: [z.shape for z in y] + [z.dtype for z in y]
    assert size(results[0]) == size(results[1])
    apart, left, right = [], [], []
    for u, s, v in results:
        assert (np.diff(s, axis=1) <= 0).all()
        assert (s >= 0).all()
        k = min(m, n)
        wide = u[:, :, :k].astype(np.complex128) * s[:, None].astype(np.float64)
        apart.append(error(x, product(wide, v[:, :k])))
        for y, z in ((left, u), (right, v.conj().swapaxes(-1, -2))):
            eye = np.broadcast_to(np.eye(z.shape[-1], dtype=dtype), (len(x), *[z.shape[-1]] * 2))
            y.append(error(eye, product(z.conj().swapaxes(-1, -2), z)))
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, left, right):
            assert ours[mine].max() <= 4 * max(theirs[mine].max(), 0.5), kind


def test_what_is_not_finite_is_nan_in_its_lane_alone():
    # The library may never end where there is an infinity.
    x = np.stack(list(general(3, "float32").values()))[:, 0]
    wrong = x.copy()
    wrong[::2, 1, 2] = [np.nan, np.inf, -np.inf, np.nan, np.inf, np.nan, np.inf]
    run = jax.jit(lambda a: svd(a.transpose(1, 2, 0), full_matrices=True, compute_uv=True))
    values = jax.jit(lambda a: svd(a.transpose(1, 2, 0), full_matrices=True, compute_uv=False))
    for alone, mixed in zip(run(x), run(wrong), strict=True):
        assert np.isnan(mixed[..., ::2]).all()
        np.testing.assert_array_equal(alone[..., 1::2], mixed[..., 1::2])
    np.testing.assert_allclose(values(wrong)[0], run(wrong)[0], rtol=1e-5, atol=1e-30)
