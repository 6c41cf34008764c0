"""Rules where lanes diverge: in branches some take, and loops some have left."""

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx

from support.oracle import agree, check, same


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


def test_loops_that_lanes_leave():
    def grow(x):
        return lax.while_loop(lambda c: c < 100, lambda c: double_up(c) * 1.01 + log(c), x)

    check(grow, jnp.array([3.0, 7.0, 1.0, 200.0]), against_jax=False, derivatives=False, jit=False)


def test_derivatives_through_loops_and_branches():
    def f(x, w):
        def step(c, n):
            return lax.cond(n % 2 == 0, lambda c: log(c + 2) * w, lambda c: jnp.sin(c), c), c

        return lax.scan(step, x, jnp.arange(4))[0]

    def plain(x, w):
        def step(c, n):
            return lax.cond(n % 2 == 0, lambda c: jnp.log(c + 2) * w, lambda c: jnp.sin(c), c), c

        return lax.scan(step, x, jnp.arange(4))[0]

    xs, ws = jnp.array([0.3, 1.1, 2.0]), jnp.array([1.0, 0.5, 2.0])
    for transform in (jax.grad, lambda f: jax.grad(jax.checkpoint(f)), jax.hessian):
        agree(bx.vmap(transform(f)), jax.vmap(transform(plain)), xs, ws)
