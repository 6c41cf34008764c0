"""Lanes of nested loops that are expensive to move: all run first, then the last in a window."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence.runner import Runner

from support.oracle import same


def test_where_moving_lanes_is_expensive_all_run_first():
    limits = TABLE["cpu-small"]._replace(kernel_lanes=0, cores=1, max_devices=1_000)
    way = Runner(thresholds=limits._replace(min_work=0.0, max_move_steps_nested=0.5))

    def draws(counts, x, matrix):
        def draw(carry, count):
            step = lambda c: (c[0] + 1, jnp.tanh(matrix @ c[1] * (c[0] + 1)))
            _, x = lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), carry))
            return x, x[0]

        return lax.scan(draw, x, counts)

    random = np.random.default_rng(0)
    counts = jnp.asarray(random.pareto(1.0, (256, 3)).clip(0, 30), jnp.int32).at[7].set(40)
    xs, matrices = (
        jnp.asarray(random.normal(size=(256, 24))),
        jnp.asarray(random.normal(size=(256, 24, 24)) / 9),
    )
    batched = bx.vmap(draws, divergence=way)
    (told,) = bx.explain(draws, divergence=way)(counts, xs, matrices).equations
    assert told.notes["widths"] == (256, 64)
    args = counts, xs, matrices
    same(*jax.jit(lambda: (batched(*args), jax.vmap(draws)(*args)))())
    expensive = Runner(thresholds=way.thresholds._replace(max_move_steps_nested=0.0))
    (told,) = bx.explain(draws, divergence=expensive)(counts, xs, matrices).equations
    assert told.notes["widths"] == (256,)
