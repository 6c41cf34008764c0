"""Loops that lanes leave when they are done: `vmap(..., divergence="compact")`."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence import runner

from support import oracle
from support.diverging import COUNTS, POINTS, N, power

NARROW = bx.Compact(width=4)


def check(fun, *args, in_axes=0, out_axes=0, divergence=NARROW, derivatives=True, **options):
    """Values as of the loop over examples; types and tangents as of lanes that are masked.

    divergence: or several, by their names.
    """
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(args)
    axes = {"in_axes": in_axes, "out_axes": out_axes, **options}
    several = divergence if isinstance(divergence, dict) else {"compact": divergence}
    ways = {name: bx.vmap(fun, **axes, divergence=d) for name, d in several.items()}
    ways["masked"] = bx.vmap(fun, **axes)
    moving = [i for i, x in enumerate(args) if oracle.is_inexact(x)]

    def tangents(batched):
        def of(*xs):
            given = dict(zip(moving, xs, strict=True))
            return batched(*[given.get(i, x) for i, x in enumerate(args)])

        xs = [args[i] for i in moving]
        dots = jax.jvp(of, xs, [oracle.direction(x, 1) for x in xs])[1]
        return [x for x in jax.tree.leaves(dots) if x.dtype != jax.dtypes.float0]

    def everything(*args):
        values = oracle.together(ways)(*args)
        if "axis_name" not in options:
            values["loop"] = oracle.moved(oracle.in_turn(fun, in_axes)(*args), out_axes)
        wanted = ways if derivatives and moving else {}
        return values, {name: tangents(batched) for name, batched in wanted.items()}

    values, dots = jax.jit(everything)(*args)
    for name in several:
        for way, value in values.items():
            oracle.same(values[name], value, None, f"{name} {way}")
        jax.tree.map(oracle.same_type, values[name], values["masked"])
        if dots:
            oracle.same(dots[name], dots["masked"], None, f"{name} jvp")


def test_lanes_leave():
    widths = {f"{width}": bx.Compact(width=width) for width in [1, np.int64(8), 22, 23, 100, None]}
    check(power, COUNTS, POINTS, divergence=widths, derivatives=False)
    check(power, COUNTS, POINTS, divergence=bx.Compact(width=3))


def test_steps_that_compute_nothing():
    def f(goes_on, x):
        step = lambda c: (False, c[2], c[1])
        return lax.while_loop(lambda c: c[0], step, (goes_on, x, x[::-1]))[1]

    check(f, COUNTS > 3, POINTS, divergence=bx.Compact())
    check(f, COUNTS > 3, POINTS[:, :0], divergence=bx.Compact(), derivatives=False)


def test_lanes_that_are_done_do_no_harm():
    """A finished lane would divide by zero; an inner loop would not end for it (#2947)."""

    def f(x):
        def step(c):
            i, x, y = c
            inner = lax.while_loop(lambda z: z > 0, lambda z: z - jnp.abs(x), 3 * jnp.abs(x))
            return i + 1, x - 1, y + 1 / x + inner

        return lax.while_loop(lambda c: c[1] > 0, step, (0, x, x * 0))[2]

    x = jnp.arange(N, dtype=float) - 2
    check(f, x)


def test_lanes_of_nested_batches_share_a_window():
    steps = bx.LaneSteps()
    compact = bx.Compact(8, steps=steps)
    slow = jnp.where(jnp.arange(64) % 8 == 0, 100, 1).reshape(8, 8)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 8, 8)), float)

    def f(n, x, shift):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] + shift))
        return lax.while_loop(lambda c: c[0] < n, step, (0, x))

    axes = (0, 1, None)
    expected = jax.jit(jax.vmap(jax.vmap(f, axes), axes))(slow.T, x, x[:, 0, 0])
    for outer in (bx.vmap, jax.vmap):
        steps.reset()
        batched = jax.jit(outer(bx.vmap(f, axes, divergence=compact), axes))
        oracle.same(batched(slow.T, x, x[:, 0, 0]), expected, None, f"{outer}")
        assert steps.useful == int(slow.sum())
        assert steps.utilization > 0.6


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_loops_of_equinox(kind):
    """They ask whether any lane goes on: of each lane its own, here."""
    steps = bx.LaneSteps()

    def f(n, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1]))
        options = {"max_steps": 100, "kind": kind}
        return eqxi.while_loop(lambda c: c[0] < n, step, (jnp.int32(0), x), **options)

    check(f, COUNTS, POINTS, derivatives=False, divergence=bx.Compact(4, steps=steps))
    assert steps.useful == int(COUNTS.sum())
    if kind == "checkpointed":
        total = lambda vmap: jax.grad(lambda x: vmap(f)(COUNTS, x)[1].sum())
        oracle.same(jax.jit(total(bx.vmap))(POINTS), jax.jit(total(jax.vmap))(POINTS))


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_loops_of_equinox_that_are_masked_are_batched_once(kind):
    ran = []

    @bx.custom_vmap
    def twice(x):
        return 2 * x

    @twice.def_vmap
    def _(axis_size, in_batched, x):
        ran.append(in_batched)
        return 2 * x, True

    def f(n, x):
        step = lambda c: (c[0] + 1, twice(c[1]))
        options = {"max_steps": 100, "kind": kind}
        return eqxi.while_loop(lambda c: c[0] < n, step, (jnp.int32(0), x), **options)

    jax.make_jaxpr(bx.vmap(f))(COUNTS, POINTS)
    # To find which carries are batched, and once they are found: not again for the masked loop.
    assert len(ran) == 2


def before_and_after(n, x):
    n, x = n + (x.sum() > 0), jnp.sin(x)
    n, x = power(n, x)
    return power(n % 3, jnp.cos(x))[1], n


@pytest.mark.parametrize("batch_size", [1, 5, 22])
def test_chunks_share_a_window(batch_size):
    check(before_and_after, COUNTS, POINTS, batch_size=batch_size, derivatives=batch_size == 5)


def test_a_slow_lane_keeps_no_chunk_waiting():
    slow = jnp.where(jnp.arange(64) % 8 == 0, 100, 1)
    x = jnp.ones((64, 3))
    steps = bx.LaneSteps()
    bx.vmap(power, batch_size=8, divergence=bx.Compact(8, 0.25, steps))(slow, x)
    assert steps.useful == int(slow.sum())
    assert steps.utilization > 0.45  # in each chunk by itself: 0.14


def test_loops_that_hold_much_stay_in_their_chunks():
    def f(n, x):
        step = lambda c: (c[0] + 1, c[1] * 0.5)
        wide = jnp.broadcast_to(x, (10_000,)) + jnp.arange(10_000.0)
        return lax.while_loop(lambda c: c[0] < n, step, (0, wide))[1].sum()

    n, x = jnp.arange(64) % 5, jnp.arange(64.0)
    batched = jax.jit(bx.vmap(f, batch_size=4, divergence=NARROW)).lower(n, x).compile()
    oracle.same(batched(n, x), jax.jit(bx.vmap(f))(n, x), {"rtol": 1e-5}, "values")
    assert batched.memory_analysis().temp_size_in_bytes < 12 * 4 * 40_000


def test_on_devices_that_hold_the_same_lanes_these_wait():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    f = lambda n, x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))
    specs = jax.P(), jax.P(None, "devices")  # counts are alike, and so are those returned
    batched = bx.vmap(f, divergence=bx.Compact(3))
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=specs, out_specs=specs)
    counts, x = COUNTS[:22] % 5, jnp.stack([POINTS[:22], POINTS[:22] + 1], 1)
    oracle.same(jax.jit(sharded)(counts, x), jax.jit(bx.vmap(f))(counts, x), None, "shards")


def test_lane_steps_are_counted():
    steps = bx.LaneSteps()
    run = jax.jit(bx.vmap(power, divergence=bx.Compact(width=4, steps=steps)))
    run(COUNTS, POINTS)
    assert steps.useful == int(COUNTS.sum())
    assert steps.useful <= steps.run < 90 * N / 2
    assert steps.utilization == steps.useful / steps.run
    run(COUNTS, POINTS)
    assert steps.useful == 2 * int(COUNTS.sum())
    assert f"useful={steps.useful}" in repr(steps)
    steps.reset()
    run(jnp.full(N, 5), POINTS)
    assert (steps.run, steps.useful, steps.utilization) == (5 * N, 5 * N, 1.0)
    everyone = bx.LaneSteps()
    bx.vmap(power, divergence=bx.Compact(width=100, threshold=1, steps=everyone))(COUNTS, POINTS)
    assert everyone.run > steps.run


def test_collectives_are_refused():
    def f(n):
        step = lambda c: c + lax.psum(1, "lanes")
        return lax.while_loop(lambda c: c < n, step, 0)

    def g(n):
        step = lambda c: c + lax.pmax(c, "lanes")
        return lax.while_loop(lambda c: c < n, step, n * 0)

    assert bx.vmap(f, axis_name="lanes", divergence=NARROW)(COUNTS).shape == (N,)  # a constant
    with pytest.raises(bx.UnsupportedError, match=r"pmax.*loop that ends at its own step.*Move"):
        bx.vmap(g, axis_name="lanes", divergence=NARROW)(COUNTS)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: bx.vmap(power, divergence="pack"), ValueError, "divergence must be .auto."),
        (lambda: bx.Compact(width=0), ValueError, "width must be a positive int"),
        (lambda: bx.Compact(width=2.5), TypeError, "width must be a positive int"),
        (lambda: bx.Compact(threshold=2), ValueError, "threshold is 2"),
        (lambda: bx.Compact(threshold="x"), TypeError, "threshold must be a number"),
        (lambda: bx.Compact(steps=3), TypeError, "steps must be a batchax.LaneSteps"),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_arrays_updated_in_place_are_not_copied():
    def f(n, x, cache):
        def step(c):
            i, cache, total = c
            cache = cache.at[i % 300].add(x)
            return i + 1, cache, total + cache[(i * 7) % 300]

        return lax.while_loop(lambda c: c[0] < n, step, (0, cache, 0.0))

    args = (COUNTS, POINTS[:, 0], jnp.zeros((N, 300)))
    check(f, *args)
    check(f, *args[:2], args[2][0], in_axes=(0, 0, None), derivatives=False)
    body = lambda jaxpr: next(e for e in jaxpr.eqns if e.primitive.name == "while").params
    batched = jax.make_jaxpr(bx.vmap(f, divergence=NARROW))(*args)
    loop = next(e for e in batched.eqns if e.primitive.name == "divergent_loop")
    inside = body(loop.params["program"].jaxpr)["body_jaxpr"].jaxpr
    selects = [e for e in inside.eqns if e.primitive.name == "select_n"]
    assert all(e.outvars[0].aval.shape != (N, 300) for e in selects)


def test_lanes_run_sequentially_where_the_default_does_so(monkeypatch):
    """A step of many small operations: windows took up to 7x the time of the default."""
    row = TABLE["cpu-small"]._replace(max_devices=100)
    monkeypatch.setattr(runner, "thresholds_here", lambda: row)

    def three_bodies(at, speed):
        def step(state):
            at, speed, t, k = state
            apart = at[None] - at[:, None]
            squares = jnp.sum(apart * apart, -1) + jnp.eye(3)
            pull = jnp.sum(apart * (squares**-1.5 * (1 - jnp.eye(3)))[..., None], 1)
            dt = jnp.clip(0.1 * jnp.min(squares), 1e-2, 0.1)
            speed = speed + dt * pull
            return at + dt * speed, speed, t + dt, k + 1

        return lax.while_loop(lambda c: (c[2] < 0.5) & (c[3] < 50), step, (at, speed, 0.0, 0))

    def strategy(option):
        found = str(bx.explain(three_bodies, divergence=option)(*given))
        return "lanes run sequentially" in found

    random = np.random.default_rng(0)
    given = [jnp.asarray(random.normal(size=(32, 3, 3)), float) for _ in range(2)]
    assert [strategy("auto"), strategy("compact")] == [True, True]
    assert not strategy(bx.Compact(width=4))
    run = jax.jit(bx.vmap(three_bodies, divergence="compact"))
    oracle.same(run(*given), oracle.loop(jax.jit(three_bodies), given, [0, 0]))
    # What derives from it is of masked lanes; another platform runs them, too.
    own, masked = (lambda x, f=f: f(x, given[1])[0] for f in (run, jax.vmap(three_bodies)))
    oracle.same(*(jax.jvp(f, given[:1], given[:1])[1] for f in (own, masked)))
    assert jax.export.export(run, platforms=["cuda"])(*given).platforms == ("cuda",)
