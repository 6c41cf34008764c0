"""Loops of cheap steps, in which few neighbors at a time run in one function of the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence.policy import Tiles
from batchax.divergence.tiles import run_in_tiles
from batchax.execution.gathered_lanes import count_active
from batchax.jaxprs.bodies import with_inside

from support.diverging import COUNTS, POINTS, N, power
from support.forced import FORCED, KERNELS, LAST, ONE_FUNCTION
from support.oracle import same


def several(count, x, key, table):
    """Loops that fit, of values of many types."""

    def step(c):
        i, x, key, total, odd, small, empty = c
        key, own = jax.random.split(key)
        x = jnp.cumsum(x)[::-1] / 2 + table[i % 5]
        return i + 1, x, key, total + jax.random.uniform(own), ~odd, small + i.astype("int8"), empty

    start = 0, x, key, 0.0, count > 3, count.astype("int8"), x[:0]
    carried = lax.while_loop(lambda c: c[0] < count, step, start)

    def inner(c):
        n, total = c
        more = lax.while_loop(lambda k: k * k < n, lambda k: k + 1, 0)
        return n - 1, total + more

    return {
        "carried": (*carried[:2], *carried[3:]),
        "key": jax.random.key_data(carried[2]),
        "not a number": lax.while_loop(lambda c: c < 9 + x[0], lambda c: c + 1, 0.0),
        "inside": lax.while_loop(lambda c: c[0] > 0, inner, (count, 0)),
        "alone": lax.while_loop(lambda odd: odd, lambda odd: ~odd, count > 3),
        "scanned": lax.scan(lambda x, k: (power((count + k) % 5, x)[1], k), x, jnp.arange(3)),
        "lanes of its own": jax.vmap(power)(jnp.arange(3) + count, x),
    }


def functions(batched, *args):
    """How many functions the loops of a batched one are."""
    text = jax.jit(batched).lower(*args).as_text()
    return text.count("xla_cpu_small_call")


@pytest.mark.parametrize(
    "way", [FORCED, KERNELS, LAST, ONE_FUNCTION], ids=["window", "tiles", "last", "kernel"]
)
@pytest.mark.each_commit(2, "last", "kernel")
def test_loops_of_many_kinds(way):
    points = POINTS.at[4].set(jnp.nan).at[11, 0].set(jnp.nan)
    args = COUNTS, points, jax.random.split(jax.random.key(0), N)
    table = jnp.arange(5.0)
    whole = lambda way: bx.vmap(several, (0, 0, 0, None), divergence=way)
    if way is ONE_FUNCTION:
        assert functions(whole(way), *args, table) == 6
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("d",), axis_types=kind, devices=jax.devices()[:2])
    even = [jnp.concatenate([x, x[::-1]]) for x in args[:2]]
    lanes, spec = bx.vmap(power, divergence=way), jax.P("d")
    spread = jax.shard_map(lanes, mesh=mesh, in_specs=spec, out_specs=spec)
    chunked = bx.vmap(power, divergence=way, batch_size=20)

    @jax.jit
    def both(*args):
        ours = whole(way)(*args, table), chunked(*args[:2]), spread(*even)
        masked = jax.vmap(power)
        return ours, (whole("predicate")(*args, table), masked(*args[:2]), masked(*even))

    same(*both(*args), None)


@pytest.mark.parametrize("size", [96, 107])
def test_few_neighbours_are_left_behind(size):
    """Each takes its own steps, all of them fewer than if neighbors waited for each other."""

    def step(width, consts, active, carry, tally):
        (most, by), (n, x, computed) = consts, carry
        n, x = n + active.astype(np.int32), jnp.where(active[:, None], x + by, x)
        return active & (n < most[0]), [n, x, computed + 1], tally

    def run(left, most):
        plan = Tiles(16, 1.0, leave_at=left)
        begun = [jnp.zeros(size, np.int32), jnp.zeros((size, 2)), jnp.zeros(size, np.int32)]
        consts = [most[None], jnp.asarray([1.0, 2.0])]
        return run_in_tiles(plan, step, consts, [1, None], most > 0, begun)

    rng, run = np.random.default_rng(0), jax.jit(run, static_argnums=0)
    tailed = [(rng.pareto(0.7, size) * 4).clip(0, 400).astype(np.int32) for _ in range(20)]
    for left in (2, 0):
        for most in (*tailed, *(np.full(size, n, np.int32) for n in (0, 1, 50))):
            n, x, computed = run(left, most)
            np.testing.assert_array_equal(n, most)
            np.testing.assert_array_equal(x, most[:, None] * np.asarray([1.0, 2.0]))
            waiting = 16 * sum(most[i : i + 16].max() for i in range(0, size, 16))
            assert most.sum() <= computed.sum() <= waiting
            if left and most.min() < most.max():
                assert computed.sum() < 0.85 * waiting


@pytest.mark.parametrize("size", [1, 6, 128, 300])
def test_lanes_are_counted_in_one_function(size):
    """Also where they are no whole number of words."""
    mask = np.random.default_rng(size).random(size) < 0.7
    for of in (mask, np.ones(size, bool), np.zeros(size, bool)):
        assert count_active(jnp.asarray(of), one_function=True) == of.sum()
        assert count_active(jnp.asarray(of)) == of.sum()


def test_what_no_step_changes_is_not_put_back():
    """The bound of a ``fori_loop`` is carried: XLA copied all of it for each block of lanes."""
    once = lambda i, x: jnp.tanh(0.9 * x) + 0.1 * i

    def held(n, x):  # the same, in which it is none of what is carried
        step = lambda c: (c[0] + 1, once(*c))
        return lax.while_loop(lambda c: c[0] < n, step, (n * 0, x))[1]

    loop = lambda n, x: lax.fori_loop(0, n, once, x)
    for way in (ONE_FUNCTION, FORCED):

        def written(fun, way=way):
            staged = jax.make_jaxpr(bx.vmap(fun, divergence=way))(COUNTS, POINTS)
            names = [e.primitive.name for e in with_inside(staged.jaxpr.eqns)]
            return names.count("scatter"), names.count("dynamic_update_slice")

        assert written(loop) == written(held)
        ours = jax.jit(bx.vmap(loop, divergence=way))(COUNTS, POINTS)
        same(ours, jax.vmap(loop)(COUNTS, POINTS), None)


def test_bounded_loops_and_their_gradients():
    def settle(count, x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) + 0.1)
        return bx.bounded_while(lambda c: c[0] < count, step, (0, x), 100)[1]

    batched = bx.vmap(settle, divergence=ONE_FUNCTION)
    assert functions(batched, COUNTS, POINTS)
    same(jax.jit(batched)(COUNTS, POINTS), jax.vmap(settle)(COUNTS, POINTS), None)
    grad = lambda f: jax.jit(jax.grad(lambda x: f(COUNTS, x).sum()))(POINTS)
    same(grad(batched), grad(jax.vmap(settle)), None)


@pytest.mark.parametrize(
    ("what", "fits"),
    [
        (lambda x: x @ jnp.full((3, 3), 0.3), True),
        (lambda x: (jnp.tile(x, 6) @ jnp.full((18, 300), 0.05))[:3], False),
        (lambda x: x - jnp.tile(x, 2000).mean(), False),
        (lambda x: x.at[x.argmax()].set(0.0), True),  # of one lane: many update several places
        (lambda x: jnp.where(x > 0, x[x.argmax()], x), True),
        (lambda x: x - x.sum(), True),
    ],
)
def test_others_do_not_run_so(what, fits):
    loop = lambda n, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, what(c[1])), (0, x))
    batched = bx.vmap(loop, divergence=ONE_FUNCTION)
    assert bool(functions(batched, COUNTS, POINTS)) == fits
    same(jax.jit(batched)(COUNTS, POINTS), jax.vmap(loop)(COUNTS, POINTS), None)


def test_short_sums_are_written_out():
    square = lambda x: jnp.outer(x, x)

    def last(count, x):
        once = lambda x: (square(x)[:2].sum((0, 1)), square(x).max(1).min(), jnp.prod(x), x.sum())
        step = lambda c: (c[0] + 1, c[1] * 0.9, once(c[1]))
        return lax.while_loop(lambda c: c[0] < count, step, (0, x, once(x)))

    points = POINTS.at[4].set(jnp.nan).at[11, 0].set(jnp.inf)
    batched = bx.vmap(last, divergence=ONE_FUNCTION)
    assert functions(batched, COUNTS, points)
    same(jax.jit(batched)(COUNTS, points), jax.jit(jax.vmap(last))(COUNTS, points), None)
