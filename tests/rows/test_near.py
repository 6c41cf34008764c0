"""Outputs of rows that are shorter than those of arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

FUNCTIONS = {
    "differences": lambda x: jnp.diff(x, axis=0),
    "third differences": lambda x: jnp.diff(x, 3, axis=0),
    "a stencil": lambda x: x[2:] - 2 * x[1:-1] + x[:-2],
    "without the first": lambda x: x[1:],
    "without the last": lambda x: x[:-1],
    "selected": lambda x: jnp.where(x[1:] > x[:-1], jnp.sin(x[1:]), 0.5),
    "integers": lambda x: (x[3:] * 3).astype(jnp.int32),
    "booleans": lambda x: x[1:] > x[:-1],
    "half precision": lambda x: x.astype(jnp.float16)[1:] - x.astype(jnp.float16)[:-1],
    "complex": lambda x: x[1:] + 1j * x[:-1],
    "less the sum": lambda x: x[1:] - x.sum(),  # of all elements of a row
    "running sum": lambda x: jnp.cumsum(x, 0)[1:],
    "divided": lambda x: (x[1:] - x[:-1]) / (x[1:] + x[:-1]),  # by zero, where rows meet
    "several": lambda x: (x[1:] + 1, x[:-1] * x[1:], x[2:]),
}
LENGTHS = {
    "mixed": [60, 0, 1, 2, 33, 3, 1, 0],
    "short at the end": [50, *[2, 1, 3] * 20],
    "of no output": [1, 0, 1],
    "one row": [40],
}


def rows_of(data, lengths):
    return jnp.split(data[: sum(lengths)], np.cumsum(lengths)[:-1])


def made(lengths, shape, spare, known=False):
    numbers = np.random.default_rng(0).normal(size=(sum(lengths) + spare, *shape))
    numbers[sum(lengths) :] = np.nan
    sizes = np.asarray(lengths, np.int32)
    return bx.Ragged(jnp.asarray(numbers), sizes if known else jnp.asarray(sizes), max(lengths))


def check(outs, lengths, x):
    own = [[f(row) for f in FUNCTIONS.values()] for row in rows_of(x.data, lengths)]
    expected = [jax.tree.leaves(of_row) for of_row in own]
    for k, out in enumerate(outs):
        of_all = np.concatenate([each[k] for each in expected])
        close = 1e-2 if of_all.dtype == np.float16 else 1e-5
        assert out.data.dtype == of_all.dtype
        np.testing.assert_array_equal(out.lengths, [len(each[k]) for each in expected])
        np.testing.assert_allclose(out.data[: len(of_all)], of_all, close, close)
        np.testing.assert_array_equal(out.data[len(of_all) :], 0)


def of_all(row):
    return [f(row) for f in FUNCTIONS.values()]


is_ragged = lambda out: isinstance(out, bx.Ragged)
leaves = functools.partial(jax.tree.leaves, is_leaf=is_ragged)


CASES = [
    *(((2,), name, False) for name in LENGTHS),
    ((), "mixed", True),
    ((3, 5), "mixed", False),
]


@pytest.mark.compiles(200)
@pytest.mark.parametrize(("shape", "name", "x64"), CASES, ids=str)
def test_shorter_rows_are_those_of_each_row(shape, name, x64):
    with jax.enable_x64(x64):
        x = made(LENGTHS[name], shape, 7)
        check(leaves(jax.jit(bx.vmap(of_all))(x)), LENGTHS[name], x)


def test_shorter_rows_of_keys():
    lengths = [3, 0, 1, 40]
    keys = jax.random.split(jax.random.key(0), sum(lengths))
    out = jax.jit(bx.vmap(lambda x: x[1:]))(bx.Ragged(keys, jnp.asarray(lengths), 40))
    own = jnp.concatenate([row[1:] for row in rows_of(keys, lengths)])
    assert (out.data[: len(own)] == own).all()


@pytest.mark.compiles(200)
@pytest.mark.parametrize(("compiled", "options"), [(True, {}), (False, {"batch_size": 3})])
def test_shorter_rows_of_known_lengths(compiled, options):
    lengths = LENGTHS["mixed"]
    x = made(lengths, (2,), 0, known=True)
    f = bx.vmap(of_all, **options)
    outs = jax.jit(lambda data: f(bx.Ragged(data, x.lengths)))(x.data) if compiled else f(x)
    check(leaves(outs), lengths, x)


@pytest.mark.parametrize("name", ["differences", "third differences", "selected"])
def test_derivatives_of_shorter_rows(name):
    f, lengths = FUNCTIONS[name], LENGTHS["mixed"]
    x = made(lengths, (2,), 5)
    with_data = lambda data: bx.Ragged(data, x.lengths, x.max_length)
    total = jax.jit(lambda data: jnp.sum(jnp.sin(bx.vmap(f)(with_data(data)).data)))
    alone = lambda data: sum(jnp.sum(jnp.sin(f(row))) for row in rows_of(data, lengths))
    expected = jax.grad(alone)(x.data)
    np.testing.assert_allclose(jax.grad(total)(x.data), expected, 1e-5, 1e-5)
    np.testing.assert_allclose(jax.jacfwd(total)(x.data), expected, 1e-5, 1e-5)
    lanes = jnp.stack([x.data, 2 * x.data])
    batched = jax.vmap(jax.grad(total))(lanes)
    np.testing.assert_allclose(batched, [*map(jax.grad(alone), lanes)], 1e-5, 1e-5)


def test_shorter_rows_of_several_batches():
    lengths = jnp.asarray([LENGTHS["mixed"], LENGTHS["mixed"][::-1]])
    data = made(lengths[0].tolist(), (2,), 5).data
    run = lambda n: leaves(bx.vmap(of_all)(bx.Ragged(data, n, 60)))
    for vmap in (jax.vmap, bx.vmap):
        batches = jax.jit(vmap(lambda n: [(out.data, out.lengths) for out in run(n)]))(lengths)
        for k, n in enumerate(lengths.tolist()):
            outs = [bx.Ragged(x[k], sizes[k], 60) for x, sizes in batches]
            check(outs, n, bx.Ragged(data, jnp.asarray(n), 60))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["differences", "several", "selected"])
def test_elements_nearby_are_not_gathered(name, known):
    if jax.default_backend() != "cpu":
        pytest.skip("a loop over rows runs on CPUs")
    x = made([60, 3], (2,), 0, known)
    given = (x.data,) if known else (x.data, x.lengths)
    run = lambda data, lengths=x.lengths: bx.vmap(FUNCTIONS[name])(bx.Ragged(data, lengths, 60))
    compiled = jax.jit(run).lower(*given).compile().as_text()
    # All cores compute sines, of the longer rows.
    assert (" gather(" in compiled) == (name == "selected")
