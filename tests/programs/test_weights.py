"""What programs are taken to cost, for choices that are made before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.programs.cost import (
    FINDINGS,
    PLANS,
    ROWS,
    STEPS,
    VECTORIZED,
    Cost,
    cost_of_program,
    reading_symbols,
)

W = np.ones((50, 50), np.float32)
X = np.ones(50, np.float32)


def step(x):
    return jnp.tanh(x @ W)


def cost(fun, *args, **options):
    return cost_of_program(jax.make_jaxpr(fun)(*args), **options)


@pytest.mark.parametrize("differs", [None, [True]], ids=["alone", "together"])
def test_a_loop_costs_no_less_than_a_step(differs):
    loops = [
        lambda x: bx.bounded_while(lambda c: c.sum() < 3, step, x, 4),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, step, x),
        lambda x: bx.scan(lambda c, _: (step(c), None), until=lambda c: c.sum() < 3)(x, x)[0],
        lambda x: jax.jit(step)(x),
        lambda x: jax.lax.cond(x.sum() < 3, step, jnp.sin, x),
    ]
    once = cost(step, X, differs=differs)
    for loop in loops:
        whole = cost(loop, X, differs=differs, steps=STEPS)
        assert whole.launches >= once.launches
        assert all(w.time(whole) >= w.time(once) for w in (VECTORIZED, ROWS, FINDINGS, PLANS))


def test_what_lanes_share_is_read_once_and_done_once():
    for times in (1, 3):
        f = lambda x, w: jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)
        own, shared = (cost(f, X, W, differs=[True, each]) for each in (True, False))
        assert own.flops == shared.flops == times * (2 * 50 * 50 + 1)
        assert own.bytes - shared.bytes == times * W.nbytes
        assert cost(f, X, W, differs=[False, False]) == Cost()


def test_places_that_depend_on_data():
    rows = np.ones((9, 4), np.float32)
    assert cost(lambda x: x.at[np.arange(3)].get(mode="clip"), rows).places == 3
    assert cost(lambda x: x.at[np.arange(17)].get(mode="clip"), X).places == 3  # eight numbers each
    assert cost(lambda x: x.at[np.arange(3)].set(1.0, mode="drop"), X).places == 6
    assert cost(jnp.linalg.cholesky, np.ones((5, 2, 2), np.float32)).calls == 5


def test_sizes_that_are_symbols_can_be_read_as_numbers():
    (n,) = jax.export.symbolic_shape("n")
    rows = jax.make_jaxpr(jax.nn.relu)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    with reading_symbols(lambda size: 7):
        assert cost_of_program(rows).flops == 21
    assert cost_of_program(rows).flops == 3
