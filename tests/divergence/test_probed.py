"""Nested loops that lanes leave, all at once, to run one after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence import policy
from batchax.divergence.probed import masked_until_unequal
from batchax.kernel.axis import Axis

from support.forced import ALONE
from support.kinds_of_axis import check_kind
from support.oracle import same

N, DRAWS = 7, 20
CLOSE = dict(rtol=1e-3, atol=1e-4)
RATES = np.random.default_rng(0).uniform(0.02, 0.9, N).astype("f")
STARTS = np.random.default_rng(1).normal(size=(N, 3)).astype("f")


def orbit(x, rate):
    """A scan of loops in loops and in branches, of which lanes take different counts of steps."""

    def inner(state):
        k, x = state
        x = lax.fori_loop(0, k % 3, lambda _, x: jnp.sin(x) + 0.1, x)
        return k + 1, jnp.tanh(x * 1.1 + rate)

    def draw(carry, t):
        x, count = carry
        steps = 1 + (7 * rate * (t % 4)).astype(jnp.int32)
        last, x = lax.while_loop(lambda c: c[0] < steps, inner, (0, x))
        far = lambda x: lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: 0.7 * x, x)
        x = lax.cond(t % 5 == 0, far, lambda x: x, x)
        return (x, count + last), jnp.sum(x)

    return lax.scan(draw, (x, 0), jnp.arange(DRAWS, dtype=jnp.float32))


def each(xs, rates):
    outs = [orbit(x, rate) for x, rate in zip(xs, rates, strict=True)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


def plans(fun, *args, **options):
    """How the loops of a function are run that hold others."""
    listed = bx.explain(fun, compile=False, **options)(*args)
    return [e.notes.get("divergence") for e in listed.equations if e.primitive in ("scan", "while")]


@pytest.fixture(params=["probed", "alone"])
def way(request, monkeypatch):
    """All lanes first; or each lane by itself from the start, as one tile."""
    few = 0 if request.param == "probed" else 1 << 30
    monkeypatch.setattr(policy, "_few_serial", lambda *_: few)
    return request.param


@pytest.mark.compiles(120)
def test_values_and_derivatives_are_those_of_the_loop(way):
    assert plans(orbit, STARTS, RATES, divergence=ALONE) == [way]
    ways = {
        "all at once": {"divergence": ALONE},
        "chunks": {"divergence": ALONE, "batch_size": 3},
        "devices": {"divergence": ALONE, "mesh": "all"},
    }
    make = functools.partial(bx.vmap, orbit)
    check_kind(make, each, STARTS, RATES, ways=ways, derivatives=False, tolerance=CLOSE)
    moved = jnp.cos(STARTS), jnp.sin(RATES)
    got = jax.jit(lambda *xs: jax.jvp(make(divergence=ALONE), xs, moved))(STARTS, RATES)
    same(got, jax.jvp(each, (STARTS, RATES), moved), CLOSE)


def test_a_while_whose_lanes_end_at_other_steps(way):
    def hailstone(n):
        halve = lambda n: lax.while_loop(lambda n: n % 2 == 0, lambda n: n // 2, n)
        return lax.while_loop(
            lambda c: c[0] != 1, lambda c: (halve(3 * c[0] + 1), c[1] + 1), (n, 0)
        )

    ns = np.array([1, 3, 7, 27, 5, 97], np.int32)
    assert plans(hailstone, ns, divergence=ALONE) == [way]
    steps = jax.jit(bx.vmap(hailstone, divergence=ALONE))(ns)[1]
    assert steps.tolist() == [0, 2, 5, 41, 1, 43]


def _loops(slowest):
    """A loop of nine steps, each with a loop of five, or in lane 0 of `slowest` times as many."""

    def body(lane, count, total):
        steps = jnp.where(lane == 0, 5 * slowest, 5)
        step = lambda c: (c[0] + 1, jnp.sin(c[1]))
        loop = lambda total: lax.while_loop(lambda c: c[0] < steps, step, (0, total))[1]
        return count + 1, lax.cond(count >= 0, jax.jit(loop), loop, total)

    types = jax.typeof(np.int32(0)), jax.typeof(np.int32(0)), jax.typeof(np.float32(0))
    test = jax.make_jaxpr(lambda count, total: count < 9)(*types[1:])
    return test, jax.make_jaxpr(body)(*types)


@pytest.mark.parametrize(
    ("slowest", "slowdown", "taken"), [(1, 1.0, 9), (1, 0.5, 4), (40, 2.5, 4), (40, 40.0, 9)]
)
def test_lanes_leave_once_one_after_another_takes_less(slowest, slowdown, taken):
    test, body = _loops(slowest)
    lanes, axis = np.arange(8, dtype=np.int32), Axis(8, None)
    carry = [np.zeros(8, np.int32), np.ones(8, np.float32)]
    run = lambda: masked_until_unequal(axis, test, body, (0,), 0, slowdown, [lanes], carry)
    counts, _ = jax.jit(run)()
    assert counts.tolist() == [taken] * 8
