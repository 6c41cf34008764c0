"""Programs of one row, put together at random: each row as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from support.rows import check_rows, ragged

W = jnp.asarray(np.random.default_rng(5).normal(size=(3, 3)) / 2, float)


def places(x):
    return jnp.arange(x.shape[0])[:, None]


def running(x):
    return lax.scan(lambda s, t: (jnp.tanh(s + t), s * t), jnp.ones(3), x)[1]


# From a row to one of the same shape.
STEPS = {
    "network": lambda x: jnp.tanh(x @ W),
    "activation": lambda x: jax.nn.relu(x) + 0.1 * x,
    "centre": lambda x: x - x.mean(0),
    "scale": lambda x: x / (1 + jnp.abs(x).sum(0)),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "attention": lambda x: jax.nn.softmax(x @ x.T / 2) @ x,
    "causal": lambda x: jnp.where(places(x) >= places(x).T, x @ x.T, 0) @ x / (1 + x.shape[0]),
    "cumsum": lambda x: jnp.cumsum(x, 0) / (1 + places(x)),
    "backwards": lambda x: x[::-1] * 2,
    "roll": lambda x: jnp.roll(x, 1, 0) + x,
    "shift": lambda x: jnp.concatenate([x[:1] * 0, x[:-1]]) - x,
    "sort features": lambda x: jnp.sort(x, 1),
    "sort": lambda x: jnp.sort(jnp.sin(3 * x), 0),
    "last": lambda x: x + x[-1],
    "positions": lambda x: x * jnp.cos(places(x)),
    "lookup": lambda x: W[jnp.clip(places(x)[:, 0], 0, 2)] + x,
    "recurrence": running,
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "inverse": lambda x: 1 / (2 + x * x),
    "transposed": lambda x: (W @ x.T).T,
    "pad and cut": lambda x: jnp.pad(x, ((1, 2), (0, 0)), constant_values=0.5)[1:-2] * 2,
    "derivative": jax.grad(lambda x: (jnp.sin(x) * x.mean(0)).sum()),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.7, x.shape),
}

ENDS = {
    "row": lambda x: x,
    "sum": lambda x: x.sum(0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "both": lambda x: (x.mean(), x[:, 0]),
    "differences": lambda x: x[1:] - x[:-1],
    "pairs": lambda x: (x[:, None] * x[None]).sum((0, 1)),
    "twice": lambda x: jnp.concatenate([x, 2 * x]),
}


@settings(max_examples=8)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    end=st.sampled_from(sorted(ENDS)),
    layout=st.sampled_from(["auto", "packed", "padded"]),
)
def test_random_programs_of_a_row(names, end, layout):
    def program(x):
        for name in names:
            x = STEPS[name](x)
        return ENDS[end](x)

    check_rows(program, ragged(3), layout=layout, tolerance=dict(rtol=2e-4, atol=2e-4))
