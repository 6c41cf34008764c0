"""Lanes diverge where that pays, without being asked: `vmap(..., divergence="auto")`."""

import functools
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence.runner import Runner

from support.forced import FORCED, KERNELS, LAST
from support.oracle import same

N = 23
COUNTS = jnp.asarray([3, 0, 40, 7, 7, 1, 0, 12, 5, 5, 90, 2, 1, 1, 0, 9, 33, 4, 4, 4, 6, 2, 0])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), float)
ONE_DEVICE = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))


def power(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(0.9 * c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))


def loops(fun, *args, divergence, **options):
    """What is said of the loops of a function."""
    explained = bx.explain(fun, divergence=divergence, **options)(*args)
    return [e.notes for e in explained.equations if e.primitive == "while"]


def expensive(count, x, weights):
    step = lambda c: (c[0] + 1, jnp.tanh(weights @ c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]


DEAR = jnp.zeros(8192, int), jnp.zeros((8192, 64)), jnp.zeros((64, 64))


def test_lanes_leave_where_steps_are_expensive():
    (notes,) = loops(expensive, *DEAR, in_axes=(0, 0, None), divergence=ONE_DEVICE)
    assert notes["divergence"] == "compact"
    assert len(notes["widths"]) == 1
    assert notes["widths"][0] <= 1024


def solver(count, x):
    """Steps of many cheap operations, as those of a solver, that update a table."""

    def step(state):
        i, x, table = state
        k = [x * (1 + 0.1 * n) + 0.1 for n in range(4)]
        x = jnp.where(
            x > 3, x - 1, x + 0.1 * (k[0] + 2 * k[1] - k[2] * k[3] / (1 + k[3] ** 2) + x[::-1])
        )
        return i + 1, x, table.at[i % 5].set(x @ jnp.full(2, 0.5))

    x = jnp.stack([x.sum(), -x[0]])
    return lax.while_loop(lambda s: s[0] < count, step, (0, x, jnp.zeros(5, x.dtype)))


@pytest.mark.parametrize("fun", [power, solver])
def test_lanes_of_cheap_steps_run_sequentially(fun):
    points = POINTS.at[3].set(jnp.nan)
    (notes,) = loops(fun, COUNTS, points, divergence=ONE_DEVICE)
    assert (notes["divergence"], notes["widths"]) == ("alone", (1,))
    ours, theirs = bx.vmap(fun, divergence=ONE_DEVICE), jax.vmap(fun)
    same(jax.jit(ours)(COUNTS, points), jax.jit(theirs)(COUNTS, points), None)
    tangents = lambda f: jax.jvp(lambda x: f(COUNTS, x)[1:], (points,), (points + 1,))
    same(jax.jit(tangents, static_argnums=0)(ours), tangents(theirs), None)
    nested = lambda f: jax.jit(jax.vmap(f, (None, 0)))(COUNTS, jnp.stack([points, points + 1]))
    same(nested(ours), nested(theirs), None)


def test_operations_that_fit_no_kernel_stay_in_loops():
    """XLA has no function for it in a kernel: "Failed to materialize symbols"."""

    def largest(count, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] + lax.approx_max_k(c[1], 2)[0].mean()))
        return lax.while_loop(lambda c: c[0] < count, step, (0, x))

    for way in (ONE_DEVICE, LAST, FORCED):
        ours = jax.jit(bx.vmap(largest, divergence=way))(COUNTS[:5], POINTS[:5])
        same(ours, jax.jit(jax.vmap(largest))(COUNTS[:5], POINTS[:5]), None)


def test_the_last_lanes_are_alone_where_steps_are_many_operations():
    def step(x, operations):
        for k in range(operations):
            x = jnp.concatenate([x, x])[: 5 + k % 17] / 2
            x = jnp.concatenate([x[1:], lax.cumlogsumexp(x)[-1:]])  # in no kernel
        return jnp.concatenate([x, x])[:4]

    def fun(count, x, operations):
        body = lambda c: (c[0] + 1, step(c[1], operations))
        return lax.while_loop(lambda c: c[0] < count, body, (0, x))[1]

    args = jnp.zeros(2048, int), jnp.zeros((2048, 4))
    for operations, apart in ((20, True), (1, False)):
        many = functools.partial(fun, operations=operations)
        (notes,) = loops(many, *args, divergence=ONE_DEVICE)
        assert [w == 2048 for w in notes.get("widths", ())] == [True, False] * apart


def bounded(count, x, weights):
    step = lambda c: (c[0] + 1, jnp.tanh(weights @ c[1]))
    return bx.bounded_while(lambda c: c[0] < count, step, (0, x), max_steps=100)[1]


def test_the_last_lanes_of_a_bounded_loop_are_alone():
    def said(lanes, size):
        args = jnp.zeros(lanes, int), jnp.zeros((lanes, size)), jnp.zeros((size, size))
        explained = bx.explain(bounded, (0, 0, None), divergence=ONE_DEVICE)(*args)
        return next(e.notes for e in explained.equations if e.primitive == "bounded loop")

    first, last = said(1024, 64)["widths"]
    assert (first, last <= 64) == (1024, True)
    assert said(64, 64)["divergence"] == "masked"  # a step takes no longer than to ask who is left
    assert said(1024, 4)["divergence"] != "compact"


def several(count, x, key, shared):
    """Loops of many kinds, whose lanes take `count` steps or so."""

    def step(c):
        i, x, key, total, odd, small, empty = c
        key, own = jax.random.split(key)
        x = jnp.tanh(shared @ x) + lax.axis_index("lane")
        return i + 1, x, key, total + jax.random.uniform(own), ~odd, small + i.astype("int8"), empty

    start = 0, x, key, 0.0, count > 3, count.astype("int8"), x[:0]
    carried = lax.while_loop(lambda c: c[0] < count, step, start)
    cooled = lambda c: (c[0] + 1, c[1] / (2 + lax.axis_index("lane")))
    cool = lambda n, x: lax.while_loop(lambda c: c[0] < n, cooled, (0, x))[1]
    return {
        "carried": (*carried[:2], *carried[3:]),
        "not a number": lax.while_loop(lambda c: c[0] < 9 + x[0], cooled, (0.0, x)),
        "lanes of its own": jax.vmap(cool)(jnp.arange(3) + count, x),
        "scanned": lax.scan(lambda x, k: (cool((count + k) % 5, x), k), x, jnp.arange(3)),
    }


@pytest.mark.parametrize("way", [FORCED, KERNELS, LAST], ids=["window", "tiles", "last"])
@pytest.mark.each_commit(2, "tiles", "last")
def test_loops_of_many_kinds(way):
    points = POINTS.at[4].set(jnp.nan).at[11, 0].set(jnp.nan)
    args = COUNTS, points, jax.random.split(jax.random.key(0), N)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), float)
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("d",), axis_types=kind, devices=jax.devices()[:2])
    spread = jax.shard_map(
        bx.vmap(power, divergence=way), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")
    )
    chunked = bx.vmap(power, divergence=way, batch_size=9)
    even = COUNTS[1:], points[1:]

    def whole(divergence, *args):
        batched = bx.vmap(several, (0, 0, 0, None), axis_name="lane", divergence=divergence)
        return batched(*args, weights)

    @jax.jit
    def both(*args):
        ours = whole(way, *args), chunked(*args[:2]), spread(*even)
        return ours, (whole("predicate", *args), jax.vmap(power)(*args[:2]), jax.vmap(power)(*even))

    same(*both(*args), None)


def test_lanes_that_may_be_spread_stay():
    assert jax.device_count() > 1
    spread = jax.make_jaxpr(bx.vmap(expensive, (0, 0, None), divergence="auto"))(*DEAR)
    assert "divergent_loop" not in str(spread)
    alone = jax.make_jaxpr(bx.vmap(expensive, (0, 0, None), divergence=ONE_DEVICE))(*DEAR)
    assert "divergent_loop" in str(alone)


def test_lanes_part_ways_on_each_device_of_a_mesh():
    """Not if lanes of a device may be spread over axes that the mesh has besides."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    specs = {"in_specs": (jax.P("a"), jax.P("a"), jax.P()), "out_specs": jax.P("a")}
    batched = bx.vmap(expensive, (0, 0, None))
    for names, apart in (({"a", "b"}, True), ({"a"}, False)):
        sharded = jax.shard_map(batched, mesh=mesh, axis_names=names, **specs)
        assert ("divergent_loop" in str(jax.make_jaxpr(sharded)(*DEAR))) == apart


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
    expensive = [lambda x: products(20, x, weights), lambda x: products(20, -x, weights)]
    return lax.switch(index, [jnp.negative, *expensive], x)


def test_few_lanes_take_branches_apart_if_each_had_a_copy_of_what_they_share():
    """Under ``jax.vmap``, that is, which takes longer than all of them in chunks."""
    xs, one = jnp.zeros((256, 64)), jnp.zeros((64, 64))
    few = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, min_branch_work=inf))
    for weights, at, way in ((one, None, "grouped"), (jnp.zeros((256, 64, 64)), 0, "masked")):
        explained = bx.explain(chosen, (0, 0, at), divergence=few)(jnp.arange(256) % 3, xs, weights)
        (notes,) = [e.notes for e in explained.equations if e.primitive == "cond"]
        assert notes["divergence"] == way


def test_derivatives_run_for_all_lanes_if_a_cache_holds_what_they_keep():
    def f(taken, x, w):
        many = lambda x, w: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(w @ x), x)
        return lax.cond(taken, many, lambda x, w: x, x, w)

    def texts(lanes):
        arrays = [jax.ShapeDtypeStruct((lanes, *s), jnp.float32) for s in ((64,), (64, 64))]
        args = jax.ShapeDtypeStruct((lanes,), bool), *arrays
        few = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, min_branch_work=inf))
        batched = bx.vmap(f, divergence=few)
        gradient = jax.grad(lambda t, x, w: batched(t, x, w).sum(), 1)
        return [str(jax.make_jaxpr(g)(*args)) for g in (batched, gradient)]

    for lanes, apart in ((64, [True, False]), (2048, [True, True])):
        assert ["chunk_loop" in text for text in texts(lanes)] == apart


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
    total = lambda divergence, x: bx.vmap(f, divergence=divergence)(x).sum()
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
        inner = bx.vmap(expensive, (0, 0, None), divergence=divergence)
        outer = jax.vmap(inner, (None, 0, 0))
        outs.append(jax.jit(outer)(COUNTS, xs, weights))
        text = str(jax.make_jaxpr(outer)(COUNTS, xs, weights))
        assert "divergent_loop" not in text
    same(*outs, None)


def test_a_loop_that_is_masked_may_ask_for_the_index_of_a_lane_around_it():
    def fun(x):
        step = lambda c: (c[0] + 1, c[1] / 2 + lax.axis_index("outer") / 9)
        return lax.while_loop(lambda c: (c[0] < 9) & (c[1] > 1), step, (0, x))

    both = lambda vmap: jax.jit(vmap(vmap(fun), axis_name="outer"))
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
