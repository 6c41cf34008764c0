"""Sums and extremes over few elements, which are written as terms on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.rules.reductions import _RESULTS

from support.operations import operations
from support.oracle import same

LANES = _RESULTS
DTYPE = jnp.zeros(()).dtype


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), DTYPE)


X = drawn(LANES, 3)
ODD = jnp.asarray([[np.nan, 1, 2], [np.inf, -np.inf, 0], [-0.0] * 3, [np.inf, 3, 4], [5, 5, 1]])


def short(fun, *args):
    """How many short reductions the program of `fun` has."""
    return operations(fun, *args)["short_reduction"]


FUNCTIONS = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "norm": jnp.linalg.norm,
    "softmax": jax.nn.softmax,
    "variance": jnp.var,
    "dot": lambda x: jnp.dot(x, x + 1),
    "distances": lambda x: jnp.sum((x[:, None] * jnp.ones(3) - x) ** 2, -1),
    "two axes": lambda x: jnp.sum(x[:, None] * x[:2], (0, 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_are_those_of_jax(name):
    f = FUNCTIONS[name]
    scalar = lambda x: jnp.sum(f(x) ** 2) / 10
    assert short(bx.vmap(f), X) > 0
    in_ways = lambda vmap: {
        "plain": vmap(f),
        "last": lambda x: vmap(f, in_axes=1)(x.T),
        "inside": vmap(jax.grad(scalar)),
        "outside": jax.grad(lambda x: vmap(scalar)(x).sum()),
        "forward": lambda x: jax.jvp(vmap(f), (x,), (x * x,))[1],
        "twice": lambda x: vmap(jax.hessian(scalar))(x)[:5],
    }
    run = lambda vmap: jax.jit(lambda x: {k: g(x) for k, g in in_ways(vmap).items()})
    got, expected = run(bx.vmap)(X), run(jax.vmap)(X)
    for way in expected:
        same(got[way], expected[way], where=f"{way}: ")
    same(bx.vmap(f)(X)[:3], jnp.stack([f(x) for x in X[:3]]))


@pytest.mark.parametrize("name", ["sum", "max", "min", "norm"])
def test_what_is_not_finite_and_zeros_with_a_sign(name):
    f, x = FUNCTIONS[name], jnp.tile(ODD.astype(DTYPE), (LANES // 5 + 1, 1))
    inverse = lambda x: 1 / f(x)  # of 0 and -0
    for g in (f, inverse, jax.grad(f)):
        same(jax.jit(bx.vmap(g))(x)[:5], jax.jit(jax.vmap(g))(ODD.astype(DTYPE)))


def test_in_every_way_to_batch():
    f = FUNCTIONS["norm"]
    expected = jnp.sqrt((X * X).sum(1))
    pairs = X.reshape(2, LANES // 2, 3)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    many = jnp.tile(X, (4, 1))
    ways = {
        "vmap of vmap": (lambda x: bx.vmap(bx.vmap(f))(x).ravel(), pairs, expected),
        "jax.vmap": (lambda x: jax.vmap(bx.vmap(f))(x)[1], jnp.stack([X, X]), expected),
        "chunks": (bx.vmap(f, batch_size=LANES // 2), many[: LANES * 2], jnp.tile(expected, 2)),
        "mesh": (bx.vmap(f, mesh="all"), many, jnp.tile(expected, 4)),
        "shard_map": (
            jax.shard_map(bx.vmap(f), mesh=mesh, in_specs=P("d"), out_specs=P("d")),
            many,
            jnp.tile(expected, 4),
        ),
        "in a loop": (
            lambda x: lax.fori_loop(0, 3, lambda _, x: x / bx.vmap(f)(x)[:, None], x)[:, 0],
            X,
            X[:, 0] / expected,
        ),
    }
    for way, (run, x, out) in ways.items():
        same(jax.jit(run)(x), out, where=f"{way}: ")


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_on_a_mesh_whose_axes_are_in_types(name):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    f = FUNCTIONS[name]
    expected = jnp.stack([f(x) for x in X[:3]])
    with jax.set_mesh(mesh):
        for spec in (P(), P("d")):
            x = jax.device_put(X, jax.NamedSharding(mesh, spec))
            assert short(bx.vmap(f), x) == (spec == P())
            same(np.asarray(jax.jit(bx.vmap(f))(x))[:3], expected)


def test_where_nothing_is_gained_it_is_the_reduction_of_jax():
    assert short(bx.vmap(jnp.sum), X[:-1]) == 0
    assert short(bx.vmap(jnp.sum), jnp.ones((LANES, 9))) == 0
    assert short(bx.vmap(jnp.sum), jnp.ones((LANES, 3), int)) == 0
    assert short(bx.vmap(jnp.sum), jnp.ones((LANES, 1))) == 0
    assert short(bx.vmap(jnp.outer), X[:, :2], X) == 0
    square = jnp.ones((LANES, 3, 3))
    same(bx.vmap(lambda x: x.T @ x)(square), jnp.full_like(square, 3))


def test_energies_of_pairs_are_sums_of_terms():
    def energy(x):
        square = jnp.sum((x[:, None] - x) ** 2, -1) + jnp.eye(12)
        return jnp.sum(1 / square**3)

    x = drawn(64, 12, 3)
    assert short(bx.vmap(energy), x) == 1
    assert short(bx.vmap(jax.grad(energy)), x) == 1
