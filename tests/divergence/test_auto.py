"""Lanes part ways where that pays, without being asked: `vmap(..., divergence="auto")`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence.auto import Auto

from support.forced import FORCED
from support.oracle import same

N = 23
COUNTS = jnp.asarray([3, 0, 40, 7, 7, 1, 0, 12, 5, 5, 90, 2, 1, 1, 0, 9, 33, 4, 4, 4, 6, 2, 0])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), float)
ONE_DEVICE = Auto(limits=Auto().limits._replace(devices=1_000))


def power(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(0.9 * c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))


def loops(fun, *args, divergence, **options):
    """What is said of the loops of a function."""
    explained = bx.explain(fun, divergence=divergence, **options)(*args)
    return [e.notes for e in explained.equations if e.primitive == "while"]


def dear(count, x, weights):
    step = lambda c: (c[0] + 1, jnp.tanh(weights @ c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]


DEAR = jnp.zeros(8192, int), jnp.zeros((8192, 64)), jnp.zeros((64, 64))


def test_lanes_leave_where_steps_are_dear():
    (notes,) = loops(dear, *DEAR, in_axes=(0, 0, None), divergence=ONE_DEVICE)
    assert notes["divergence"] == "compact"
    assert len(notes["widths"]) == 1
    assert notes["widths"][0] <= 1024


def test_on_few_cores_a_window_is_narrower_where_its_steps_are_products():
    def elementwise(count, x, _):
        fifty = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(50), x)
        step = lambda c: (c[0] + 1, fifty(c[1]))
        return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]

    args = jnp.zeros(65536, int), jnp.zeros((65536, 64)), jnp.zeros((64, 64))
    limits = ONE_DEVICE.limits
    for fun, cores, share in ((dear, 2, 32), (dear, 8, 16), (elementwise, 2, 16)):
        way = Auto(limits=limits._replace(cores=cores))
        (notes,) = loops(fun, *args, in_axes=(0, 0, None), divergence=way)
        assert notes["widths"] == (65536 // share,)


def test_cheap_loops_are_as_they_were():
    (notes,) = loops(power, COUNTS, POINTS, divergence=ONE_DEVICE)
    assert notes["divergence"] == "masked"
    assert notes["why"]
    programs = [
        jax.make_jaxpr(bx.vmap(power, divergence=d))(COUNTS, POINTS)
        for d in (ONE_DEVICE, "predicate")
    ]
    assert str(programs[0]) == str(programs[1])


def test_values_and_tangents():
    ways = [bx.vmap(power, divergence=d) for d in (FORCED, "predicate")]
    outs = [jax.jit(f)(COUNTS, POINTS) for f in ways]
    same(*outs, None)
    dots = [jax.jvp(lambda x, f=f: f(COUNTS, x)[1], (POINTS,), (POINTS,))[1] for f in ways]
    same(*dots, None)


def test_lanes_that_may_be_spread_stay():
    assert jax.device_count() > 1
    spread = jax.make_jaxpr(bx.vmap(dear, (0, 0, None), divergence="auto"))(*DEAR)
    assert "parting_loop" not in str(spread)
    alone = jax.make_jaxpr(bx.vmap(dear, (0, 0, None), divergence=ONE_DEVICE))(*DEAR)
    assert "parting_loop" in str(alone)


def test_lanes_part_ways_on_each_device_of_a_mesh():
    """Not if lanes of a device may be spread over axes that the mesh has besides."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    specs = {"in_specs": (jax.P("a"), jax.P("a"), jax.P()), "out_specs": jax.P("a")}
    batched = bx.vmap(dear, (0, 0, None))
    for names, apart in (({"a", "b"}, True), ({"a"}, False)):
        sharded = jax.shard_map(batched, mesh=mesh, axis_names=names, **specs)
        assert ("parting_loop" in str(jax.make_jaxpr(sharded)(*DEAR))) == apart


def test_collectives_and_calls_of_the_host_stay():
    def meet(count, x):
        step = lambda c: (c[0] + 1, c[1] + lax.pmean(c[1], "i"))
        return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]

    seen = []

    def told(count, x):
        def step(c):
            jax.debug.callback(lambda i: seen.append(int(i)), c[0])
            return c[0] + 1, c[1] / 2

        return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]

    outs = [
        bx.vmap(meet, axis_name="i", divergence=d)(COUNTS, POINTS) for d in (FORCED, "predicate")
    ]
    same(*outs, None)
    bx.vmap(told, divergence=FORCED)(COUNTS, POINTS)
    jax.effects_barrier()
    assert len(seen) == int(COUNTS.sum())


def products(times, x, weights):
    for _ in range(times):
        x = jnp.tanh(weights @ x)
    return x


def chosen(index, x, weights):
    dear = [lambda x: products(20, x, weights), lambda x: products(20, -x, weights)]
    return lax.switch(index, [jnp.negative, *dear], x)


def branches(fun, *args):
    explained = bx.explain(fun, (0, 0, None), divergence=ONE_DEVICE)(*args)
    return [e.notes for e in explained.equations if e.primitive == "cond"]


def test_dear_branches_run_for_the_lanes_that_take_them():
    args = jnp.arange(8192) % 3, jnp.zeros((8192, 64)), jnp.zeros((64, 64))
    (notes,) = branches(chosen, *args)
    assert notes["apart"] == [1, 2]


def test_branches_of_elementwise_functions_stay():
    """On a processor they are one loop with the selection, which skips what is not selected."""

    def f(index, x, _):
        fifty = lambda g, x: functools.reduce(lambda y, _: g(y), range(50), x)
        many = [functools.partial(fifty, g) for g in (jnp.sin, jnp.tanh)]
        return lax.switch(index, many, x)

    (notes,) = branches(f, jnp.arange(8192) % 2, jnp.zeros((8192, 64)), 0.0)
    assert notes["divergence"] == "masked"


@pytest.mark.compiles(60)
def test_rules_of_forward_mode_give_results_without_tangents():
    @jax.custom_jvp
    def f(x):
        return lax.cond(x > 0, jnp.sin, lambda x: jnp.sin(2 * x), x)

    @f.defjvp
    def rule(primals, tangents):
        out, dot = jax.jvp(f.fun, primals, tangents)
        return out, 2 * dot

    x = jnp.linspace(-1.0, 1.0, 5)

    def total(divergence, x):
        return bx.vmap(f, divergence=divergence)(x).sum()

    grads = [jax.grad(functools.partial(total, d))(x) for d in (FORCED, "predicate")]
    same(*grads, None)
    hessians = [jax.hessian(functools.partial(total, d))(x) for d in (FORCED, "predicate")]
    same(*hessians, None)


def test_lanes_of_two_axes_that_cannot_be_one_set_are_masked():
    """Where that would copy a matrix for each lane of the inner axis."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 16)), float) / 4
    xs = jnp.asarray(np.random.default_rng(2).normal(size=(2, N, 16)), float)
    outs = []
    for divergence in (FORCED, "predicate"):
        inner = bx.vmap(dear, (0, 0, None), divergence=divergence)
        outer = jax.vmap(inner, (None, 0, 0))
        outs.append(jax.jit(outer)(COUNTS, xs, weights))
        text = str(jax.make_jaxpr(outer)(COUNTS, xs, weights))
        assert "parting_loop" not in text
    same(*outs, None)


def test_a_loop_that_is_masked_may_ask_for_the_index_of_a_lane_around_it():
    def fun(x):
        step = lambda c: (c[0] + 1, c[1] / 2 + lax.axis_index("outer") / 9)
        return lax.while_loop(lambda c: (c[0] < 9) & (c[1] > 1), step, (0, x))

    def both(vmap):
        return jax.jit(vmap(vmap(fun), axis_name="outer"))

    xs = jnp.asarray(np.random.default_rng(0).uniform(0, 99, size=(3, N)), float)
    same(both(functools.partial(bx.vmap, divergence=FORCED))(xs), both(jax.vmap)(xs), None)


def test_branches_that_lanes_take_apart_hold_no_tracer_of_the_loop_around_them():
    def fun(n, x, y):
        def step(s):
            of_one = lambda x, y: jnp.sin(x)
            return s[0] + 1, lax.cond(s[0] % 2 == 0, of_one, jnp.multiply, s[1], s[2]), s[2] + 1

        return lax.while_loop(lambda s: s[0] < n, step, (0, x, y))

    with jax.checking_leaks():
        jax.make_jaxpr(bx.vmap(fun, divergence=FORCED))(np.arange(3), np.ones(3), np.ones(3))


def test_branches_that_lanes_take_apart_may_read_numbers_and_what_all_lanes_share():
    table = np.arange(3, dtype=np.float32)

    def fun(n, x):
        yes, no = lambda x, k, c: jnp.sin(x) * k + c.sum(), lambda x, k, c: jnp.log(x) + k
        return lax.cond(n % 2 == 0, yes, no, x, 2.0, table)

    def both(vmap):
        grad = jax.grad(lambda x: vmap(fun)(ns, x).sum())
        return jax.jit(lambda x: (vmap(fun)(ns, x), grad(x)))

    ns, xs = np.arange(5), np.linspace(1, 2, 5, dtype=np.float32)
    same(both(functools.partial(bx.vmap, divergence=FORCED))(xs), both(jax.vmap)(xs), None)
