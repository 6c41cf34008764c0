"""The program of a derivative in two parts, and programs made of the equations of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr

from batchax.jaxprs.rewriter import Rewriter
from batchax.kernel.own_primitive import Linearized


def of_one(n, w, x):
    y = jnp.sin(w * x)
    return jnp.exp(y) * n, jnp.argmax(x), y


N, W, X = jnp.float32(3), jnp.float32(0.5), jnp.linspace(0.1, 0.9, 4)
PROGRAM = jax.make_jaxpr(of_one)(N, W, X)


def run(program, *xs):
    return eval_jaxpr(program.jaxpr, program.consts, *xs)


@pytest.mark.parametrize("saved", ["residuals", "nothing"])
def test_a_linear_part_has_the_tangents_and_cotangents_of_the_program(saved):
    split = Linearized.of(PROGRAM, perturbed=[1, 2], results=[0, 2], saved=saved)
    outs = run(split.values, N, W, X)
    given = [*([N, W, X][i] for i in split.reads), *outs[3:]]
    assert len(split.residuals) == len(outs[3:])
    assert bool(split.residuals) == (saved == "residuals")

    smooth = lambda w, x: of_one(N, w, x)[::2]
    dots = jnp.float32(2), jnp.ones(4)
    want, moved = jax.jvp(smooth, (W, X), dots)
    np.testing.assert_allclose(outs[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(run(split.tangents, *given, *dots)[0], moved[0], rtol=1e-6)
    cotangents = jnp.arange(4.0), jnp.ones(4)
    want = jax.vjp(smooth, W, X)[1](cotangents)
    got = run(split.transpose(), *given, *cotangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), list(want), got)


def test_a_program_can_be_inlined_twice():
    table = jnp.arange(3.0)
    inner = jax.make_jaxpr(lambda x: x * table + 1)(table)
    outer = jax.make_jaxpr(lambda x: x - 2)(table)
    to = Rewriter(outer, outer.jaxpr.eqns)
    (once,) = to.inline(inner, outer.jaxpr.outvars)
    (twice,) = to.inline(inner, [once])
    program = to.program(outputs=[twice, once])
    made = [v for eqn in program.jaxpr.eqns for v in eqn.outvars]
    assert len(set(made)) == len(made)
    x = jnp.ones(3)
    once = (x - 2) * table + 1
    np.testing.assert_array_equal(run(program, x), [once * table + 1, once])


def test_what_replaces_an_equation_computes_the_same_variables():
    first = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    other = jax.make_jaxpr(lambda x: -jnp.cos(x))(1.0)
    to = Rewriter(first)
    sine, double = first.jaxpr.eqns
    to.replace(sine, other)
    to.eqns.append(to.own(double))
    assert to.eqns[-2].outvars == sine.outvars
    np.testing.assert_allclose(run(to.program(), 1.0), [-2 * np.cos(1.0)], rtol=1e-6)
