"""Eigenvalues and eigenvectors with lanes last, against the library's of the same matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.matrices import (
    DTYPES,
    error,
    general,
    lanes_last,
    positive,
    product,
    with_wrong_elements,
)

eigh = functools.partial(lanes_last, "eigh")

EPS = {dtype: float(np.finfo(dtype).eps) for dtype in DTYPES}


def adjoint(x):
    return x.conj().swapaxes(-1, -2)


@functools.cache
def _both(lower):
    def run(a):
        v, w = eigh(a.transpose(1, 2, 0), lower=lower)
        values, vectors = jnp.linalg.eigh(a, "L" if lower else "U", symmetrize_input=False)
        return (v.transpose(2, 0, 1), w.T), (vectors, values)

    return jax.jit(run)


def both(x, lower=True):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _both(lower)(x))


def hermitian(n, dtype):
    """Hermitian matrices of each kind."""
    rng = np.random.default_rng(n)
    kinds = {kind: (x / 2 + adjoint(x) / 2) for kind, x in general(n, dtype).items()}
    kinds |= {f"definite {kind}": x for kind, x in positive(n, dtype).items()}
    turns = np.linalg.qr(rng.standard_normal((4, n, n)))[0]
    repeated = (turns * np.where(np.arange(n) % 2, 1.0, 2.0)) @ adjoint(turns)
    kinds["repeated"] = ((repeated + adjoint(repeated)) / 2).astype(dtype)
    kinds["no diagonal"] = kinds["random"] * (1 - np.eye(n, dtype=dtype))
    return kinds


@pytest.mark.parametrize("n", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(4, "float32-6", "complex128-5", "float64-2")
def test_matrices_are_what_they_are_decomposed_into_as_the_librarys_are(dtype, n):
    kinds = hermitian(n, dtype)
    x = np.concatenate(list(kinds.values()))
    names = np.repeat([*kinds], 4)
    given = np.where(np.tri(n, dtype=bool), x, x.dtype.type(np.nan))
    full = x.copy()
    full[..., range(n), range(n)] = full[..., range(n), range(n)].real
    apart, oblique = [], []
    for v, w in both(given):
        assert (v.dtype, w.dtype) == (x.dtype, x.real.dtype)
        assert (np.diff(w, axis=1) >= 0).all()
        wide = v.astype(np.complex128) * w[:, None].astype(np.float64)
        apart.append(error(full, product(wide, adjoint(v))))
        oblique.append(
            error(np.broadcast_to(np.eye(n, dtype=dtype), v.shape), product(adjoint(v), v))
        )
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, oblique):
            # Processors round in other places: the sums of n numbers in it by half of sqrt(n) each.
            assert ours[mine].max() <= 4 * max(theirs[mine].max(), np.sqrt(n) / 2), kind


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_eigenvalues_of_graded_definite_matrices_are_accurate(dtype):
    """As far as the matrices are without their grades (Demmel and Veselic 1992)."""
    n = 5
    rng = np.random.default_rng(0)
    half = rng.integers(-3, 4, (4, n, n)) + 4 * np.eye(n)
    whole = half @ adjoint(half)
    grades = 2.0 ** -(np.arange(n) * (6 if dtype == "float32" else 16))
    x = (grades[:, None] * whole * grades).astype(dtype)
    ours, theirs = both(x)
    # The product of all eigenvalues is the determinant: a whole number times powers of two.
    exact = np.round(np.linalg.det(whole)) * np.prod(grades) ** 2
    off = [np.abs(np.prod(w.astype(np.float64), 1) / exact - 1) for _, w in (ours, theirs)]
    sizes = np.sqrt(np.diagonal(whole, axis1=1, axis2=2))
    condition = np.linalg.cond(whole / sizes[:, :, None] / sizes[:, None])
    assert (off[0] <= n * condition * EPS[dtype]).all()
    assert off[0].max() <= 4 * max(off[1].max(), n * EPS[dtype])


@pytest.mark.parametrize("lower", [True, False])
def test_one_triangle_is_read_and_a_lane_does_not_see_the_others(lower):
    n, dtype = 4, "complex64"
    x = hermitian(n, dtype)["random"]
    mixed = with_wrong_elements(x)
    (v, w), _ = both(mixed, lower)
    there = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    wrong = ~np.isfinite(np.where(there, mixed, 0)).all((1, 2))
    assert wrong.any()
    np.testing.assert_array_equal(np.isnan(w).all(1), wrong)
    np.testing.assert_array_equal(np.isnan(w).any(1), wrong)
    np.testing.assert_array_equal(np.isnan(v).all((1, 2)), wrong)
    # What a lane is with neighbors that are slower or wrong is what it is among its like.
    alike = np.where(wrong[:, None, None], 0, mixed)
    (again, values), _ = both(alike, lower)
    np.testing.assert_array_equal(v[~wrong], again[~wrong])
    np.testing.assert_array_equal(w[~wrong], values[~wrong])


def test_blocks_of_lanes_are_what_one_block_is():
    x = np.concatenate([hermitian(2, "float32")["random"]] * 1000)
    run = jax.jit(lambda a: eigh(a.transpose(1, 2, 0), lower=True))
    v, w = map(np.asarray, run(np.concatenate([x] * 4)[:15001]))
    np.testing.assert_array_equal(v, np.concatenate([v[..., :4]] * 3751, -1)[..., :15001])
    np.testing.assert_array_equal(w, np.concatenate([w[..., :4]] * 3751, -1)[..., :15001])
