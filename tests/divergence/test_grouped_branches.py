"""Branches that run for the lanes that take them: `vmap(..., divergence="compact")`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support import oracle
from support.operations import equations
from support.oracle import agree, at_once, example, same

N, D = 11, 8
NARROW = bx.Compact(width=4)
compact = functools.partial(bx.vmap, divergence=NARROW)
X = example((N, D), seed=1)
W = example((D, D), seed=2) / 3
WS = example((N, D, D), seed=3) / 3
P = jnp.asarray([True, False, False, True, True, False, True, True, False, True, False])
SOME = {"rtol": 1e-3, "atol": 2e-4}


def steps(x, w, length=400):
    """What costs enough to be run for some lanes only."""
    return lax.scan(lambda x, _: (0.99 * x + 0.02 * jnp.tanh(w @ x), None), x, None, length)[0]


def model(p, x, w):
    return lax.cond(p, lambda x: (steps(x, w), x[0]), lambda x: (x * 2, x[1] ** 2), x)


def loops_over_picks(fun, *args):
    """How many chunk loops over some lanes only `fun` stages to."""
    loops = (eqn.params["loop"] for eqn in equations(fun, *args) if "loop" in eqn.params)
    return sum(loop.gathers for loop in loops)


def check(fun, *args, in_axes=0, vmap=compact, loops=1, derivatives=True, types=True, **options):
    """As lanes that are masked: values, types, and gradients if wanted."""
    axes = {"in_axes": in_axes, **options}
    ours, masked = vmap(fun, **axes), bx.vmap(fun, **axes)
    assert loops_over_picks(ours, *args) == loops
    moving = [i for i, x in enumerate(args) if oracle.is_inexact(x)]

    def everything(f):
        ways = {"values": f}
        if derivatives and moving:
            ways["gradients"] = jax.grad(total(f), moving)
        return oracle.together(ways)

    got, expected = at_once(everything(ours), everything(masked))(*args)
    same(got["values"], expected["values"])
    if in_axes == 0 and not options and types:
        expected_types = jax.eval_shape(jax.vmap(fun), *args)
        jax.tree.map(oracle.same_type, got["values"], expected_types)
    if derivatives and moving:
        same(got["gradients"], expected["gradients"], SOME)


def total(fun):
    """A number that depends on all that `fun` returns."""

    def of(*args):
        outs = [y for y in jax.tree.leaves(fun(*args)) if oracle.is_inexact(y)]
        return sum(jnp.sum(jnp.sin(y)) for y in outs)

    return of


AXES = [(0, 0, None), (0, 1, 0), (0, None, None), (0, 0, 2)]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
@pytest.mark.each_commit(2)
def test_cond(in_axes):
    x = {0: X, 1: X.T, None: X[0]}[in_axes[1]]
    w = {None: W, 0: WS, 2: jnp.moveaxis(WS, 0, 2)}[in_axes[2]]
    # What all lanes share is computed once.
    loops = 0 if in_axes == (0, None, None) else 1
    check(model, P, x, w, in_axes=in_axes, out_axes=(1, 0), loops=loops)
    ours, alone = compact(model, in_axes), oracle.in_turn(model, in_axes)
    if in_axes == AXES[0]:  # outside of jit
        same(ours(P, x, w), jax.jit(alone)(P, x, w), SOME)
    else:
        agree(ours, alone, P, x, w, tolerance=SOME)


SWITCH = [
    lambda x, w: (steps(x, w), 1.0),
    lambda x, w: (x + 1, 2.0),
    lambda x, w: (jnp.log1p(steps(x, w) ** 2), x[0]),
    lambda x, w: (x, x[1]),
]


@functools.lru_cache
def switches(width):
    f = lambda i, x, w: lax.switch(i, SWITCH, x, w)
    axes = (0, 0, None)
    made = [compact(f, axes, divergence=bx.Compact(width=width)), bx.vmap(f, axes)]
    return at_once(
        *[oracle.together({"values": f, "grad": jax.grad(total(f), (1, 2))}) for f in made]
    )


@settings(max_examples=12)
@given(st.lists(st.integers(-1, 5), min_size=N, max_size=N), st.sampled_from([1, 4]))
def test_drawn_indices(indices, width):
    same(*switches(width)(jnp.asarray(indices), X, W), SOME)


def test_types():
    w = W.astype(jnp.bfloat16)

    def f(p, x, n, c, k):
        def heavy():
            y = steps(x, w, 3000)
            return y, 1.0, n + 1, c * 2, ~p, jax.random.fold_in(k, 3), 7

        return lax.cond(p, heavy, lambda: (x, 2.0, n, c, p, k, 8))

    args = (
        P,
        X.astype(jnp.bfloat16),
        example((N,), jnp.int8),
        example((N,), jnp.complex64),
        jax.random.split(jax.random.key(0), N),
    )
    check(f, *args, derivatives=False)


OUTER = 3
PAIRS = example((OUTER, N, D), seed=7)
MASKS = jnp.asarray(np.random.default_rng(8).random((OUTER, N)) < 0.4)


@pytest.mark.parametrize("name", ["i", "o"])
def test_collectives_are_refused(name):
    f = lambda p, x: lax.cond(p, lambda x: lax.psum(steps(x, W), name), lambda x: x, x)
    inner = compact(f, axis_name="i")
    with pytest.raises(UnsupportedError, match=r"test_grouped_branches.py.*psum.*predicate"):
        jax.vmap(inner, axis_name="o")(MASKS, PAIRS)


def test_what_stays_masked():
    def with_reference(p, x):
        ref = jax.new_ref(x)

        def heavy(x):
            ref[...] = steps(x, W)
            return ref[...]

        return lax.cond(p, heavy, lambda x: x, x)

    check(with_reference, P, X, loops=0, types=False)

    def creates_reference(p, x):
        def heavy(x):
            ref = jax.new_ref(steps(x, W))
            ref[...] += 1
            return ref[...]

        return lax.cond(p, heavy, lambda x: x, x)

    check(creates_reference, P, X, loops=0, types=False)

    def closes_over(p, x):
        y = jnp.sin(x)

        @jax.custom_jvp
        def g(z):
            return steps(z, W)

        @g.defjvp
        def rule(primals, tangents):
            return g(*primals), tangents[0] * y

        return lax.cond(p, g, lambda z: z, x)

    check(closes_over, P, X, loops=0, derivatives=False)


def test_a_rule_that_is_told_the_name_is_masked():
    ruled = bx.custom_vmap(lambda x: steps(x, W))

    @ruled.def_vmap
    def rule(axis_size, in_batched, x, *, axis_name):
        return bx.vmap(lambda x: steps(x, W), axis_name=axis_name)(x), True

    f = lambda p, x: lax.cond(p, ruled, lambda x: x, x)
    check(f, P, X, axis_name="i", loops=0, derivatives=False)


def test_a_result_of_dtype_float0():
    zero = np.zeros((), jax.dtypes.float0)

    @jax.jit
    def tangents(x, i):
        return jax.jvp(lambda x, i: (steps(x, W), i * 2), (x, i), (x, zero))[1]

    def fun(p, x, i):
        return lax.cond(p, tangents, lambda x, i: (x, zero), x, i)

    numbers = jnp.arange(N)
    assert loops_over_picks(compact(fun), P, X, numbers) == 1
    same(compact(fun)(P, X, numbers), bx.vmap(fun)(P, X, numbers), SOME)


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a batch"])
def test_lanes_that_gain_nothing_by_width_run_alone(around):
    # A CPU sorts one row after another. A slice compiles sooner than a gather and a scatter.
    f = lambda p, x: lax.cond(p, jnp.sort, jnp.negative, x)
    ours, masked = bx.vmap(f, divergence="compact"), bx.vmap(f, divergence="predicate")
    p, x = jnp.tile(P, 24), example((24 * N, 256))
    if around:
        ours, masked = bx.vmap(ours), bx.vmap(masked)
        p, x = jnp.stack([p, ~p]), jnp.stack([x, -x])
    else:
        text = jax.jit(ours).lower(p, x).compile().as_text()
        assert "while(" in text
        assert not any(f"{slow}(" in text for slow in ("gather", "scatter"))
    gradient = lambda f: jax.grad(lambda x: total(f)(p, x))
    same(*at_once(ours, masked)(p, x))
    same(*at_once(gradient(ours), gradient(masked))(x), SOME)
