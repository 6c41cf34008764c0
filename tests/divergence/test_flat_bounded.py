"""Lanes of loops around bounded loops are each at a place of their own; derivatives are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence import flat, nest

from support import forced, oracle

LANES = 6
COUNTS = np.random.default_rng(0).integers(0, 9, (LANES, 4))  # of steps: some are none, or too many
POINTS = np.random.default_rng(1).normal(size=(LANES, 2))
MATRIX = np.random.default_rng(2).normal(size=(2, 2))


@pytest.fixture(autouse=True)
def cuts_cheap_loops(monkeypatch):
    """Programs of tests are small: they are cut whatever that costs."""
    monkeypatch.setattr(nest, "FEW_STEPS", float("inf"))


@pytest.fixture
def runs(monkeypatch):
    """How many loops ran flat."""
    loops, run = [], flat.FlatLoop.run
    monkeypatch.setattr(
        flat.FlatLoop, "run", lambda loop, *xs: (loops.append(1), run(loop, *xs))[1]
    )
    return loops


def until_counted(count, x, matrix):
    step = lambda c: (c[0] + 1, jnp.tanh(matrix @ c[1]) + 0.1)
    return bx.bounded_while(lambda c: c[0] < count, step, (0, x), max_steps=7)


def scan_of_bounded(x, counts, matrix):
    def step(x, count):
        n, x = until_counted(count, x, matrix)
        return x + n / 8, x.sum()

    return lax.scan(step, x, counts)


def scan_of_scans(x, counts, matrix):
    """Scans that end early, one after another; the second has steps of the first as entries."""

    def step(x, count):
        grow = lambda x, entry: (x * 1.3 + entry, jnp.sin(x) @ matrix)
        until = lambda x: jnp.abs(x).sum() > count
        y, ys = bx.scan(grow, until=until)(x, jnp.arange(5.0))
        z, zs = bx.scan(lambda z, y: (z / 2 + y, z), in_axes=1, out_axes=1, until=until)(x, ys.T)
        return jnp.tanh(y) + z, zs.sum(1)

    return lax.scan(step, x, counts, reverse=True)


def three_deep(x, counts, matrix):
    def step(x, count):
        middle = lambda c: (c[0] + 1, jnp.cos(until_counted(count - c[0], c[1], matrix)[1]))
        return bx.bounded_while(lambda c: c[0] < count % 3, middle, (0, x), 2)[1], x

    return lax.scan(step, x, counts)


def bounded_outermost(x, counts, matrix):
    """A loop of a step for each entry of `counts`, except for those of lanes that are done."""

    def step(c):
        at, x, ends = c
        n, y = until_counted(counts[at], x, matrix)
        return at + 1, y + n / 8, ends.at[at].set(y.sum())

    more = lambda c: c[1].sum() < 1.5
    return bx.bounded_while(more, step, (0, x, jnp.zeros(len(counts))), len(counts))[1:]


def scan_until_outermost(x, counts, matrix):
    def step(x, count):
        n, x = until_counted(count, x, matrix)
        return x + n / 8, x.sum()

    return bx.scan(step, until=lambda x: x.sum() > 1.5)(x, counts)


OUTERMOST = [bounded_outermost, scan_until_outermost]
PROGRAMS = [scan_of_bounded, scan_of_scans, three_deep, *OUTERMOST]


def total(fun, *args):
    return sum(jnp.sum(y**2) for y in jax.tree.leaves(fun(*args)))


def vmap(fun, divergence=forced.FORCED):
    return bx.vmap(fun, (0, 0, None), divergence=divergence)


@pytest.mark.parametrize("fun", PROGRAMS)
def test_values_and_gradients_of_each_lane(fun, runs):
    def both(*args):
        return fun(*args), jax.grad(lambda x, w: total(fun, x, args[1], w), (0, 1))(
            args[0], args[2]
        )

    args = jnp.asarray(POINTS, float), jnp.asarray(COUNTS), jnp.asarray(MATRIX, float)
    got = jax.jit(vmap(both))(*args)
    # Values, values with what the way back needs, and the way back.
    assert len(runs) == 3 or fun in OUTERMOST
    oracle.same(got, oracle.loop(jax.jit(both), args, (0, 0, None)))


@pytest.fixture
def args():
    return jnp.asarray(POINTS, float), jnp.asarray(COUNTS), jnp.asarray(MATRIX, float)
