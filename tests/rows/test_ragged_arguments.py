"""Ragged arguments of `vmap` with its other options, and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import same
from support.rows import LENGTHS, check_rows, ragged

WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), float)
X = ragged(3)
SQUARES = bx.Ragged(np.ones(5), ([2, 1], [2, 1]), axis=(0, 1))
IMAGES = bx.Ragged(np.ones(10), ([2, 1], [3, 4]), axis=(0, 1))


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.each_commit(1)
def test_rows_in_chunks(batch_size):
    f = lambda x, w: (attend(x @ w).sum(0), x[1:] * 2)
    check_rows(f, X, WEIGHTS, in_axes=(0, None), batch_size=batch_size)


def test_rows_in_chunks_of_arrays_with_more_room_and_with_less():
    x, n = np.asarray(X.data)[: sum(LENGTHS)], bx.ragged("n")
    few, much = (bx.Ragged(np.pad(x, ((0, k), (0, 0))), X.lengths, X.max_length) for k in (0, 5))
    batched = jax.jit(bx.vmap(lambda x, y: (x * y).sum(0), in_axes=n, batch_size=2))
    expected = np.stack([(row**2).sum(0) for row in np.split(x, np.cumsum(LENGTHS)[:-1])])
    for pair in ((few, much), (much, few)):
        same(batched(*pair), expected)


def test_rows_in_chunks_that_fit_a_limit():
    options = dict(batch_size="auto", memory_limit="1MiB", derivatives=False)
    check_rows(attend, X, traced=False, eager=True, **options)


def test_outputs_reduced_over_rows():
    sums = [row.sum(0) for row in X.rows()]
    same(bx.vmap(lambda x: x.sum(0), out_axes=bx.Reduce("sum"))(X), sum(sums))
    same(bx.vmap(attend, layout="padded")(X).rows()[1], attend(X.rows()[1]))


def test_outputs_that_no_row_changes_need_no_rows():
    total, constant = bx.vmap(lambda x: (x.sum(), jnp.sin(WEIGHTS)), out_axes=bx.AUTO)(X)
    assert total.shape == (4,)
    same(constant, jnp.sin(WEIGHTS))


def test_collectives_over_the_rows():
    f = lambda x: x - jax.lax.pmean(x.mean(), "rows")
    got = bx.vmap(f, axis_name="rows")(X)
    middle = jnp.stack([row.mean() for row in X.rows()]).mean()
    for mine, row in zip(got.rows(), X.rows(), strict=True):
        same(mine, row - middle)


def test_sizes_of_rows_as_numbers():
    assert bx.vmap(lambda x: x.shape[0])(X).tolist() == list(LENGTHS)
    assert jax.jit(bx.vmap(lambda x: 2 * x.shape[0] + x.size))(X).tolist() == [
        5 * n for n in LENGTHS
    ]


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


def test_one_object_as_two_arguments():
    for mine, row in zip(bx.vmap(jnp.add)(X, X).rows(), X.rows(), strict=True):
        same(mine, 2 * row)


def test_arguments_of_separate_sizes():
    y = ragged(3, lengths=(2, 2, 3, 1), seed=1)
    check_rows(lambda x, y: jax.nn.softmax(x @ y.T) @ y, X, y)


def test_callbacks_are_called_in_order():
    seen = []

    def f(x):
        jax.debug.callback(lambda s: seen.append(("sum", s)), x.sum(), ordered=True)
        jax.debug.callback(lambda s: seen.append(("best", s)), attend(x).max(), ordered=True)
        return x @ WEIGHTS

    jax.block_until_ready(jax.jit(bx.vmap(f, batch_size=1))(X).data)
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["sum", "best"] * 4


def test_vmaps_around_and_inside():
    outer = lambda vmap: vmap(lambda d: bx.vmap(lambda x: jnp.tanh(x).sum(0))(X.with_data(d)))
    data = jnp.stack([X.data, 2 * X.data])
    expected = jnp.stack([outer(lambda f: f)(d) for d in data])
    for vmap in (jax.vmap, bx.vmap):
        same(outer(vmap)(data), expected)
        check_rows(lambda x, vmap=vmap: vmap(lambda t: jnp.tanh(t @ WEIGHTS))(x).sum(0), X)


def test_derivatives_inside():
    loss = lambda x: jnp.tanh(x @ WEIGHTS).sum() / x.shape[0]
    check_rows(jax.grad(loss), X)
    check_rows(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1], X)


def test_the_gradient_of_rows_is_ragged():
    loss = lambda x: bx.vmap(lambda x: (x**2).sum())(x).sum()
    got = jax.grad(loss, allow_int=True)(X)
    assert isinstance(got, bx.Ragged)
    same(X.with_data(got.data).rows(), [2 * row for row in X.rows()])


def test_segments_by_hand_give_the_same():
    data, lengths = X.data[: sum(LENGTHS)], np.array(LENGTHS)
    ids = np.repeat(np.arange(4), lengths)
    sums = jax.ops.segment_sum(data, ids, 4)
    best = jax.ops.segment_max(data, ids, 4)
    shifted = jnp.exp(data - best[ids])
    softmax = shifted / jax.ops.segment_sum(shifted, ids, 4)[ids]
    for layout in ("packed", "padded"):
        run = lambda f, layout=layout: jax.jit(bx.vmap(f, layout=layout))(X)
        same(run(lambda x: x.mean(0)), sums / lengths[:, None])
        same(run(lambda x: x.max(0)), best)
        same(run(lambda x: jax.nn.softmax(x, 0)).data[: len(ids)], softmax)


MISTAKES = {
    "an output for all rows": (
        lambda: bx.vmap(jnp.sum, out_axes=None)(X),
        bx.AxisError,
        "depends on the batch",
    ),
    "a length for all rows": (
        lambda: bx.vmap(lambda x: x.shape[0], out_axes=None)(X),
        bx.AxisError,
        "out depends on the batch",
    ),
    "rows elsewhere": (
        lambda: bx.vmap(jnp.sin, out_axes=1)(X),
        bx.AxisError,
        r"out_axes gives 1 for out, whose shape for each row is \(n, 3\)",
    ),
    "rows reduced": (
        lambda: bx.vmap(jnp.sin, out_axes=bx.Reduce("sum"))(X),
        bx.AxisError,
        "rows of different lengths cannot be reduced",
    ),
    "a name for one of two": (
        lambda: bx.vmap(jnp.sin, bx.ragged("n"))(SQUARES),
        bx.AxisError,
        r"in_axes gives batchax.ragged\('n'\) for x, whose rows have 2 ragged axes, \(0, 1\)",
    ),
    "two names for one": (
        lambda: bx.vmap(jnp.sin, bx.ragged("n", "m"))(X),
        bx.AxisError,
        "whose rows have one ragged axis. Pass a name for each",
    ),
    "rows that are not square": (
        lambda: bx.vmap(jnp.sin, bx.ragged("n", "n"))(IMAGES),
        bx.AxisError,
        "calls two sizes of the rows of x 'n', but their lengths differ: row 0 has 2 and 3",
    ),
    "several axes reduced over the batch": (
        lambda: bx.vmap(lambda x: x @ x.T, out_axes=bx.Reduce("sum"))(X),
        bx.AxisError,
        r"whose shape for each row is \(n, n\): rows of different lengths cannot be reduced",
    ),
    "an axis for rows": (
        lambda: bx.vmap(jnp.sin, in_axes=1)(X),
        bx.AxisError,
        r"in_axes gives 1 for x, whose rows are along axis 0",
    ),
    "a name for an array": (
        lambda: bx.vmap(jnp.sin, in_axes=bx.ragged("n"))(jnp.ones(3)),
        bx.ArgumentTypeError,
        r"for x",
    ),
    "one name for two sizes": (
        lambda: bx.vmap(jnp.add, in_axes=(bx.ragged("n"),) * 2)(X, ragged(lengths=(1, 1, 1, 1))),
        bx.AxisError,
        r"args\[0\] and of args\[1\] 'n', but their lengths differ: row 0 has 3 and 1",
    ),
    "another number of rows": (
        lambda: bx.vmap(lambda x, y: x.sum() + y)(X, jnp.ones(5)),
        bx.AxisError,
        r"x: shape \(4, None, 3\), axis 0, size 4",
    ),
    "rows as steps": (
        lambda: bx.scan(lambda carry, x: (carry, x.sum()))(0.0, X),
        bx.ArgumentTypeError,
        r"x is a Ragged, whose rows differ in length; the steps of a scan",
    ),
    "no name": (lambda: bx.ragged("n + 1"), bx.ArgumentTypeError, "takes a name for the size"),
    "a number, traced": (
        lambda: jax.jit(bx.vmap(lambda x: x[0] if x.shape[0] > 3 else x[-1]))(X),
        bx.UnsupportedError,
        "needs the length of a row as a number.*lengths are traced",
    ),
    "what cannot be padded, traced": (
        lambda: jax.jit(bx.vmap(lambda x: jnp.linalg.svd(x)[1]))(X),
        bx.UnsupportedError,
        r"`svd` at .*test_ragged_arguments.py(.|\n)*lengths are traced here",
    ),
    "rows of two sizes added, traced": (
        lambda: jax.jit(bx.vmap(jnp.add))(X, X),
        TypeError,
        "incompatible shapes",
    ),
}


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=message) as raised:
        call()
    if name.startswith("rows of two sizes"):
        assert 'batchax.ragged("n") for each of them' in raised.value.__notes__[0]
