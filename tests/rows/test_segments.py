"""Reductions over packed rows, against NumPy's of each row."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import same

LENGTHS = np.array([3, 40, 0, 17, 1, 33, 2, 0, 128, 5], np.int32)
DTYPE = jnp.zeros(()).dtype


def rows(*shape, dtype=DTYPE, room=7, known=False):
    """Rows of small numbers, of which some are equal, with room behind the last."""
    size = int(LENGTHS.sum()) + room
    data = np.random.default_rng(0).integers(-4, 5, (size, *shape)).astype(dtype)
    lengths = LENGTHS if known else jnp.asarray(LENGTHS)
    return bx.Ragged(jnp.asarray(data), lengths, 130)


def each(x):
    ends = np.cumsum(LENGTHS)
    return [np.asarray(x.data[b:e]) for b, e in zip(ends - LENGTHS, ends, strict=True)]


REDUCED = {
    "sum": (jnp.sum, lambda x: x.sum(0)),
    "max": (jnp.max, lambda x: x.max(0, initial=-9)),
    "min": (jnp.min, lambda x: x.min(0, initial=9)),
}


def reduced(name, ahead=0):
    of = REDUCED[name][0]
    options = {} if name == "sum" else {"initial": {"max": -9, "min": 9}[name]}
    return lambda x: of(x[ahead:] if ahead else x, 0, **options)


@pytest.mark.each_commit(7)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (2, 2), (16,), (17,)], ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_reductions_are_those_of_each_row(name, shape):
    for dtype in (DTYPE, np.int32, np.float16):
        for known in (False, True):
            x = rows(*shape, dtype=dtype, known=known)
            for ahead in (0, 2):
                run = jax.jit(bx.vmap(reduced(name, ahead), layout="packed"))
                expected = [REDUCED[name][1](row[ahead:]) for row in each(x)]
                same(run(x), np.stack(expected))
                if not shape:
                    same(bx.vmap(reduced(name, ahead), layout="packed")(x), np.stack(expected))


def test_truths_of_rows():
    x = rows()
    for of, own in ((jnp.any, np.any), (jnp.all, np.all)):
        got = jax.jit(bx.vmap(lambda x, of=of: of(x > 2), layout="packed"))(x)
        same(got, np.array([own(row > 2) for row in each(x)]))


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("ahead", [0, 2])
def test_derivatives_of_rows(name, ahead):
    x = rows(2)
    total = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    packed = lambda data: total(bx.vmap(reduced(name, ahead), layout="packed"))(
        bx.Ragged(data, x.lengths, 130)
    )
    alone = lambda row: total(reduced(name, ahead))(row)
    expected = [np.asarray(jax.grad(alone)(jnp.asarray(row))) for row in each(x) if len(row)]
    got = jax.jit(jax.grad(packed))(x.data)
    same(got, np.concatenate([*expected, np.zeros((7, 2), DTYPE)]))
    moved = jax.jvp(packed, (x.data,), (jnp.ones_like(x.data),))[1]
    same(moved, np.concatenate(expected).sum())


def test_what_is_not_finite_reaches_its_row_alone():
    x = rows(room=0)
    data = x.data.at[10].set(np.nan).at[60].set(np.inf)
    x = bx.Ragged(data, x.lengths, 130)
    for name in REDUCED:
        got = jax.jit(bx.vmap(reduced(name), layout="packed"))(x)
        same(got, np.stack([REDUCED[name][1](row) for row in each(x)]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of programs for CPUs")
def test_cpus_add_no_elements_by_index_and_call_no_library_for_few_of_them():
    lengths = jnp.full(100, 40, np.int32)
    x = bx.Ragged(jnp.ones((4000, 3), DTYPE), lengths, 64)
    speed = lambda x: jnp.sqrt(jnp.sum((x[2:] - x[:-2]) ** 2, 1))
    for of in (jnp.sum, jnp.max):
        text = jax.jit(bx.vmap(lambda x, of=of: of(speed(x)))).lower(x).compile().as_text()
        assert not re.findall(r" (?:scatter|reduce|gather)\(", text)
