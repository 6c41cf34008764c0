"""Attention of rows in padded arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import tolerances
from support.rows import check_rows, check_rows_of_all, ragged

check = partial(check_rows, layout="padded")
check_all = partial(check_rows_of_all, layout="padded")
attend = jax.nn.dot_product_attention
SINGLE = tolerances(jnp.float32)  # JAX takes the softmax in it, whatever the dtype of its operands


def masked(x):
    n = x.shape[0]
    allowed = jnp.tril(jnp.ones((n, n), bool))
    return jax.nn.softmax(jnp.where(allowed, x @ x.T, -jnp.inf)) @ x


def causal(x):
    at = jnp.arange(x.shape[0])
    scores = jnp.where(at[:, None] >= at, x @ x.T / np.sqrt(3), -1e30)
    return jax.nn.softmax(scores) @ x


def window(x):
    at = jnp.arange(x.shape[0])
    near = jnp.abs(at[:, None] - at) <= 1
    return jax.nn.softmax(jnp.where(near, x @ x.T, -jnp.inf), where=near) @ x


def several_heads(x):
    scores = jnp.einsum("qhd,khd->hqk", x, x)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), x)


def with_mask_and_bias(x):
    n = x.shape[0]
    mask = jnp.tril(jnp.ones((1, n, n), bool))
    return attend(x, x, x, jnp.sin(jnp.arange(n)[None, :] + jnp.zeros((2, n, 1))), mask)


ONE_HEAD = {
    "softmax": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "masked": masked,
    "causal": causal,
    "window": window,
    "differentiated": lambda x: jax.grad(lambda x: (masked(x) ** 2).sum())(x),
}

HEADS = {
    "several heads": several_heads,
    "of JAX": lambda x: attend(x, jnp.sin(x), x),
    "of JAX, causal": lambda x: attend(x, 0.3 * x, x, is_causal=True),
    "of JAX, with mask and bias": with_mask_and_bias,
}

CROSS = {
    "of JAX": lambda q, k: attend(q, k, jnp.sin(k)),
    "softmax": lambda q, k: jax.nn.softmax(q[:, 0] @ k[:, 0].T) @ k[:, 1],
}


def test_attention_sees_its_own_row():
    check_all(ONE_HEAD, ragged(3, lengths=(3, 0, 2)))


@pytest.mark.nightly
def test_attention_of_several_heads_sees_its_own_row():
    check_all(HEADS, ragged(2, 3, lengths=(3, 1)), tolerance=SINGLE)


@pytest.mark.parametrize("name", CROSS)
def test_attention_to_another_row_sees_its_own_rows(name):
    sizes = (bx.ragged("n"), bx.ragged("m"))
    check(
        CROSS[name],
        ragged(2, 3, lengths=(3, 1)),
        ragged(2, 3, lengths=(2, 4), seed=5),
        in_axes=sizes,
        tolerance=SINGLE,
    )


def test_shared_weights_of_attention_have_no_nan_from_padding():
    def layer(x, queries, keys):
        scores = (x @ queries) @ (x @ keys).T
        return jnp.log(jnp.abs(jax.nn.softmax(scores) @ x))

    generator = np.random.default_rng(2)
    queries, keys = jnp.asarray(generator.normal(size=(2, 3, 2)))
    near = dict(rtol=1e-4, atol=1e-4)
    x = ragged(3, lengths=(3, 0, 2))
    check(layer, x, queries, keys, in_axes=(0, None, None), tolerance=near)
