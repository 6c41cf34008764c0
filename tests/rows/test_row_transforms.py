"""Transforms, eigenvalues and singular values of rows: one program for rows of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import shares
from support.rows import check_rows, ragged

LOOSE = dict(rtol=2e-3, atol=2e-4)


def real(x):
    """Both parts, which tell the sign of an angle."""
    return x.real + 2 * x.imag


def square(x):
    return jnp.sin(jnp.outer(x, jnp.cos(x))) + jnp.diag(2.0 + jnp.arange(x.shape[0]))


def positive(x):
    return jnp.outer(x, x) + jnp.diag(2.0 + jnp.arange(x.shape[0]))


def again(vectors, values, others):
    """What does not depend on the signs of vectors, and on all of them."""
    return (vectors * jnp.sin(values)) @ others


FUNCTIONS = {
    "odd irfft": lambda x: jnp.fft.irfft(x + 1j * x, n=2 * x.shape[0] - 1),
    "shorter rfft": lambda x: real(jnp.fft.rfft(x, n=3)),
    "two axes": lambda x: real(jnp.fft.rfft2(jnp.stack([x, x**2, 1 - x], 1))),
    "eigh": lambda x: (lambda w, v: again(v, w, v.T @ x))(*jnp.linalg.eigh(positive(x))),
    "svd": lambda x: (lambda u, s, v: again(u, s, v @ x))(*jnp.linalg.svd(square(x))),
    "svd of three columns": lambda x: (lambda u, s, v: again(u, s, v))(
        *jnp.linalg.svd(jnp.stack([x, jnp.cos(3 * x), x**2], 1), full_matrices=False)
    ),
}


@pytest.mark.parametrize("names", shares(FUNCTIONS, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_as_each_row_alone(names):
    every = lambda x: {name: FUNCTIONS[name](x) for name in names}
    x = ragged(lengths=(3, 1, 5, 2), spare=1)
    check_rows(every, x, tolerance=LOOSE, modes=("vjp",), reverse_traced=True)


def test_vectors_of_a_singular_matrix_are_orthogonal():
    def vectors(x):
        u, s, v = jnp.linalg.svd(jnp.outer(x, x))
        w, e = jnp.linalg.eigh(0 * jnp.outer(x, x))
        eye = jnp.eye(x.shape[0])
        return jnp.abs(u.T @ u - eye).max(), jnp.abs(v @ v.T - eye).max(), s[0], w, e @ e.T @ x

    x = bx.Ragged(jnp.arange(1.0, 8.0), np.array([3, 4]), 40)
    of_u, of_v, largest, zeros, back = jax.jit(bx.vmap(vectors))(x)
    assert max(of_u.max(), of_v.max()) < 1e-5
    np.testing.assert_allclose(largest, [14.0, 126.0], rtol=1e-5)
    assert not np.asarray(zeros.data).any()
    np.testing.assert_allclose(back.data, x.data, rtol=1e-5)


def test_nan_stays_in_its_row():
    x = bx.Ragged(jnp.arange(8.0).at[1].set(jnp.nan), np.array([3, 5]), 9)

    def each(x):
        return jnp.abs(jnp.fft.fft(x)).sum() + jnp.linalg.eigvalsh(positive(x)).sum()

    def loss(data):
        y = bx.vmap(each)(x.with_data(data))
        return jnp.where(jnp.isnan(y), 0, y).sum(), y

    gradient, y = jax.jit(jax.grad(loss, has_aux=True))(x.data)
    assert np.isnan(y[0])
    assert np.isfinite(y[1])
    assert np.isfinite(gradient[3:]).all()
