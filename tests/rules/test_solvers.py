"""Solvers with implicit derivatives, against the loop over examples."""

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import batchax as bx

from support.oracle import check, example, loop_function, quickly, same

LOOSE = dict(rtol=2e-3, atol=2e-3)
N = 3


def matrices(*lead, seed=0):
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
    a, b = of(matrices, in_axes[0]), of(vectors, in_axes[1])
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
    a = matrices()
    jaxpr = jax.make_jaxpr(bx.vmap(dense, (None, 0)))(a, vectors(2))
    factors = [
        v.aval.shape
        for eqn in all_equations(jaxpr.jaxpr)
        if eqn.primitive.name == "lu"
        for v in eqn.outvars
    ]
    assert factors
    assert factors[0] == (N, N)


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(sub, "jaxpr") or hasattr(sub, "eqns"):
                yield from all_equations(getattr(sub, "jaxpr", sub))


@pytest.mark.parametrize(
    ("solver", "in_axes"),
    [(cg, (0, 0)), (cg, (None, 0)), (cg, (0, None)), (gmres, (0, None)), (bicgstab, (0, 0))],
)
@pytest.mark.each_commit(3)
def test_iterative_solvers(solver, in_axes):
    a, b = of(matrices, in_axes[0]), of(vectors, in_axes[1])

    def fun(a, b):
        a = a @ a.T
        return solver(lambda x: a @ x, b, tol=1e-6)[0]

    slopes = solver is cg and in_axes == (0, 0)
    quickly(fun, a, b, in_axes=in_axes, derivatives=slopes, tolerance=LOOSE)


def root(a):
    def newton(f, x):
        return lax.fori_loop(0, 20, lambda _, x: x - f(x) / jax.grad(f)(x), x)

    return lax.custom_root(lambda x: x**3 + x - a, 1.0, newton, lambda g, y: y / g(1.0))


def test_custom_root():
    a = jnp.array([0.5, 2.0, 10.0])
    quickly(root, a, second=True, tolerance=LOOSE)
    same(bx.vmap(root)(a) ** 3 + bx.vmap(root)(a), a, LOOSE)


@pytest.mark.nightly
def test_minimize():
    def minimum(p):
        def rosenbrock(x):
            return (p - x[0]) ** 2 + 5 * (x[1] - x[0] ** 2) ** 2

        return jax.scipy.optimize.minimize(rosenbrock, jnp.zeros(2), method="BFGS").x

    p = jnp.array([0.5, 1.0, -1.0])
    got = jax.jit(bx.vmap(minimum))(p)
    np.testing.assert_allclose(got, jnp.stack([p, p**2], 1), atol=2e-2)
    same(got, jax.jit(jax.vmap(minimum))(p), LOOSE)


def test_gradient_of_a_matrix_shared_by_all_lanes():
    a, b = matrices(), vectors(2)

    def total(vmapped):
        return jax.jit(jax.grad(lambda a: (vmapped(a, b) ** 2).sum()))(a)

    same(total(bx.vmap(dense, (None, 0))), total(loop_function(dense, (None, 0), 0)), LOOSE)
