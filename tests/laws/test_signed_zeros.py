"""Zeros of a lane have the sign that they have in that example alone, at any number of lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

# The largest of zeros of both signs is not in here: XLA's own has either sign, by the length.


def sums(v):
    rows, around = v.reshape(2, 4), jnp.outer(v[:4], v[4:])
    wide = jnp.tile(v, 5)[:36].reshape(6, 6)
    return [
        *(v.sum(), v[:1].sum(), v.mean(), v @ v[::-1], rows.sum(0), rows.sum(1), rows @ v[:4]),
        *(around @ around, around @ v[:4], wide @ wide, rows @ rows.T),
        *(jnp.cumsum(v), lax.cumsum(v, reverse=True), jnp.convolve(v, v[:3])),
        lax.reduce_window(v, 0.0, lax.add, (3,), (1,), "SAME"),
        *(jax.grad(lambda v: (v * v[::-1]).sum())(v), jax.ops.segment_sum(v, np.arange(8) // 2, 4)),
    ]


def others(v):
    return [
        *(v.prod(), jnp.cumprod(v), lax.cummax(v), lax.cummin(v), jnp.sign(v), jnp.abs(v), -v),
        *(jnp.arctan2(v, v[::-1]), jnp.copysign(1, v), jnp.maximum(v, v[::-1]), jnp.sort(v)),
        *(jnp.minimum(v, v[::-1]), jnp.clip(v, 0, 1), jax.nn.relu(v), jnp.linalg.norm(v)),
        lax.scan(lambda c, x: (c + x, c * x), v[0], v)[1],
    ]


def in_loops(v):
    """Of different numbers of steps, which may be one function for many lanes."""

    def loop(step):
        goes_on = lambda c: c[0] < jnp.abs(v[0]) + 2
        return lax.while_loop(goes_on, lambda c: (c[0] + 1, step(c[1])), (0.0, v))[1]

    return [
        loop(lambda v: v * 0 + v.sum()),
        loop(lambda v: v * v.prod()),
        loop(lambda v: v * v.reshape(2, 4).sum(0).repeat(2)),
        loop(lambda v: jnp.tile(jnp.outer(v[:4], v[4:]) @ v[:4], 2)),
    ]


def examples():
    rng = np.random.default_rng(0)
    zeros = lambda *shape: np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    numbers = rng.choice([-1, 1, 2], (36, 8))
    few = np.where(rng.random((36, 8)) < 0.7, zeros(36, 8), numbers)
    return np.stack([np.full(8, -0.0), np.zeros(8), *zeros(26, 8), *few]).astype("float32")


WAYS = {
    "few": (1, {}),
    "many": (64, {}),
    "chunks": (64, dict(batch_size=1000)),
    "compact": (64, dict(divergence="compact")),
    "mesh": (16, dict(mesh="all")),
}


@functools.cache
def alone(function):
    run = jax.jit(function)
    return [list(map(np.asarray, run(x))) for x in examples()]


@pytest.mark.parametrize("function", [sums, others, in_loops])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_commit(8)
def test_a_lane_has_the_zeros_of_the_example_alone(way, function):
    times, options = WAYS[way]
    got = jax.jit(bx.vmap(function, **options))(np.tile(examples(), (times, 1)))
    for i, expected in enumerate(alone(function)):
        for k, (x, y) in enumerate(zip(expected, got, strict=True)):
            y = np.asarray(y)[[i, i + (times - 1) * len(examples())]]
            np.testing.assert_array_equal(np.signbit(y), np.stack([np.signbit(x)] * 2), str(k))


@pytest.mark.parametrize("lanes", [2, 64, 65])
def test_sums_over_lanes_begin_with_zero(lanes):
    x = np.full(lanes, -0.0, "float32")
    for kind in ("sum", "mean"):
        for batch_size in (None, 1, 7):
            run = jax.jit(bx.vmap(lambda x: x, out_axes=bx.Reduce(kind), batch_size=batch_size))
            assert not np.signbit(run(x)), batch_size


def summing(v):
    """Sums that are 0 for some examples, whose derivatives are not."""
    rows, around = v.reshape(2, 4), jnp.outer(v[:4] + 1, v[4:])
    image, kernel = around[None, None], jnp.stack([v[:4], 1 - v[4:]]).reshape(2, 1, 2, 2)
    total = v.sum() + (rows @ (v[:4] - 1)).sum() + (around @ around).sum() + (rows.T @ rows).sum()
    return total + lax.conv(image, kernel, (1, 1), "SAME").sum()


@pytest.mark.parametrize("options", [{}, {"divergence": "compact"}], ids=str)
def test_sums_of_zero_have_derivatives(options):
    """A sum that is selected to be 0 has the derivative of its terms, not that of a constant."""
    x = np.concatenate([examples()[:2], np.eye(8, dtype="float32"), examples()]).astype("float32")
    both = lambda f: (
        lambda x: (
            f(jax.grad(summing))(x),
            jax.grad(lambda x: f(summing)(x).sum())(x),
            jax.jvp(f(summing), (x,), (jnp.cos(x),))[1],
            jax.jvp(jax.grad(lambda x: f(summing)(x).sum()), (x,), (jnp.cos(x),))[1],
        )
    )
    got = jax.jit(both(lambda f: bx.vmap(f, **options)))(x)
    expected = jax.jit(both(jax.vmap))(x)
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=str(k))
