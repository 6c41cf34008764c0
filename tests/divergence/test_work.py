"""What a program is taken to cost, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from batchax.divergence.cost import launches, work

W = np.ones((50, 50), np.float32)


def step(x):
    return jnp.tanh(x @ W)


def staged(fun):
    return jax.make_jaxpr(fun)(jnp.ones(50)).jaxpr


def test_a_loop_costs_no_less_than_a_step():
    loops = [
        lambda x: bx.bounded_while(lambda c: c.sum() < 3, step, x, 4),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, step, x),
        lambda x: bx.scan(lambda c, _: (step(c), None), until=lambda c: c.sum() < 3)(x, x)[0],
        lambda x: jax.jit(step)(x),
        lambda x: jax.lax.cond(x.sum() < 3, step, jnp.sin, x),
    ]
    for loop in loops:
        assert work(staged(loop)) >= work(staged(step))
        assert launches(staged(loop)) >= launches(staged(step))
