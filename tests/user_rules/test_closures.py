"""What only the rule closes over, and the function does not use."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.oracle import example, plainly, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


def solve(a, b, prepare=lambda inverse: inverse):
    """a^-1 b, whose rule uses an inverse that was computed outside of it."""
    prepared = prepare({"inverse": jnp.linalg.inv(a)})

    @bx.custom_vmap
    def one(b):
        return jnp.linalg.solve(a, b)

    @one.def_vmap
    def rule(axis_size, in_batched, b):
        return 3 * (b @ prepared["inverse"].T), True

    return one(b)


A, B = jnp.eye(3) + 0.1 * example((3, 3)), example((4, 3), seed=1)


def reference(scale):
    return lambda a, b: scale * jnp.linalg.solve(a, b)


# how it is called, what the rule's factor of three does to the result
ORDERS = {
    "vmap": (lambda vmap, f: vmap(f, (None, 0)), 3),
    "jit of vmap": (lambda vmap, f: jax.jit(vmap(f, (None, 0))), 3),
    "vmap of jit": (lambda vmap, f: vmap(jax.jit(f), (None, 0)), 3),
    "vmap of scan": (
        lambda vmap, f: vmap(
            lambda a, b: jax.lax.scan(lambda c, _: (c, f(a + 0 * c, b)), 0.0, length=2)[1],
            (None, 0),
        ),
        3,
    ),
    "vmap of checkpoint": (lambda vmap, f: vmap(jax.checkpoint(f), (None, 0)), 3),
    "vmap of grad by the argument": (
        lambda vmap, f: vmap(jax.grad(lambda b, a: f(a, b).sum()), (0, None)),
        3,
    ),
    "grad of vmap": (
        lambda vmap, f: jax.grad(lambda a, b: jnp.sum(jnp.sin(vmap(f, (None, 0))(a, b)))),
        3,
    ),
    "vmap of grad by what is closed over": (
        lambda vmap, f: vmap(jax.grad(lambda a, b: f(a, b).sum()), (None, 0)),
        1,
    ),
    "vmap of both": (lambda vmap, f: lambda a, b: vmap(f)(jnp.stack([a, 2 * a]), b[:2]), 1),
}


@VMAPS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.each_commit(9)
def test_a_value_made_ready_for_the_rule(vmap, order):
    transform, scale = ORDERS[order]
    args = (B, A) if "by the argument" in order else (A, B)
    got = transform(vmap, solve)(*args)
    same(got, transform(jax.vmap, reference(scale))(*args))


@VMAPS
def test_nothing_of_it_is_needed_without_a_batch(vmap):
    same(
        jax.jit(jax.grad(lambda a: solve(a, B[0]).sum()))(A),
        plainly(jax.grad(lambda a: reference(1)(a, B[0]).sum()), A),
    )


def test_a_rule_left_over_from_a_trace_that_is_over_breaks_nothing_but_batches():
    @bx.custom_vmap
    def f(x):
        return jnp.sin(x)

    @jax.jit
    def leave_a_rule(w):
        f.def_vmap(lambda n, b, x: (jnp.sin(x) * w, True))
        return w

    leave_a_rule(1.0)
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))):
        same(transform(f)(0.5), transform(jnp.sin)(0.5))
    with pytest.raises(bx.UnsupportedError, match="of a transformation that is over"):
        bx.vmap(f)(jnp.ones(3))
    with pytest.raises(bx.UnsupportedError, match="of a transformation that is over"):
        jax.jit(jax.vmap(f))(jnp.ones(3))
