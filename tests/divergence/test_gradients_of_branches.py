"""Derivatives of loops with branches that run for the lanes that take them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support import forced, oracle

LANES, STEPS = 6, 5
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(LANES, 3)).astype(np.float32)
TAKEN = RNG.integers(0, 3, (LANES, STEPS))
MATRIX = RNG.normal(size=(3, 3)).astype(np.float32)

in_blocks = functools.partial(bx.vmap, divergence=forced.FORCED)


def layer(x, matrix):
    return jnp.tanh(matrix @ x)


def seldom(x, taken, matrix):
    def step(x, taken):
        x = lax.cond(taken == 1, layer, lambda x, _: x * 0.9, x + 0.1, matrix)
        return x, x.sum()

    return lax.scan(step, x, taken)


def arms(x, taken, matrix):
    """Branches of other dtypes, that hand on, and that use others of their operands."""

    def step(carry, taken):
        n, x, seen = carry
        one = lambda n, x, seen: (n + 1, layer(x, matrix), x > 0, x[0])
        other = lambda n, x, seen: (n, jnp.sin(x) * n, seen, 2 * x.prod())
        n, x, seen, y = lax.switch(
            taken, [lambda n, x, seen: (n, x, seen, np.float32(1)), one, other], *carry
        )
        return (n, x, seen), (y, jnp.where(seen, x, 0))

    return lax.scan(step, (0, x, x > 9), taken, reverse=True)


def nested(x, taken, matrix):
    """In a loop inside, in calls, and once more at the end of a step."""

    @jax.jit
    def turn(x, taken):
        return lax.cond(taken == 2, jax.checkpoint(layer), lambda x, _: x, x, matrix)

    def step(x, taken):
        x, ys = lax.scan(lambda x, k: (turn(x * 1.1, k), x), x, jnp.arange(3) + taken)
        return lax.cond(taken > 0, lambda x: jnp.exp(-x), jnp.cos, x), ys.sum()

    return lax.scan(step, x, taken)


def bounded(x, taken, matrix):
    """Loops that end early: both are bounded."""

    def step(x, taken):
        x = lax.cond(taken == 1, layer, lambda x, _: x, x + 0.3, matrix)
        return x, x[0]

    x, ys = bx.scan(step, until=lambda x: x.sum() > 2)(x, taken)
    turn = lambda c: (c[0] + 1, lax.cond(taken[c[0]] == 1, jnp.sin, lambda x: x, c[1] * 1.5))
    return bx.bounded_while(lambda c: c[1].sum() < 2, turn, (0, x), STEPS)[1], ys


def with_own(x, taken, matrix):
    """Beside what all lanes share a branch has a matrix of the lane's, the same at each step."""
    own = jnp.outer(x, jnp.cos(x))

    def step(carry, entry):
        x, taken = carry, entry[0]
        far = lambda x, own, matrix: jnp.tanh(own @ x + matrix[1] * entry[1]) @ matrix
        x = lax.cond(taken == 1, far, lambda x, *_: x * 0.9, x + 0.1, own, matrix)
        return x, x.sum()

    return lax.scan(step, x, (taken, jnp.sin(taken.astype(x.dtype))))


PROGRAMS = [seldom, arms, nested, with_own, bounded]


def total(fun, *args):
    outs = jax.tree.leaves(fun(*args))
    return sum(jnp.sum(y**2) for y in outs if jnp.issubdtype(y.dtype, np.inexact))


def both_ways(derivative, programs, **options):
    """Ours, and that of ``jax.vmap``; of all programs as one."""

    def run(vmap):
        some = lambda *xs: [derivative(vmap, fun)(*xs) for fun in programs]
        return jax.jit(some)(XS, TAKEN, MATRIX)

    oracle.same(
        run(functools.partial(bx.vmap, **{"divergence": forced.FORCED, **options})), run(jax.vmap)
    )


def gradient(vmap, fun, which: Any = 0):
    """Of the loss over all lanes, with the loss."""
    loss = lambda x, taken, matrix: total(vmap(fun, (0, 0, None)), x, taken, matrix)
    return jax.value_and_grad(loss, which)


@pytest.mark.parametrize("fun", PROGRAMS)
@pytest.mark.each_commit(2, "seldom", "bounded")
def test_gradients(fun):
    both_ways(gradient, [fun])


@pytest.mark.parametrize("fun", PROGRAMS)
@pytest.mark.each_commit(1, "seldom")
def test_tangents_and_second_derivatives(fun):
    def tangents(vmap, fun):
        def run(x, taken, matrix):
            batched = lambda x, matrix: vmap(fun, (0, 0, None))(x, taken, matrix)
            floats = lambda outs: [y for y in jax.tree.leaves(outs) if y.dtype == x.dtype]
            some = lambda *xs: floats(batched(*xs))
            first = lambda x: gradient(vmap, fun, (0, 2))(x, taken, matrix)[1]
            back = jax.grad(lambda x: sum(jnp.mean(g) for g in first(x)) / 10)
            return jax.jvp(some, (x, matrix), (x + 1, matrix - 1)), back(x)

        return run

    both_ways(tangents, [fun])


def test_lanes_of_an_outer_vmap_and_of_devices():
    def two(vmap):
        return lambda x, taken, matrix: jax.vmap(vmap(seldom, (0, None, None)), (None, 0, None))(
            x, taken, matrix
        )

    loss = lambda vmap: jax.jit(jax.grad(lambda *xs: total(two(vmap), *xs)))
    oracle.same(loss(in_blocks)(XS, TAKEN, MATRIX), loss(jax.vmap)(XS, TAKEN, MATRIX))
    spread = functools.partial(bx.vmap, divergence=forced.FORCED, mesh="all")
    got = jax.jit(gradient(spread, seldom, (0, 2)))(XS, TAKEN, MATRIX)
    oracle.same(got, jax.jit(gradient(jax.vmap, seldom, (0, 2)))(XS, TAKEN, MATRIX))


def test_nan_in_a_branch_that_is_not_taken():
    def fun(x, taken, matrix):
        def step(x, taken):
            far = lambda x: jnp.sqrt(x - 1) + layer(x, matrix)
            x = lax.cond(x.min() > 1, far, lambda x: x * 1.5, jnp.abs(x) + 0.1)
            return x, x[0]

        return lax.scan(step, x, taken)

    x = XS.copy()
    x[2] = np.nan
    run = lambda vmap: jax.jit(gradient(vmap, fun))(x, TAKEN, MATRIX)
    ours, theirs = (
        run(in_blocks),
        [jax.grad(functools.partial(total, fun))(v, TAKEN[0], MATRIX) for v in x],
    )
    oracle.same(ours[1], np.stack(theirs))
    assert np.isfinite(np.delete(ours[1], 2, 0)).all()


def test_who_calls_the_host_in_a_branch():
    seen = []

    def fun(x, taken, matrix):
        def called(x):
            jax.debug.callback(lambda x: seen.append(float(x)), x[0])
            return layer(x, matrix)

        return lax.scan(lambda x, k: (lax.cond(k == 1, called, jnp.sin, x), k), x, taken)

    got = jax.jit(gradient(in_blocks, fun))(XS, TAKEN, MATRIX)
    jax.effects_barrier()
    assert len(seen) >= (TAKEN == 1).sum()
    oracle.same(got, jax.jit(gradient(jax.vmap, fun))(XS, TAKEN, MATRIX))


def test_rules_of_the_users():
    """A rule for cotangents has no tangents, which are staged beside the way back."""

    @jax.custom_vjp
    def odd(x):
        return x * 2

    odd.defvjp(lambda x: (odd(x), x), lambda x, ct: (3 * ct * x,))

    def fun(x, taken, matrix):
        far = lambda x: odd(layer(x, matrix))
        return lax.scan(lambda x, k: (lax.cond(k == 1, far, jnp.sin, x), k), x, taken)

    run = lambda vmap: jax.jit(gradient(vmap, fun, (0, 2)))(XS, TAKEN, MATRIX)
    oracle.same(run(in_blocks), run(jax.vmap))
