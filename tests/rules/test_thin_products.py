"""Products of many lanes with a small matrix that they share, which are written as terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.rules.contraction import _LONG_PRODUCTS

from support.operations import operations
from support.oracle import same

LANES = _LONG_PRODUCTS // 2
DTYPE = jnp.zeros(()).dtype
ON_CPU = jax.default_backend() == "cpu"


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), DTYPE)


X, W = drawn(LANES, 3), drawn(3, 4, seed=1)


def count(fun, *args):
    """How many thin products the program of `fun` has."""
    return operations(fun, *args)["thin_product"]


FUNCTIONS = {
    "vector times matrix": lambda x, w: x @ w,
    "matrix times vector": lambda x, w: w.T @ x,
    "rows times matrix": lambda x, w: (x * jnp.ones((2, 1))) @ w,
    "matrix times columns": lambda x, w: w.T @ (x[:, None] * jnp.ones(2)),
    "three axes": lambda x, w: jnp.einsum("i,ijk->jk", x, w.reshape(3, 2, 2)),
    "two layers": lambda x, w: jnp.tanh(x @ w) @ w.T,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_are_those_of_jax(name):
    f = FUNCTIONS[name]
    scalar = lambda x, w: jnp.sum(f(x, w) ** 2) / 10
    assert (count(bx.vmap(f, in_axes=(0, None)), X, W) > 0) == ON_CPU
    in_ways = lambda vmap, x, w: {
        "plain": vmap(f, in_axes=(0, None))(x, w),
        "last": vmap(f, in_axes=(1, None))(x.T, w),
        "inside": vmap(jax.grad(scalar), in_axes=(0, None))(x, w),
        "outside": jax.grad(
            lambda x, w: vmap(scalar, in_axes=(0, None))(x, w).sum() / LANES, (0, 1)
        )(x, w),
        "forward": jax.jvp(vmap(f, in_axes=(0, None)), (x, w), (x * x, w * w))[1:],
        "twice": vmap(jax.hessian(scalar), in_axes=(0, None))(x, w)[:5],
    }
    got = jax.jit(lambda x, w: in_ways(bx.vmap, x, w))(X, W)
    expected = jax.jit(lambda x, w: in_ways(jax.vmap, x, w))(X, W)
    for way in expected:
        same(got[way], expected[way], where=f"{way}: ")
    same(bx.vmap(f, in_axes=(0, None))(X, W)[:3], jnp.stack([f(x, W) for x in X[:3]]))


def test_what_is_not_finite():
    x = X.at[0, 0].set(np.inf).at[1, 1].set(np.nan).at[2].set(0)
    w = W.at[1, 1].set(np.inf)
    f = FUNCTIONS["vector times matrix"]
    in_both = lambda vmap: jax.jit(vmap(f, in_axes=(0, None)))(x, w)
    same(in_both(bx.vmap), in_both(jax.vmap))


NOT_THIN = {
    "few lanes": (lambda x, w: x @ w, X[: LANES // 4], W),
    "many terms": (lambda x, w: x @ w, drawn(LANES, 6), drawn(6, 4)),
    "a matrix of each lane": (lambda x, w: (w * x[0]).T @ x, X, W),
    "integers": (lambda x, w: x @ w, X.astype(int), W.astype(int)),
    "another type of result": (
        lambda x, w: jnp.dot(x, w, preferred_element_type="float32"),
        X.astype(np.float16),
        W.astype(np.float16),
    ),
    "an algorithm": (
        lambda x, w: jnp.dot(x, w, precision="F32_F32_F32"),
        X.astype(np.float32),
        W.astype(np.float32),
    ),
    "in a loop": (lambda x, w: lax.fori_loop(0, 2, lambda _, x: jnp.tanh(w @ x), x), X, W[:, :3]),
}


@pytest.mark.parametrize("name", NOT_THIN)
def test_other_products_are_those_of_a_library(name):
    f, x, w = NOT_THIN[name]
    batched = bx.vmap(f, in_axes=(0, None))
    assert not count(batched, x, w)
    same(jax.jit(batched)(x, w)[:3], jnp.stack([f(row, w) for row in x[:3]]))


@pytest.mark.skipif(not ON_CPU, reason="of programs for CPUs")
def test_no_library_is_called():
    lowered = jax.jit(bx.vmap(FUNCTIONS["two layers"], in_axes=(0, None))).lower(X, W)
    assert " dot(" not in lowered.compile().as_text()
