"""Nested loops whose lanes are each at a place of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis import thresholds
from batchax.divergence import flat, nest
from batchax.divergence.runner import Runner

from support import forced, oracle

LANES = 7
FLAT = "each lane advances independently"


@pytest.fixture(autouse=True, params=["masked", "in blocks"])
def cuts_cheap_loops(request, monkeypatch):
    """Programs of tests are small: they are cut whatever that costs."""
    monkeypatch.setattr(nest, "FEW_STEPS", float("inf"))
    asked = thresholds.TABLE["compact"]._replace(min_work=0.0)
    monkeypatch.setitem(thresholds.TABLE, "compact", asked)
    if request.param == "in blocks":
        monkeypatch.setattr(flat, "NARROWEST", 2)
        monkeypatch.setattr(flat, "MASKED", float("inf"))


def halve(x, most):
    """Halves until under one: a few steps, other ones in each lane."""
    return lax.while_loop(
        lambda c: (c[1] > 1) & (c[0] < most), lambda c: (c[0] + 1, c[1] / 2), (0, x)
    )


def scan_of_while(x, entries):
    def step(x, entry):
        i, y = halve(jnp.abs(x) + entry, 9)
        return y * 3 + entry, (i, y)

    return lax.scan(step, x, entries)


def two_in_turn(x, entries):
    def step(carry, entry):
        a, b = carry
        i, a = halve(jnp.abs(a) + entry, 5)
        kept = jnp.sin(a) + i
        j, b = halve(jnp.abs(b) + kept + entry, 7)
        return (b + 1.5, a * 4), (i + j, kept)

    return lax.scan(step, (x, x + 1), entries)


def three_deep(x, entries):
    def outer(x, entry):
        def middle(carry):
            k, x = carry
            i, x = halve(x + 2 + entry, 6)
            return k + 1, x * 2 + i / 8

        k, x = lax.while_loop(lambda c: (c[0] < 4) & (c[1] < 3), middle, (0, jnp.abs(x)))
        return x * 1.25, (k, x)

    return lax.scan(outer, x, entries)


def while_of_while(x, entries):
    def step(carry):
        n, x, seen = carry
        i, y = halve(x + jnp.asarray(entries)[n % 3], 8)
        return n + 1, y * 2.5, seen.at[n].set(i)

    going_on = lambda c: (c[0] < 6) & (c[1] < 2.4)
    return lax.while_loop(going_on, step, (0, jnp.abs(x), jnp.zeros(6, jnp.int32)))


def with_keys(x, entries):
    def step(key, entry):
        key, own = jax.random.split(key)
        n = jax.random.randint(own, (), 0, 6)
        y = lax.fori_loop(0, n, lambda i, y: y * 0.5 + i, entry + x)
        return key, (y, jax.random.uniform(own))

    key = jax.random.key(3)
    key, ys = lax.scan(step, jax.random.fold_in(key, (x * 100).astype(jnp.int32)), entries)
    return jax.random.key_data(key), ys


def arrays(x, entries):
    """Lanes hold arrays, of several dtypes, and hand some on as they are."""

    def step(carry, entry):
        a, flag, b, same = carry
        i, y = halve(a.sum() + entry, 9)
        return (jnp.roll(a, 1) * y, i % 2 == 0, b + i.astype(jnp.uint8), same), (a, flag, b)

    start = jnp.stack([x, x + 1, x * x]), True, jnp.zeros((2, 2), jnp.uint8), x
    return lax.scan(step, start, entries)


def handed_on(x, entries):
    """What loops carry is handed from one to the next, swapped, read again later, or twice."""

    def grown(n, a, b):
        step = lambda c: (c[0] + 1, jnp.cos(c[1]) * 2, c[2] - c[1])
        return lax.while_loop(lambda c: c[0] < n, step, (0, a, b))

    def step(carry, entry):
        a, b, c, d, e = carry
        i, a, b = grown((jnp.abs(x) + entry).astype(jnp.int32) % 4, a, b)
        j, b, a = grown((jnp.abs(b) * 8).astype(jnp.int32) % 5, b, a)  # they change places
        k, first, second = grown((jnp.abs(c) * 8).astype(jnp.int32) % 3, c, c)
        m, later, e = grown((jnp.abs(d) * 8).astype(jnp.int32) % 3, d + entry, jnp.sin(e))
        return (a, b, second, d + later, e), (i + j, k + m, first + c)

    start = x, x / 2, jnp.sin(x), jnp.cos(x), x * x
    return lax.scan(step, start, entries, reverse=True)


PROGRAMS = [
    handed_on,
    scan_of_while,
    two_in_turn,
    three_deep,
    while_of_while,
    with_keys,
    arrays,
]
XS = np.array([0.3, 1.7, 40.0, 2.5, 0.0, 7.1, 300.0], np.float32)
ENTRIES = np.array([0.5, 3.0, 0.1, 17.0, 1.0], np.float32)


def is_flat(fun, *args, in_axes=(0, None), **options):
    how = {"divergence": "compact", **options}
    text = str(bx.explain(fun, in_axes, **how)(*args))
    return FLAT in text


def check(fun, *args, in_axes, expected=None, **options):
    options = {"divergence": "compact", **options}
    expected = oracle.loop(jax.jit(fun), args, in_axes) if expected is None else expected
    oracle.same(jax.jit(bx.vmap(fun, in_axes, **options))(*args), expected)
    return expected


@pytest.mark.parametrize("fun", PROGRAMS)
@pytest.mark.each_commit(10)
def test_lanes_have_what_they_have_alone(fun):
    entries = (ENTRIES + XS[:, None] / 5).T
    assert is_flat(fun, XS, ENTRIES)
    check(fun, XS, ENTRIES, in_axes=(0, None))
    check(fun, XS, entries, in_axes=(0, 1))


def let_nobody_wait(monkeypatch):
    waiting_costs = property(lambda lanes: np.float32(1e-6 if lanes.nest.parts else 1.0))
    monkeypatch.setattr(flat.Lanes, "time", waiting_costs)


@pytest.mark.parametrize("fun", [two_in_turn, three_deep, with_keys])
@pytest.mark.each_commit(3)
def test_no_lane_waits_long(fun, monkeypatch):
    """Who is in a loop leaves it after a step if another waits, and all goes on from there."""
    let_nobody_wait(monkeypatch)
    check(fun, XS, ENTRIES, in_axes=(0, None))


def test_types_are_those_of_masked_lanes():
    for fun in PROGRAMS:
        ways = [bx.vmap(fun, (0, None), divergence=d) for d in ("compact", "predicate")]
        got, expected = (jax.eval_shape(way, XS, ENTRIES) for way in ways)
        jax.tree.map(oracle.same_type, got, expected)


def on_devices(fun, in_specs, out_specs, sizes=(2,), **options):
    """`fun` of the part of its arguments that each device has, on a mesh of these sizes."""
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, tuple("ab")[: len(sizes)], axis_types=kinds)
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def flat_loops(fun, *args):
    """How many loops have lanes at places of their own."""
    return str(jax.make_jaxpr(fun)(*args)).count("FlatLoop(")


def in_turn(x, entries):
    """Several programs: to compile one takes less time than to compile each."""
    return [fun(x, entries) for fun in (two_in_turn, three_deep, while_of_while, arrays)]


SHARDED = XS[:6]
BY_DEFAULT = Runner(thresholds=forced.EVERYWHERE._replace(max_devices=1))
ROWS, SAME, BOTH = jax.P("a"), jax.P(), jax.P("a", "b")


@pytest.mark.parametrize(
    ("how", "check_vma"), [("compact", True), (bx.Compact(width=2), True), (BY_DEFAULT, False)]
)
@pytest.mark.each_commit(3)
def test_each_device_has_its_own_lanes(how, check_vma):
    """Devices leave their loops on their own, whatever types say of what varies between them."""
    batched = bx.vmap(in_turn, (0, None), divergence=how)
    sharded = on_devices(batched, (ROWS, SAME), ROWS, check_vma=check_vma)
    assert flat_loops(sharded, SHARDED, ENTRIES) == 4
    expected = jax.jit(jax.vmap(in_turn, (0, None)))(SHARDED, ENTRIES)
    oracle.same(jax.jit(sharded)(SHARDED, ENTRIES), expected)
    if how is BY_DEFAULT:
        shard_lanes = bx.vmap(in_turn, (0, None), divergence=how, mesh="all")
        assert flat_loops(shard_lanes, SHARDED, ENTRIES) == 4
        oracle.same(shard_lanes(SHARDED, ENTRIES), expected)


def test_what_varies_over_other_axes_than_lanes_do():
    """Lanes differ along one axis of the mesh, entries along another, and both in a nested vmap."""
    rows = ENTRIES + np.arange(6, dtype=np.float32)[:, None]

    def nested(vmap):  # JAX asks for a carry that varies as entries do
        both = lambda x, entries: scan_of_while(x + 0 * entries[0], entries)
        return vmap(vmap(both, (None, 0)), (0, None))

    def own(vmap):  # the carry does not vary as entries do, and may not
        fun = lambda x, rows: lax.scan(lambda x, e: (halve(x, 3)[1] + 1, e * rows), x, ENTRIES)
        return vmap(fun, (0, None))

    compact = functools.partial(bx.vmap, divergence="compact")
    for fun, made, count in ((nested, BOTH, 1), (own, (ROWS, jax.P("a", None, "b")), 0)):
        sharded = on_devices(fun(compact), (ROWS, jax.P("b")), made, (2, 2))
        assert flat_loops(sharded, SHARDED, rows) == count
        oracle.same(jax.jit(sharded)(SHARDED, rows), jax.jit(fun(jax.vmap))(SHARDED, rows))


def counting(x, entries):
    """A count that all lanes share, and all devices; it is one of the results, and of the ys."""

    def step(carry, entry):
        k, x = carry
        _, x = halve(jnp.abs(x) + entry + k, 9)
        return (k + entry, x * 3), (k, x)

    (k, x), (ks, ys) = lax.scan(step, (jnp.zeros_like(entries[0]), x), entries)
    n, x = lax.while_loop(lambda c: c[0] < ks[3], lambda c: (c[0] + 9, halve(c[1], 3)[1]), (k, x))
    return (k, ks, n), (x, ys)


def test_what_lanes_share_stays_one_value():
    axes = {"in_axes": (0, None), "out_axes": (None, 0)}
    batched = bx.vmap(counting, divergence="compact", **axes)
    assert flat_loops(batched, SHARDED, ENTRIES) == 2
    expected = jax.jit(jax.vmap(counting, **axes))(SHARDED, ENTRIES)
    oracle.same(jax.jit(batched)(SHARDED, ENTRIES), expected)
    sharded = on_devices(batched, (ROWS, SAME), (SAME, ROWS))
    oracle.same(jax.jit(sharded)(SHARDED, ENTRIES), expected)

    def total(f):  # of a scan, which has a derivative in reverse
        return lambda entries: sum(jnp.sum(x**2) for x in f(SHARDED, entries)[0][:2])

    ours, theirs = (total(f) for f in (batched, jax.vmap(counting, **axes)))
    oracle.same(jax.grad(ours)(ENTRIES), jax.grad(theirs)(ENTRIES))


def test_a_batching_rule_is_given_all_lanes():
    def centered(vmap):
        @vmap
        def f(x):
            return x

        @f.def_vmap
        def rule(axis_size, in_batched, x):
            return x - x.mean(), True

        return f

    for vmap in (jax.custom_batching.custom_vmap, bx.custom_vmap):
        f = centered(vmap)

        def fun(x, entries, f=f):
            return lax.scan(lambda x, e: (f(halve(jnp.abs(x) + e, 9)[1]) * 3, x), x, entries)

        assert not is_flat(fun, XS, ENTRIES)
        expected = jax.jit(jax.vmap(fun, (0, None)))(XS, ENTRIES)
        check(fun, XS, ENTRIES, in_axes=(0, None), expected=expected)
        check(fun, XS, ENTRIES, in_axes=(0, None), expected=expected, divergence=forced.FORCED)


def test_lanes_that_take_no_step_at_all():
    entries = np.zeros(0, np.float32)
    check(scan_of_while, XS, entries, in_axes=(0, None))

    def never(x, entries):
        return lax.while_loop(lambda x: x > 1e9, lambda x: halve(x, 3)[1], x + entries.sum())

    check(never, XS, ENTRIES, in_axes=(0, None))
    got = bx.vmap(scan_of_while, (0, None), divergence="compact")(XS[:0], ENTRIES)
    assert [x.shape for x in jax.tree.leaves(got)] == [(0,), (0, 5), (0, 5)]
    check(lambda x, e: scan_of_while(x, e)[0], XS, ENTRIES, in_axes=(0, None))


def entries_put_by_the_user(x, entries):
    """One is read at once, one goes to two places, one has an index of few bits."""

    def step(carry, entry):
        k, y, once, twice, narrow = carry
        i, y = halve(jnp.abs(y) + entry, 9)
        once = lax.dynamic_update_slice(once, y[None], (i,))
        twice = lax.dynamic_update_slice(twice, jnp.stack([y, entry])[None], (k - 2, 0))
        narrow = lax.dynamic_update_slice(narrow, y[None], (k.astype(jnp.uint8) * 60,))
        return (k + 1, y * 3, once, twice, narrow), (i, once[2], twice)

    like = x.dtype
    start = 0, x, jnp.zeros(9, like), jnp.ones((4, 2), like), jnp.zeros(250, like)
    return lax.scan(step, start, entries)


def test_entries_that_are_read_once_put():
    assert is_flat(entries_put_by_the_user, XS, ENTRIES)
    check(entries_put_by_the_user, XS, ENTRIES, in_axes=(0, None))


@pytest.mark.each_commit(1)
def test_indices_of_few_bits_reach_as_far_as_others():
    """Alone, XLA clamps one that an entry is put at as if the axis were shorter by 256."""

    def fun(dtype, x, entries):
        table = x * jnp.arange(300, dtype=x.dtype)

        def step(carry, entry):
            k, y, puts = carry
            i, y = halve(jnp.abs(y) + entry, 9)
            index = (k * 60 + i).astype(dtype)
            puts = lax.dynamic_update_slice(puts, y[None], (index,))
            return (k + 1, y * 3, puts), lax.dynamic_slice(table, (index,), (1,))

        return lax.scan(step, (0, x, jnp.zeros(300, x.dtype)), entries)

    few, many = (functools.partial(fun, dtype) for dtype in (jnp.uint8, jnp.int32))
    assert is_flat(few, XS, ENTRIES)
    expected = oracle.loop(jax.jit(many), (XS, ENTRIES), (0, None))
    # Without these emitters, which conftest.py leaves out, XLA clamps indices of a scatter, too.
    emitters = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
    batched = bx.vmap(few, (0, None), divergence="compact")
    oracle.same(jax.jit(batched, compiler_options=emitters)(XS, ENTRIES), expected)


def test_a_scan_may_be_given_what_is_more_weakly_typed_than_its_results():
    def fun(x, entries):
        def step(carry, entry):
            a, b, x = carry
            i, y = halve(jnp.abs(x) + entry + b, 9)
            return (b, y, 1.5 + entry), (i, a)

        return lax.scan(step, (0.0, 0.0, x), entries)

    ways = [bx.vmap(fun, (0, None), divergence=d) for d in ("compact", "predicate")]
    xs, entries = (jnp.asarray(x, float) for x in (XS, ENTRIES))  # as wide as a Python float
    assert is_flat(fun, xs, entries)
    got, expected = (jax.jit(way)(xs, entries) for way in ways)
    jax.tree.map(oracle.same_type, got, expected)


@pytest.mark.parametrize("width", [None, 2])
def test_counted_steps_are_those_of_the_innermost_loops(width):
    steps = bx.LaneSteps()
    how = bx.Compact(width, steps=steps)
    assert is_flat(scan_of_while, XS, ENTRIES, divergence=how)
    run = jax.jit(bx.vmap(scan_of_while, (0, None), divergence=how))
    _, (counts, _) = run(XS, ENTRIES)
    together = len(XS) * counts.max(0).sum()
    assert steps.useful == counts.sum() < steps.run < together * 2
    assert steps.run % (width or len(XS)) == 0
    run(XS, ENTRIES)
    assert steps.useful == 2 * counts.sum()


def test_what_lanes_share_at_a_step_is_not_copied_for_each():
    """A lane at a step of its own would have a matrix of its own."""
    matrices = jnp.zeros((3, 40, 40), np.float32)

    def fun(x, matrices):
        def step(v, matrix):
            going_on = lambda c: (c[0] < 9) & (c[1].sum() > 1)
            i, v = lax.while_loop(going_on, lambda c: (c[0] + 1, matrix @ c[1]), (0, v))
            return v + 1, i

        return lax.scan(step, jnp.full(40, x), matrices)

    assert not is_flat(fun, XS, matrices)
    assert is_flat(fun, XS, jnp.stack([matrices] * LANES), in_axes=(0, 0))

    def deeper(x, matrices):
        step = lambda _, x: fun(x, matrices)[0].sum()
        return lax.fori_loop(0, 3, step, x)

    assert not is_flat(deeper, XS, matrices)


def test_what_a_loop_inside_updates_in_place_is_not_copied_at_each_step(monkeypatch):
    monkeypatch.setattr(nest, "FEW_STEPS", 4)

    def fun(x, entries, size, kept):
        def step(carry, entry):
            x, seen = carry
            put = lambda c: (c[0] + 1, jnp.sin(c[1]) / 2, c[2].at[c[0]].set(c[1]))
            going_on = lambda c: (c[0] < 9) & (c[1] > 0.1)
            i, x, new = lax.while_loop(going_on, put, (0, jnp.abs(x) + entry, seen))
            return (x + 1, new), i + (seen[0] if kept else 0)

        return lax.scan(step, (x, jnp.zeros(size, x.dtype)), entries)

    assert is_flat(functools.partial(fun, size=9, kept=True), XS, ENTRIES)
    assert not is_flat(functools.partial(fun, size=10_000, kept=True), XS, ENTRIES)
    # Where nobody reads it later it stays where it is.
    assert is_flat(functools.partial(fun, size=10_000, kept=False), XS, ENTRIES)


def test_loops_that_ask_about_all_lanes():
    """As in the steps of diffrax."""
    eqxi = pytest.importorskip("equinox.internal")

    def fun(x, entries):
        def attempt(carry):
            i, x = carry
            begins = jnp.where(eqxi.unvmap_any(x < 0), 0, 1)
            stages = lambda c: (c[0] + 1, c[1] - 0.25 * x)
            return i + 1, lax.while_loop(lambda c: c[0] < 3, stages, (begins, x))[1]

        def step(x, entry):
            i, x = lax.while_loop(lambda c: eqxi.unvmap_any(c[1] > 1), attempt, (0, abs(x) + entry))
            return x + 1, i

        return lax.scan(step, x, entries)

    assert is_flat(fun, XS, ENTRIES)
    check(fun, XS, ENTRIES, in_axes=(0, None))


def test_a_check_of_equinox_sees_only_lanes_that_are_there(monkeypatch):
    """Those that are still in the loop before it would not pass it."""
    let_nobody_wait(monkeypatch)
    eqx = pytest.importorskip("equinox")

    def fun(x, entries):
        def step(x, entry):
            start = jnp.int32(0), jnp.abs(x) + entry
            i, x = lax.while_loop(lambda c: c[1] > 0.1, lambda c: (c[0] + 1, c[1] / 2), start)
            return eqx.error_if(x + 1, x > 0.1, "a lane has not come through"), i

        return lax.scan(step, x, entries)

    assert is_flat(fun, XS, ENTRIES)
    check(fun, XS, ENTRIES, in_axes=(0, None))
