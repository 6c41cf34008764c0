"""Primitives without a rule here: what JAX knows of them, or one lane after another."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching

import batchax as bx

X = jnp.arange(6.0).reshape(3, 2)


def primitive(name):
    p = Primitive(name)
    p.def_impl(lambda x: 2 * x)
    p.def_abstract_eval(lambda x: x)
    return p


def test_jax_rule_decides_what_is_batched_and_where():
    """A rule of a third party may put the axis anywhere, or take it away."""
    last_p = primitive("last")
    batching.primitive_batchers[last_p] = lambda args, dims: (jnp.moveaxis(args[0], dims[0], -1), 1)
    got = bx.vmap(lambda x: last_p.bind(x) + x)(X)
    assert jnp.array_equal(got, 2 * X)

    whole_p = primitive("whole")
    batching.primitive_batchers[whole_p] = lambda args, dims: (args[0].sum(dims[0]), None)
    got = bx.vmap(lambda x: whole_p.bind(x), out_axes=None)(X)  # not batched
    assert jnp.array_equal(got, X.sum(0))
    got = jax.vmap(bx.vmap(lambda x: whole_p.bind(x), out_axes=bx.AUTO))(jnp.stack([X, 2 * X]))
    assert jnp.array_equal(got, jnp.stack([X.sum(0), 2 * X.sum(0)]))


def test_equinox_unvmapped_predicate_stays_unbatched():
    """A loop on it stops when all lanes are done, and what it counts is not batched."""

    def count(x):
        def step(carry):
            n, x = carry
            return eqxi.nonbatchable(n) + 1, jnp.where(x < 5, x + 1, x)

        more = lambda carry: eqxi.unvmap_any(carry[1] < 5)
        return jax.lax.while_loop(more, step, (0, x))

    n, x = bx.vmap(count, out_axes=(None, 0))(jnp.arange(3.0))
    assert n == 5
    assert jnp.array_equal(x, jnp.full(3, 5.0))


def test_no_rule_anywhere_runs_lane_after_lane_and_warns_with_the_users_line():
    plain_p = primitive("plain")
    plain_p.def_impl(lambda x: 2 * x)
    jax.interpreters.mlir.register_lowering(
        plain_p, jax.interpreters.mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
    )
    with pytest.warns(bx.SequentialFallbackWarning, match=r"`plain` at .*test_fallback.py:\d+"):
        got = bx.vmap(lambda x: plain_p.bind(x))(X)
    assert jnp.array_equal(got, 2 * X)
