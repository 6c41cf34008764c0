"""Sums over lanes of what each lane would need an array of its own for."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

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
    Slow(
        "clipped gradients of a network",
        FAMILY,
        clipped_gradient,
        clipped_gradients_by_hand,
        _images,
        lanes=512,
        goal=1.2,
        rival=HAND,
        in_axes=(None, 0, 0),
        summed=True,
    ),
    Slow(
        "clipped gradients, 64 at a time",
        FAMILY,
        clipped_gradient,
        clipped_gradients_by_hand,
        _images,
        lanes=512,
        goal=1.2,
        rival=HAND,
        in_axes=(None, 0, 0),
        summed=True,
        options={"batch_size": 64},
    ),
]
