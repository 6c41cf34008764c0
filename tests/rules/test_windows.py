"""Sliding windows, against the loop over examples."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from support.batches import batch
from support.oracle import quickly

SHAPE = (4, 5)
WINDOW = dict(
    window_dimensions=(2, 3),
    window_strides=(2, 1),
    padding=((0, 1), (1, 0)),
    base_dilation=(1, 2),
    window_dilation=(1, 1),
)
PLAIN = {k: WINDOW[k] for k in ("window_dimensions", "window_strides", "padding")}
START = {"reduce_window_sum": 0.0, "reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}
COMPUTE = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}


def pool(name, window=WINDOW):
    return lambda x: lax.reduce_window(x, START[name], COMPUTE[name], **window)


@pytest.mark.parametrize("name", START)
def test_derivatives_of_pooling(name):
    quickly(jax.jit(pool(name, PLAIN)), batch(SHAPE, 1), in_axes=1, nested=True)
