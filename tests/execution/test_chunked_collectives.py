"""Collectives in chunks span the whole batch, as without chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.chunks import check_chunks
from support.oracle import agree, example, same

LANES = 4
GROUPS = [[0, 3], [2, 1]]
UNEVEN = [[2], [0, 3, 1]]
X = example((LANES, 4, 8))
W = example((8,), seed=2)

WITH_GROUPS = {
    "psum": lambda x, i, g: lax.psum(x, i, axis_index_groups=g),
    "pmean": lambda x, i, g: lax.pmean(x, i, axis_index_groups=g),
    "pmax": lambda x, i, g: lax.pmax(x, i, axis_index_groups=g),
    "all_gather": lambda x, i, g: lax.all_gather(x, i, axis_index_groups=g, axis=1),
    "all_to_all": lambda x, i, g: lax.all_to_all(x[:2], i, 0, 1, axis_index_groups=g),
}


def around(collective):
    """A collective with work before and after it, and values that cross."""

    def fun(x, w):
        y = jnp.sin(x * w)
        out = collective(y, "i")
        return jax.tree.map(lambda z: z * 2 + y.sum(), out), y

    return fun


@pytest.mark.parametrize("groups", [GROUPS, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", WITH_GROUPS)
@pytest.mark.each_commit(5)
def test_groups(name, groups):
    if groups is UNEVEN and name not in ("psum", "pmax"):
        return  # these need groups of one size
    fun = around(lambda x, i: WITH_GROUPS[name](x, i, groups))
    derivatives = (name, groups) not in (("pmax", GROUPS), ("pmax", UNEVEN))
    options = dict(in_axes=(0, None), axis_name="i", batch_size=3, eager=False)
    check_chunks(fun, X, W, derivatives=derivatives, **options)


def test_what_crosses_is_kept_or_computed_again():
    """Little is kept; much (here: more than the inputs of a lane) is recomputed."""
    counts = []

    def counted(x):
        counts.append(None)
        return x

    call = lambda x: jax.pure_callback(counted, jax.typeof(x), x, vmap_method="sequential")

    def small(x):
        y = call(x)
        return y - lax.pmean(y, "i")

    def large(x):
        y = call(jnp.broadcast_to(x, (3, *x.shape)))
        return (y - lax.pmean(y.sum(0), "i")).sum(0)

    x = example((5, 2))
    for fun, times in ((small, 5), (large, 10)):
        counts.clear()
        got = jax.jit(bx.vmap(fun, axis_name="i", batch_size=2))(x)
        assert len(counts) == times
        same(got, bx.vmap(fun, axis_name="i")(x))


def test_of_values_that_are_not_batched():
    def fun(x, w):
        total = lax.psum(w, "i")
        return total, lax.pmax(w, "i"), lax.all_gather(w, "i"), x * total, lax.psum(1, "i")

    x = example((5, 3))
    out_axes = (None, None, None, 0, None)
    options = dict(in_axes=(0, None), axis_name="i")
    check_chunks(fun, x, W[:3], out_axes=out_axes, **options)
    check_chunks(fun, x, W[:3], **options)


def test_a_shadowed_name_is_that_of_the_inner_axis():
    fun = lambda x: bx.vmap(lambda y: y - lax.pmean(y, "i"), axis_name="i", batch_size=2)(x)
    x = example((5, 3))
    same(bx.vmap(fun, axis_name="i", batch_size=2)(x), x - x.mean(1, keepdims=True))


def test_index_of_the_lane_in_loops_and_branches():
    def fun(x, n):
        i = lax.axis_index("i")
        counted = lax.fori_loop(0, 3, lambda _, c: c + lax.axis_index("i"), 0)
        _, scanned = lax.scan(lambda c, y: (c, y * lax.axis_index("i")), 0, x)
        waited = lax.while_loop(
            lambda c: c < lax.axis_index("i"), lambda c: c + 1 + lax.axis_index("i") * 0, 0
        )
        chosen = lax.cond(
            n > 1, lambda x: x * lax.axis_index("i"), lambda x: x + lax.axis_index("i"), x
        )
        switched = lax.switch(i % 2, [jnp.sin, lambda x: x * lax.axis_index("i")], x)
        return i, counted, scanned, waited, chosen, switched

    x, n = example((5, 3)), jnp.arange(5)
    check_chunks(fun, x, n, axis_name="i", forward=False)
    for batch_size in (1, 4):
        got = jax.jit(bx.vmap(fun, axis_name="i", batch_size=batch_size))(x, n)
        same(got[0], jnp.arange(5, dtype=jnp.int32))
        same(got[1], 3 * jnp.arange(5, dtype=jnp.int32))


IN_LOOPS = {
    "scan": lambda x: lax.scan(lambda c, _: (lax.psum(c, "i"), None), x, None, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: c + lax.psum(c, "i"), x),
    "while of each lane": lambda x: lax.while_loop(
        lambda c: c.sum() < 3, lambda c: jnp.abs(c) + 1 + lax.pmean(jnp.abs(c), "i"), x
    ),
    "fori_loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c - lax.pmean(c, "i"), x),
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: lax.psum(x, "i"), lambda x: x, x),
    "cond of all": lambda x: lax.cond(
        lax.psum(x[0], "i") > 0, lambda x: lax.psum(x, "i"), lambda x: x, x
    ),
    "jit in scan": lambda x: lax.scan(
        lambda c, _: (jax.jit(lambda y: lax.all_gather(y, "i")[0])(c), None), x, None, length=2
    )[0],
}


@pytest.mark.parametrize("name", IN_LOOPS)
@pytest.mark.each_commit(4)
def test_a_collective_in_a_loop_runs_its_steps_in_chunks(name):
    fun = lambda x: IN_LOOPS[name](jnp.sin(x) - lax.pmean(x, "i")) * x
    forward_only = "while" in name
    x = example((5, 3))
    options = dict(axis_name="i", derivatives=not forward_only, eager=name == "scan")
    check_chunks(fun, x, **options)
    if name == "scan":
        check_chunks(fun, x, **options, residuals="keep", second=True)


def test_effects_around_and_in_a_loop_with_a_collective_happen_once():
    calls = []

    def told(kind, x):
        note = lambda x: calls.append(kind) or np.asarray(x)
        return jax.experimental.io_callback(note, jax.typeof(x), x, ordered=True)

    def fun(x):
        step = lambda c, _: (told("step", c) - lax.psum(c, "i"), None)
        return lax.scan(step, told("before", x), None, length=2)[0]

    x = example((5, 3))
    got = jax.jit(bx.vmap(fun, axis_name="i", batch_size=2))(x)
    jax.effects_barrier()
    assert calls == ["before"] * 5 + ["step"] * 10
    rest = x - x.sum(0)
    same(got, rest - rest.sum(0))


def test_memory_of_a_step_with_a_collective_is_that_of_a_chunk():
    def fun(x, w):
        def step(c, _):
            y = jnp.tanh(jnp.outer(c, w))
            return c + y.sum(1) - lax.pmean(c, "i"), None

        return lax.scan(step, x, None, length=3)[0].sum()

    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (256,)))
    chunked = bx.vmap(fun, (0, None), axis_name="i", batch_size=2)
    for of in (chunked, jax.grad(lambda x, w: chunked(x, w).sum())):
        stats = jax.jit(of).lower(x, w).compile().memory_analysis()
        assert stats.temp_size_in_bytes < 64 * 256 * 256 * 4 / 4


# Chunks in chunks


IN_BOTH = {
    "psum": lambda x, w: jnp.sin(x * w) - lax.psum(jnp.cos(x * w), "i"),
    "pmax": lambda x, w: jnp.sin(x * w) - lax.pmax(x, "i"),
    "all_gather": lambda x, w: x * lax.all_gather(jnp.cos(x * w), "i").sum(0),
    "ppermute": lambda x, w: x * lax.ppermute(x * w, "i", [(0, 2), (2, 4), (4, 0)]),
    "axis_index": lambda x, w: x * w * lax.axis_index("i"),
    "both": lambda x, w: jnp.sin(x * w) - lax.psum(x, ("i", "j")),
    "one after the other": lambda x, w: x - lax.psum(lax.pmean(jnp.sin(x), "j") * x * w, "i"),
    "twice": lambda x, w: standardised(standardised(x * w)),
    "scan": lambda x, w: lax.scan(lambda c, y: (jnp.sin(y) - lax.pmean(c, "i"), c), x, x * w)[0],
    "bounded_while": lambda x, w: bx.bounded_while(
        lambda c: jnp.abs(c).sum() < 3, lambda c: 2 * c * w + lax.pmean(c, "i"), x, 4
    ),
    "cond": lambda x, w: lax.cond(w.sum() < 0, jnp.sin, lambda x: x - lax.pmean(x * x, "i"), x * w),
}


def standardised(x):
    return jnp.sin(x) - lax.pmean(x * x, "i")


def in_both(fun, outer, inner):
    rows = bx.vmap(fun, (0, None), axis_name="j", **inner)
    return bx.vmap(rows, (0, None), axis_name="i", **outer)


CHUNKS = {"batch_size": 2}


@pytest.mark.parametrize(
    ("outer", "inner", "names"),
    [
        (CHUNKS, CHUNKS, ("psum", "all_gather", "both", "bounded_while")),
        ({"batch_size": 2, "residuals": "keep"}, CHUNKS, ("twice", "scan")),
        ({"batch_size": 3}, {"batch_size": 2, "residuals": "keep"}, ("twice", "scan")),
        ({"mesh": "all"}, CHUNKS, ("ppermute", "axis_index", "scan", "bounded_while")),
        ({"mesh": "all", "batch_size": 1}, CHUNKS, ("twice", "cond")),
    ],
    ids=["plain", "outer keeps", "inner keeps", "mesh", "mesh and chunks"],
)
@pytest.mark.each_commit(0)
def test_derivatives_of_chunks_in_chunks_that_meet_over_the_outer_axis(outer, inner, names):
    fun = lambda x, w: sum(IN_BOTH[name](x, w) for name in names)

    def every(*how):
        def of(x, w):
            out, back = jax.vjp(in_both(fun, *how), x, w)
            return out, back(jnp.cos(x)), jax.jvp(in_both(fun, *how), (x, w), (w * x, w))[1]

        return of

    x, w = example((5, 3, 2), seed=3), example((2,), seed=4)
    agree(every(outer, inner), every({}, {}), x, w)


def test_collectives_over_an_outer_axis_run_anywhere():
    """Only the chunked axis is in pieces: others have all their lanes in each chunk."""

    def fun(x):
        def step(c, y):
            return c + lax.psum(y, "outer"), c

        total, _ = lax.scan(step, 0.0, x)
        return total - lax.pmean(total, "inner")

    x = example((3, 5, 2))
    nested = lambda inner: bx.vmap(inner(fun, axis_name="inner"), axis_name="outer")
    chunked = functools.partial(bx.vmap, batch_size=2)
    agree(nested(chunked), nested(bx.vmap), x)
    gradient = lambda inner: jax.grad(lambda x: jnp.sin(nested(inner)(x)).sum())
    agree(gradient(chunked), gradient(bx.vmap), x)
