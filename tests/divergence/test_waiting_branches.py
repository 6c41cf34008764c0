"""Expensive branches inside loops: lanes wait before them, until a block of them is full."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence import flat
from batchax.divergence.runner import Runner

from support import forced, oracle

LANES = 7
WAITS = "lanes wait before branch"
XS = np.array([0.3, 1.7, 40.0, 2.5, 0.0, 7.1, 300.0], np.float32)
ENTRIES = np.array([0.5, 3.0, 0.1, 17.0, 1.0, 0.2], np.float32)


@pytest.fixture(autouse=True)
def every_branch_is_expensive(monkeypatch):
    """Programs of tests are small."""
    forced.wait_before_branches(monkeypatch)


def seldom(x, entries):
    def step(x, entry):
        far = lambda x: jnp.sin(x) + 2
        x = lax.cond((x * 8 + entry) % 3 < 1, far, lambda x: x, x * 0.9 + entry)
        return x, x * 2

    return lax.scan(step, x, entries)


def several(x, entries):
    """Branches that hand on, that return numbers, of several dtypes; what nobody reads."""

    def nothing(a, b, x):
        return a, np.float32(1), b, x, x

    def one(a, b, x):
        return a, jnp.cos(x), b, jnp.tanh(b), x * x

    def other(a, b, x):
        return jnp.sinh(b).astype(jnp.uint8) > a, np.float32(2), x + 1, b, x

    def step(carry, entry):
        n, a, b = carry
        branch = (n + (b * 7).astype(jnp.int32)) % 4 % 3
        a, c, b, d, _ = lax.switch(branch, [one, nothing, other], a, b, entry)
        return (n + 1, a, jnp.clip(c + d, -1, 1)), (branch, a, b)

    return lax.scan(step, (0, False, jnp.tanh(x)), entries, reverse=True)


def both(x, entries):
    """Neither branch is cheap, and a loop comes between two of them."""

    def step(carry):
        n, x, seen = carry
        turn = lambda x: lax.cond(x > 1, jnp.cos, lambda x: jnp.sqrt(x + 1), x)
        y = turn(x + jnp.asarray(entries)[n % 3])
        i, y = lax.while_loop(
            lambda c: (c[1] > 0.2) & (c[0] < 5), lambda c: (c[0] + 1, c[1] / 2), (0, jnp.abs(y))
        )
        return n + 1 + i % 2, turn(y) * 2.5, seen.at[n].set(i)

    return lax.while_loop(lambda c: c[0] < 7, step, (0, jnp.abs(x), jnp.zeros(8, jnp.int32)))


def nested(x, entries):
    """Branches in a loop inside, in calls, and at the end of a step."""

    @jax.jit
    def turn(x):
        far = jax.checkpoint(lambda x: jnp.log1p(jnp.abs(x)))
        return lax.cond(jnp.abs(x) > 2, far, lambda x: x, x)

    def outer(x, entry):
        x, ys = lax.scan(lambda x, e: (turn(x * 1.5 + e), x), x, entries[:3])
        return lax.cond(x > 1.5, lambda x: jnp.exp(-x), lambda x: x, x + entry), ys.sum()

    return lax.scan(outer, x, entries)


def with_keys(x, entries):
    def step(key, entry):
        key, own = jax.random.split(key)
        more = lambda key: (jax.random.fold_in(key, 7), jax.random.normal(key, dtype=entry.dtype))
        again = lambda key: (key, entry)
        key, y = lax.cond(jax.random.uniform(own) < 0.3, more, again, key)
        return key, y

    key, ys = lax.scan(step, jax.random.fold_in(jax.random.key(3), (x * 9).astype(int)), entries)
    return jax.random.key_data(key), ys


def loops_inside(x, entries):
    """A branch of a loop that never ends in a lane which does not take it."""

    def rejected(x, k):
        return lax.while_loop(lambda c: c[0] != 5, lambda c: (c[0] + 1, c[1] * 0.5), (k, x))[1]

    def step(carry, entry):
        k, x = carry
        x = lax.cond(k <= 5, rejected, lambda x, k: x + k, x, k)
        return ((k + 1 + (x > 1)) % 8, x + entry), x

    return lax.scan(step, (3, x), entries)


PROGRAMS = [seldom, several, both, nested, with_keys, loops_inside]


def in_turn(x, entries):
    return [fun(x, entries) for fun in PROGRAMS]


def branches_before_which_lanes_wait(fun, *args, in_axes=(0, None), **options):
    how: dict[str, Any] = {"divergence": "compact", **options}
    return str(bx.explain(fun, in_axes, **how)(*args)).count(WAITS)


@functools.cache
def alone(fun, in_x64):
    run = jax.jit(fun)
    lanes = [run(x, ENTRIES) for x in XS]
    return jax.tree.map(lambda *xs: np.stack(xs), *lanes)


def expected_of(fun):
    return alone(fun, jax.config.jax_enable_x64)


def test_explain_says_where_lanes_wait():
    counts = [branches_before_which_lanes_wait(fun, XS, ENTRIES) for fun in PROGRAMS]
    assert counts == [1, 1, 2, 2, 1, 1]
    assert branches_before_which_lanes_wait(seldom, XS, ENTRIES, divergence="predicate") == 0


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "compact"},
        {"divergence": forced.FORCED},
        {"divergence": bx.Compact(width=3)},
        {"divergence": "compact", "batch_size": 3},
    ],
)
@pytest.mark.each_commit(2)
def test_lanes_have_what_they_have_alone(options):
    got = jax.jit(bx.vmap(in_turn, (0, None), **options))(XS, ENTRIES)
    oracle.same(got, expected_of(in_turn))


def test_outside_of_jit():
    got = bx.vmap(several, (0, None), divergence="compact")(XS, ENTRIES)
    oracle.same(got, expected_of(several))


@pytest.mark.parametrize("cost", [1e-6, 1e9])
def test_who_waits_comes_through(cost, monkeypatch):
    """Whether steps are so cheap that nobody is late, or so expensive that everybody is."""
    monkeypatch.setattr(flat.Lanes, "time", property(lambda lanes: np.float32(cost)))
    got = jax.jit(bx.vmap(in_turn, (0, None), divergence="compact"))(XS, ENTRIES)
    oracle.same(got, expected_of(in_turn))


def test_all_lanes_run_masked_if_most_come_through(monkeypatch):
    for limit, value in {"CHEAPER": 0.0, "COMPILING": 0.0, "MOST": 0.5}.items():
        monkeypatch.setattr(flat, limit, value)
    compact = functools.partial(bx.vmap, divergence="compact")
    oracle.same(jax.jit(compact(in_turn, (0, None)))(XS, ENTRIES), expected_of(in_turn))

    def fun(x, steps):
        def step(x, taken):
            return lax.cond(taken, lambda x: jnp.sin(x) + 2, lambda x: x, x + 1), x

        return lax.scan(step, x, steps)

    steps = np.array([True, False, True])[:, None] ^ (np.arange(LANES) == 3)
    ways = (vmap(fun, (0, 1)) for vmap in (compact, jax.vmap))
    oracle.same(*oracle.at_once(*ways)(XS, steps))
    counts = bx.explain(fun, (0, 1), divergence="compact", measure=True, time_limit=600)(
        XS, steps
    ).steps
    (expensive,) = (c for c in counts if c.way == "gathered" and c.branch == 1)
    assert expensive.needed == steps.sum() <= expensive.done


def test_few_blocks_run_and_no_lane_waits_long():
    """Of 64 lanes one in 16 takes the branch at each step."""
    rng = np.random.default_rng(0)
    taken = rng.uniform(size=(64, 60)) < 1 / 16

    def fun(taken):
        def step(x, taken):
            return lax.cond(taken, jnp.sin, lambda x: x, x + 1), None

        return lax.scan(step, 0.0, taken)[0]

    counts = bx.explain(fun, divergence="compact", measure=True, time_limit=600)(taken).steps
    (scan,) = (c for c in counts if c.branch is None)
    cheap, expensive = (next(c for c in counts if c.branch == k) for k in (0, 1))
    assert (cheap.way, expensive.way, scan.way) == ("masked", "gathered", "flat")
    assert (
        expensive.needed
        == taken.sum()
        <= expensive.done
        <= expensive.needed * 1.5
        < expensive.masked
    )
    assert cheap.done == scan.done <= 64 * 60 * 2


def test_derivatives():
    def values(vmap, fun):
        def total(xs, entries):
            outs = jax.tree.leaves(vmap(fun, (0, None))(xs, entries))
            return sum(jnp.sum(y**2) for y in outs if jnp.issubdtype(y.dtype, np.inexact))

        return total

    compact_vmap = functools.partial(bx.vmap, divergence="compact")
    for fun in (seldom, several, nested):
        ours, theirs = (
            jax.jit(jax.value_and_grad(values(vmap, fun), (0, 1)))(XS / 50, ENTRIES)
            for vmap in (compact_vmap, jax.vmap)
        )
        oracle.same(ours, theirs)
    tangent = lambda vmap: jax.jit(
        lambda xs: jax.jvp(lambda xs: vmap(both, (0, None))(xs, ENTRIES)[1], (xs,), (xs + 1,))
    )
    oracle.same(tangent(compact_vmap)(XS), tangent(jax.vmap)(XS))
    each = lambda vmap: jax.jit(vmap(jax.grad(lambda x, e: nested(x, e)[1].sum()), (0, None)))
    oracle.same(each(compact_vmap)(XS / 50, ENTRIES), each(jax.vmap)(XS / 50, ENTRIES))


def test_bounded_loops():
    def early(x, entries):
        step = lambda x, e: (lax.cond(x > 1, jnp.sin, lambda x: x, x + e), x)
        x, ys = bx.scan(step, until=lambda x: x > 9)(x, entries)
        take = lambda c: (c[0] + 1, lax.cond(c[1] > 1, jnp.sqrt, lambda x: x, c[1] * 1.5))
        return bx.bounded_while(lambda c: c[1] < 2, take, (0, x), 6)[1], ys

    def total(vmap):
        return lambda xs: sum(jnp.sum(y) for y in vmap(early, (0, None))(xs, ENTRIES))

    compact_vmap = functools.partial(bx.vmap, divergence="compact")
    flat_loops = str(jax.make_jaxpr(compact_vmap(early, (0, None)))(XS, ENTRIES)).count("FlatLoop(")
    assert flat_loops == 2
    ours, theirs = (jax.jit(jax.value_and_grad(total(v)))(XS) for v in (compact_vmap, jax.vmap))
    oracle.same(ours, theirs)


def test_lanes_of_an_outer_vmap_and_of_devices():
    rows = ENTRIES + np.arange(3, dtype=np.float32)[:, None]
    both_axes = lambda vmap: jax.vmap(vmap(seldom, (None, 0)), (0, None))
    compact_vmap = functools.partial(bx.vmap, divergence="compact")
    expected = jax.jit(both_axes(jax.vmap))(XS, rows)
    oracle.same(jax.jit(both_axes(compact_vmap))(XS, rows), expected)
    by_default = Runner(thresholds=forced.EVERYWHERE._replace(max_devices=1))
    for how in ("compact", by_default):
        got = bx.vmap(several, (0, None), divergence=how, mesh="all")(XS, ENTRIES)
        oracle.same(got, expected_of(several))


def test_nan_stays_in_its_lane():
    xs = XS.copy()
    xs[[1, 4]] = np.nan, -30.0

    def fun(x, entries):
        def step(x, entry):
            return lax.cond(x < 9, lambda x: jnp.log(x) + 3, lambda x: x * 0.5, x + entry), x

        return lax.scan(step, x, entries)

    assert branches_before_which_lanes_wait(fun, xs, ENTRIES) == 1
    run = lambda vmap: jax.jit(vmap(fun, (0, None)))(xs, ENTRIES)
    oracle.same(run(functools.partial(bx.vmap, divergence="compact")), run(jax.vmap))
    with jax.debug_nans(True):
        jax.block_until_ready(bx.vmap(fun, (0, None), divergence="compact")(XS + 1, ENTRIES))


@pytest.mark.parametrize("ordered", [False, True])
def test_who_calls_the_host_waits_at_each_step(ordered):
    """A branch with a callback is no place to wait: it is made once by each lane that takes it."""
    seen = []

    def fun(x, entries):
        def called(x):
            jax.debug.callback(lambda x: seen.append(float(x)), x, ordered=ordered)
            return jnp.sin(x)

        turn = lambda x: lax.cond(x > 2, called, lambda x: x, x)
        return lax.scan(lambda x, e: (turn(x + e), x), x, entries)

    text = str(bx.explain(fun, (0, None), divergence="compact")(XS, ENTRIES))
    assert WAITS not in text
    _, before = jax.jit(bx.vmap(fun, (0, None), divergence="compact"))(XS, ENTRIES)
    jax.effects_barrier()
    given = before + ENTRIES
    assert sorted(seen) == sorted(given[given > 2].tolist())


def test_collectives_keep_the_barrier():
    def meets(x, entries):
        far = lambda x: jnp.sin(x)
        step = lambda x, e: (lax.cond(x > 1, far, lambda x: x, x + lax.pmean(e * x, "lanes")), x)
        return lax.scan(step, x, entries)

    options: dict[str, Any] = {"axis_name": "lanes", "divergence": "compact"}
    assert branches_before_which_lanes_wait(meets, XS, ENTRIES, **options) == 0
    expected = jax.jit(jax.vmap(meets, (0, None), axis_name="lanes"))(XS, ENTRIES)
    oracle.same(jax.jit(bx.vmap(meets, (0, None), **options))(XS, ENTRIES), expected)


def test_a_branch_outside_of_a_loop_is_as_it_was():
    fun = lambda x: lax.cond(x > 1, jnp.sin, lambda x: x, x)
    assert WAITS not in str(bx.explain(fun, divergence="compact")(XS))


def test_what_branches_hand_on_to_nobody_is_not_kept():
    def f(x, entries):
        def step(x, entry):
            seen = jnp.sin(x * jnp.arange(37.0))
            far = lambda x, seen: (jnp.cos(x), seen)
            x, _ = lax.cond(entry + x > 2, far, lambda x, seen: (x, seen), x, seen)
            return x + entry, x

        return lax.scan(step, x, entries)

    batched = bx.vmap(f, (0, None), divergence="compact")
    assert WAITS in str(bx.explain(batched)(XS, ENTRIES))
    assert f"tensor<{LANES}x37xf" not in jax.jit(batched).lower(XS, ENTRIES).as_text()
