"""Functions of rows that are ragged along two axes, or that return such: against each row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import same
from support.rows import SHAPES, check_rows, check_rows_of_all, images, ragged

HW = bx.ragged("h", "w")
X = images()
CHANNELS = images(2)
KERNEL = np.random.default_rng(1).normal(size=(3, 2, 2, 2)).astype(np.float32)


def convolved(x, padding="SAME", strides=(1, 1)):
    kernel = jnp.asarray(KERNEL, x.dtype)
    dims = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x[None], kernel, strides, padding, dimension_numbers=dims)
    return out[0]


ELEMENTWISE = {
    "scaled": lambda x: 2 * x + 1,
    "by rows and columns": lambda x: jnp.arange(x.shape[0])[:, None] * x - jnp.arange(x.shape[1]),
    "chosen": lambda x: jnp.where(x > 0, x, jnp.exp(x)),
}
REDUCED = {
    "sum of all": lambda x: x.sum(),
    "sums": lambda x: (x.sum(0), x.sum(1)),
    "means": lambda x: (x.mean(0), x.mean(1), x.mean()),
    "greatest": lambda x: (x.max(0), x.max(1), x.min(), jnp.argmax(x, 1)),
    "spread": lambda x: (jnp.std(x, 1), jnp.var(x)),
    "softmax": lambda x: (jax.nn.softmax(x, 0), jax.nn.softmax(x, 1)),
    "normalized": lambda x: (x - x.mean(1, keepdims=True)) / (1 + x.std(0)),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=(0, 1)),
    "cumulative": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)),
}
CONTRACTED = {
    "gram": lambda x: (x @ x.T, x.T @ x),
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "outer": lambda x: x[:, :, None] * x[:, None, :],
    "with the identity": lambda x: x @ jnp.eye(x.shape[1]) + jnp.eye(x.shape[0]) @ x,
}
MOVED = {
    "transposed": lambda x: x.T,
    "flipped": lambda x: (x[::-1], x[:, ::-1], jnp.flip(x)),
    "sorted": lambda x: (jnp.sort(x, 0), jnp.sort(x, 1)),
    "neighbours": lambda x: (x[1:] - x[:-1], x[:, 1:] * x[:, :-1]),
    "with a border": lambda x: jnp.pad(x, ((1, 0), (2, 1))),
    "in one row": lambda x: x.ravel(),
    "triangles": lambda x: (jnp.tril(x), jnp.triu(x, 1)),
    "rolled": lambda x: (jnp.roll(x, 1, 0), jnp.roll(x, 1, 1)),
    "beside ones": lambda x: jnp.concatenate([x, jnp.ones((x.shape[0], 2))], 1),
    "diagonal": lambda x: jnp.diagonal(x @ x.T),
}
FAMILIES = {
    "elementwise": ELEMENTWISE,
    "reduced": REDUCED,
    "contracted": CONTRACTED,
    "moved": MOVED,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_along_either_axis(family):
    check_rows_of_all(FAMILIES[family], X, in_axes=HW)


def test_convolutions_and_windows():
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (1, 1, 1), "SAME")
    functions = {
        "same": convolved,
        "explicit": lambda x: convolved(x, [(2, 2), (1, 1)]),
        "activated": lambda x: jax.nn.relu(convolved(jnp.tanh(convolved(x)))).mean((0, 1)),
        "pooled": pool,
    }
    check_rows_of_all(functions, CHANNELS, in_axes=HW)
