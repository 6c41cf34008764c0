"""A scalar over the whole batch and its gradient: one loop, in which no chunk runs twice."""

import functools

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.oracle import example, plainly, same

W = example((3,), seed=1)
X = example((7, 3), seed=2)


def loss(w, x):
    return jnp.tanh(w @ x) ** 2 + jnp.sum(w**2)


def mean_loss(w, x, **options):
    return bx.vmap(loss, (None, 0), bx.Reduce("mean"), **options)(w, x)


chunked_loss = functools.partial(mean_loss, batch_size=3)


def loops(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("chunk_loop[")


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.each_commit(1)
def test_value_and_gradient_in_one_loop(jit):
    for argnums in (0, 1, (0, 1)):
        both = jax.value_and_grad(chunked_loss, argnums)
        same(jit(both)(W, X), plainly(jax.value_and_grad(mean_loss, argnums), W, X))
    assert loops(jax.value_and_grad(chunked_loss), W, X) == 1
    assert loops(lambda w, x: jax.jvp(lambda w: chunked_loss(w, x), (w,), (w,)), W, X) == 1


def test_each_lane_runs_once():
    seen = []

    def noted(w, x):
        jax.debug.callback(lambda x: seen.append(float(x)), x[0])
        return loss(w, x)

    f = bx.vmap(noted, (None, 0), bx.Reduce("mean"), batch_size=3)
    jax.block_until_ready(jax.value_and_grad(f)(W, X))
    jax.effects_barrier()
    assert sorted(seen) == sorted(float(x) for x in X[:, 0])  # what is not ordered comes in any


def test_input_and_output_can_be_differentiated_here():
    seen = []

    def noted(w, x):
        jax.experimental.io_callback(lambda x: seen.append(float(x)), None, x[0], ordered=True)
        return loss(w, x)

    f = bx.vmap(noted, (None, 0), bx.Reduce("mean"), batch_size=3)
    same(jax.grad(f)(W, X), plainly(jax.grad(mean_loss), W, X))
    assert seen == [float(x) for x in X[:, 0]]


@pytest.mark.parametrize("order", [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))])
@pytest.mark.compiles(100)
def test_second_derivatives(order):
    same(order(chunked_loss)(W, X), order(mean_loss)(W, X))


def test_what_has_no_reverse_mode_goes_forward():
    def growing(w, x):
        return jax.lax.while_loop(lambda c: c < 50.0, lambda c: c * 1.5 + w[0] ** 2, x[0] ** 2 + 1)

    def total(w, x, **options):
        return bx.vmap(growing, (None, 0), bx.Reduce("sum"), **options)(w, x)

    chunked = functools.partial(total, batch_size=3)
    same(jax.jacfwd(chunked)(W, X), plainly(jax.jacfwd(total), W, X))
    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(chunked)(W, X)


def test_weights_of_low_precision_are_added_up_in_float32():
    w = W.astype(jnp.bfloat16)
    x = jnp.full((4096, 3), 1.0, jnp.bfloat16)

    def total(w):
        return bx.vmap(lambda x: w @ x, out_axes=bx.Reduce("sum"), batch_size=4)(x)

    # One by one, 1 is lost against 256 in bfloat16.
    same(jax.grad(total)(w), jnp.full((3,), 4096, jnp.bfloat16))


def test_a_mean_by_a_collective():
    def through_pmean(w, x, **options):
        f = bx.vmap(
            lambda w, x: jax.lax.pmean(loss(w, x), "i"), (None, 0), None, axis_name="i", **options
        )
        return f(w, x)

    got = jax.value_and_grad(functools.partial(through_pmean, batch_size=3))(W, X)
    same(got, plainly(jax.value_and_grad(mean_loss), W, X))
    assert loops(jax.grad(functools.partial(through_pmean, batch_size=3)), W, X) == 1
