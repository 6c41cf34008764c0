"""A scalar over the batch and its gradient in one loop; and one lane at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.kinds_of_axis import check_kind
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

    total = lambda w, x, **options: bx.vmap(growing, (None, 0), bx.Reduce("sum"), **options)(w, x)
    chunked = functools.partial(total, batch_size=3)
    same(jax.jacfwd(chunked)(W, X), plainly(jax.jacfwd(total), W, X))
    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(chunked)(W, X)


COUNTS = np.array([3, 0, 17, 5, 1], np.int32)
POINTS = np.random.default_rng(0).normal(size=(5, 3)).astype("f")
WEIGHTS = np.random.default_rng(1).normal(size=(3, 3)).astype("f")
SERIAL = {
    "serial": {"divergence": "serial"},
    "kept": {"divergence": "serial", "residuals": "keep"},
    "devices": {"divergence": "serial", "mesh": "all"},
}


def walk(weights, x, count):
    x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(weights @ x), x)
    return lax.cond(count > 4, jnp.sin, lambda x: 2 * x, x)


def steps(count):
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, 2.0 * c[1]), (0, 1.0))[1]


def test_values_and_derivatives_are_those_of_the_loop():
    make = functools.partial(bx.vmap, walk, (None, 0, 0))
    each = lambda weights, xs, counts: jnp.stack(
        [walk(weights, x, n) for x, n in zip(xs, counts, strict=True)]
    )
    check_kind(make, each, WEIGHTS, POINTS, COUNTS, ways=SERIAL)


def test_a_lane_runs_the_branch_that_it_takes_and_no_other():
    taken = []
    branch = lambda name: lambda x: (jax.debug.callback(taken.append, name), x)[1]
    named = [functools.partial(lambda i, x: branch(i)(x), i) for i in range(3)]
    out = bx.vmap(lambda i, x: lax.switch(i, named, x), divergence="serial")(
        jnp.array([1, 0, 1, 1]), jnp.arange(4.0)
    )
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert sorted(map(int, taken)) == [0, 1, 1, 1]


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_another_batch_size_raises(batch_size):
    with pytest.raises(TypeError, match=r'divergence="serial" runs one lane at a time, but batch_'):
        bx.vmap(steps, divergence="serial", batch_size=batch_size)
    with pytest.raises(TypeError, match="Omit batch_size, or omit divergence"):
        bx.auto_vmap(0, divergence="serial", batch_size=batch_size)(steps)
