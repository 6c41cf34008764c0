"""Whole programs: a few hundred equations, or the shape of a real job."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from benchmarks.workload import normal, workload
from benchmarks.workloads.linalg import positive_definite
from benchmarks.workloads.networks import (
    attention_parameters,
    mlp,
    mlp_parameters,
    normalised,
    self_attention,
)

FAMILY = "programs"


@workload(FAMILY, lambda n: (normal(n, 8, 2), normal(n, 8, 2, seed=1)), lanes=256)
def many_small_operations(position, velocity):
    """Eight bodies that attract each other, 16 unrolled steps: a few hundred equations."""
    step = 0.01
    for _ in range(16):
        offset = position[None] - position[:, None]
        distance = jnp.sqrt(jnp.sum(offset**2, axis=-1) + 0.1)
        pull = jnp.sum(offset / distance[..., None] ** 3, axis=1)
        velocity = (velocity + step * pull) * (1 - 0.001 * jnp.max(jnp.abs(velocity)))
        position = position + step * velocity
        position = position - jnp.mean(position, axis=0)
    energy = 0.5 * jnp.sum(velocity**2)
    return position, velocity, energy


def transformer(parameters, x):
    for attention, feed_forward in parameters:
        x = x + self_attention(attention, normalised(x))
        x = x + mlp(feed_forward, normalised(x))
    return jnp.mean(x, axis=0)


@workload(
    FAMILY,
    lambda n: ([(attention_parameters(32), mlp_parameters(32, 64, 32))] * 3, normal(n, 16, 32)),
    lanes=16,
    in_axes=(None, 0),
)
def gradients_of_a_transformer(parameters, x):
    return jax.grad(lambda p: jnp.sum(transformer(p, x) ** 2))(parameters)


def ensemble(lanes, seed):
    return jax.tree.map(
        lambda p: normal(lanes, *p.shape, seed=seed) / 10, mlp_parameters(16, 64, 64, 4)
    )


@workload(
    FAMILY,
    lambda n: (
        ensemble(n, 0),
        ensemble(n, 1),
        jax.tree.map(jnp.abs, ensemble(n, 2)),
        ensemble(n, 3),
        jnp.int32(7),
    ),
    lanes=16,
    in_axes=(0, 0, 0, 0, None),
)
def adam_update_of_an_ensemble(parameters, mean, square, gradients, step):
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradients)
    unbias_mean, unbias_square = 1 - 0.9**step, 1 - 0.999**step

    def updated(p, m, v):
        return p - 1e-3 * (m / unbias_mean) / (jnp.sqrt(v / unbias_square) + 1e-8)

    return jax.tree.map(updated, parameters, mean, square), mean, square


@workload(
    FAMILY,
    lambda n: (normal(n, 10, 4), positive_definite(1, 4)[0] / 20),
    lanes=128,
    in_axes=(0, None),
)
def kalman_filter(observations, noise):
    transition = jnp.eye(4) * 0.9 + jnp.eye(4, k=1) * 0.1

    def step(state, y):
        m, p = state
        m, p = transition @ m, transition @ p @ transition.T + noise
        gain = jnp.linalg.solve(p + jnp.eye(4), p).T
        return (m + gain @ (y - m), p - gain @ p), jnp.sum(m)

    return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), observations)


@workload(
    FAMILY,
    lambda n: (normal(n, 8), normal(5, 8), positive_definite(5, 8)),
    lanes=512,
    in_axes=(0, None, None),
)
def mixture_density(x, means, covariances):
    densities = jsp.stats.multivariate_normal.logpdf(x, means, covariances)
    return jax.nn.logsumexp(densities), jsp.stats.t.logpdf(x, 3.0).sum()
