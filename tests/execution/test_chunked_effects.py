"""Callbacks and random numbers in chunks: once for each lane, in the order of the lanes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

import batchax as bx

from support.oracle import example, plainly, same

LANES = 5
X = jnp.arange(float(LANES))


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["at once", "jit"])
def wrap(request):
    return request.param


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("residuals", ["recompute", "keep"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.each_commit(4)
def test_callbacks_run_once_for_each_lane_in_order(batch_size, residuals, ordered, wrap):
    seen, printed = [], []

    def f(x, w):
        jax.debug.callback(lambda x: printed.append(float(x)), x, ordered=ordered)
        y = io_callback(lambda x: seen.append(float(x)) or x * 2, jax.typeof(x), x, ordered=ordered)
        return y + w, x

    batched = bx.vmap(
        f, (0, None), (0, bx.Reduce("sum")), batch_size=batch_size, residuals=residuals
    )
    same(wrap(batched)(X, 1.0), (X * 2 + 1, X.sum()))
    jax.effects_barrier()
    if residuals == "keep" and not ordered:
        # A last, smaller chunk stands after the loop, where JAX promises no order.
        seen, printed = sorted(seen), sorted(printed)
    assert seen == printed == list(range(LANES))


def test_a_callback_on_what_all_lanes_share_runs_as_without_chunks():
    seen = []

    def f(x):
        jax.debug.callback(lambda: seen.append(None))
        return x

    counts = []
    for batch_size in (None, 2):
        seen.clear()
        jax.block_until_ready(jax.jit(bx.vmap(f, batch_size=batch_size))(X))
        jax.effects_barrier()
        counts.append(len(seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("much", [False, True], ids=["little crosses", "much crosses"])
def test_effects_before_a_collective_happen_once(much, wrap):
    seen = []

    def f(x):
        y = io_callback(lambda x: seen.append(float(x)) or x * 2, jax.typeof(x), x, ordered=True)
        z = jnp.sin(y) + jnp.zeros(8 if much else ())
        mean = lax.pmean(z, "i")
        io_callback(lambda x: seen.append(100 + float(x)), None, x, ordered=True)
        return z - mean, y

    batched = bx.vmap(f, axis_name="i", batch_size=2)
    z = jnp.sin(X * 2)
    got = wrap(batched)(X)
    same(got[0].reshape(LANES, -1)[:, 0], z - z.mean())
    same(got[1], X * 2)
    jax.effects_barrier()
    assert sorted(seen) == [*range(LANES), *range(100, 100 + LANES)]
    for part in ([s for s in seen if s < 100], [s for s in seen if s >= 100]):
        assert part == sorted(part)


def test_differentiating_input_and_output_is_refused_by_name(wrap):
    def f(x):
        jax.debug.callback(lambda _: None, x, ordered=True)
        return jnp.sin(x)

    def total(**options):
        return lambda x: bx.vmap(f, batch_size=2, **options)(x).sum()

    with pytest.raises(bx.errors.UnsupportedError, match=r"would do it twice.*residuals=.keep"):
        wrap(jax.grad(total()))(X)


def test_derivatives_of_programs_with_unordered_callbacks(wrap):
    def f(x):
        jax.debug.callback(lambda _: None, x)
        return jnp.sin(x)

    for residuals in ("recompute", "keep"):
        batched = bx.vmap(f, batch_size=2, residuals=residuals)
        same(wrap(jax.grad(lambda x: batched(x).sum()))(X), jnp.cos(X))


# --- randomness ------------------------------------------------------------------------------


def test_derivatives_see_the_same_random_numbers():
    """What is recomputed in reverse mode draws what was drawn before."""
    keys = jax.random.split(jax.random.key(3), LANES)
    x = example((LANES, 3), seed=4)

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0.0)

    def value_and_gradient(**options):
        return jax.value_and_grad(lambda x: bx.vmap(dropout, **options)(keys, x).sum())

    same(jax.jit(value_and_gradient(batch_size=2))(x), plainly(value_and_gradient(), x))


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": 1}, {"mesh": "all"}])
def test_what_lanes_share_may_be_computed_by_what_makes_calls(options, wrap):
    """A loop of numbers that all lanes share, which is told each lane's own."""
    seen = []

    def f(x, w):
        def step(c):
            jax.debug.callback(lambda *xs: seen.append(tuple(map(float, xs))), x, c[1])
            return c[0] + 1, jnp.sin(c[1]) * 0 + c[0]

        return lax.while_loop(lambda c: c[0] < 3, step, (0.0, w))[1], w

    got = wrap(bx.vmap(f, (0, None), (None, 0), **options))(X, 1.0)
    same(got, (jnp.asarray(2.0), jnp.ones(LANES)))
    jax.effects_barrier()
    assert sorted(seen) == [(i, c) for i in range(LANES) for c in (0.0, 1.0, 1.0)]
