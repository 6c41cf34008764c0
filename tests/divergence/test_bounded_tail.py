"""Bounded loops whose lanes diverge without being asked, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support import oracle
from support.forced import FORCED

N = 16
MATRIX = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)) / 2, float)
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), float)
NARROW = bx.Compact(width=4)
SERIES = jnp.asarray(np.random.default_rng(2).normal(size=(N, 9, 3)), float)
COUNTS = {
    "others": [3, 0, 12, 7, 7, 1, 0, 12, 5, 5, 40, 2, 1, 1, 0, 9],
    "equal": [5] * N,
    "none": [0] * N,
    "one is left": [1] * (N - 1) + [40],
    "half is left": [0] * (N // 2) + [11] * (N // 2),
}


def settled(count, x, matrix, most=15):
    step = lambda c: (c[0] + 1, jnp.tanh(matrix @ c[1] + x))
    return bx.bounded_while(lambda c: c[0] < count, step, (0, x), max_steps=most)[1]


def followed(count, x, series):
    def step(carry, entry):
        n, y = carry
        y = jnp.sin(y) + entry
        return (n + 1, y), (y * 2, n > 2)

    (_, last), ys = bx.scan(step, until=lambda c: c[0] >= count)((0, x), series)
    return last, ys


PROGRAMS = {"bounded_while": (settled, MATRIX, None), "scan": (followed, SERIES, 0)}


def loss(out):
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out) if oracle.is_inexact(x))


def derivatives(name, divergence):
    """Values and first derivatives, from counts, points and what else there is."""
    fun, _, of_other = PROGRAMS[name]
    of = lambda f: bx.vmap(f, (0, 0, of_other), divergence=divergence)
    of_all, of_each = of(fun), of(jax.grad(lambda n, x, w: loss(fun(n, x, w)), (1, 2)))
    tangents = lambda n, x, w: jax.jvp(lambda x, w: fun(n, x, w), (x, w), (jnp.cos(x), jnp.cos(w)))
    pull = lambda n, x, w: jax.grad(lambda x, w: loss(of_all(n, x, w)), (0, 1))(x, w)
    ways = {"values": of_all, "vjp": pull, "vjp of each": of_each, "jvp of each": of(tangents)}
    return oracle.together(ways)


@pytest.mark.parametrize("way", [FORCED, NARROW], ids=["auto", "compact"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.each_commit(2)
def test_values_and_derivatives(name, way):
    compiled = oracle.at_once(*(derivatives(name, way) for way in (way, "predicate")))
    other = PROGRAMS[name][1]
    for label, counts in COUNTS.items():
        oracle.same(*compiled(jnp.asarray(counts), POINTS, other), None, f"{label}: ")
    # Lanes that are done hold what they like.
    counts, points = jnp.asarray(COUNTS["others"]), POINTS.at[1].set(jnp.nan).at[10].set(jnp.inf)
    oracle.same(*compiled(counts, points, other), None, "not finite: ")


@pytest.mark.parametrize(
    ("reads", "of", "sines"),
    [(False, jax.grad, 3), (True, jax.grad, 4), (False, jax.value_and_grad, 4)],
)
def test_what_only_a_derivative_needs_is_compiled_once_forth(reads, of, sines):
    """A loop forward, a window if a result or the predicate needs it, and two steps back."""

    def f(n, x):
        more = lambda c: (c[0] < n) & (c[1].sum() > 0.5) if reads else c[0] < n
        return bx.bounded_while(more, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x), 9)

    of_all = bx.vmap(f, divergence=FORCED)
    run = jax.jit(of(lambda n, x: of_all(n, x)[1].sum(), 1))
    text = run.lower(jnp.zeros(16, int), jnp.zeros((16, 4))).compile().as_text()
    assert text.count(" sine(") == sines
    assert text.count(" cosine(") == 2


def test_a_sweep_does_not_copy_checkpoints():
    args = jnp.zeros(64, int), jnp.zeros((64, 512))

    def held(divergence):
        gradient = jax.grad(lambda n, x: settled(n, x, jnp.eye(512)).sum(), 1)
        compiled = jax.jit(bx.vmap(gradient, divergence=divergence)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert held(FORCED) < 1.3 * held("predicate")


def test_a_gradient_keeps_residuals_of_one_window():
    def temporaries(divergence):
        run = bx.vmap(settled, (0, 0, None), divergence=divergence)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(run(counts, x, jnp.eye(32)) ** 2)))
        return gradient.lower(x).compile().memory_analysis().temp_size_in_bytes

    counts, x = jnp.arange(128) % 9, jnp.ones((128, 32))
    assert 2 * temporaries(bx.Compact(8)) < temporaries("predicate")


def test_collectives_are_refused():
    def f(n, x):
        step = lambda c: c + jax.lax.pmax(x, "lanes")
        return bx.bounded_while(lambda c: c < n, step, x, max_steps=5)

    with pytest.raises(bx.UnsupportedError, match=r"pmax.*bounded loop"):
        bx.vmap(f, axis_name="lanes", divergence=NARROW)(POINTS[:, 0], POINTS[:, 1])
