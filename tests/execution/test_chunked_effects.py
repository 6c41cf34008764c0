"""Callbacks, references and random numbers in chunks: once for each lane, in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import example, same

LANES = 5
X = jnp.arange(float(LANES))


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["at once", "jit"])
def wrap(request):
    return request.param


def test_calls_in_order_wait_for_those_before_that_need_a_collective(wrap):
    seen = []

    def f(x):
        total = lax.psum(x, "i")
        jax.debug.callback(lambda t: seen.append(100 + float(t)), total - x, ordered=True)
        jax.debug.callback(lambda x: seen.append(float(x)), x, ordered=True)
        return total

    for options in ({}, {"divergence": "compact"}):
        seen.clear()
        same(wrap(bx.vmap(f, axis_name="i", batch_size=2, **options))(X), jnp.full(LANES, 10.0))
        jax.effects_barrier()
        for lane in range(LANES):
            assert seen.index(110.0 - lane) < seen.index(float(lane))
        assert len(seen) == 2 * LANES


def test_differentiating_input_and_output_is_refused_by_name(wrap):
    def f(x):
        jax.debug.callback(lambda _: None, x, ordered=True)
        return jnp.sin(x)

    total = lambda **options: lambda x: bx.vmap(f, batch_size=2, **options)(x).sum()
    with pytest.raises(bx.errors.UnsupportedError, match=r"would do it twice.*residuals=.keep"):
        wrap(jax.grad(total()))(X)


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": 1}, {"mesh": "all"}])
def test_what_lanes_share_may_be_computed_by_what_makes_calls(options, wrap):
    """A loop of numbers that all lanes share, which is told each lane's own."""
    seen = []

    def f(x, w):
        def step(c):
            jax.debug.callback(lambda *xs: seen.append(tuple(map(float, xs))), x, c[1])
            return c[0] + 1, jnp.sin(c[1]) * 0 + c[0]

        return lax.while_loop(lambda c: c[0] < 3, step, (0.0, w))[1], w

    got = wrap(bx.vmap(f, (0, None), (None, 0), **options))(X, 1.0)
    same(got, (jnp.asarray(2.0), jnp.ones(LANES)))
    jax.effects_barrier()
    assert sorted(seen) == [(i, c) for i in range(LANES) for c in (0.0, 1.0, 1.0)]


XS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
WAYS = jnp.array([0, 3, 1, -1])


@jax.custom_jvp
def doubled(x):
    """Its derivative is twice that of what it computes."""
    return jnp.sum(jnp.sin(x))


doubled.defjvp(lambda x, t: (doubled(*x), 2 * jnp.vdot(jnp.cos(x[0]), t[0])))


@jax.custom_vjp
def tripled(x):
    """Its derivative is three times a cosine, which is none of what it computes."""
    return jnp.sum(x**2)


tripled.defvjp(lambda x: (tripled(x), x), lambda x, g: (3 * g * jnp.cos(x),))


def in_a_branch_beside_one(x, way):
    def other(p):
        ref = jax.new_ref(x * 1.0)
        ref[0] = 2.0
        return p * 2 + doubled(p)

    own = lambda x: jnp.tanh(x + doubled(x) + tripled(x))
    return lax.cond(way > 1, own, other, x) + doubled(x)


def in_a_loop_and_a_call(x, way):
    ref = jax.new_ref(x * 1.0)

    def step(c, t):
        ref[0] = doubled(c) + tripled(c)
        return jnp.tanh(c + ref[0] * t), t

    out, _ = lax.scan(step, x, jnp.arange(2.0, dtype=x.dtype))
    return jax.jit(lambda c: doubled(c) * ref[1] + ref[...])(out) + way


@pytest.mark.parametrize("function", [in_a_branch_beside_one, in_a_loop_and_a_call])
def test_derivatives_of_ones_own_are_kept_where_references_are_used(function):
    # JAX opens functions with derivatives of their own in loops and branches that use references.
    gradient = lambda f: jax.grad(lambda x, way: jnp.sin(f(x, way)).sum())
    expected = jnp.stack([gradient(function)(x, way) for x, way in zip(XS, WAYS, strict=True)])
    for size in (2, None):
        found = jax.jit(gradient(bx.vmap(function, batch_size=size)))(XS, WAYS)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


OPTIONS = {
    "chunks": dict(batch_size=2),
    "auto": dict(batch_size="auto"),
    "devices": dict(mesh="all"),
    "both": dict(mesh="all", batch_size=1),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", OPTIONS)
def test_a_reference_that_is_mapped(way, jit):
    """Each lane has a part of its own, so lanes may run in any order."""

    def f(ref, x, tree):
        old = ref[0]
        ref[0] = x
        jax.lax.fori_loop(0, 2, lambda i, _: jax.ref.addupdate(ref, 1, old * x), None)
        tree["count"][...] += 1
        return ref[...].sum() - jax.lax.pmean(x, "i")

    def run(call):
        def with_references(values, counts, x):
            refs = jax.new_ref(values), jax.new_ref(counts)
            out = call(refs[0], x, {"count": refs[1]})
            return out, [ref[...] for ref in refs]

        return jax.jit(with_references) if jit else with_references

    args = jnp.asarray(example((3, 5))), jnp.arange(5), jnp.asarray(example((5,), seed=1))
    in_axes = dict(in_axes=(1, 0, 0), axis_name="i")
    ours, at_once = run(bx.vmap(f, **in_axes, **OPTIONS[way])), run(bx.vmap(f, **in_axes))
    same(ours(*args), at_once(*args))
    assert not np.allclose(ours(*args)[1][0], args[0])


@pytest.mark.parametrize("options", [dict(batch_size=2), dict(mesh="all")])
def test_a_reference_that_all_lanes_share_is_refused_by_name(options):
    ref, x = jax.new_ref(jnp.zeros(3)), jnp.arange(4.0)
    read = lambda m, x: m["ref"][0] + x
    with pytest.raises(bx.UnsupportedError, match=r"m\['ref'\] is a reference .* all lanes share"):
        bx.vmap(read, (None, 0), **options)({"ref": ref}, x)
    with pytest.raises(bx.UnsupportedError, match="the function closes over is a reference"):
        bx.vmap(lambda x: ref[0] + x, **options)(x)
    same(bx.vmap(read, (None, 0), **options)({"ref": ref[...]}, x), x)
    same(bx.vmap(read, (None, 0), batch_size=4)({"ref": ref}, x), x)  # of one chunk


XS_DONATED = np.array([0.5, -1.0, 2.0, 3.0, -0.25], np.float32)
C = np.array([1.0, 2.0, np.nan, 4.0], np.float32)

walk = jax.jit(lambda x, c: (x + c, c + 1), donate_argnums=1)  # one result is the same for all
more = jax.jit(lambda c: c + 1, donate_argnums=0)


def first_lane(x):
    return walk(x, jnp.asarray(C) * 1)


def read_before(x):
    c = jnp.asarray(C) * 1
    return x + c, more(c)


@jax.jit
def cut_by_a_collective(x):
    c = jnp.asarray(C) * 1
    total, after = walk(jax.lax.psum(x, "i"), c)
    return x + 0 * total + C, after


EXPECTED = XS_DONATED[:, None] + C, np.broadcast_to(C + 1, (5, 4))


@pytest.mark.parametrize("function", [first_lane, read_before, cut_by_a_collective])
@pytest.mark.compiles(60)
def test_what_is_donated_inside_is_there_for_each_chunk(function):
    batched = bx.vmap(function, axis_name="i", batch_size=2)
    around = {
        "eager": lambda xs: batched(xs),
        "jax.vmap": lambda xs: [y[0] for y in jax.vmap(batched)(xs[None])],
        "jit": jax.jit(batched),
    }
    for name, call in around.items():
        for got, expected in zip(call(jnp.asarray(XS_DONATED)), EXPECTED, strict=True):
            np.testing.assert_array_equal(got, expected, name)
