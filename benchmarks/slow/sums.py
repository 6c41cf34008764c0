"""Sums over lanes of what each lane would need an array of its own for."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from benchmarks.slow.others import DIMENSIONS, convolve, patches
from benchmarks.slow.workload import HAND, Slow
from benchmarks.workload import normal

FAMILY = "Sums over lanes"
MOST = 1.0  # the norm to which a gradient is clipped


def clipped_outer(a: Any, b: Any) -> Any:
    g = jnp.outer(a, b)
    return g * jnp.minimum(1.0, MOST / jnp.sqrt((g**2).sum()))


def clipped_outers_by_hand(a: Any, b: Any) -> Any:
    norms = jnp.sqrt((a**2).sum(1) * (b**2).sum(1))
    return jnp.einsum("ki,kj,k->ij", a, b, jnp.minimum(1.0, MOST / norms))


def network(parameters: Any, x: Any) -> Any:
    *hidden, (w, b) = parameters
    for w_, b_ in hidden:
        x = jnp.tanh(x @ w_ + b_)
    return x @ w + b


def loss(parameters: Any, x: Any, y: Any) -> Any:
    return -jax.nn.log_softmax(network(parameters, x))[y]


def clipped_gradient(parameters: Any, x: Any, y: Any) -> Any:
    g = jax.grad(loss)(parameters, x, y)
    norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, MOST / norm), g)


def clipped_by_optax(parameters: Any, x: Any, y: Any) -> Any:
    g = jax.grad(loss)(parameters, x, y)
    return optax.clip_by_global_norm(MOST).update(g, optax.EmptyState())[0]


def clipped_as_one_vector(parameters: Any, x: Any, y: Any) -> Any:
    g, unravel = ravel_pytree(jax.grad(loss)(parameters, x, y))
    return unravel(g * jnp.minimum(1.0, MOST / jnp.linalg.norm(g)))


def clipped_gradients_by_hand(parameters: Any, x: Any, y: Any) -> Any:
    activations = [x]
    for w, b in parameters[:-1]:
        activations.append(jnp.tanh(activations[-1] @ w + b))
    w, b = parameters[-1]
    delta = jax.nn.softmax(activations[-1] @ w + b) - jax.nn.one_hot(y, len(b))
    deltas = [delta]
    for (w, _), a in zip(parameters[:0:-1], activations[:0:-1], strict=True):
        deltas.insert(0, (deltas[0] @ w.T) * (1 - a**2))
    pairs = list(zip(activations, deltas, strict=True))
    norms = jnp.sqrt(sum(((a**2).sum(1) + 1) * (d**2).sum(1) for a, d in pairs))
    scale = jnp.minimum(1.0, MOST / norms)[:, None]
    return [(a.T @ (d * scale), (d * scale).sum(0)) for a, d in pairs]


def pooled(x: Any) -> Any:
    *shape, h, w = x.shape
    return x.reshape(*shape, h // 2, 2, w // 2, 2).mean((-3, -1))


def convolutional_loss(parameters: Any, x: Any, y: Any) -> Any:
    *kernels, (w, b) = parameters
    for k, c in kernels:
        x = pooled(jnp.tanh(convolve(k, x) + c[:, None, None]))
    return -jax.nn.log_softmax(x.ravel() @ w + b)[y]


def clipped_convolutions(parameters: Any, x: Any, y: Any) -> Any:
    g = jax.grad(convolutional_loss)(parameters, x, y)
    return optax.clip_by_global_norm(MOST).update(g, optax.EmptyState())[0]


def clipped_convolutions_by_hand(parameters: Any, x: Any, y: Any) -> Any:
    *kernels, (w, b) = parameters
    n = len(x)

    def total(added: Any) -> Any:
        *inner, last = added
        seen, a = [], x
        for (k, c), more in zip(kernels, inner, strict=True):
            seen.append(patches(a, 3).reshape(n, -1, a.shape[2] * a.shape[3]))
            out = lax.conv_general_dilated(a, k, (1, 1), "SAME", dimension_numbers=DIMENSIONS)
            a = pooled(jnp.tanh(out + c[:, None, None] + more))
        a = a.reshape(n, -1)
        likely = jax.nn.log_softmax(a @ w + b + last)
        return -jnp.take_along_axis(likely, y[:, None], 1).sum(), (seen, a)

    sizes = [x.shape[2] >> depth for depth in range(len(kernels))]
    inner = [jnp.zeros((n, len(k), s, s)) for (k, _), s in zip(kernels, sizes, strict=True)]
    (*deltas, delta), (seen, a) = jax.grad(total, has_aux=True)([*inner, jnp.zeros((n, len(b)))])
    flat = [d.reshape(*d.shape[:2], -1) for d in deltas]
    own = [(d @ jnp.swapaxes(s, 1, 2), d.sum(2)) for d, s in zip(flat, seen, strict=True)]
    norms = sum((g**2).sum((1, 2)) + (h**2).sum(1) for g, h in own)
    scale = jnp.minimum(1.0, MOST / jnp.sqrt(norms + ((a**2).sum(1) + 1) * (delta**2).sum(1)))
    sums = [
        (jnp.tensordot(scale, g, 1).reshape(k.shape), scale @ h)
        for (g, h), (k, _) in zip(own, kernels, strict=True)
    ]
    return [*sums, (a.T @ (delta * scale[:, None]), scale @ delta)]


def embedding_loss(parameters: Any, tokens: Any, y: Any) -> Any:
    table, w, b = parameters
    return -jax.nn.log_softmax(table[tokens].mean(0) @ w + b)[y]


def clipped_embeddings(parameters: Any, tokens: Any, y: Any) -> Any:
    g = jax.grad(embedding_loss)(parameters, tokens, y)
    return optax.clip_by_global_norm(MOST).update(g, optax.EmptyState())[0]


def clipped_embeddings_by_hand(parameters: Any, tokens: Any, y: Any) -> Any:
    table, w, b = parameters
    a = table[tokens].mean(1)
    delta = jax.nn.softmax(a @ w + b) - jax.nn.one_hot(y, len(b))
    back = delta @ w.T / tokens.shape[1]  # of each token
    # A token that an example has n times gets n times the gradient.
    times = (tokens[:, :, None] == tokens[:, None]).sum((1, 2))
    norms = jnp.sqrt(((a**2).sum(1) + 1) * (delta**2).sum(1) + times * (back**2).sum(1))
    scale = jnp.minimum(1.0, MOST / norms)[:, None]
    rows = jnp.broadcast_to((back * scale)[:, None], (*tokens.shape, table.shape[1]))
    return jnp.zeros_like(table).at[tokens].add(rows), a.T @ (delta * scale), (delta * scale).sum(0)


def _with_table(lanes: int) -> Any:
    parameters = normal(10_000, 64), normal(64, 10) / 8, normal(10)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 10_000, (lanes, 32)))
    return parameters, tokens, jnp.arange(lanes) % 10


def sequence_loss(parameters: Any, x: Any, y: Any) -> Any:
    *layers, (w, b) = parameters
    for v, c in layers:
        x = jnp.tanh(x @ v + c)
    return -jax.nn.log_softmax((x @ w + b).mean(0))[y]


def clipped_sequences(parameters: Any, x: Any, y: Any) -> Any:
    g = jax.grad(sequence_loss)(parameters, x, y)
    return optax.clip_by_global_norm(MOST).update(g, optax.EmptyState())[0]


def clipped_sequences_by_hand(parameters: Any, x: Any, y: Any) -> Any:
    def total(added: Any) -> Any:
        a, seen = x, []
        for (w, b), more in zip(parameters, added, strict=True):
            seen.append(a)
            out = a @ w + b + more
            a = jnp.tanh(out)
        likely = jax.nn.log_softmax(out.mean(1))
        return -jnp.take_along_axis(likely, y[:, None], 1).sum(), seen

    zeros = [jnp.zeros((*x.shape[:2], len(b))) for _, b in parameters]
    deltas, seen = jax.grad(total, has_aux=True)(zeros)
    products = lambda a: jnp.einsum("kti,ksi->kts", a, a)
    norms = sum(
        jnp.einsum("kts,kts->k", products(a), products(d)) + (d.sum(1) ** 2).sum(1)
        for a, d in zip(seen, deltas, strict=True)
    )
    scale = jnp.minimum(1.0, MOST / jnp.sqrt(norms))[:, None, None]
    return [
        (jnp.tensordot(a, d * scale, ((0, 1), (0, 1))), (d * scale).sum((0, 1)))
        for a, d in zip(seen, deltas, strict=True)
    ]


def _with_sequences(lanes: int) -> Any:
    sizes = 256, 256, 256, 256, 10
    parameters = [(normal(n, m) / n**0.5, normal(m)) for n, m in itertools.pairwise(sizes)]
    return parameters, normal(lanes, 32, 256, seed=1), jnp.arange(lanes) % 10


def recurrent_loss(parameters: Any, x: Any, y: Any) -> Any:
    w, v, b, out = parameters
    step = lambda h, x: (jnp.tanh(x @ w + h @ v + b), None)
    return -jax.nn.log_softmax(lax.scan(step, jnp.zeros(len(v)), x)[0] @ out)[y]


def clipped_recurrent(parameters: Any, x: Any, y: Any) -> Any:
    g = jax.grad(recurrent_loss)(parameters, x, y)
    return optax.clip_by_global_norm(MOST).update(g, optax.EmptyState())[0]


def clipped_recurrent_by_hand(parameters: Any, x: Any, y: Any) -> Any:
    w, v, b, out = parameters
    lanes, steps = x.shape[:2]

    def total(added: Any) -> Any:
        def step(h: Any, given: Any) -> Any:
            x, more = given
            return jnp.tanh(x @ w + h @ v + b + more), h

        last, before = lax.scan(step, jnp.zeros((lanes, len(v))), (xs, added[0]))
        likely = jax.nn.log_softmax(last @ out + added[1])
        return -jnp.take_along_axis(likely, y[:, None], 1).sum(), (before, last)

    xs = jnp.swapaxes(x, 0, 1)
    zeros = jnp.zeros((steps, lanes, len(v))), jnp.zeros((lanes, out.shape[1]))
    (d, e), (before, last) = jax.grad(total, has_aux=True)(zeros)
    products = lambda a: jnp.einsum("tki,ski->kts", a, a)
    norms = ((products(xs) + products(before) + 1) * products(d)).sum((1, 2))
    norms += (last**2).sum(1) * (e**2).sum(1)
    scale = jnp.minimum(1.0, MOST / jnp.sqrt(norms))[:, None]
    d, e = d * scale, e * scale
    summed = lambda a: jnp.tensordot(a, d, ((0, 1), (0, 1)))
    return summed(xs), summed(before), d.sum((0, 1)), last.T @ e


def _with_steps(lanes: int) -> Any:
    parameters = normal(128, 128) / 12, normal(128, 128) / 12, normal(128), normal(128, 10) / 12
    return parameters, normal(lanes, 32, 128, seed=1), jnp.arange(lanes) % 10


def _with_kernels(lanes: int) -> Any:
    shapes = (8, 1, 3, 3), (16, 8, 3, 3), (7 * 7 * 16, 10)
    widths = 8, 16, 10
    parameters = [(normal(*s) / 10, normal(m)) for s, m in zip(shapes, widths, strict=True)]
    return parameters, normal(lanes, 1, 28, 28, seed=1), jnp.arange(lanes) % 10


def _parameters() -> Any:
    sizes = 784, 256, 256, 10
    return [(normal(n, m) / n**0.5, normal(m)) for n, m in itertools.pairwise(sizes)]


def _images(lanes: int) -> Any:
    return _parameters(), normal(lanes, 784, seed=1), jnp.arange(lanes) % 10


WORKLOADS = [
    Slow(
        "clipped outer products",
        FAMILY,
        clipped_outer,
        clipped_outers_by_hand,
        lambda lanes: (normal(lanes, 784), normal(lanes, 64, seed=1)),
        lanes=128,
        goal=1.2,
        rival=HAND,
        summed=True,
    ),
    *(
        Slow(
            name,
            FAMILY,
            one,
            clipped_gradients_by_hand,
            _images,
            lanes=512,
            goal=1.2,
            rival=HAND,
            in_axes=(None, 0, 0),
            summed=True,
            options=options,
        )
        for name, one, options in (
            ("clipped gradients of a network", clipped_gradient, {}),
            ("clipped gradients, 64 at a time", clipped_gradient, {"batch_size": 64}),
            ("the same, by optax", clipped_by_optax, {}),
            ("the same, as one vector", clipped_as_one_vector, {}),
        )
    ),
    *(
        Slow(
            name,
            FAMILY,
            clipped_convolutions,
            clipped_convolutions_by_hand,
            _with_kernels,
            lanes=128,
            goal=1.2,
            rival=HAND,
            in_axes=(None, 0, 0),
            summed=True,
            options=options,
        )
        for name, options in (
            ("of a convolutional network, by optax", {}),
            ("of it, 32 at a time", {"batch_size": 32}),
        )
    ),
    *(
        Slow(
            name,
            FAMILY,
            one,
            by_hand,
            data,
            lanes=64,
            goal=goal,
            rival=HAND,
            in_axes=(None, 0, 0),
            summed=True,
        )
        for name, one, by_hand, data, goal in (
            (
                "of an embedding table",
                clipped_embeddings,
                clipped_embeddings_by_hand,
                _with_table,
                2,
            ),
            (
                "of layers at each place",
                clipped_sequences,
                clipped_sequences_by_hand,
                _with_sequences,
                1.3,
            ),
            (
                "of a recurrent network",
                clipped_recurrent,
                clipped_recurrent_by_hand,
                _with_steps,
                1.3,
            ),
        )
    ),
]
