"""Derivative rules that close over what is differentiated: JAX loses its part, and so refuses."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.high_operations import OLD
from support.oracle import at_once, loop_function, same

X = jnp.array([0.3, 1.1, 2.0])


def with_rule(where, closed):
    """A function with a derivative rule of which the part `where` multiplies by `closed`."""
    by = lambda part, x: x * closed if part == where else 2 * x
    if where.startswith("jvp"):
        f = jax.custom_jvp(lambda z: 2 * z)
        f.defjvp(lambda z, t: (by("jvp: value", z[0]), by("jvp: tangent", t[0]) * z[0]))
        return f
    f = jax.custom_vjp(lambda z: 2 * z)
    f.defvjp(
        lambda z: (by("vjp: value", z), by("vjp: residual", z)),
        lambda r, c: (by("vjp: cotangent", c) * r,),
    )
    return f


REFUSALS = bx.UnsupportedError, jax.errors.UnexpectedTracerError

PARTS = ["jvp: value", "jvp: tangent", "vjp: value", "vjp: residual", "vjp: cotangent"]

IN_LOOPS = {
    "alone": lambda g, x: g(x),
    "jit": lambda g, x: jax.jit(g)(x),
    "checkpoint": lambda g, x: jax.checkpoint(g)(x),
    "scan": lambda g, x: jax.lax.scan(lambda c, _: (g(c), None), x, None, length=2)[0],
    "cond": lambda g, x: jax.lax.cond(x > 1, g, jnp.sin, x),
    "vmap": lambda g, x: bx.vmap(g)(jnp.stack([x, x])).sum(),
    "bounded_while": lambda g, x: bx.bounded_while(lambda c: c < 1, g, x, 2),
}

CALLS = {
    "gradient of each lane": lambda f: bx.vmap(jax.grad(f))(X),
    "of jit, of each lane": lambda f: bx.vmap(jax.grad(jax.jit(f)))(X),
    "of all lanes": lambda f: jax.grad(lambda x: bx.vmap(f)(x).sum())(X),
    "of second order": lambda f: bx.vmap(jax.grad(jax.grad(f)))(X),
    "of all lanes, in jit": lambda f: jax.grad(lambda x: jax.jit(bx.vmap(f))(x).sum())(X),
    "nested": lambda f: bx.vmap(bx.vmap(jax.grad(f)))(X[None]),
    "in chunks": lambda f: bx.vmap(jax.grad(f), batch_size=2)(X),
}


@pytest.mark.each_commit(
    8, "alone-vjp: value", "alone-vjp: cotangent", "bounded_while-jvp: tangent"
)
@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("around", IN_LOOPS)
def test_what_is_differentiated_is_refused_by_name(around, where):
    """Where nobody needs what the rule computes of it, too: then JAX itself would run it."""

    f = lambda x: IN_LOOPS[around](with_rule(where, jnp.sin(x)), x * 1.0) * 1.5
    for call in (lambda f: jax.grad(f)(1.0), *CALLS.values()):
        # Of programs in which JAX has staged a part, it says that there is no constant handler.
        with pytest.raises((*REFUSALS, TypeError), match=r"unexpected tracer|argument|handler"):
            call(f)
    for name in ("gradient of each lane", "nested", "in chunks"):
        with pytest.raises(REFUSALS) as raised:
            jax.eval_shape(lambda name=name: CALLS[name](f))
        assert "test_closing_rules.py:" in str(raised.value)
        assert "as an argument" in str(raised.value)


@pytest.mark.parametrize("where", ["jvp: value", "jvp: tangent"])
def test_what_is_differentiated_around_jit_is_refused_by_name(where):
    """JAX itself says there that there is no constant handler for a tracer."""
    total = lambda w: jax.jit(bx.vmap(lambda x: with_rule(where, w)(x * w)))(X).sum()
    with pytest.raises(bx.UnsupportedError, match=r"test_closing_rules\.py.* as an argument"):
        jax.grad(total)(2.0)


def test_what_has_no_derivative_is_closed_over():
    """A mask, and what `stop_gradient` returns: plain JAX takes them, outside of `jit`."""

    def by_forward(x):
        mask, still = x > 1, jax.lax.stop_gradient(jnp.sin(x))
        f = jax.custom_jvp(lambda z: jnp.where(mask, z, 2.0))
        f.defjvp(
            lambda z, t: (jnp.where(mask, z[0], 3.0) * still, jnp.where(mask, 5, still) * t[0])
        )
        return f(x * 1.0) * 1.5

    def by_reverse(x):
        mask, still = x > 1, jax.lax.stop_gradient(jnp.sin(x))
        f = jax.custom_vjp(lambda z: jnp.where(mask, z, 2.0))
        f.defvjp(
            lambda z: (jnp.where(mask, z, 3.0) * still, z),
            lambda r, c: (jnp.where(mask, c, 7 * c) * still * r,),
        )
        return f(x * 1.0) * 1.5

    ways, functions = [], [by_forward, by_reverse]
    if OLD and jax.config.jax_custom_vjp3:
        functions.remove(by_reverse)
        with pytest.raises(jax.errors.UnexpectedTracerError, match="closed over"):
            jax.vmap(by_reverse)(X)
    for f in functions:
        total = lambda x, f=f: bx.vmap(f)(x).sum()
        ways += [jax.grad(total), bx.vmap(jax.grad(f)), loop_function(jax.grad(f), (0,), 0)]
        ways += [lambda x, total=total: jax.vjp(total, x)[1](jnp.ones(()))[0]]
    results = iter(at_once(*ways)(X))
    for of_all, of_each, expected, later in zip(*[results] * 4, strict=True):
        for got in (of_all, of_each, later):
            same(got, expected)
