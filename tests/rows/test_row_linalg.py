"""Linear algebra of rows in padded arrays: what is exact beside an identity, and what is not."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import pytest
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

check = partial(check_rows, layout="padded", tolerance=dict(rtol=2e-3, atol=2e-4))
check_all = partial(check_rows_of_all, layout="padded", tolerance=dict(rtol=2e-3, atol=2e-4))
FIXED = jnp.eye(3) + 0.2


def positive(x):
    return 0.3 * x @ x.T + 2 * jnp.eye(x.shape[0])


def general(x):
    return x @ jnp.cos(x).T + 3 * jnp.eye(x.shape[0])


SQUARE = {
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)).sum(0),
    "pivots": lambda x: lax.linalg.lu(general(x))[1:],
    "lu_solve": lambda x: jsl.lu_solve(jsl.lu_factor(general(x)), x),
    "solve": lambda x: jnp.linalg.solve(general(x), x),
    "det": lambda x: jnp.linalg.det(general(x)),
    "slogdet": lambda x: jnp.linalg.slogdet(general(x)),
    "ragged right-hand sides": lambda x: jsl.solve_triangular(FIXED, x.T, lower=True).sum(0),
    "differentiated": lambda x: jax.grad(lambda x: jnp.linalg.slogdet(positive(x))[1])(x),
}


@pytest.mark.parametrize("names", shares(SQUARE, 2), ids=" ".join)
def test_linear_algebra_of_a_row_is_exact(names):
    check_all(chosen(SQUARE, names), ragged(3, lengths=(3, 1)), modes=("vjp",))


def test_a_matrix_without_rows_has_what_numpy_says():
    names = ["cholesky", "solve", "slogdet", "det"]
    check_all(chosen(SQUARE, names), ragged(3, lengths=(2, 0, 1)), derivatives=False)


MANY = {
    "eigh": lambda x: jnp.linalg.eigh(x + x.mT)[0],
    "singular values": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "qr": jnp.linalg.qr,
    "det": jnp.linalg.det,
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(3)),
}


def test_a_row_of_matrices_has_linear_algebra_of_each():
    check_all(MANY, ragged(3, 3, lengths=(2, 3)), modes=("vjp",))


def test_no_nan_from_padding_reaches_shared_weights():
    def likelihood(x, w):
        covariance = (x * w) @ x.T + 2 * jnp.eye(x.shape[0])
        return jnp.linalg.solve(covariance, x @ w), jnp.log(jnp.linalg.det(covariance))

    w = jnp.array([0.1, 0.2, 0.3])
    check(likelihood, ragged(3, lengths=(3, 1)), w, in_axes=(0, None))


def test_a_solver_needs_no_transpose_where_it_is_not_transposed():
    def solved(x):
        return lax.custom_linear_solve(lambda v: (x + 2) * v, x, lambda _, b: b / (x + 2))

    check(solved, ragged(), modes=("jvp",))


REFUSED = {
    "some eigenvalues": lambda x: jax.lax.linalg.eigh(positive(x), subset_by_index=(0, 1))[1],
    "svd with vectors of no singular value": lambda x: jnp.linalg.svd(x)[1],
    "qr": jnp.linalg.qr,
    "a tridiagonal matrix": lambda x: lax.linalg.tridiagonal_solve(x[:, 0], x[:, 1], x[:, 2], x),
    "lu of a matrix that is not square": lambda x: lax.linalg.lu(x)[0],
    "reflectors": lambda x: jnp.linalg.slogdet(general(x), method="qr"),
    "eigenvalues of what is not symmetric": lambda x: jnp.linalg.eigvals(general(x)),
    "an update of a factor": lambda x: lax.linalg.cholesky_update(general(x), x[:, 0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_padding_makes_exact_is_refused(name):
    with pytest.raises(UnsupportedError, match="for rows of different lengths at once"):
        jax.jit(bx.vmap(REFUSED[name], layout="padded"))(ragged(3))
