"""`size`: the size of each lane as a dimension; and dense results as rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import example, same
from support.rows import ways

SIZES = np.array([3, 0, 5, 1, 5])
N = bx.size("n", max_size=6)
OPTIONS = ways("auto", "chunks", "compact", "padded")

pytestmark = pytest.mark.compiles(110)


def rows_of(fun, *args):
    """What `fun` returns for each lane, as a list."""
    return [fun(int(n), *(x[i] for x in args)) for i, n in enumerate(SIZES)]


def polynomial(n, x):
    return (x ** jnp.arange(n)).sum() / (n + 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.each_commit(4, "True-padded")
def test_a_size_for_each_lane(options, traced):
    x = example((5,), seed=1)
    batched = bx.vmap(polynomial, (N, 0), **options)
    expected = jnp.stack(rows_of(polynomial, x))
    if traced:
        same(jax.jit(batched)(SIZES, x), expected)
        gradient = jax.jit(jax.grad(lambda x: batched(jnp.asarray(SIZES), x).sum()))(x)
    else:
        same(batched(SIZES, x), expected)
        gradient = jax.grad(lambda x: batched(SIZES, x).sum())(x)
    looped = lambda x: sum(rows_of(polynomial, x), jnp.zeros(()))
    same(gradient, jax.grad(looped)(x))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
@pytest.mark.each_commit(1)
def test_what_has_that_size_is_rows(run):
    def fun(n, x):
        return x * jnp.arange(n), jnp.zeros((2, n)).at[0].set(x), jnp.arange(2 * n)

    x = example((5,), seed=2)
    for options in OPTIONS.values():
        got = run(bx.vmap(fun, (N, 0), **options))(SIZES, x)
        for k, ragged in enumerate(got):
            expected = [row[k] for row in rows_of(fun, x)]
            assert isinstance(ragged, bx.Ragged)
            lengths = np.asarray(ragged.lengths)
            padded = ragged.to_padded()
            for row, n, e in zip(padded, lengths, expected, strict=True):
                same(jax.lax.slice_in_dim(row, 0, int(n), axis=row.ndim - 1), e)


def test_beside_keys_and_in_nests():
    draw = lambda key, n: jax.random.normal(key, (4,))[:n].sum()
    small = np.minimum(SIZES, 4)
    key = jax.random.key(0)
    got = bx.vmap(draw, (bx.split_key, bx.size("n", max_size=4)))(key, small)
    same(got, jnp.stack([draw(jax.random.fold_in(key, i), int(n)) for i, n in enumerate(small)]))
    table = jnp.asarray(np.stack([SIZES, SIZES[::-1]]))
    total = lambda n: jnp.arange(n).sum()
    both = bx.vmap(bx.vmap(total, N))(table)
    same(both, jax.vmap(lambda row: row * (row - 1) // 2)(table))


def test_sizes_beyond_the_bound_are_clipped_where_they_are_traced():
    got = jax.jit(bx.vmap(lambda n: jnp.ones(n).sum(), bx.size("n", max_size=3)))(
        jnp.array([5, -2, 2])
    )
    same(got, jnp.array([3.0, 0.0, 2.0]))


def test_no_bound_is_needed_where_sizes_are_known():
    same(bx.vmap(lambda n: jnp.arange(n).sum(), bx.size("n"))(SIZES), SIZES * (SIZES - 1) // 2)
    assert bx.vmap(lambda n: jnp.ones(n).sum(), bx.size("n"))(np.zeros(0, int)).shape == (0,)


# --- dense results as rows ---------------------------------------------------------------------


@pytest.mark.parametrize("options", ways("auto", "chunks", "compact").values())
def test_results_of_equal_sizes_as_rows(options):
    x = example((4, 3, 2), seed=3)
    fun = lambda x: {"rows": jnp.sin(x), "sum": x.sum()}
    batched = bx.vmap(fun, out_axes={"rows": bx.ragged("n")}, **options)
    for run in (lambda f: f, jax.jit):
        got = run(batched)(x)
        assert isinstance(got["rows"], bx.Ragged)
        assert got["rows"].max_length == 3
        same(got["rows"].to_padded(), jnp.sin(x))
        same(got["sum"], x.sum((1, 2)))
    loss = lambda x: (batched(x)["rows"].data ** 2).sum()
    same(jax.grad(loss)(x), jax.grad(lambda x: (jnp.sin(x) ** 2).sum())(x))


ANY = jax.export.symbolic_shape("b")
REFUSED = {
    "Pass an array of ints of shape (lanes,), the size of each lane": lambda: bx.vmap(
        jnp.arange, N
    )(np.ones(3)),
    "of which there are b, a symbolic number": lambda: jax.eval_shape(
        bx.vmap(jnp.ones, N), jax.ShapeDtypeStruct(ANY, jnp.int32)
    ),
    "whose sizes are [3, 0, 5, 1, 5]: each must be in [0, 2]": lambda: bx.vmap(
        jnp.arange, bx.size("n", max_size=2)
    )(SIZES),
    "batchax.size('n', max_size=...)": lambda: jax.jit(bx.vmap(jnp.arange, bx.size("n")))(SIZES),
    "by sizes that all processes must know": lambda: bx.vmap(jnp.arange, N)(bx.local(SIZES)),
    "the function needs the size of a lane as a number, but lanes have": lambda: jax.jit(
        bx.vmap(lambda n: jnp.ones(n) if n > 1 else n, N)
    )(SIZES),
    "Lanes of one size could run together, but their sizes are traced here": lambda: jax.jit(
        bx.vmap(lambda n: jnp.linalg.svd(jnp.ones((n, 3)))[1], N)
    )(SIZES),
    "their lengths differ: row 0 has 3 and 2": lambda: bx.vmap(
        lambda n, r: r.sum() + n, (N, bx.ragged("n"))
    )(SIZES, bx.Ragged.from_rows([jnp.ones(2)] * 5)),
    "is for arguments, in in_axes": lambda: bx.vmap(jnp.sin, 0, N)(jnp.ones(3)),
    'takes a name for the size of rows, such as size("n")': lambda: bx.size("2n"),
    "max_size must be a non-negative int": lambda: bx.size("n", max_size=-1),
    "which is a number for each lane": lambda: bx.vmap(jnp.sin, 0, bx.ragged("n"))(jnp.ones(3)),
    "Ragged.from_padded": lambda: bx.vmap(jnp.sin, bx.ragged("n"))(jnp.ones(3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(bx.BatchaxError, match=re.escape(message)):
        REFUSED[message]()
