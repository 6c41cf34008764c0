"""References that a function creates, where it runs a few lanes at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import example, same

XS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
WAYS = jnp.array([0, 3, 1, -1])


@jax.custom_jvp
def doubled(x):
    """Its derivative is twice that of what it computes."""
    return jnp.sum(jnp.sin(x))


doubled.defjvp(lambda x, t: (doubled(*x), 2 * jnp.vdot(jnp.cos(x[0]), t[0])))


@jax.custom_vjp
def tripled(x):
    """Its derivative is three times a cosine, which is none of what it computes."""
    return jnp.sum(x**2)


tripled.defvjp(lambda x: (tripled(x), x), lambda x, g: (3 * g * jnp.cos(x),))


def in_a_branch_beside_one(x, way):
    def other(p):
        ref = jax.new_ref(x * 1.0)
        ref[0] = 2.0
        return p * 2 + doubled(p)

    own = lambda x: jnp.tanh(x + doubled(x) + tripled(x))
    return lax.cond(way > 1, own, other, x) + doubled(x)


def in_a_loop_and_a_call(x, way):
    ref = jax.new_ref(x * 1.0)

    def step(c, t):
        ref[0] = doubled(c) + tripled(c)
        return jnp.tanh(c + ref[0] * t), t

    out, _ = lax.scan(step, x, jnp.arange(2.0, dtype=x.dtype))
    return jax.jit(lambda c: doubled(c) * ref[1] + ref[...])(out) + way


@pytest.mark.parametrize("function", [in_a_branch_beside_one, in_a_loop_and_a_call])
def test_derivatives_of_ones_own_are_kept_where_references_are_used(function):
    # JAX opens functions with derivatives of their own in loops and branches that use references.
    gradient = lambda f: jax.grad(lambda x, way: jnp.sin(f(x, way)).sum())
    expected = jnp.stack([gradient(function)(x, way) for x, way in zip(XS, WAYS, strict=True)])
    for size in (2, None):
        found = jax.jit(gradient(bx.vmap(function, batch_size=size)))(XS, WAYS)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_program_without_references_is_made_once():
    from batchax.execution.call import without_references

    program = jax.make_jaxpr(in_a_loop_and_a_call)(XS[0], WAYS[0])
    made = without_references(program, None, 0)
    assert without_references(program, None, 0) is made
    assert without_references(made, None, 0) is made
    assert "custom_jvp_call" in str(made)
    assert "Ref{" not in str(made)


OPTIONS = {
    "chunks": dict(batch_size=2),
    "auto": dict(batch_size="auto"),
    "devices": dict(mesh="all"),
    "both": dict(mesh="all", batch_size=1),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", OPTIONS)
def test_a_reference_that_is_mapped(way, jit):
    """Each lane has a part of its own, so lanes may run in any order."""

    def f(ref, x, tree):
        old = ref[0]
        ref[0] = x
        jax.lax.fori_loop(0, 2, lambda i, _: jax.ref.addupdate(ref, 1, old * x), None)
        tree["count"][...] += 1
        return ref[...].sum() - jax.lax.pmean(x, "i")

    def run(call):
        def with_references(values, counts, x):
            refs = jax.new_ref(values), jax.new_ref(counts)
            out = call(refs[0], x, {"count": refs[1]})
            return out, [ref[...] for ref in refs]

        return jax.jit(with_references) if jit else with_references

    args = jnp.asarray(example((3, 5))), jnp.arange(5), jnp.asarray(example((5,), seed=1))
    in_axes = dict(in_axes=(1, 0, 0), axis_name="i")
    ours, at_once = run(bx.vmap(f, **in_axes, **OPTIONS[way])), run(bx.vmap(f, **in_axes))
    same(ours(*args), at_once(*args))
    assert not np.allclose(ours(*args)[1][0], args[0])


@pytest.mark.parametrize("options", [dict(batch_size=2), dict(mesh="all")])
def test_a_reference_that_all_lanes_share_is_refused_by_name(options):
    ref, x = jax.new_ref(jnp.zeros(3)), jnp.arange(4.0)
    read = lambda m, x: m["ref"][0] + x
    with pytest.raises(bx.UnsupportedError, match=r"m\['ref'\] is a reference .* all lanes share"):
        bx.vmap(read, (None, 0), **options)({"ref": ref}, x)
    with pytest.raises(bx.UnsupportedError, match="the function closes over is a reference"):
        bx.vmap(lambda x: ref[0] + x, **options)(x)
    same(bx.vmap(read, (None, 0), **options)({"ref": ref[...]}, x), x)
    same(bx.vmap(read, (None, 0), batch_size=4)({"ref": ref}, x), x)  # of one chunk
