"""Loops and branches of rows in padded arrays: each row takes its own steps and branches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

check = partial(check_rows, layout="padded")
check_all = partial(check_rows_of_all, layout="padded")
GENERATOR = np.random.default_rng(3)
INTO = jnp.asarray(GENERATOR.normal(size=(3, 4)), float)
AGAIN = jnp.asarray(0.3 * GENERATOR.normal(size=(4, 4)), float)


def recurrent(x, into=INTO, again=AGAIN):
    def step(hidden, row):
        hidden = jnp.tanh(hidden @ again + row @ into)
        return hidden, hidden

    return lax.scan(step, jnp.zeros(4), x)


def logarithms(x, reverse=False):
    """A row of zeros, as in padding, would make infinities of the value and the derivative."""

    def step(carry, row):
        return carry * 0.5 + jnp.log(jnp.abs(row)), 1 / row

    return lax.scan(step, jnp.zeros(3), x, reverse=reverse)


def keys_and_counts(x):
    def step(carry, row):
        key, count, total = carry
        key, own = jax.random.split(key)
        return (key, count + 1, total + row * jax.random.normal(own, row.shape)), count

    (key, count, total), counts = lax.scan(step, (jax.random.key(0), 0, jnp.zeros(3)), x)
    return count, total, counts, jax.random.key_data(key)


SCANS = {
    "a recurrence": recurrent,
    "in reverse": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(3), x, reverse=True),
    "of logarithms": logarithms,
    "of logarithms, in reverse": partial(logarithms, reverse=True),
    "over rows and what else they have": lambda x: lax.scan(
        lambda c, r: (c + (jnp.log(jnp.abs(r)) * jnp.abs(x).sum(0)), r * c), jnp.zeros(3), x
    ),
    "with a ragged carry": lambda x: lax.scan(
        lambda c, r: (c * 0.5 + r * jnp.sqrt(jnp.abs(c).mean()), (c * r).sum()), x, x
    ),
    "of keys and counts": keys_and_counts,
}


@pytest.mark.parametrize("names", shares(SCANS, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_a_scan_over_a_row_takes_as_many_steps_as_the_row_has(names):
    check_all(chosen(SCANS, names), ragged(3, lengths=(3, 0, 2)))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_carry_that_nothing_reads_after_the_scan_is_not_held_in_steps_not_taken(reverse):
    def outputs(x):
        step = lambda hidden, row: (jnp.tanh(hidden @ AGAIN + row @ INTO),) * 2
        return jax.jit(lambda x: lax.scan(step, jnp.zeros(4), x, reverse=reverse))(x)[1]

    x = ragged(3, lengths=(3, 1, 2))
    jaxpr = jax.make_jaxpr(bx.vmap(outputs, layout="padded"))(x)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    names = [e.primitive.name for e in scan.params["jaxpr"].eqns]
    assert names.count("select_n") == (2 if reverse else 1)
    check(outputs, x)


def test_a_scan_of_rows_that_are_all_empty_returns_its_initial_carry():
    check(recurrent, ragged(3, lengths=(0, 0)))
    check(recurrent, ragged(3, lengths=(0, 0), spare=0, poison=False))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.each_commit(1)
def test_the_gradient_of_shared_weights_has_no_nan_from_steps_not_taken(reverse):
    def shared(x, w):
        def step(carry, row):
            return carry + jnp.log(jnp.abs(row @ w)) / jnp.sqrt(jnp.abs(carry) + 1), row @ w

        return lax.scan(step, jnp.zeros(4), x, reverse=reverse)

    check(shared, ragged(3, lengths=(3, 0, 2, 3)), INTO, in_axes=(0, None))


def test_what_overflows_in_a_step_not_taken_does_not_reach_the_gradient():
    # The short row ends with a carry whose exponential is infinite; the long one stays at zero.
    def growing(x, w):
        return lax.scan(lambda c, r: (jnp.exp(c * w) + r, c), jnp.ones(()), x)[0]

    short, long = np.full(3, 0.5, np.float32), np.full(6, -1.0, np.float32)
    long[0] = -np.exp(np.float32(1))
    x, w = bx.Ragged.from_rows([short, long]), np.float32(1.0)
    alone, batched = jax.grad(growing, 1), bx.vmap(growing, in_axes=(0, None), layout="padded")
    expected = jax.jit(lambda w: sum(alone(row, w) for row in x.rows()))(w)
    got = jax.jit(jax.grad(lambda w: batched(x, w).sum()))(w)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_recurrence_in_half_precision_does_not_overflow_where_padding_is_zero():
    # (c + x) ** 2 is small in each step that is taken; of the carry alone it is infinite.
    def squares(x, w):
        return lax.scan(lambda c, r: (c, ((c + r) * (c + r)) * w), np.float16(300), x)[1]

    x = bx.Ragged.from_rows([np.full(n, -299, np.float16) for n in (1, 3)])
    total = lambda w: bx.vmap(squares, in_axes=(0, None), layout="padded")(x, w).data.sum()
    assert jax.jit(jax.grad(total))(np.float16(1)) == 4


COUNTED = {
    "from 0": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, c: jnp.sin(c) + jnp.cos(i * x.sum(0)), jnp.zeros(3)
    ),
    "of elements": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, c: c * jnp.cos(x[i]) + 1 / x[i], jnp.ones(3)
    ),
    "with a ragged carry": lambda x: lax.fori_loop(
        0, x.shape[0] - 1, lambda i, c: c.at[i + 1].add(jnp.sin(c[i])), x
    ),
    "a scan of so many steps": lambda x: lax.scan(
        lambda c, _: (jnp.sin(c) + x.sum(0), c), jnp.zeros(3), length=x.shape[0]
    ),
    "a scan of rows that names its length": lambda x: lax.scan(
        lambda c, r: (jnp.sin(c) + r, c), jnp.zeros(3), x, x.shape[0], reverse=True
    ),
}


def test_a_scan_of_another_length_than_that_of_its_rows_raises():
    scan = lambda x: lax.scan(lambda c, r: (c, r), 0, x, length=x.shape[0] - 1)
    with pytest.raises(ValueError, match="leading axis sizes"):
        bx.vmap(scan)(ragged(3, lengths=(3, 1, 2)))


def test_a_loop_that_counts_to_the_length_has_both_derivatives():
    check_all(COUNTED, ragged(3, lengths=(3, 1, 2, 3)))


WHILES = {
    "with a limit closed over": lambda x: lax.while_loop(
        lambda s: s[0] < x.shape[0],
        lambda s: (s[0] + 1, s[1] + jnp.log(jnp.abs(x[s[0]]))),
        (0, jnp.zeros(3)),
    ),
}


def test_a_loop_of_a_row_ends_by_its_own_condition():
    check_all(WHILES, ragged(3, lengths=(3, 1, 2, 3)), modes=("jvp",))


BRANCHES = {
    "by length": lambda x: lax.cond(
        jnp.asarray(x.shape[0]) > 2, lambda: x.mean(0), lambda: x.max(0, initial=-1.0)
    ),
    "by platform": lambda x: lax.platform_dependent(
        x, cpu=lambda x: x - x.mean(0), default=jnp.sin
    ),
}


def test_a_row_takes_its_own_branch():
    check_all(BRANCHES, ragged(3, lengths=(3, 1, 2, 3)))


def test_a_loop_for_each_place():
    """Each takes its own number of steps, and none is taken in the padding, which would not end"""

    def doubled(t, k):
        return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2 + k, c[1] + 1), (t, 0))

    def f(x):
        sizes = jnp.abs(x[:, 0])
        pairs = jax.vmap(jax.vmap(doubled, (0, None)), (None, 0))
        return jax.vmap(doubled)(sizes, sizes), pairs(sizes, jnp.ones(2, x.dtype))[0]

    check(f, ragged(3, lengths=(3, 0, 2, 3), spare=40), modes=("jvp",))


REFUSED = {
    "outside the loop": lambda x: lax.scan(
        lambda c, r: (c + lax.psum(r, "rows"), c), jnp.zeros(3), x
    ),
    "with an effect in each": lambda x: lax.scan(
        lambda c, r: (jax.debug.print("{}", c), c)[1:] * 2, jnp.zeros(3), x
    ),
    "hands to Python": lambda x: jax.pure_callback(np.sin, x, x),
    "`debug.*hands to Python": lambda x: (jax.debug.print("{}", x), x)[1],
    "Reduce over the row first": lambda x: lax.psum(x, "rows"),
    "which take different ways": lambda x: bx.vmap(
        lambda t: lax.cond(t > 0, jnp.log, lambda t: t, t)
    )(x[:, 0]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_rows_cannot_do_together_is_refused(why):
    run = jax.jit(bx.vmap(REFUSED[why], axis_name="rows", layout="padded"))
    with pytest.raises(UnsupportedError, match=why):
        run(ragged(3))
