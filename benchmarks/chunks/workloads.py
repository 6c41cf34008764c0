"""The table of workloads: chunks, then steps; and one of them over the sizes of its chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.chunks.workload import ChunkedWorkload, ScanWorkload
from benchmarks.workload import integers, normal
from benchmarks.workloads.derivatives import cross_entropy
from benchmarks.workloads.networks import (
    attention_parameters,
    mlp,
    mlp_parameters,
    normalised,
    self_attention,
)


def outer_product(x: Any, w: Any, v: Any) -> Any:
    """A lane's intermediate values, 256 x 64, are much larger than what goes in and out."""
    return jnp.sum(jnp.tanh(jnp.outer(x, w)) @ v)


def clipped_gradient(parameters: Any, x: Any, label: Any) -> Any:
    gradients = jax.grad(cross_entropy)(parameters, x, label)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradients)


def attention(parameters: Any, x: Any) -> Any:
    return x + self_attention(parameters, normalised(x))


def kernel_row(x: Any, others: Any, weights: Any) -> Any:
    """One row of a Gaussian kernel matrix, times a vector."""
    distances = jnp.sum((x - others) ** 2, axis=1)
    return jnp.exp(-0.5 * distances) @ weights


def neural_ode(parameters: Any, x: Any) -> Any:
    """Twenty steps of the midpoint method."""

    def velocity(x: Any) -> Any:
        return jnp.tanh(mlp(parameters, x))

    def step(x: Any, _: Any) -> tuple[Any, None]:
        return x + 0.05 * velocity(x + 0.025 * velocity(x)), None

    return lax.scan(step, x, None, length=20)[0]


def recurrent(parameters: Any, xs: Any) -> Any:
    """The states of a recurrent network over time."""
    w, u = parameters

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(w @ h + u @ x)
        return h, h

    return lax.scan(step, jnp.zeros(w.shape[0], xs.dtype), xs)[1]


def standardised(x: Any, gain: Any) -> Any:
    return jnp.tanh(normalised(x)) * gain


def filtered(state: Any, x: Any, gain: Any) -> tuple[Any, Any]:
    """One step of an exponential moving average, and what it leaves of its input."""
    state = state + gain * (x - state)
    return state, jnp.tanh(x - state)


def gated(h: Any, x: Any, parameters: Any) -> tuple[Any, Any]:
    """One step of a gated recurrent network on a batch."""
    w, u = parameters
    z = jax.nn.sigmoid(h @ w + x @ u)
    h = z * h + (1 - z) * jnp.tanh(x)
    return h, h


WORKLOADS = {
    w.name: w
    for w in (
        ChunkedWorkload(
            "outer product",
            outer_product,
            lambda n: (normal(n, 256), normal(64, seed=1), normal(64, seed=2)),
            lanes=2048,
            chunk=32,
            in_axes=(0, None, None),
            wrt=(0, 1, 2),
        ),
        ChunkedWorkload(
            "mean loss of an mlp",
            cross_entropy,
            lambda n: (mlp_parameters(128, 512, 512, 10), normal(n, 128), integers(n, below=10)),
            lanes=4096,
            chunk=256,
            in_axes=(None, 0, 0),
            mean=True,
            wrt=(0,),
        ),
        ChunkedWorkload(
            "per-example gradients",
            jax.grad(cross_entropy),
            lambda n: (mlp_parameters(64, 64, 10), normal(n, 64), integers(n, below=10)),
            lanes=2048,
            chunk=128,
            in_axes=(None, 0, 0),
        ),
        ChunkedWorkload(
            "mean of clipped gradients",
            clipped_gradient,
            lambda n: (mlp_parameters(64, 64, 10), normal(n, 64), integers(n, below=10)),
            lanes=2048,
            chunk=128,
            in_axes=(None, 0, 0),
            mean=True,
        ),
        ChunkedWorkload(
            "attention",
            attention,
            lambda n: (attention_parameters(64), normal(n, 64, 64)),
            lanes=256,
            chunk=16,
            in_axes=(None, 0),
            wrt=(0, 1),
        ),
        ChunkedWorkload(
            "rows of a kernel matrix",
            kernel_row,
            lambda n: (normal(n, 16), normal(1024, 16, seed=1), normal(1024, seed=2) / 1024),
            lanes=1024,
            chunk=64,
            in_axes=(0, None, None),
            wrt=(0, 1, 2),
        ),
        ChunkedWorkload(
            "neural ode",
            neural_ode,
            lambda n: (mlp_parameters(16, 64, 16), normal(n, 16)),
            lanes=4096,
            chunk=512,
            in_axes=(None, 0),
            wrt=(0, 1),
        ),
        ChunkedWorkload(
            "columns",
            standardised,
            lambda n: (normal(512, n), normal(512, seed=1)),
            lanes=16384,
            chunk=1024,
            in_axes=(1, None),
            out_axes=1,
            wrt=(0, 1),
        ),
        ChunkedWorkload(
            "recurrent network, time first",
            recurrent,
            lambda n: (
                (normal(64, 64) / 8, normal(64, 64, seed=1) / 8),
                normal(32, n, 64),
            ),
            lanes=2048,
            chunk=256,
            in_axes=(None, 1),
            out_axes=1,
            wrt=(0, 1),
        ),
        ChunkedWorkload(
            "images, batch last",
            lambda x: jnp.tanh(x - jnp.mean(x, axis=(0, 1), keepdims=True)),
            lambda n: (normal(48, 48, n),),
            lanes=2048,
            chunk=128,
            in_axes=(2,),
            out_axes=2,
            wrt=(0,),
        ),
        ChunkedWorkload(
            "remainder of 40 lanes",
            lambda parameters, x: mlp(parameters, normalised(x)),
            lambda n: (mlp_parameters(512, 256, 512), normal(n, 512)),
            lanes=1000,
            chunk=64,
            in_axes=(None, 0),
            wrt=(0, 1),
        ),
        ScanWorkload(
            "scan of a filter, time last",
            filtered,
            lambda n: (jnp.zeros((128, 64)), normal(128, 64, n), jnp.full(64, 0.1)),
            lanes=256,
            chunk=1,
            in_axes=(2, None),
            out_axes=2,
            wrt=(0, 1, 2),
        ),
        ScanWorkload(
            "scan of a network, batch first",
            gated,
            lambda n: (
                jnp.zeros((256, 64)),
                normal(256, n, 64),
                (normal(64, 64) / 8, normal(64, 64, seed=1) / 8),
            ),
            lanes=256,
            chunk=1,
            in_axes=(1, None),
            out_axes=1,
            wrt=(0, 1, 2),
        ),
        ScanWorkload(
            "scan of a network, time first",
            gated,
            lambda n: (
                jnp.zeros((256, 64)),
                normal(n, 256, 64),
                (normal(64, 64) / 8, normal(64, 64, seed=1) / 8),
            ),
            lanes=256,
            chunk=1,
            in_axes=(0, None),
            wrt=(0, 1, 2),
        ),
    )
}

EXAMPLE = WORKLOADS["outer product"]
"""The workload whose goals are stated, and which is measured over the sizes of its chunks."""

CURVE = {
    f"{EXAMPLE.name}, chunks of {chunk}": replace(
        EXAMPLE, name=f"{EXAMPLE.name}, chunks of {chunk}", chunk=chunk, both=False
    )
    for chunk in (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
}
