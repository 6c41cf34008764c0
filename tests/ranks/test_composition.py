"""Functions of declared ranks under transformations, and options of the batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import at_once, example, same, together


def plain(w, x):
    return jnp.tanh(w @ x).sum()


def reference(w, x):
    """`plain` with a batch shape for each argument, by einsum."""
    return jnp.tanh(jnp.einsum("...ij,...j->...i", w, x)).sum(-1)


W, X = example((4, 1, 2, 3)), example((5, 3), seed=1)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100, "auto"])
@pytest.mark.compiles(60)
@pytest.mark.each_commit(4)
def test_at_most_so_many_lanes_at_a_time(batch_size):
    f = bx.auto_vmap(2, 1, batch_size=batch_size)(plain)
    same(f(W, X), reference(W, X))
    same(f(W[:, 0], X[:4]), reference(W[:, 0], X[:4]))
    same(f(W[0, 0], X), reference(W[0, 0], X))
    total = lambda g: lambda w, x: jnp.sum(jnp.cos(g(w, x)))
    same(jax.grad(total(f), (0, 1))(W, X), jax.grad(total(reference), (0, 1))(W, X))


@pytest.mark.parametrize(
    ("shapes", "batch_size", "most"),
    [
        (((6,), (6,)), 4, 4),
        (((2, 3), (2, 3)), 4, 4),
        (((4, 1), (5,)), 10, 10),
        (((4, 1), (5,)), 3, 3),
        (((4, 1), (1, 5)), 100, 20),
    ],
)
def test_lanes_are_counted_over_all_dimensions(shapes, batch_size, most):
    f = bx.auto_vmap(1, 1, batch_size=batch_size)(lambda x, y: jnp.outer(x, y).sum())
    x, y = (jnp.ones((*s, 3)) for s in shapes)
    text = jax.jit(f).lower(x, y).as_text()
    shapes_of_sums = re.findall(r"stablehlo\.reduce\([^\n]*->\s*tensor<([^>]*)xf(?:32|64)>", text)
    lanes = [np.prod(list(map(int, shape.split("x")))) for shape in shapes_of_sums]
    assert max(lanes) == most
    same(f(x, y), jnp.full(np.broadcast_shapes(*shapes), 9.0))


def test_under_other_transformations():
    f = bx.auto_vmap(2, 1)(plain)
    twice = lambda w: jnp.stack([w, 2 * w])

    def transformed(g, vmap):
        def summed(w, x):
            step = lambda c, x: (c + g(w, x), None)
            return jax.lax.scan(step, jnp.zeros((4, 1)), x[:, None])[0]

        ways = {
            "jit": g,
            "jax.vmap": lambda w, x: jax.vmap(g, (0, None))(twice(w), x),
            "vmap": lambda w, x: vmap(g, (0, None))(twice(w), x),
            "jacobian": jax.jacfwd(g, 1),
            "hessian": lambda w, x: jax.hessian(lambda x: g(w[:1], x).sum())(x[:2]),
            "checkpoint": jax.checkpoint(g),
            "scan": summed,
        }
        return together(ways)

    got, want = at_once(transformed(f, bx.vmap), transformed(reference, jax.vmap))(W, X)
    same(got, want)
    same(want["scan"], want["jit"].sum(1, keepdims=True))


def test_sharded_batches():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(X[:4], jax.NamedSharding(mesh, jax.P("data")))
    f = bx.auto_vmap(2, 1)(plain)
    same(jax.jit(f)(W, placed), reference(W, X[:4]))
    explicit = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        rows = jax.device_put(jnp.ones((4, 5, 3)), jax.P("data"))
        got = jax.jit(bx.auto_vmap(1)(lambda x: jnp.sin(x).sum()))(rows)
    same(np.asarray(got), np.asarray(jnp.sin(jnp.ones((4, 5, 3))).sum(-1)))
