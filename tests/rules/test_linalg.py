"""Linear algebra and solvers, against the loop over examples."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import jax.scipy.optimize
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg as ll

import batchax as bx

from support.operations import bind, equations
from support.oracle import check, check_all, example, quickly, same, shares

LOOSE = dict(rtol=2e-3, atol=2e-3)
N = 3


def matrices(*lead, seed=0, dtype=float):
    """Well conditioned square matrices with well separated eigenvalues."""
    x = np.asarray(example((*lead, N, N), dtype, seed))
    return jnp.asarray(x * x.dtype.type(0.3) + np.diag(np.arange(1.0, N + 1)).astype(x.dtype))


positive = lambda x: x @ jnp.swapaxes(x, -1, -2).conj() + jnp.eye(N, dtype=x.dtype)
symmetric = lambda x: (x + jnp.swapaxes(x, -1, -2).conj()) / 2


def reflectors(x):
    return bind("geqrf")(x)


# Each of one matrix. Vectors that LAPACK leaves free up to a phase enter by their moduli.
DIFFERENTIABLE = {
    "cholesky": lambda x: ll.cholesky(positive(x)),
    "lu": lambda x: ll.lu(x)[0],
    "qr": lambda x: ll.qr(x, full_matrices=False),
    "eigh": lambda x: (lambda v, w: (abs(v), w))(*ll.eigh(symmetric(x))),
    "svd": lambda x: (lambda u, s, v: (abs(u), s, abs(v)))(*ll.svd(x)),
    "eigvals": lambda x: jnp.linalg.eigvals(x).real.sum(),
    "solve": lambda x: jnp.linalg.solve(x, jnp.arange(1.0, N + 1)),
    "inv": jnp.linalg.inv,
    "pinv": jnp.linalg.pinv,
    "cho_solve": lambda x: jsl.cho_solve(jsl.cho_factor(positive(x)), x),
    "solve_triangular": lambda x: jsl.solve_triangular(x, x.T, lower=True, trans=1),
}

VALUES_ONLY = {
    "lu_pivots": lambda x: ll.lu(x)[1:],
    "pivots_to_permutation": lambda x: ll.lu_pivots_to_permutation(ll.lu(x)[1], N + 1),
    "eig": lambda x: [abs(y) for y in bind_eig(x)],
    "hessenberg": lambda x: ll.hessenberg(x),
    "householder_product": lambda x: ll.householder_product(*reflectors(x)),
    "schur": lambda x: ll.schur(symmetric(x))[0],
    "tridiagonal": lambda x: ll.tridiagonal(symmetric(x))[1:3],
    "symmetric_product": lambda x: jnp.tril(ll.symmetric_product(x, symmetric(x))),
    "qr_pivoting": lambda x: ll.qr(x, pivoting=True),
    "sqrtm": lambda x: jsl.sqrtm(positive(x)).real,
}


def bind_eig(x):
    return ll.eig(x, compute_left_eigenvectors=True, compute_right_eigenvectors=True)


# These functions are compiled already, each as a program in a program: `jit` inside is the same.
COMPILED = dict(tolerance=LOOSE, jit=False, unrolled=False)


@pytest.mark.parametrize("names", shares(DIFFERENTIABLE, 3), ids=" ".join)
@pytest.mark.each_commit(2)
def test_of_a_matrix_with_derivatives(names):
    cases = {name: (jax.jit(DIFFERENTIABLE[name]), matrices(2), {}) for name in names}
    check_all(cases, **COMPILED)


@pytest.mark.parametrize("names", shares(VALUES_ONLY, 2), ids=" ".join)
def test_of_a_matrix(names):
    cases = {name: (jax.jit(VALUES_ONLY[name]), matrices(2), {}) for name in names}
    check_all(cases, derivatives=False, **COMPILED)


def test_complex():
    x, functions = matrices(2, dtype=jnp.complex64), {**DIFFERENTIABLE, **VALUES_ONLY}
    names = ["cholesky", "lu", "svd", "eig", "qr", "schur"]
    check_all({n: (functions[n], x, {}) for n in names}, derivatives=False, tolerance=LOOSE)


def matrices_of_solvers(*lead, seed=0):
    return 0.2 * example((*lead, N, N), seed=seed) + 2 * jnp.eye(N)


def of(make, axis, size=2):
    """A batch of what `make` gives, with the batch axis at `axis`, or one example."""
    return (
        make(*(() if axis is None else (size,)))
        if axis in (None, 0)
        else jnp.moveaxis(make(size), 0, axis)
    )


def vectors(*lead):
    return example((*lead, N), seed=7)


def dense(a, b):
    """A solve whose programs hold the matrix, its transpose and a factorisation."""
    lu = jax.scipy.linalg.lu_factor(a)
    return lax.custom_linear_solve(
        lambda x: a @ x,
        b,
        solve=lambda _, b: jax.scipy.linalg.lu_solve(lu, b),
        transpose_solve=lambda _, b: jax.scipy.linalg.lu_solve(lu, b, trans=1),
    )


@pytest.mark.parametrize("in_axes", [(0, 0), (None, 1), (2, None)])
def test_custom_linear_solve(in_axes):
    a, b = of(matrices_of_solvers, in_axes[0]), of(vectors, in_axes[1])
    check(
        jax.jit(dense),
        a,
        b,
        in_axes=in_axes,
        eager=False,
        second=in_axes == (0, 0),
        tolerance=LOOSE,
    )


def test_unbatched_leaf_of_the_right_hand_side_stays_unbatched():
    def fun(x, y):
        return lax.custom_linear_solve(
            lambda v: {"x": 2 * v["x"], "y": 3 * v["y"]},
            {"x": x, "y": y},
            solve=lambda _, v: {"x": v["x"] / 2, "y": v["y"] / 3},
        )

    x, y = jnp.arange(3.0), jnp.arange(2.0)
    same(bx.vmap(fun, (0, None), out_axes={"x": 0, "y": None})(x, y), {"x": x / 2, "y": y / 3})


def test_leaf_that_becomes_batched_through_another():
    def solve(_, v):
        return {"x": v["x"] / 2, "y": v["y"] - v["x"] / 2}

    def fun(x, y):
        return lax.custom_linear_solve(
            lambda v: {"x": 2 * v["x"], "y": v["x"] + v["y"]},
            {"x": x, "y": y},
            solve=solve,
            transpose_solve=lambda _, v: {"x": (v["x"] - v["y"]) / 2, "y": v["y"]},
        )

    check(fun, jnp.arange(1.0, 4.0), jnp.asarray(2.0, float), in_axes=(0, None))


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_auxiliary_results(in_axes):
    def fun(a, b):
        return lax.custom_linear_solve(
            lambda x: a * x,
            b,
            solve=lambda _, b: (b / a, {"of_a": a + 1, "constant": jnp.int32(3)}),
            transpose_solve=lambda _, b: (b / a, {"of_a": a, "constant": jnp.int32(4)}),
            has_aux=True,
        )

    a, b = (jnp.arange(1.0, 3.0) if ax == 0 else jnp.asarray(2.0, float) for ax in in_axes)
    check(fun, a, b, in_axes=in_axes)


def test_programs_keep_to_unbatched_matrix():
    """A matrix that all lanes share is factorised once."""
    a = matrices_of_solvers()
    every = equations(bx.vmap(dense, (None, 0)), a, vectors(2))
    factors = [v.aval.shape for eqn in every if eqn.primitive.name == "lu" for v in eqn.outvars]
    assert factors
    assert factors[0] == (N, N)


def root(a):
    newton = lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / jax.grad(f)(x), x)
    return lax.custom_root(lambda x: x**3 + x - a, 1.0, newton, lambda g, y: y / g(1.0))


def test_custom_root():
    a = jnp.array([0.5, 2.0, 10.0])
    quickly(root, a, second=True, tolerance=LOOSE)
    same(bx.vmap(root)(a) ** 3 + bx.vmap(root)(a), a, LOOSE)
