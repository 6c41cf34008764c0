"""QR factors with lanes last, against the library's of the same matrices."""

import functools

import jax
import numpy as np
import pytest
from jax.lax import linalg as ll

from support.matrices import DTYPES, error, general, lanes_last, product, with_wrong_elements

qr = functools.partial(lanes_last, "qr")


@functools.cache
def _both(full):
    def run(a):
        ours = qr(a.transpose(1, 2, 0), full_matrices=full, pivoting=False)
        return [x.transpose(2, 0, 1) for x in ours], ll.qr(a, full_matrices=full)

    return jax.jit(run)


def both(x, full):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _both(full)(x))


@pytest.mark.parametrize("shape", [(5, 5), (5, 3), (3, 5), (1, 1), (2, 1)])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(
    4, "float32-True-shape1", "complex128-False-shape0", "complex64-True-shape2"
)
def test_factors_are_the_librarys(dtype, full, shape):
    m, n = shape
    kinds = general(max(shape), dtype)
    x = np.concatenate([y[:, :m, :n] for y in kinds.values()]) + 0  # signs of zeros are not told
    names = np.repeat([*kinds], 4)
    (q, r), (q0, r0) = both(x, full)
    assert (q.shape, r.shape, q.dtype) == (q0.shape, r0.shape, q0.dtype)
    assert (np.tril(r[:, :, :n], -1) == 0).all()
    results = [(q, r), (q0, r0)]
    apart = [error(x, product(a, b)) for a, b in results]
    eye = np.broadcast_to(np.eye(q.shape[-1], dtype=dtype), (len(x), *[q.shape[-1]] * 2))
    oblique = [error(eye, product(a.conj().swapaxes(-1, -2), a)) for a, _ in results]
    signs = [np.sign(np.diagonal(b.real, 0, 1, 2)) for _, b in results]
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, oblique):
            # The library overflows where matrices are huge, and is no measure there.
            fair = np.nan_to_num(theirs[mine], nan=1.0, posinf=1.0).max()
            assert ours[mine].max() <= 4 * max(fair, 0.5), kind
        if kind in ("random", "graded rows", "graded columns", "permuted", "zero", "tiny"):
            np.testing.assert_array_equal(signs[0][mine], signs[1][mine], kind)
    # What is well-conditioned is the same except for rounding, columns that complete it, too.
    mine = names == "orthogonal"
    np.testing.assert_allclose(q[mine], q0[mine], atol=100 * np.finfo(dtype).eps)


def test_nan_is_where_the_library_has_it():
    x = with_wrong_elements(general(3, "float32")["random"])
    (q, r), (q0, r0) = both(x, False)
    for ours, theirs in ((q, q0), (r, r0)):
        nan = np.isnan(x).any((1, 2))
        np.testing.assert_array_equal(np.isnan(ours)[nan], np.isnan(theirs)[nan])
        good = np.isfinite(x).all((1, 2))
        assert np.isfinite(ours[good]).all()
        np.testing.assert_allclose(ours[good], theirs[good], rtol=1e-4, atol=1e-5)
    infinite = np.isinf(x).any((1, 2))
    assert not (np.isfinite(q) & np.isfinite(r))[infinite].all((1, 2)).any()
