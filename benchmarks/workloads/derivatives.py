"""Derivatives per example, and functions with derivatives of their own."""

import jax
import jax.numpy as jnp

from benchmarks.workload import integers, normal, workload
from benchmarks.workloads.networks import (
    attention_parameters,
    mlp,
    mlp_parameters,
    normalised,
    self_attention,
)

FAMILY = "derivatives"


def cross_entropy(parameters, x, label):
    return -jax.nn.log_softmax(mlp(parameters, x))[label]


@workload(
    FAMILY,
    lambda n: (mlp_parameters(64, 64, 10), normal(n, 64), integers(n, below=10)),
    lanes=128,
    in_axes=(None, 0, 0),
)
def per_example_gradients(parameters, x, label):
    return jax.grad(cross_entropy)(parameters, x, label)


@workload(
    FAMILY,
    lambda n: (mlp_parameters(64, 64, 10), normal(n, 64), integers(n, below=10)),
    lanes=128,
    in_axes=(None, 0, 0),
)
def clipped_per_example_gradients(parameters, x, label):
    loss, gradients = jax.value_and_grad(cross_entropy)(parameters, x, label)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return loss, jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradients)


@workload(
    FAMILY,
    lambda n: (attention_parameters(32), normal(n, 16, 32)),
    lanes=32,
    in_axes=(None, 0),
)
def gradients_of_attention(parameters, x):
    return jax.grad(lambda p: jnp.sum(jnp.sin(self_attention(p, normalised(x)))))(parameters)


@workload(
    FAMILY,
    lambda n: (mlp_parameters(32, 32, 32, 4), normal(n, 32)),
    lanes=128,
    in_axes=(None, 0),
)
def gradients_with_checkpoint(parameters, x):
    @jax.checkpoint
    def layer(w, b, h):
        return jnp.tanh(h @ w + b)

    def loss(parameters):
        h = x
        for w, b in parameters:
            h = layer(w, b, h)
        return jnp.sum(h**2)

    return jax.grad(loss)(parameters)


@workload(FAMILY, lambda n: (mlp_parameters(8, 16, 1), normal(n, 8)), lanes=128, in_axes=(None, 0))
def hessians(parameters, x):
    return jax.hessian(lambda y: jnp.sum(jnp.tanh(mlp(parameters, y))))(x)


@workload(FAMILY, lambda n: (mlp_parameters(8, 16, 6), normal(n, 8)), lanes=256, in_axes=(None, 0))
def jacobians_forward_and_reverse(parameters, x):
    network = lambda y: jnp.tanh(mlp(parameters, y))
    return jax.jacfwd(network)(x), jax.jacrev(network)(x)


@jax.custom_jvp
def stable_softplus(x):
    return jnp.logaddexp(x, 0.0)


@stable_softplus.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return stable_softplus(x), jax.nn.sigmoid(x) * t


@workload(FAMILY, lambda n: (normal(n, 256),), lanes=1024)
def function_with_custom_jvp(x):
    return stable_softplus(x), jax.grad(lambda y: jnp.sum(stable_softplus(y) ** 2))(x)


@jax.custom_vjp
def clip_gradient(limit, x):
    return x


clip_gradient.defvjp(
    lambda limit, x: (x, limit), lambda limit, g: (None, jnp.clip(g, -limit, limit))
)


@workload(FAMILY, lambda n: (normal(256), normal(n, 256)), lanes=1024, in_axes=(None, 0))
def function_with_custom_vjp(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.sin(clip_gradient(0.5, w * x) ** 2)))(w)


@workload(FAMILY, lambda n: (normal(16, 16), normal(n, 16)), lanes=128, in_axes=(None, 0))
def gradients_through_scan(w, x):
    def final(w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(w @ h + x), None), x, None, length=10)[0]

    return jax.grad(lambda w: jnp.sum(final(w)))(w)
