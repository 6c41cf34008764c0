"""Functions of graphs, sequences, and point clouds, and attention: each row as if alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import tolerances
from support.rows import check_rows, check_rows_of_all, ragged

WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), float)
NODES, EDGES = (3, 5, 2, 4), (4, 6, 0, 5)
SAME = (bx.ragged("n"), bx.ragged("n"))
ROUGHLY = dict(rtol=1e-3, atol=1e-3)


def ends(seed):
    """For each edge of each graph, one of the graph's nodes."""
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(0, n, e) for n, e in zip(NODES, EDGES, strict=True)]
    data = jnp.asarray(np.concatenate(drawn), jnp.int32)
    return bx.Ragged(data, np.array(EDGES, np.int32), 8)


def convolution_of_a_graph(nodes, senders, receivers):
    sums = jax.ops.segment_sum(nodes[senders] @ WEIGHTS, receivers, num_segments=nodes.shape[0])
    return jnp.tanh(sums + nodes)


def attention_of_a_graph(nodes, senders, receivers):
    count = nodes.shape[0]
    scores = jnp.exp(jnp.tanh((nodes[senders] * nodes[receivers]).sum(-1)))
    total = jax.ops.segment_sum(scores, receivers, num_segments=count)
    shares = scores / total[receivers]
    return jax.ops.segment_sum(shares[:, None] * nodes[senders], receivers, num_segments=count)


@pytest.mark.parametrize("fun", [convolution_of_a_graph, attention_of_a_graph])
def test_graphs(fun):
    edges = bx.ragged("e")
    nodes = ragged(3, lengths=NODES)
    check_rows(fun, nodes, ends(1), ends(2), in_axes=(bx.ragged("n"), edges, edges))


def energy(x):
    n = x.shape[0]
    distance = ((x[:, None] - x[None]) ** 2).sum(-1) + jnp.eye(n)
    return jnp.where(jnp.eye(n, dtype=bool), 0, 1 / distance).sum()


def likelihood_of_a_process(x, y):
    kernel = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)) + jnp.eye(x.shape[0])
    return y @ jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(kernel), y)


def cross_entropy(scores, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).mean()


OF_ONE_ROW = {
    "energy of particles": energy,
    "forces on particles": jax.grad(energy),
}


def test_functions_of_one_row():
    check_rows_of_all(OF_ONE_ROW, ragged(3))


@pytest.mark.nightly
def test_functions_of_two():
    check_rows(likelihood_of_a_process, ragged(3), ragged(seed=2), in_axes=SAME, tolerance=ROUGHLY)
    check_rows(cross_entropy, ragged(5), ragged(dtype=np.int32), in_axes=SAME)


def masked(x):
    n = x.shape[0]
    allowed = jnp.tril(jnp.ones((n, n), bool))
    return jax.nn.softmax(jnp.where(allowed, x @ x.T, -jnp.inf)) @ x


def window(x):
    at = jnp.arange(x.shape[0])
    near = jnp.abs(at[:, None] - at) <= 1
    return jax.nn.softmax(jnp.where(near, x @ x.T, -jnp.inf), where=near) @ x


def with_mask_and_bias(x):
    n = x.shape[0]
    mask, bias = jnp.tril(jnp.ones((1, n, n), bool)), jnp.sin(jnp.arange(n) + jnp.zeros((2, n, 1)))
    return jax.nn.dot_product_attention(x, x, x, bias, mask)


def test_attention_sees_its_own_row():
    functions = {
        "masked": masked,
        "window": window,
        "differentiated": jax.grad(lambda x: (masked(x) ** 2).sum()),
    }
    near = dict(rtol=1e-4, atol=1e-4)
    check_rows_of_all(functions, ragged(3, lengths=(3, 0, 2)), layout="padded", tolerance=near)


@pytest.mark.nightly
def test_attention_of_several_heads_sees_its_own_row():
    # JAX takes the softmax in single precision, whatever the dtype of its operands.
    options = dict(layout="padded", tolerance=tolerances(jnp.float32))
    check_rows(with_mask_and_bias, ragged(2, 3, lengths=(3, 1)), **options)


def test_shared_weights_of_attention_have_no_nan_from_padding():
    def layer(x, queries, keys):
        scores = (x @ queries) @ (x @ keys).T
        return jnp.log(jnp.abs(jax.nn.softmax(scores) @ x))

    queries, keys = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 2)))
    x = ragged(3, lengths=(3, 0, 2))
    check_rows(layer, x, queries, keys, in_axes=(0, None, None), layout="padded", tolerance=ROUGHLY)
