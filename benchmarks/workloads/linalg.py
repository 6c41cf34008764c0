"""Contractions and factorisations."""

import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from benchmarks.workload import normal, workload


def positive_definite(lanes, size):
    x = normal(lanes, size, size)
    return x @ x.transpose(0, 2, 1) + size * jnp.eye(size)


@workload(
    "contraction", lambda n: (normal(256, 256), normal(n, 256)), lanes=1024, in_axes=(None, 0)
)
def matvec_with_shared_matrix(a, x):
    return a @ x


@workload("contraction", lambda n: (normal(n, 64, 64), normal(n, 64)), lanes=1024)
def matvec_with_own_matrix(a, x):
    return a @ x


@workload(
    "contraction",
    lambda n: (normal(32, n, 48), normal(48, 24, n), normal(32, 24)),
    lanes=256,
    in_axes=(1, 2, None),
    out_axes=1,
)
def bilinear_form_with_inner_axes(x, y, w):
    return jnp.einsum("ij,jk,ik->i", x, y, w)


@workload(
    "contraction",
    lambda n: (normal(n, 16, 12), normal(n, 12, 16, 4), normal(4, 5)),
    lanes=512,
    in_axes=(0, 0, None),
)
def tensor_contraction(x, y, z):
    return jnp.einsum("ab,bac,cd->d", x, y, z), jnp.tensordot(y, x, axes=([0, 1], [1, 0]))


@workload("factorisation", lambda n: (positive_definite(n, 16), normal(n, 16)), lanes=256)
def cholesky_solve(a, b):
    factor = jsp.linalg.cho_factor(a)
    return jsp.linalg.cho_solve(factor, b), 2 * jnp.sum(jnp.log(jnp.diagonal(factor[0])))


@workload("factorisation", lambda n: (positive_definite(n, 16), normal(n, 16, 2)), lanes=256)
def general_solve(a, b):
    return jnp.linalg.solve(a, b), jnp.linalg.slogdet(a)[1]


@workload("factorisation", lambda n: (positive_definite(n, 16),), lanes=128)
def symmetric_eigenvalues(a):
    values, vectors = jnp.linalg.eigh(a)
    return values, jnp.abs(vectors)


@workload("factorisation", lambda n: (normal(n, 24, 12),), lanes=128)
def qr_and_singular_values(a):
    r = jnp.linalg.qr(a)[1]
    return jnp.abs(r), jnp.linalg.svd(a, compute_uv=False)


@workload(
    "factorisation",
    lambda n: (jnp.linalg.cholesky(positive_definite(1, 64)[0]), normal(n, 64)),
    lanes=512,
    in_axes=(None, 0),
)
def triangular_solve_with_shared_matrix(lower, b):
    return jsp.linalg.solve_triangular(lower, b, lower=True)


@workload("factorisation", lambda n: (positive_definite(n, 24), normal(n, 24)), lanes=256)
def triangular_solve_with_own_matrix(a, b):
    return lax.linalg.triangular_solve(
        jnp.tril(a), b[:, None], left_side=True, lower=True, transpose_a=True
    )
