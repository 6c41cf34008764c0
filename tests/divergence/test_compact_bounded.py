"""Bounded loops, and scans that end early, whose lanes leave when they are done."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support import oracle

N = 21
COUNTS = jnp.asarray([3, 0, 12, 7, 7, 1, 0, 12, 5, 5, 40, 2, 1, 1, 0, 9, 16, 4, 4, 4, 6])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), float)
MATRIX = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)) / 2, float)
SERIES = jnp.asarray(np.random.default_rng(2).normal(size=(N, 10, 3)), float)
NARROW = bx.Compact(width=4)


def settled(count, x, matrix):
    step = lambda c: (c[0] + 1, jnp.tanh(matrix @ c[1] + x))
    return bx.bounded_while(lambda c: c[0] < count, step, (0, x), max_steps=15)


def followed(series, x, limit):
    def step(carry, entry):
        carry = jnp.sin(carry) + entry
        return carry, carry * 2

    return bx.scan(step, until=lambda c: jnp.sum(c) > limit)(x, series)


PROGRAMS = {
    "bounded_while": (settled, (COUNTS, POINTS, MATRIX), (0, 0, None)),
    "scan": (followed, (SERIES, POINTS, jnp.linspace(-2, 3, N)), 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives(name):
    fun, args, axes = PROGRAMS[name]
    ours = bx.vmap(fun, axes, divergence=NARROW)
    masked = bx.vmap(fun, axes)
    in_axes = axes if isinstance(axes, tuple) else (axes,) * len(args)
    assert oracle.types(ours, args) == oracle.types(masked, args)
    theirs = {"loop": oracle.in_turn(fun, in_axes), "masked": masked}
    values = oracle.Claim({"ours": ours}, {}, theirs, args, oracle.alike())
    second = name == "bounded_while"
    derivatives = oracle.claims_of_derivatives(ours, masked, args, second)
    oracle.settle([values, *derivatives])


def test_steps_follow_the_lanes():
    steps = bx.LaneSteps()
    compact = bx.Compact(4, steps=steps)
    jax.jit(bx.vmap(settled, (0, 0, None), divergence=compact))(COUNTS, POINTS, MATRIX)
    assert steps.useful == int(jnp.minimum(COUNTS, 15).sum())
    assert steps.run < 15 * N


def test_a_gradient_keeps_residuals_of_one_window():
    def temporaries(divergence):
        run = bx.vmap(settled, (0, 0, None), divergence=divergence)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(run(counts, x, jnp.eye(32))[1] ** 2)))
        return gradient.lower(x).compile().memory_analysis().temp_size_in_bytes

    counts, x = jnp.arange(128) % 9, jnp.ones((128, 32))
    assert 2 * temporaries(bx.Compact(8)) < temporaries("predicate")


def test_nested_and_inside_a_mesh():
    counts, xs = COUNTS[:20].reshape(4, 5), POINTS[:20].reshape(4, 5, 3)
    inner = bx.vmap(settled, (0, 0, None), divergence=bx.Compact(2))
    nested = [jax.vmap(f, (0, 0, None)) for f in (inner, bx.vmap(settled, (0, 0, None)))]
    got, expected = jax.jit(lambda *args: [f(*args) for f in nested])(counts, xs, MATRIX)
    oracle.same(got, expected, None, "nested")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("d"), jax.P("d"), jax.P())
    sharded = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))
    expected = jax.jit(inner)(COUNTS[:20], POINTS[:20], MATRIX)
    oracle.same(jax.jit(sharded)(COUNTS[:20], POINTS[:20], MATRIX), expected, None, "shards")
    loss = lambda run, x: jnp.sum(run(COUNTS[:20], x, MATRIX)[1] ** 2)
    gradients = [
        jax.jit(jax.grad(functools.partial(loss, f)))(POINTS[:20]) for f in (sharded, inner)
    ]
    oracle.same(*gradients, None, "gradient in shards")


def test_collectives_are_refused():
    def f(n, x):
        step = lambda c: c + jax.lax.pmax(x, "lanes")
        return bx.bounded_while(lambda c: c < n, step, x, max_steps=5)

    with pytest.raises(bx.UnsupportedError, match=r"pmax.*bounded loop"):
        bx.vmap(f, axis_name="lanes", divergence=NARROW)(POINTS[:, 0], POINTS[:, 1])
