"""Rules where lanes diverge: in branches some take, and loops some have left."""

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx

from support.oracle import same


@bx.custom_vmap
def double_up(x):
    return 2.0 ** jnp.ceil(jnp.log2(100 / x)) * x


@double_up.def_vmap
def _(axis_size, in_batched, x):  # never ends for a lane that is not positive
    return lax.while_loop(
        lambda x: (x < 100).any(), lambda x: jnp.where(x < 100, 2 * x, x), x
    ), True


@bx.custom_vmap
def log(x):
    return jnp.log(x)


@log.def_vmap
def _(axis_size, in_batched, x):
    return jnp.log(x), True


def where_positive(fun):
    return lambda x: lax.cond(x > 0, fun, lambda x: x, x)


def test_a_rule_that_does_not_end_for_lanes_that_do_not_call_it():
    f = where_positive(double_up)
    same(bx.vmap(f)(jnp.array([3.0, 7.0, -1.0])), jnp.array([192.0, 112.0, -1.0]))
    same(bx.vmap(f)(-jnp.ones(3)), -jnp.ones(3))
    same(bx.vmap(bx.vmap(f))(jnp.array([[3.0, -1.0]])), jnp.array([[192.0, -1.0]]))


def test_nothing_leaks_from_lanes_that_do_not_call_it():
    xs = jnp.array([3.0, 0.0, -1.0])
    want = jnp.array([1 / 3, 1.0, 1.0])
    f = where_positive(log)
    same(bx.vmap(f)(xs), jnp.array([jnp.log(3.0), 0.0, -1.0]))
    same(bx.vmap(jax.grad(f))(xs), want)
    same(jax.grad(lambda x: bx.vmap(f)(x).sum())(xs), want)
