"""Lanes that end at different steps, for tests of loops."""

import jax.numpy as jnp
import numpy as np
from jax import lax

N = 23  # two blocks of eight, and one more that begins within the second
COUNTS = jnp.asarray([3, 0, 40, 7, 7, 1, 0, 12, 5, 5, 90, 2, 1, 1, 0, 9, 33, 4, 4, 4, 6, 2, 0])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), float)


def power(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(0.9 * c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (0, x))
