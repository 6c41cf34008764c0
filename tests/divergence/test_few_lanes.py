"""A branch that few lanes take runs for these one after another, as one function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.analysis.one_function import fits_single_kernel
from batchax.analysis.thresholds import TABLE, device_kind, thresholds_here
from batchax.execution.chunk_loop import ChunkLoop
from batchax.jaxprs.bodies import with_inside

from support.oracle import loop, same

LANES = 24
SIDE = 6


@pytest.fixture(autouse=True)
def for_few(monkeypatch):
    """Lets few lanes run by themselves wherever that may be: these branches are small."""
    limits = thresholds_here()._replace(
        max_devices=100,
        min_work=0.0,
        min_unfused_share=0.0,
        min_gain=1e9,
        min_gain_per_operation=0.0,
        min_serial_gain=1.5,
    )
    monkeypatch.setitem(TABLE, device_kind(), limits)


def new_board(key):
    """Draws, an update of one place, a running sum, a search: as environments start again."""
    key, at, odds = jax.random.split(key, 3)
    row, column = jax.random.randint(at, (2,), 0, SIDE)
    board = jnp.zeros((SIDE, SIDE)).at[row, column].set(jax.random.uniform(odds))
    free = jnp.cumsum((board == 0).ravel())
    return board, jnp.searchsorted(free, 7), key


def turn(board, place, key, over):
    """A step of an environment that starts again when it is over."""
    start = lambda board, place, key: new_board(key)
    go_on = lambda board, place, key: (jnp.sqrt(board + 1), place + 1, key)
    return lax.cond(over, start, go_on, board, place, key)


def state(share, seed=0):
    random = np.random.default_rng(seed)
    board = jnp.asarray(random.uniform(size=(LANES, SIDE, SIDE)), float)
    place, keys = jnp.arange(LANES, dtype="int32"), jax.random.split(jax.random.key(seed), LANES)
    return board, place, keys, jnp.asarray(random.uniform(size=LANES) < share)


def of_each(f, *args):
    return loop(jax.jit(f), args, [0] * len(args))


def singly(f, *args):
    """Of how many lanes the branches of a program run by themselves, for each chunk loop."""
    eqns = with_inside(jax.make_jaxpr(f)(*args).jaxpr.eqns)
    return [
        v.serial for e in eqns for v in e.params.values() if isinstance(v, ChunkLoop) and v.serial
    ]


def test_whether_few_or_many_take_a_branch_results_are_those_of_one_example():
    batched = bx.vmap(turn)
    most = max(singly(batched, *state(0.5)))
    assert 2 <= most < LANES
    compiled = jax.jit(batched)
    assert "xla_cpu_small_call" in compiled.lower(*state(0.5)).as_text()
    for share in (0, 0.1, 0.7, 1):
        args = state(share)
        expected = of_each(turn, *args)
        same(compiled(*args), expected)
        if share == 0.1:
            same(batched(*args), expected)
            assert 0 < args[-1].sum() <= most


def test_in_chunks_on_devices_and_under_other_vmaps():
    args = state(0.1)
    expected = of_each(turn, *args)
    same(jax.jit(bx.vmap(turn, batch_size=7))(*args), expected)
    halves = jax.tree.map(lambda x: x.reshape(2, LANES // 2, *x.shape[1:]), args)
    for outer in (jax.vmap, bx.vmap):
        outs = jax.jit(outer(bx.vmap(turn)))(*halves)
        assert singly(outer(bx.vmap(turn)), *halves)
        same(jax.tree.map(lambda x: x.reshape(LANES, *x.shape[2:]), outs), expected)
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.shard_map(bx.vmap(turn), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert singly(sharded, *args)
    same(jax.jit(sharded)(*args), expected)
    same(jax.jit(bx.vmap(turn, mesh=mesh))(*args), expected)


def test_in_a_loop_whose_carry_nobody_reads():
    def games(board, place, key, over):
        def step(carry, _):
            board, place, key = carry
            new = turn(board, place, key, (place + over) % 3 == 0)
            return new, new[1]

        return lax.scan(step, (board, place, key), length=4)[1]

    args = state(0.3)
    assert singly(bx.vmap(games), *args)
    same(jax.jit(bx.vmap(games))(*args), of_each(games, *args))


def test_gradients_and_a_nan_of_lanes_that_go_elsewhere():
    def f(x, y, taken):
        def slow(x, y):
            for _ in range(4):
                x = lax.cumsum(x) / (1 + x**2) * jnp.sqrt(y)
            return x

        return lax.cond(taken, slow, lambda x, y: 2 * x * y, x, y)

    x = jnp.linspace(0.1, 2, LANES * 5).reshape(LANES, 5)
    taken = jnp.arange(LANES) % 9 == 0
    y = jnp.where(taken, 2.0, -1.0)  # of which the root is a NaN
    batched = bx.vmap(f)
    assert singly(batched, x, y, taken)
    same(jax.jit(batched)(x, y, taken), of_each(f, x, y, taken))
    total = lambda batched: jax.jit(jax.grad(lambda x, y: batched(x, y, taken).sum(), (0, 1)))
    gradients = total(batched)(x, y)
    of_example = jax.grad(lambda *xs: f(*xs).sum(), (0, 1))
    same(gradients, of_each(of_example, x, y, taken))
    same(jax.jit(bx.vmap(of_example))(x, y, taken), gradients)
    tangents = jax.jit(lambda x: jax.jvp(lambda x: batched(x, y, taken), (x,), (x,))[1])(x)
    moved = lambda x, *xs: jax.jvp(lambda x: f(x, *xs), (x,), (x,))[1]
    same(tangents, of_each(moved, x, y, taken))


def thrice(x):
    return bx.bounded_while(lambda c: c[0] < 2, lambda c: jnp.sin(c), x, 3)


@pytest.mark.parametrize(
    ("what", "fits"),
    [
        (lambda x: jnp.max(x), False),  # of many a library makes these
        (lambda x: jnp.sum(x), False),
        (lambda x: x @ x, False),
        (lambda x: jnp.sort(x), False),
        (lambda x: x.at[jnp.array([1, 2])].set(0), False),
        (lambda x: lax.fft(x, "FFT", (8,)), False),
        (lambda x: lax.approx_max_k(x, 2)[0], False),  # "Failed to materialize symbols" of XLA
        (lambda x: jnp.nonzero(x, size=1), False),  # adds up, unseen, in an equation of JAX 0.12
        (lambda x: jnp.searchsorted(x, x[0]), True),
        (thrice, True),
        (lambda x: jax.vjp(thrice, x)[1](x), False),  # sorts what it keeps for the way back
        (lambda x: x.at[1].set(0), True),
        (lambda x: jnp.sum(x > 1) + jnp.argmax(x), True),
        (lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x), True),
    ],
)
def test_what_may_be_in_one_function(what, fits):
    assert fits_single_kernel(jax.make_jaxpr(what)(jnp.ones(8)).jaxpr) == fits
