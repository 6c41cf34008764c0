"""Lanes diverge where that pays, without being asked: `vmap(..., divergence="auto")`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.analysis.thresholds import TABLE
from batchax.divergence.policy import Alone, FewAlone, Loop, Masked, Request, decide
from batchax.divergence.runner import Runner

from support.diverging import COUNTS, POINTS, N, power
from support.forced import FORCED
from support.oracle import same

ONE_DEVICE = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))


def loops(fun, *args, divergence, **options):
    """What is said of the loops of a function."""
    explained = bx.explain(fun, divergence=divergence, **options)(*args)
    return [e.notes for e in explained.equations if e.primitive == "while"]


def expensive(count, x, weights):
    step = lambda c: (c[0] + 1, jnp.tanh(weights @ c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]


DEAR = jnp.zeros(8192, int), jnp.zeros((8192, 64)), jnp.zeros((64, 64))


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


@pytest.mark.parametrize(("operations", "widths"), [(450, (64, 4)), (540, None)])
def test_long_steps_are_compiled_once(operations, widths):
    def body(x):
        for k in range(operations // 3):
            wide = lax.pad(jnp.sort(x) if k < 12 else x, x.dtype.type(0), [(0, k % 45, 0)] * 2)
            x = lax.add(x, lax.slice(wide, (0, 0), (3, 3)))
        return [x]

    program = _compat.stage(body, [jax.typeof(jnp.zeros((3, 3), np.float32))])
    decision = decide(Loop(64, None, program, (True,)), TABLE["cpu-small"], Request())
    assert getattr(decision, "widths", None) == widths
    assert widths or decision == Masked("a step is too long to be compiled again")


@pytest.mark.parametrize("lanes", [64, 128])
def test_lanes_that_draw_few_numbers_slowly_by_themselves_begin_together(lanes):
    def body(key, x):
        key, now = jax.random.split(key)
        return key, x * jax.random.uniform(now, (8,)).max()

    program = jax.make_jaxpr(body)(jax.random.key(0), jnp.ones(64))
    decision = decide(Loop(lanes, None, program, (True, True)), TABLE["cpu-small"], Request())
    assert isinstance(decision, Masked | FewAlone)


def test_lanes_that_add_up_many_numbers_are_not_run_alone_from_the_first_step():
    """Sums of one lane wait for each term: equal counts took up to 4.6x the time."""
    for step in (jax.nn.softmax, lambda x: x - jax.nn.logsumexp(x), lambda x: x - jnp.max(x)):
        for size in (8, 16, 64):
            program = jax.make_jaxpr(lambda x, step=step: [step(x)])(jnp.ones(size, np.float32))
            decision = decide(Loop(1024, None, program, (True,)), TABLE["cpu-small"], Request())
            assert not isinstance(decision, Alone), (step, size)


def test_lanes_part_ways_on_each_device_of_a_mesh():
    """Not if lanes of a device may be spread over axes that the mesh has besides."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    specs = {"in_specs": (jax.P("a"), jax.P("a"), jax.P()), "out_specs": jax.P("a")}
    batched = bx.vmap(expensive, (0, 0, None))
    for names, apart in (({"a", "b"}, True), ({"a"}, False)):
        sharded = jax.shard_map(batched, mesh=mesh, axis_names=names, **specs)
        assert ("divergent_loop" in str(jax.make_jaxpr(sharded)(*DEAR))) == apart


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


def test_branches_that_lanes_take_apart_hold_no_tracer_of_the_loop_around_them():
    def fun(n, x, y):
        def step(s):
            of_one = lambda x, y: jnp.sin(x)
            return s[0] + 1, lax.cond(s[0] % 2 == 0, of_one, jnp.multiply, s[1], s[2]), s[2] + 1

        return lax.while_loop(lambda s: s[0] < n, step, (0, x, y))

    with jax.checking_leaks():
        jax.make_jaxpr(bx.vmap(fun, divergence=FORCED))(np.arange(3), np.ones(3), np.ones(3))
