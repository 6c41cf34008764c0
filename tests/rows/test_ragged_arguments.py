"""Ragged arguments of `vmap` with its other options, and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.mistakes import check_raises, raising
from support.oracle import same
from support.rows import attend, check_rows, ragged

WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), float)
X = ragged(3)
SQUARES = bx.Ragged(np.ones(5), ([2, 1], [2, 1]), axis=(0, 1))
IMAGES = bx.Ragged(np.ones(10), ([2, 1], [3, 4]), axis=(0, 1))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.each_commit(1)
def test_rows_in_chunks(batch_size):
    f = lambda x, w: (attend(x @ w).sum(0), x[1:] * 2)
    check_rows(f, X, WEIGHTS, in_axes=(0, None), batch_size=batch_size)


def test_trees_keywords_and_names():
    batch = {"a": X, "b": jnp.arange(4.0)}
    same(
        bx.vmap(lambda d: d["a"].sum() + d["b"])(batch),
        jnp.stack([row.sum() + i for i, row in enumerate(X.rows())]),
    )
    by_name = bx.vmap(lambda x, w: (x @ w).sum(), in_axes={"w": None})
    same(by_name(X, w=WEIGHTS), jnp.stack([(row @ WEIGHTS).sum() for row in X.rows()]))


def test_arguments_that_share_a_size():
    y = ragged(3, seed=1)
    expected = [a + b for a, b in zip(X.rows(), y.rows(), strict=True)]
    named = bx.ragged("n")
    runs = {
        "known to be equal": lambda: bx.vmap(jnp.add)(X, y),
        "one array": lambda: jax.jit(lambda x: bx.vmap(jnp.add)(x, x.with_data(y.data)))(X),
        "named": lambda: jax.jit(bx.vmap(jnp.add, in_axes=(named, named)))(X, y),
    }
    for run in runs.values():
        for mine, theirs in zip(run().rows(), expected, strict=True):
            same(mine, theirs)
    # Where rows of one size are is found once, also if their lengths are two arrays.
    padded = lambda x, y: jnp.linalg.lstsq(x @ WEIGHTS, y[:, 0])[0]
    program = jax.make_jaxpr(bx.vmap(padded, in_axes=(named, named)))(X, y)
    assert str(program).count("row_places[") == 1


def test_callbacks_are_called_in_order():
    seen = []

    def f(x):
        jax.debug.callback(lambda s: seen.append(("sum", s)), x.sum(), ordered=True)
        jax.debug.callback(lambda s: seen.append(("best", s)), attend(x).max(), ordered=True)
        return x @ WEIGHTS

    jax.block_until_ready(jax.jit(bx.vmap(f, batch_size=1))(X).data)
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["sum", "best"] * 4


vmap, named, Reduce = bx.vmap, bx.ragged, bx.Reduce
MISTAKES = {
    bx.AxisError: {
        "depends on the batch": lambda: vmap(jnp.sum, out_axes=None)(X),
        r"gives 1 for out, whose shape for each row is \(n, 3\)": lambda: vmap(jnp.sin, out_axes=1)(
            X
        ),
        ": rows of different lengths cannot be": lambda: vmap(jnp.sin, out_axes=Reduce("sum"))(X),
        r"ragged\('n'\) for x, whose rows have 2 ragged axes, \(0, 1\)": lambda: vmap(
            jnp.sin, named("n")
        )(SQUARES),
        "rows have one ragged axis. Pass a name for each": lambda: vmap(jnp.sin, named("n", "m"))(
            X
        ),
        "rows of x 'n', but their lengths differ: row 0 has 2 and 3": lambda: vmap(
            jnp.sin, named("n", "n")
        )(IMAGES),
        r"in_axes gives 1 for x, whose rows are along axis 0": lambda: vmap(jnp.sin, in_axes=1)(X),
        r"args\[0\] and of args\[1\] 'n', but .*: row 0 has 3 and 1": lambda: vmap(
            jnp.add, in_axes=(named("n"),) * 2
        )(X, ragged(lengths=(1, 1, 1, 1))),
        r"x: shape \(4, n, 3\), axis 0, size 4": lambda: vmap(lambda x, y: x.sum() + y)(
            X, jnp.ones(5)
        ),
    },
    bx.ArgumentTypeError: {
        r"for x": lambda: vmap(jnp.sin, in_axes=named("n"))(jnp.ones(3)),
        r"x is a Ragged, whose rows differ in length; the steps of a scan": lambda: bx.scan(
            lambda carry, x: (carry, x.sum())
        )(0.0, X),
    },
    bx.UnsupportedError: {
        "needs the length of a row as a number.*lengths are traced": lambda: jax.jit(
            vmap(lambda x: x[0] if x.shape[0] > 3 else x[-1])
        )(X),
        r"take a number\.\nTo compute with the length, pass x\.shape\[0\]": lambda: jax.jit(
            vmap(lambda x: x.sum() / len(x))
        )(X),
        "Python loops over an array take a number": lambda: jax.jit(vmap(lambda x: sum(x)))(X),
        r"`svd` at .*test_ragged_arguments.py(.|\n)*lengths are traced here": lambda: jax.jit(
            vmap(lambda x: jnp.linalg.svd(x)[1])
        )(X),
    },
    TypeError: {"incompatible shapes": lambda: jax.jit(vmap(jnp.add))(X, X)},
}


@pytest.mark.usefixtures("longer_rows")
@raising(MISTAKES)
def test_mistakes_are_named(call, error, match):
    raised = check_raises(call, error, match)
    if error is TypeError:
        assert 'bx.ragged("n") for each of them' in str(raised)


@pytest.mark.parametrize("fun", [lambda x: x @ x.T, lambda x: jnp.outer(x[:, 0], x[:, 1])])
def test_two_axes_of_rows_that_are_all_empty(fun):
    empty = bx.Ragged.from_rows([jnp.zeros((0, 3))] * 4)
    assert [row.shape for row in bx.vmap(fun)(empty).rows()] == [(0, 0)] * 4


@pytest.mark.parametrize("bounds", [None, (3, 0), (0, 3), (2, 2)])
def test_arguments_with_two_axes_of_rows_that_are_all_empty(bounds):
    x = bx.Ragged(jnp.zeros(0), ([0] * 4, [0] * 4), bounds, axis=(0, 1))
    assert x.to_padded().shape == (4, *x.max_length)
    np.testing.assert_array_equal(x.offsets, np.zeros(5))
    for how in [{}, {"batch_size": 2}]:
        np.testing.assert_array_equal(bx.vmap(jnp.sum, **how)(x), np.zeros(4))
        rows = bx.vmap(lambda row: jnp.sin(row) @ row.T, **how)(x).rows()
        assert [row.shape for row in rows] == [(0, 0)] * 4
    gradient = jax.grad(lambda data: bx.vmap(jnp.sum)(x.with_data(data)).sum())(x.data)
    assert gradient.shape == (0,)
