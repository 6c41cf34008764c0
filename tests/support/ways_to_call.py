"""Functions that are called through one primitive or another."""

import jax
import jax.numpy as jnp
from jax.experimental import compute_on

import batchax as bx


def body_of_evaluation(staged):
    """Its parameters, of which one was renamed."""
    return {"jaxpr": staged} if jax.__version_info__ < (0, 12) else {"call_jaxpr": staged}


def third(r, x):
    return x / r


def double(ref):
    ref[...] = ref[...] * 2


def on_host(body):
    place = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return place(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(body)


def with_metadata(body):
    from jax.experimental.scheduling_groups import xla_metadata_call

    return xla_metadata_call(body, tag="a")


def in_program_order(body):
    from jax.experimental.overlap import program_order  # in newer JAX

    return program_order(enforce=True)(body)


@jax.custom_vjp
def own_backward(x):
    return jnp.sin(x)


own_backward.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda r, c: (c * r,), optimize_remat=True)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.sin(x)


@own_batching.def_vmap
def own_batching_rule(axis_size, in_batched, x):
    return jnp.sin(x), in_batched[0]


@bx.custom_vmap
def batched_by_rule(x):
    return jnp.sin(x)


@batched_by_rule.def_vmap
def batched_by_rule_rule(axis_size, in_batched, x):
    return jnp.sin(x), in_batched[0]


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvps(lambda t, out, x: t * jnp.cos(x))


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (c * jnp.cos(x),))
