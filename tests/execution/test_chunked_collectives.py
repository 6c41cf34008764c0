"""Collectives in chunks span the whole batch, as without chunks."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.chunks import check_chunks
from support.oracle import example, same

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


def test_a_shadowed_name_is_that_of_the_inner_axis():
    fun = lambda x: bx.vmap(lambda y: y - lax.pmean(y, "i"), axis_name="i", batch_size=2)(x)
    x = example((5, 3))
    same(bx.vmap(fun, axis_name="i", batch_size=2)(x), x - x.mean(1, keepdims=True))


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
