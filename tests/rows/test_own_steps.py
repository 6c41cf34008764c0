"""Scans over many rows, of cheap steps: each row takes its own, and derivatives are a scan's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.rows.padded_rules import own_steps

from support.oracle import example, same

LENGTHS = np.random.default_rng(1).integers(0, 30, 300).astype(np.int32)
DTYPE = jnp.zeros(()).dtype
ON_CPU = jax.default_backend() == "cpu"
HERE = ON_CPU and _compat.single_kernels()
needs_kernels = pytest.mark.skipif(not HERE, reason="of programs for CPUs, in single kernels")


def rows(*shape, lengths=LENGTHS):
    data = np.random.default_rng(2).normal(size=(int(lengths.sum()) + 5, *shape))
    return bx.Ragged(jnp.asarray(data, DTYPE), jnp.asarray(lengths), 30)


def each(x):
    ends = np.cumsum(np.asarray(x.lengths))
    return [x.data[e - n : e] for e, n in zip(ends, np.asarray(x.lengths), strict=True)]


def kalman(y, noise=1.0):
    def step(carry, y):
        mean, variance, total = carry
        variance = variance + 0.1
        spread = variance + noise
        gain, error = variance / spread, y - mean
        total = total - 0.5 * (error**2 / spread + jnp.log(spread))
        return (mean + gain * error, (1 - gain) * variance, total), None

    zero = jnp.zeros((), y.dtype)
    return lax.scan(step, (zero, zero + 1, zero), y)[0]


def averages(x, reverse=False):
    return lax.scan(lambda c, r: (0.9 * c + 0.1 * r, None), jnp.zeros(3), x, reverse=reverse)[0]


def counted(x):
    step = lambda c, r: (c + (r[0] > 0), None)
    return jax.jit(lambda x: lax.scan(step, 0, x)[0])(x)


def of_changed_rows(x):
    # What is scanned is padded here, and no argument.
    return lax.scan(lambda c, r: (c / (1 + r), None), 1.0, jnp.cumsum(x * x, 0).sum(1))[0]


def of_two_arrays(x, w):
    step = lambda c, r: (jnp.log(1 + r[0] ** 2 + c * c).sum() * w + r[1], None)
    return lax.scan(step, 0.5, (x, jnp.arange(x.shape[0]) / 10))[0]


SCANS = {
    "Kalman": (kalman, ()),
    "averages": (averages, (3,)),
    "in reverse": (lambda x: averages(jnp.exp(x), True), (3,)),
    "counts": (counted, (3,)),
    "of changed rows": (of_changed_rows, (2,)),
}


def has_own_steps(fun, *args):
    """Whether the program of `fun` holds a scan in which rows take their own steps."""
    return "own_steps[" in str(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize("name", SCANS)
def test_each_row_takes_its_own_steps(name):
    f, shape = SCANS[name]
    x = rows(*shape)
    assert has_own_steps(bx.vmap(f), x) == HERE
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *map(jax.jit(f), each(x)))
    same(jax.jit(bx.vmap(f))(x), expected)
    same(bx.vmap(f)(x), expected)
    few = rows(*shape, lengths=LENGTHS[:3])
    same(jax.jit(bx.vmap(f))(few), jax.tree.map(lambda *xs: jnp.stack(xs), *map(f, each(few))))


@pytest.mark.parametrize("name", SCANS)
def test_rows_of_which_none_has_elements(name):
    f, shape = SCANS[name]
    x = bx.Ragged(jnp.zeros((0, *shape), DTYPE), jnp.zeros(3, np.int32), 4)
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *map(f, each(x)))
    same(jax.jit(bx.vmap(f))(x), expected)


@pytest.mark.compiles(60)
def test_rows_and_what_else_they_have():
    x, w = rows(2), jnp.asarray(np.random.default_rng(3).normal(size=300), DTYPE)
    alone = jax.jit(of_two_arrays)
    expected = np.stack([alone(row, v) for row, v in zip(each(x), w, strict=True)])
    same(jax.jit(bx.vmap(of_two_arrays))(x, w), expected)
    shared = bx.vmap(of_two_arrays, in_axes=(0, None))
    of_all = [np.stack([alone(row, v) for row in each(x)]) for v in w[:2]]
    same(jax.jit(shared)(x, w[0]), of_all[0])
    twice = jax.jit(jax.vmap(shared, in_axes=(None, 0)))(x, w[:2])
    same(twice, np.stack(of_all))


@pytest.mark.parametrize("inside", [False, True])
def test_derivatives_are_those_of_the_scan(inside):
    x = rows()
    value = lambda y, noise: kalman(y, noise)[2]
    alone = jax.jit(jax.grad(value, (0, 1)))
    of_rows, of_noise = zip(*(alone(row, 1.5) for row in each(x)), strict=True)
    if inside:
        got_rows, got_noise = jax.jit(bx.vmap(jax.grad(value, (0, 1)), in_axes=(0, None)))(x, 1.5)
        same(got_rows.data, jnp.concatenate([*of_rows, jnp.zeros(5)]))
        same(got_noise, jnp.stack(of_noise))
        return

    def total(data, noise):
        rows = bx.Ragged(data, x.lengths, 30)
        return bx.vmap(value, in_axes=(0, None))(rows, noise).sum()

    got = jax.jit(jax.grad(total, (0, 1)))(x.data, 1.5)
    same(got, (jnp.concatenate([*of_rows, jnp.zeros(5)]), sum(of_noise)))
    moved = jax.jit(lambda d: jax.jvp(lambda d: total(d, 1.5), (d,), (d,)))(x.data)[1]
    same(moved, jnp.vdot(got[0], x.data))


def test_what_a_step_not_taken_makes_is_no_error():
    from jax.experimental import checkify

    inverse = bx.vmap(lambda x: lax.scan(lambda c, r: (c + 1 / r, None), 0.0, x)[0])
    x = rows()
    errors, got = checkify.checkify(jax.jit(inverse), errors=checkify.float_checks)(x)
    errors.throw()
    same(got, jnp.stack([jnp.sum(1 / row) for row in each(x)]))


@needs_kernels
def test_rows_are_read_where_they_are_packed_by_a_loop_that_is_one_kernel():
    x = rows(3)
    text = jax.jit(bx.vmap(averages)).lower(x).compile().as_text()
    assert not re.findall(r"f(?:32|64)\[(?:300,30|30,300)", text)  # no padded rows


@pytest.fixture
def halves(monkeypatch):
    """Rows run in halves, however little that saves."""
    monkeypatch.setattr(own_steps, "_SORTED", 0.0)
    monkeypatch.setattr(own_steps, "RUNS_OF_ROWS", 1e9)


def recurrent(x, reverse=False):
    """A state that is multiplied by a matrix in each step, and a random key that is carried."""
    matrices, bias = (example((64, 64), DTYPE) / 8, example((64, 4), DTYPE, seed=1)), x.sum() / 9

    def step(carry, row):
        state, key = carry
        state = jnp.tanh(matrices[0] @ state + matrices[1] @ row + bias)
        return (state, jax.random.fold_in(key, 1)), None

    (state, key), _ = lax.scan(step, (jnp.ones(64), jax.random.key(0)), x, reverse=reverse)
    return state, jax.random.key_data(key)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_half_of_the_rows_that_takes_most_steps_goes_on_alone(reverse):
    f = jax.jit(functools.partial(recurrent, reverse=reverse))
    x, batched = rows(4), jax.jit(bx.vmap(f))
    same(batched(x), jax.tree.map(lambda *xs: jnp.stack(xs), *map(f, each(x))))
    assert ("tensor<150x64xf" in batched.lower(x).as_text()) == ON_CPU


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("lengths", [LENGTHS[:33], np.full(33, 7), np.arange(33) % 31])
def test_halves_of_any_rows(lengths):
    x = rows(4, lengths=lengths.astype(np.int32))
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *map(recurrent, each(x)))
    same(jax.jit(bx.vmap(recurrent))(x), expected)


@pytest.mark.usefixtures("halves")
def test_halves_and_what_is_around_them():
    x, f = rows(4), lambda x: recurrent(x)[0]
    masked = bx.vmap(f, divergence="predicate")
    assert has_own_steps(bx.vmap(f), x) == ON_CPU
    assert not has_own_steps(masked, x)
    scaled = lambda run: lambda s: run(bx.Ragged(s * x.data, x.lengths, 30))
    total = lambda run: jax.jit(jax.grad(lambda s: (scaled(run)(s) ** 2).sum()))
    same(total(bx.vmap(f))(1.0), total(masked)(1.0))
    both = lambda run: jax.jit(jax.vmap(scaled(run)))(jnp.asarray([1.0, -1.0]))
    same(both(bx.vmap(f)), both(masked))
    same(bx.vmap(f)(x), masked(x))
