"""Primitives of libraries whose batch is `jax.vmap` of their `impl`."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import lax

import batchax as bx

RNG = np.random.default_rng(0)
N, SIZE = 12, 5
_Q = np.linalg.qr(RNG.normal(size=(N, SIZE, SIZE)))[0]
_EIGENVALUES = 10 ** (RNG.uniform(0, 3, (N, 1)) * np.linspace(0, 1, SIZE))
A = jnp.asarray(np.einsum("nij,nj,nkj->nik", _Q, _EIGENVALUES, _Q), jnp.float32)
B = jnp.asarray(RNG.normal(size=(N, SIZE)), jnp.float32)

SOLVERS = {
    "CG": lx.CG(rtol=1e-4, atol=1e-4, max_steps=100),
    "GMRES": lx.GMRES(rtol=1e-4, atol=1e-4, max_steps=100),
    "QR": lx.QR(),
    "LU": lx.LU(),
    "Cholesky": lx.Cholesky(),
    "SVD": lx.SVD(),
}


def _solve(solver, throw=False):
    def solve(a, b):
        operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
        return lx.linear_solve(operator, b, SOLVERS[solver], throw=throw).value

    return solve


def _one_by_one(fun, *args):
    outs = [jax.jit(fun)(*xs) for xs in zip(*args, strict=True)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


def _close(got, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-3, 2e-3), got, expected)


def _primitives(fun, *args):
    every = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            every.add(eqn.primitive.name)
            # Of derivatives alone is what the library made.
            params = [x for name, x in eqn.params.items() if name != "of"]
            for inner in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(fun)(*args).jaxpr)
    return every


@pytest.mark.parametrize("divergence", ["auto", "compact", "predicate"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions(solver, divergence):
    solve = _solve(solver)
    expected = _one_by_one(solve, A, B)
    _close(bx.vmap(solve, divergence=divergence)(A, B), expected)
    _close(bx.vmap(solve, (None, 0), divergence=divergence)(A[0], B)[:1], expected[:1])


def test_is_batched_by_rules_of_batchax():
    assert "vprim" in _primitives(jax.vmap(_solve("CG")), A, B)
    assert "vprim" not in _primitives(bx.vmap(_solve("CG")), A, B)
    text = str(bx.explain(_solve("CG"))(A, B))
    assert "`linear_solve`" not in text


@pytest.mark.parametrize("solver", ["CG", "QR"])
def test_derivatives_are_those_of_the_primitive(solver):
    solve = _solve(solver)
    loss = lambda a, b: jnp.sum(solve(a, b) ** 2)
    gradient = jax.grad(loss, (0, 1))
    expected = _one_by_one(gradient, A, B)
    _close(bx.vmap(gradient)(A, B), expected)  # inside
    every = lambda a, b: jnp.sum(bx.vmap(loss)(a, b))
    _close(jax.grad(every, (0, 1))(A, B), expected)  # outside, in reverse through a loop
    ahead = lambda a, b: jax.jvp(solve, (a, b), (a, b))
    _close(bx.vmap(ahead)(A, B), _one_by_one(ahead, A, B))
    _close(jax.jvp(bx.vmap(solve), (A, B), (A, B)), _one_by_one(ahead, A, B))


@pytest.mark.parametrize("solver", ["CG", "LU"])
def test_is_transposed_as_the_primitive(solver):
    solve = _solve(solver)
    transposed = lambda vmap: jax.linear_transpose(lambda b: vmap(solve)(A, b), B)(B)[0]
    _close(transposed(bx.vmap), transposed(jax.vmap))
    _close(jax.jit(lambda: transposed(bx.vmap))(), transposed(jax.vmap))


def test_in_a_loop_and_a_branch():
    def fun(a, b):
        step = lambda x: _solve("QR")(a, x)
        x = lax.while_loop(lambda x: jnp.sum(x**2) > 1e-3, step, b)
        return lax.cond(b[0] > 0, _solve("CG"), lambda a, x: x, a, x)

    a = A + 2 * jnp.eye(SIZE)
    _close(bx.vmap(fun)(a, B), _one_by_one(fun, a, B))
    assert "vprim" not in _primitives(bx.vmap(fun), a, B)


def test_is_the_librarys_where_it_calls_the_host():
    solve = _solve("LU", throw=True)
    _close(bx.vmap(solve)(A, B), _one_by_one(solve, A, B))
    assert "vprim" in _primitives(bx.vmap(solve), A, B)


@pytest.mark.parametrize("solver", ["CG", "LU"])
def test_on_devices(solver):
    """Lineax compares types of arrays in `shard_map`, which have the mesh, with those of shapes."""
    solve = _solve(solver)
    _close(bx.vmap(solve, mesh="all")(A, B), _one_by_one(solve, A, B))
    gradient = jax.grad(lambda a, b: jnp.sum(solve(a, b) ** 2), (0, 1))
    _close(bx.vmap(gradient, mesh="all", batch_size=2)(A, B), _one_by_one(gradient, A, B))


@pytest.mark.parametrize(
    "how", [{}, {"batch_size": 5}, {"mesh": "all"}, {"mesh": "all", "batch_size": 2}]
)
def test_an_impl_with_a_collective_is_the_librarys(how):
    centered = lambda x: [x - lax.pmean(x, "i")]
    primitive = eqxi.create_vprim("centered", centered, lambda x: [x], None, None)
    run = bx.vmap(lambda x: jnp.sin(primitive.bind(x)[0]), axis_name="i", **how)
    np.testing.assert_allclose(run(B), jnp.sin(B - B.mean(0)), 1e-5, 1e-5)
    in_a_call = bx.vmap(jax.jit(lambda x: primitive.bind(2 * x)[0]), axis_name="i", **how)
    np.testing.assert_allclose(in_a_call(B), 2 * (B - B.mean(0)), 1e-5, 1e-5)


def test_composes_with_vmap_of_jax():
    solve = _solve("CG")
    expected = _one_by_one(solve, A, B).reshape(3, 4, SIZE)
    a, b = A.reshape(3, 4, SIZE, SIZE), B.reshape(3, 4, SIZE)
    _close(jax.vmap(bx.vmap(solve))(a, b), expected)
    _close(bx.vmap(jax.vmap(solve))(a, b), expected)
    _close(bx.vmap(bx.vmap(solve, batch_size=2), batch_size=2)(a, b), expected)


def test_a_users_rule_comes_first():
    impl = lambda x: [x * 2]
    primitive = eqxi.create_vprim("doubled", impl, lambda x: [x], None, None)
    run = lambda x: primitive.bind(x)[0]
    assert "doubled" not in _primitives(bx.vmap(run), B)
    bx.register_rule(primitive)(lambda axis, args, axes: ([args[0] * 3], [axes[0]]))
    np.testing.assert_allclose(bx.vmap(run)(B), B * 3)


@pytest.mark.parametrize("divergence", ["auto", "compact"])
def test_loops_whose_steps_stay_together_are_not_flattened(divergence):
    def fun(x):
        def stage(carry):
            index, y = carry
            index = eqxi.nonbatchable(index)
            y = lax.while_loop(lambda y: jnp.sum(y) < x, lambda y: y * 1.5 + jnp.sin(y), y)
            return index + 1, y * 0.1

        return lax.while_loop(lambda c: c[0] < 3, stage, (0, jnp.ones(40)))[1]

    x = jnp.linspace(50.0, 5e3, 300)
    got = bx.vmap(fun, divergence=divergence)(x)
    np.testing.assert_allclose(got, eqx.filter_vmap(fun)(x), 1e-4)
