"""Scans over many rows, of cheap steps: each row takes its own, and derivatives are a scan's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat

from support.oracle import same

LENGTHS = np.random.default_rng(1).integers(0, 30, 300).astype(np.int32)
DTYPE = jnp.zeros(()).dtype
HERE = jax.default_backend() == "cpu" and _compat.single_kernels()
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


def test_expensive_steps_are_masked():
    w = jnp.ones((64, 64)) / 64
    step = lambda c, r: (jnp.tanh(w @ c + r), None)
    assert not has_own_steps(bx.vmap(lambda x: lax.scan(step, jnp.ones(64), x)[0]), rows())
