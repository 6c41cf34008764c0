"""`scan`, `while_loop` and what is made of them, against the loop over examples."""

import logging
from dataclasses import replace

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core.primitives import while_p

import batchax as bx
from batchax.errors import UnsupportedError
from batchax.kernel import registry

from support.oracle import example, quickly, same

X = example((4, 3))
W = example((3, 3), seed=3)


def equation(f, *args, name):
    """The one equation of primitive `name` that `f` stages to."""
    (eqn,) = [e for e in jax.make_jaxpr(f)(*args).jaxpr.eqns if e.primitive.name == name]
    return eqn


# scan


@settings(max_examples=5)
@given(
    axes=st.tuples(*[st.sampled_from([None, 0, 1])] * 2, st.sampled_from([None, 0, 1, 2])),
    reverse=st.booleans(),
    out_axes=st.sampled_from([0, -1]),
)
def test_scan_of_batched_subsets(axes, reverse, out_axes):
    """The constant, the carry and the sequence each batched anywhere or not at all."""

    def f(w, c, xs):
        def step(carry, x):
            c, n = carry
            c = jnp.tanh(w * c) + x
            return (c, n + 1), (c * w, n, x.sum())

        return lax.scan(step, (c, 0), xs, reverse=reverse)

    if axes == (None, None, None):
        axes = (None, None, 0)
    shapes = [(3,), (3,), (5, 3)]
    args = [
        example(shape if a is None else (*shape[:a], 4, *shape[a:]), seed=i)
        for i, (shape, a) in enumerate(zip(shapes, axes, strict=True))
    ]
    sequence = None if axes[2] is None else 0
    out_axes = ((out_axes, None), (out_axes, None, sequence))
    quickly(f, *args, in_axes=axes, out_axes=out_axes, against_jax=False)


def test_unroll_length_and_no_sequence():
    for options in (dict(unroll=2), dict(unroll=True), dict(length=5), dict(_split_transpose=True)):
        f = lambda xs: lax.scan(lambda c, x: (c + x, c), 0.0, xs, **options)
        quickly(f, example((4, 5)))
    for length in (3, 0):
        quickly(lambda x: lax.scan(lambda c, _: (c * x, c), x, None, length=length), X)
    quickly(lambda x: lax.scan(lambda c, y: (c + y, c), 1.0, x), example((4, 0)))
    assert bx.vmap(lambda x: lax.scan(lambda c, y: (c + y, c), 1.0, x))(X[:0])[1].shape == (0, 3)


def test_carry_is_batched_only_if_an_iteration_makes_it_so():
    def f(x):
        def step(carry, _):
            count, a, b, c = carry  # a becomes batched, then b, then c
            return (count + 1, a + x, b + a, c + b), count

        return lax.scan(step, (0, 0.0, 0.0, 0.0), None, length=4)

    quickly(f, X[:, 0], out_axes=((None, 0, 0, 0), None))
    carried = [v.aval.shape for v in equation(bx.vmap(f), X[:, 0], name="scan").outvars]
    assert carried == [(), (4,), (4,), (4,), (4,)]

    loop = lambda x, n: lax.fori_loop(0, n, lambda i, c: (c[0] + 1, c[1] + x), (0, x))
    loop = bx.vmap(loop, in_axes=(0, None))
    carried = [v.aval.shape for v in equation(loop, X[:, 0], 3, name="while").outvars]
    assert sorted(carried) == [(), (), (), (4,)]  # index, bound, count, sum


def test_axis_of_a_carry_is_moved_outside_the_loop_only():
    def f(c):
        return lax.scan(lambda c, _: (c @ W, None), c, None, length=3)[0]

    x = example((2, 4, 3))
    quickly(f, x, in_axes=1)
    for in_axes in (0, 1):
        body = equation(bx.vmap(f, in_axes=in_axes), x, name="scan").params["jaxpr"]
        assert "transpose" not in [e.primitive.name for e in body.jaxpr.eqns]
    swap = lambda a, b: lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), None, length=3)[0]
    quickly(swap, X, X.T, in_axes=(0, 1))


# while


@settings(max_examples=6)
@given(
    counts=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    axes=st.tuples(*[st.sampled_from([None, 0, 1])] * 2, st.sampled_from([None, 0])),
)
def test_while_with_a_count_for_each_lane(counts, axes):
    """Trip counts equal, uneven and zero; constants and carry batched or not."""

    def f(w, x, n):
        return lax.while_loop(
            lambda c: (c[0] < n) & (c[1][0] < 50.0),
            lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1] * w),
            (0, x),
        )

    if axes == (None, None, None):
        axes = (None, None, 0)
    shape = {None: (3,), 0: (4, 3), 1: (3, 4)}
    n = jnp.array(counts)
    args = [example(shape[axes[0]]), example(shape[axes[1]], seed=1), n if axes[2] == 0 else n[0]]
    quickly(f, *args, in_axes=axes, modes=("jvp",))


@pytest.mark.parametrize("lanes", [20, 97])
def test_masked_lanes_of_small_arrays_are_where_steps_are_fast(lanes):
    """Last on a CPU, if they are many: arrays of several ranks, shared and own constants, NaN."""

    def step(state, own, w):
        i, x, m, k, z, b = state
        y = jnp.tanh(w @ x) * own - 0.1 * x.sum() + jnp.concatenate([x[1:], x[:1]]) * 0.1
        m = m @ m.T / 4 + jnp.outer(x, y)[:4, :4] * 0.1
        m = (m / jnp.max(jnp.abs(m))).T
        return i + 1, jnp.where(k[0] > 0, y, x * 0.9), m, k[::-1] + 1, z * 1j + x[0], b ^ (x > 0)

    def f(n, x, m, own, w):
        first = 0, x, m, jnp.arange(3), jnp.zeros(2, complex), jnp.zeros(5, bool)
        return lax.while_loop(lambda s: s[0] < n, lambda s: step(s, own, w), first)

    n, x = jnp.arange(lanes) % 7, example((lanes, 5)).at[3, 2].set(jnp.nan)
    args = n, x, example((lanes, 4, 4), seed=1), example((lanes, 5), seed=2), example((5, 5)) / 3
    axes = 0, 0, 0, 0, None
    batched = bx.vmap(f, axes, divergence="predicate")
    on_cpu = jax.default_backend() == "cpu" and lanes > 48
    carries = [v.aval.shape for v in equation(batched, *args, name="while").outvars]
    assert ((5, lanes) in carries) == on_cpu
    expected = jax.jit(jax.vmap(f, axes))
    same(batched(*args), expected(*args))
    along = lambda g: jax.jit(
        lambda x, m: jax.jvp(lambda x, m: g(n, x, m, *args[3:])[1], (x, m), (x, m))
    )
    same(along(batched)(*args[1:3]), along(expected)(*args[1:3]))
    turned = bx.vmap(f, (0, 1, 0, 0, None), out_axes=-1)(n, x.T, *args[2:])
    same(turned[1], expected(*args)[1].T)


@pytest.mark.parametrize("divergence", ["predicate", "auto", "compact"])
def test_each_loop_of_a_nest_is_batched_once(divergence, monkeypatch):
    def nest(depth, x):
        step = lambda c: (c[0] + 1, nest(depth - 1, c[1]) if depth > 1 else jnp.sin(c[1]))
        return lax.while_loop(lambda c: c[0] < c[1], step, (0.0, x))[1]

    batched = []

    def rule(axis, args, axes, **params):
        batched.append(params["body_jaxpr"])
        return entry.rule(axis, args, axes, **params)

    entry = registry.find(while_p)
    monkeypatch.setitem(registry._rules, while_p, replace(entry, rule=rule))
    jax.make_jaxpr(bx.vmap(lambda x: nest(4, x), divergence=divergence))(jnp.arange(3.0))
    assert len(batched) == 4


def test_reference_that_predicate_and_body_read():
    def f(n):
        r = jax.new_ref(n)

        def body(c):
            r[...] = r[...] // 2
            return c + 1

        return lax.while_loop(lambda c: (r[...] != 1) & (c < 1000), body, 0), r[...]

    # JAX itself does not end this loop for one lane.
    same(jax.jit(bx.vmap(f))(jnp.array([9, 4, 1])), (jnp.array([3, 2, 0]), jnp.array([1, 1, 1])))


def test_sequence_that_is_a_reference():
    def f(r):
        lax.scan(lambda c, x: (x.__setitem__(..., x[...] * 2), None), None, r)
        return r[...]

    r = jax.new_ref(X)
    bx.vmap(f, in_axes=1, out_axes=1)(r)
    same(r[...], X * 2)
    with pytest.raises(UnsupportedError, match="batch axis is 0"):
        bx.vmap(f)(jax.new_ref(X))


# Compiling once.


step = lambda c, x: (jnp.sin(c) * x, c)
scanning = lambda x: lax.scan(step, x[0], x)
keep_going = lambda c: c < 4
double = lambda c: c * 2 + 1
doubling = lambda x: lax.while_loop(keep_going, double, x)
halve_twice = lambda c: lax.while_loop(is_even, halve, c) - 1
is_even = lambda c: c % 2 == 0
halve = lambda c: c // 2
is_positive = lambda c: c > 0
loop_in_loop = lambda x: lax.while_loop(is_positive, halve_twice, x)
keep = lambda x: x
loop_in_branch = lambda x: lax.cond(x > 1, loop_in_loop, keep, x)


@pytest.mark.parametrize("f", [scanning, doubling, loop_in_loop, loop_in_branch])
def test_eager_calls_compile_once(f, caplog):
    x = example((4, 3)) if f is scanning else jnp.arange(5)
    bx.vmap(f)(x)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(3):
            bx.vmap(f)(x)
    assert [r.message for r in caplog.records if "ompil" in r.message] == []


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("kind", ["rule", "collective", "sort"])
def test_a_carry_that_lanes_share_stays_shared(kind, loop):
    @bx.custom_vmap
    def ruled(x):
        return x

    @ruled.def_vmap
    def _(axis_size, in_batched, x):
        return x.sum(0), False

    sorts = lambda x: lax.sort([jnp.arange(2.0), jnp.stack([x, -x])], num_keys=1)[0][1]
    shared = {"rule": ruled, "collective": lambda x: lax.psum(x, "lanes"), "sort": sorts}[kind]

    def f(x):
        step = lambda carry: (carry[0] + 1, carry[1] + shared(x), carry[2] + x)
        start = jnp.int32(0), jnp.asarray(0.0, x.dtype), jnp.asarray(0.0, x.dtype)
        if loop == "scan":
            return lax.scan(lambda c, _: (step(c), None), start, None, 3)[0]
        return lax.while_loop(lambda c: c[1] < 9, step, start)

    x = jnp.arange(3.0)
    count, total, own = bx.vmap(f, axis_name="lanes", out_axes=(None, None, 0))(x)
    steps = 3 if loop == "scan" or kind != "sort" else 9
    same(count, jnp.int32(steps))
    same(total, jnp.asarray(steps * (1.0 if kind == "sort" else 3.0)))
    same(own, steps * x)
