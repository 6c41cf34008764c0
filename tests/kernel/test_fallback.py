"""Primitives without a rule here: what JAX knows of them, or sequentially."""

import functools
import warnings

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.interpreters import batching

import batchax as bx

from support.new_primitive import new_primitive

X = jnp.arange(6.0).reshape(3, 2)


def doubling(name):
    return new_primitive(name, lambda x: 2 * x)


def test_jax_rule_decides_what_is_batched_and_where():
    """A rule of a third party may put the axis anywhere, or take it away."""
    last_p = doubling("last")
    batching.primitive_batchers[last_p] = lambda args, dims: (jnp.moveaxis(args[0], dims[0], -1), 1)
    got = bx.vmap(lambda x: last_p.bind(x) + x)(X)
    assert jnp.array_equal(got, 2 * X)

    whole_p = doubling("whole")
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


def test_equinox_loops_mask_lanes_once():
    """Where lanes run apart, they are masked as those of any loop, and the body masks none."""

    def halved(loop, x):
        step = lambda carry: (carry[0] + 1, carry[1] / 2, carry[1])
        return loop(lambda c: c[1] > 1, step, (jnp.int32(0), x, x))

    plain = functools.partial(halved, lax.while_loop)
    masking = functools.partial(halved, functools.partial(eqxi.while_loop, kind="lax"))
    xs = jnp.linspace(0.5, 900, 200)
    got = bx.vmap(masking, divergence="compact")(xs)
    by_lane = [jnp.stack(x) for x in zip(*map(jax.jit(masking), xs), strict=True)]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, tuple(by_lane)))
    listed = lambda f: str(jax.make_jaxpr(bx.vmap(f, divergence="compact"))(xs))
    assert listed(masking).count("select_n") == listed(plain).count("select_n")


plain_p = doubling("plain")


def doubled(x):
    return plain_p.bind(x)


DOUBLED_AT = doubled.__code__.co_firstlineno + 1


def test_no_rule_anywhere_runs_lane_after_lane_and_warns_with_the_users_line():
    with pytest.warns(
        bx.SequentialFallbackWarning, match=rf"`plain` at .*test_fallback.py:{DOUBLED_AT}"
    ) as seen:
        got = bx.vmap(doubled, 1)(X.T)
    assert jnp.array_equal(got, 2 * X)
    assert (seen[0].filename, seen[0].lineno) == (__file__, DOUBLED_AT)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_warning_has_a_place_where_the_function_is_none_of_the_users(around):
    p = doubling("nameless")
    with pytest.warns(bx.SequentialFallbackWarning, match=r"at .*test_fallback.py:\d+ ") as seen:
        around(bx.vmap(p.bind))(X)
    assert seen[0].filename == __file__


def test_one_warning_for_each_place():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")  # of what tests before left behind, say
        warnings.simplefilter("default", bx.SequentialFallbackWarning)
        for _ in range(3):
            bx.vmap(doubled)(X)
            jax.jit(bx.vmap(doubled))(X)
        assert len(seen) == 1
        bx.vmap(lambda x: plain_p.bind(x))(X)
        assert len(seen) == 2


@pytest.mark.filterwarnings("ignore::batchax.SequentialFallbackWarning")
def test_no_rule_anywhere_composes():
    expected = 2 * X
    assert jnp.array_equal(jax.jit(bx.vmap(jax.jit(doubled)))(X), expected)
    assert jnp.array_equal(bx.vmap(bx.vmap(doubled))(X), expected)
    assert bx.vmap(doubled)(X[:0]).shape == (0, 2)
    shared = bx.vmap(lambda x, y: (x + 1, doubled(y)), (0, None), (0, None))(X, 3.0)
    assert shared[1] == 6.0
    total = lambda x: bx.vmap(doubled)(x).sum()
    assert jnp.array_equal(jax.grad(total)(X), jnp.full_like(X, 2))
    inside = bx.vmap(jax.grad(lambda x: doubled(x).sum()))(X)
    assert jnp.array_equal(inside, jnp.full_like(X, 2))


@pytest.mark.filterwarnings("error::batchax.SequentialFallbackWarning")
def test_what_batchax_rejects_inside_a_rule_of_jax_is_no_missing_rule():
    p = new_primitive("calls_batchax", lambda x: x)

    def rule(args, dims):
        raise bx.UnsupportedError("not in this rule")

    batching.primitive_batchers[p] = rule
    with pytest.raises(bx.UnsupportedError, match="not in this rule"):
        bx.vmap(p.bind)(X)


def rule_of_jax(p):
    def rule(size, name, main_type, args, dims, *, names):
        assert name in names
        return (args[0] * size, None) if dims[0] is None else (args[0].sum(dims[0]), None)

    batching.axis_primitive_batchers[p] = rule


def rule_of_batchax(p):
    @bx.register_rule(p)
    def rule(axis, args, axes, /, *, names):
        if axis.name not in names:
            return p.bind(args[0], names=names), axes[0]
        return (args[0] * axis.size, None) if axes[0] is None else (args[0].sum(axes[0]), None)


AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "loop": lambda f: lambda x: lax.fori_loop(0, 1, lambda _, x: f(x), x),
    "branch": lambda f: lambda x: lax.cond(x[0] > 2, f, f, x),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("register", [rule_of_jax, rule_of_batchax])
@pytest.mark.parametrize("around", AROUND)
def test_a_collective_of_constants_of_a_third_partys(register, around):
    # Without an effect that says that it is one: the number of lanes.
    p = new_primitive("lanes", lambda x, **params: x)
    register(p)
    f = AROUND[around](lambda x: x + p.bind(jnp.float32(5), names=("i", "j")))
    for vmap in (bx.vmap, jax.vmap):
        assert jnp.array_equal(vmap(f, axis_name="i")(X), X + 15)
    assert jnp.array_equal(bx.vmap(f)(X) if register is rule_of_batchax else X + 5, X + 5)
