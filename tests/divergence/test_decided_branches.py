"""Branches of which it is decided while the program runs for whom they do: few lanes, or all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence.runner import Runner
from batchax.execution.chunk_loop import (
    ActiveMask,
    AllAtOnce,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.programs.thresholds import TABLE

from support.forced import DECIDED
from support.oracle import same

LANES = 40
SHARES = {"nobody": 0, "one": 1, "few": 17, "half": 20, "all": LANES}


def takers(count):
    """Which lanes take the branch."""
    return np.random.default_rng(count).permutation(LANES) < count


def data():
    """Squares, of which lanes that do not take the branch must not see the roots."""
    x = np.random.default_rng(0).normal(size=(LANES, 3))
    return jnp.asarray(x, float), jnp.asarray(np.eye(3)[::-1] + 0.1, float)


def model(taken, x, w):
    """Results that are computed, handed on, integers, and keys; the index of the lane."""

    def expensive(x, w, key):
        key = jax.random.fold_in(key, lax.axis_index("lanes"))
        inner = lax.cond(x[0] > 0, lambda x: jnp.log(x @ w), jnp.cos, jnp.abs(x) + 1)
        return inner.cumsum(), x, (x > 0).sum(), key

    other = lambda x, w, key: (2 * x, x, 7, key)
    y, z, n, key = lax.cond(taken, expensive, other, x, w, jax.random.key(3))
    return y, z * 2, n, jax.random.key_data(key)


def roots(taken, x, w):
    return lax.cond(taken, lambda x, w: jnp.sqrt(x @ w), lambda x, w: 2 * x, x, w)


def everything(divergence):
    """Uses of a batched function, as one function."""
    vmap = functools.partial(bx.vmap, divergence=divergence)
    f = vmap(roots, (0, 0, None))

    def uses(taken, x, w):
        number = lambda x, w: jnp.sum(jnp.sin(f(taken, x, w)))
        of_each = lambda t, x, w: jax.grad(lambda x: roots(t, x, w).sum())(x)
        masks = jnp.stack([taken, ~taken, taken & True])
        return {
            "values": vmap(model, (0, 0, None), axis_name="lanes")(taken, x, w),
            "gradient": jax.grad(number, (0, 1))(x, w),
            "of each": vmap(of_each, (0, 0, None))(taken, x, w),
            "scan": lax.scan(lambda x, t: (f(t, x, w), None), x, masks)[0],
            "outer": jax.vmap(f, (0, None, None))(masks, x, w),
            "shared mask": jax.vmap(f, (None, 0, None))(taken, jnp.stack([x, x + 1]), w),
            "both": vmap(f, (0, None, 0))(masks, x, jnp.stack([w, w + 1, w])),
            "chunks": vmap(roots, (0, 0, None), batch_size=24)(taken, x, w),
        }

    return uses


@functools.cache
def compiled(double):
    return [jax.jit(everything(d)) for d in (DECIDED, "predicate")]


@pytest.mark.each_commit(2)
@pytest.mark.parametrize("share", SHARES)
def test_results_are_those_of_masked_lanes(share):
    x, w = data()
    taken = takers(SHARES[share])
    x = jnp.where(taken[:, None], jnp.abs(x), x)
    x = x.at[3].set(jnp.where(taken[3], x[3], jnp.nan))
    ours, masked = (f(taken, x, w) for f in compiled(x.dtype))
    for use, expected in masked.items():
        same(ours[use], expected, {"rtol": 2e-4, "atol": 2e-5}, use)


def products(x, w):
    for _ in range(20):
        x = jnp.tanh(w @ x)
    return x


def one_of_two(taken, x, w):
    return lax.cond(taken, products, lambda x, w: x / 2, x, w)


def two(taken, x, w):
    return lax.cond(taken, products, lambda x, w: products(-x, w), x, w)


def within(taken, x, w):
    """A branch in a branch that is compiled twice."""
    inside = lambda x, w: one_of_two(x[0] > 0, products(x, w), w)
    return lax.cond(taken, inside, lambda x, w: x, x, w)


def short(taken, x, w):
    return lax.cond(taken, lambda x, w: w @ x, lambda x, w: x, x, w)


def ordered(sort):
    """One expensive operation, beside which to move a lane is nothing."""
    wide = lambda x: jnp.outer(x, x).ravel()
    return lambda taken, x, w: lax.cond(taken, lambda x: sort(wide(x)), wide, x)


def explained(fun, lanes=1024, **limits):
    how = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, **limits))
    args = jnp.arange(lanes) % 20 == 0, jnp.ones((lanes, 24)), jnp.ones((24, 24))
    return bx.explain(fun, (0, 0, None), divergence=how)(*args)


def test_what_runs_is_chosen_by_what_a_branch_costs():
    conds = lambda f, **limits: [
        (e.notes["divergence"], e.notes.get("apart", []), e.notes.get("decided", []))
        for e in explained(f, **limits).equations
        if e.primitive == "cond"
    ]
    assert conds(one_of_two) == [("grouped", [1], [1])]
    # 100 calls of few lanes do not gain back what compiling takes longer.
    assert conds(one_of_two, lanes=256) == [("masked", [], [])]
    assert conds(one_of_two, min_gain_per_operation=1e8) == [
        ("masked", [], [])
    ]  # it would take too long
    assert conds(short) == [("masked", [], [])]
    # Blocks of it cost what all lanes do, except for an operation that many lanes run otherwise.
    assert conds(ordered(jnp.sort)) == [("grouped", [1], [])]
    assert conds(ordered(jnp.sort), min_core_work=float("inf")) == [("grouped", [1], [1])]
    assert conds(ordered(lambda x: 1.0 * jnp.argsort(x[:256]).sum() + x)) == [("grouped", [1], [1])]
    # Whoever takes one of two spares the other: nothing is to be decided.
    assert conds(two) == [("grouped", [0, 1], [])]


def test_a_branch_inside_another_is_compiled_no_more_than_twice():
    args = jnp.zeros(256, bool), jnp.ones((256, 24)), jnp.ones((24, 24))
    for fun in (one_of_two, within):
        how = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))
        program = jax.jit(bx.vmap(fun, (0, 0, None), divergence=how)).lower(*args).as_text()
        assert program.count("tanh") <= 2 * 20 * (1 + (fun is within))


def test_where_all_run_nobody_asks_whether_one_does():
    args = jnp.zeros(1024, bool), jnp.ones((1024, 24)), jnp.ones((24, 24))
    steps = lambda x, w: lax.fori_loop(0, 20, lambda _, x: jnp.tanh(w @ x), x)
    f = lambda taken, x, w: lax.cond(taken, steps, lambda x, w: x, x, w)
    how = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))
    text = jax.jit(bx.vmap(f, (0, 0, None), divergence=how)).lower(*args).as_text()
    assert text.count("stablehlo.tanh") == 2
    assert "stablehlo.or across" not in text  # of the lanes that take it


def test_a_short_branch_that_would_copy_what_lanes_share_is_compiled_once():
    steps = lambda x, w: lax.fori_loop(0, 20, lambda _, x: jnp.tanh(w @ x), x)
    f = lambda taken, x, w: lax.cond(taken, steps, lambda x, w: x, x, w)
    typed = jax.ShapeDtypeStruct
    args = typed((8192,), bool), typed((8192, 64), np.float32), typed((64, 64), np.float32)

    def compiled(**limits):
        how = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, **limits))
        batched = bx.vmap(f, (0, 0, None), divergence=how)
        gradient = jax.grad(lambda taken, x, w: batched(taken, x, w).sum(), (1, 2))
        programs = (jax.jit(g).lower(*args).as_text() for g in (batched, gradient))
        return [text.count("stablehlo.tanh") for text in programs]

    assert compiled() == [1, 1]
    assert compiled(min_core_work=float("inf")) == [2, 2]


def test_nobody_runs_or_some_or_all():
    """Chunks return ones, all lanes at once twos."""

    def of(number):
        return ChunkBody(lambda width: lambda start, mask: [jnp.full(width, number)])

    every = AllAtOnce(of(2), 0.5)
    loop = ChunkLoop(of(1), (ActiveMask(),), (Gathered(0),), LANES, 16, all_at_once=every)
    run = jax.jit(lambda mask: chunk_loop(loop, [mask])[0])
    for count in (0, 1, 17, 19, 20, LANES):
        taken = takers(count)
        expected = np.full(LANES, 2) if count >= 20 else taken * 1
        np.testing.assert_array_equal(run(taken), expected)
        np.testing.assert_array_equal(chunk_loop(loop, [jnp.asarray(taken)])[0], expected)


def test_explain_says_what_runs():
    options = {"in_axes": (0, 0, None), "divergence": DECIDED, "measure": True, "time_limit": 0}
    explanation = bx.explain(short, **options)(takers(3), *data())
    assert "branch 1 for the lanes that take it, or for all if most do" in str(explanation)
    assert [s.way for s in explanation.steps] == ["decided"]


def test_devices():
    x, w = data()
    x, taken = jnp.abs(x), takers(20)
    how = Runner(thresholds=DECIDED.thresholds._replace(max_devices=1))
    f = functools.partial(bx.vmap, one_of_two, (0, 0, None))
    got = jax.jit(f(divergence=how, mesh="all"))(taken, x, w)
    same(got, jax.jit(f(divergence="predicate"))(taken, x, w))
