"""Rows in buckets of few sizes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.compiled import compilations
from support.mistakes import check_raises, raising
from support.rows import ragged

LENGTHS = (3, 9, 1, 8, 0, 2, 20)


def padded_elements(lengths, sizes):
    """The elements of all rows, each padded to the least of `sizes` that it fits."""
    return sum(min((s for s in sizes if s >= n), default=np.inf) for n in lengths)


def best(lengths, most, multiple_of=1):
    """The fewest elements, and the fewest sizes for those, by trying all sets of sizes."""
    rounded = sorted({max(-(-n // multiple_of), 1) * multiple_of for n in lengths})
    return min(
        (padded_elements(lengths, sizes), count)
        for count in range(1, most + 1)
        for sizes in itertools.combinations(rounded, count)
    )


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_no_other_sizes_have_less_padding(most, multiple_of):
    generator = np.random.default_rng(most)
    for draw in range(12):
        count = int(generator.integers(1, 15))
        lengths = np.floor(generator.lognormal(1.5, 1, count)).astype(int)
        if draw % 3 == 0:
            lengths = generator.integers(0, 5, count)
        buckets = bx.bucket(lengths, most, multiple_of=multiple_of)
        got = sum(size * len(rows) for size, rows in zip(buckets.sizes, buckets.rows, strict=True))
        assert (got, len(buckets.sizes)) == best(lengths, most, multiple_of)
        assert all(size % multiple_of == 0 for size in buckets.sizes)


def test_waste_is_elements_with_padding_for_each_true_one():
    buckets = bx.bucket([3, 1, 8, 8], 2)
    assert buckets.sizes == (3, 8)
    assert buckets.waste == 22 / 20
    assert buckets.waste_unbucketed == 32 / 20
    x = bx.Ragged(np.zeros(20), [3, 1, 8, 8], 10)
    assert bx.bucket(x, 2).waste_unbucketed == 40 / 20
    assert bx.bucket([4, 4]).waste == bx.bucket([]).waste == 1.0
    assert bx.bucket([]).split(np.zeros((0, 2))) == []
    assert bx.bucket([0, 0]).waste == np.inf  # they are given a size of 1


def test_buckets_are_shown_as_a_table():
    assert repr(bx.bucket([3, 1, 8, 8], 2)).splitlines() == [
        "Buckets(4 rows in 2 sizes, waste 1.10; 1.60 in one size of 8)",
        "  size  rows  elements  waste",
        "     3     2         4   1.50",
        "     8     2        16   1.00",
    ]
    assert repr(bx.bucket([0], 2)).splitlines()[-1] == "     1     1         0      -"
    assert repr(bx.bucket([])).startswith("Buckets(0 rows in 0 sizes")


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_are_split_and_joined_are_the_same(axis):
    x = ragged(2, lengths=LENGTHS, axis=axis)
    alone = jax.device_get(x).rows()
    buckets = bx.bucket(x, 3)
    parts = buckets.split(x)
    assert [part.max_length for part in parts] == list(buckets.sizes)
    for part, rows in zip(parts, buckets.rows, strict=True):
        for row, i in zip(jax.device_get(part).rows(), rows, strict=True):
            np.testing.assert_array_equal(row, alone[int(i)])
    joined = jax.device_get(buckets.join(parts))
    assert joined.max_length == x.max_length
    for row, expected in zip(joined.rows(), alone, strict=True):
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arrays_that_are_split_and_joined_are_the_same(axis):
    labels = np.moveaxis(np.arange(14).reshape(7, 2), 0, axis)
    buckets = bx.bucket(LENGTHS, 3)
    parts = buckets.split(labels, axis)
    for part, rows in zip(parts, buckets.rows, strict=True):
        np.testing.assert_array_equal(part, np.take(labels, rows, axis))
    np.testing.assert_array_equal(buckets.join(parts, axis), labels)


def test_splitting_and_joining_have_derivatives_without_a_scatter():
    x = ragged(2, lengths=LENGTHS)
    buckets = bx.bucket(x, 3)

    def loss(data):
        parts = buckets.split(x.with_data(data))
        return (buckets.join([p.with_data(jnp.sin(p.data)) for p in parts]).data ** 2).sum()

    own = sum(LENGTHS)
    expected = np.zeros(x.data.shape)
    expected[:own] = np.sin(2 * np.asarray(x.data[:own]))
    np.testing.assert_allclose(jax.grad(loss)(x.data), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x.data), expected, rtol=1e-5, atol=1e-6)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(x.data))


# A function run in buckets.


def test_each_bucket_has_its_own_bound():
    x = ragged(2, lengths=LENGTHS)
    buckets = bx.bucket(x, 3)
    run = bx.vmap(lambda x: x.sum(0), buckets=buckets, layout="padded")
    text = str(jax.make_jaxpr(lambda data: run(x.with_data(data)))(x.data))
    for size, rows in zip(buckets.sizes, buckets.rows, strict=True):
        assert f"[{len(rows)},{size},2]" in text
    assert f"[7,{x.max_length},2]" not in text


def test_no_rows_are_no_buckets():
    x = ragged(2, lengths=())
    fun = lambda x: (x.sum(0), x * 2)
    total, same = bx.vmap(fun, buckets=3)(x)
    assert total.shape == (0, 2)
    assert len(same) == 0


# Messages.


X = ragged(2, lengths=LENGTHS)
BUCKETS = bx.bucket(X, 2)
MISTAKES = {
    bx.ArgumentTypeError: {
        "bucket: the lengths are traced": lambda: jax.jit(lambda x: bx.bucket(x).waste)(X),
        "integers with one axis.*float": lambda: bx.bucket([1.0]),
        r"got an array of shape \(\) and": lambda: bx.bucket(3),
        r"max_buckets must be a positive int, got 1\.5 of type float": lambda: bx.bucket([2], 1.5),
        "split: x has traced lengths": lambda: jax.jit(BUCKETS.split)(X),
        "a Ragged or an array, got str": lambda: BUCKETS.split("a"),
        r"parts\[1\] is not a Ragged": lambda: BUCKETS.join([BUCKETS.split(X)[0], np.zeros(3)]),
        "buckets must be": lambda: bx.vmap(jnp.sum, buckets=1.5),
        "no mapped argument is a .*Ragged": lambda: bx.vmap(jnp.sum, buckets=2)(jnp.ones((2, 2))),
        "axis must be an int, got 'rows'": lambda: BUCKETS.split(np.zeros((7, 2)), axis="rows"),
    },
    bx.AxisError: {
        r"lengths\[1\] is -1": lambda: bx.bucket([0, -1]),
        "max_buckets must be a positive int": lambda: bx.bucket([2], 0),
        "made for other lengths than those of x": lambda: BUCKETS.split(
            ragged(2, lengths=(3, 9, 2, 8, 0, 2, 20))
        ),
        "x has 2 rows; it should have 7": lambda: BUCKETS.split(ragged(2, lengths=(3, 9))),
        r"\(3, 7\), 3 rows along axis 0.* have 7": lambda: BUCKETS.split(np.zeros((3, 7))),
        "no axis 1": lambda: BUCKETS.split(np.zeros(7), 1),
        "there are 2 buckets, but 1 parts": lambda: BUCKETS.join([np.zeros(7)]),
        r"parts\[0\] has . rows; it should have .": lambda: BUCKETS.join(BUCKETS.split(X)[::-1]),
        "nothing to join": lambda: bx.bucket([]).join([]),
        "made for other lengths than those of a,": lambda: bx.vmap(
            jnp.sum, buckets=bx.bucket([1, 2])
        )(X),
        "returns a number that depends on the row": lambda: bx.vmap(
            lambda x: float(len(range(x.shape[0]))), buckets=9, out_axes=None
        )(X),
    },
    bx.OptionError: {"or None, got 0": lambda: bx.vmap(jnp.sum, buckets=0)},
    bx.UnsupportedError: {
        "buckets: the lengths of rows are traced.*buckets=2": lambda: jax.jit(
            bx.vmap(jnp.sum, buckets=BUCKETS)
        )(X),
        "buckets does not support axis_name='rows'": lambda: bx.vmap(
            jnp.sum, buckets=2, axis_name="rows"
        )(X),
    },
}


@raising(MISTAKES)
def test_a_mistake_is_named(call, error, match):
    check_raises(call, error, match)


def test_outside_of_jit_a_bucket_is_one_program_for_whatever_lengths():
    generator, float_type = np.random.default_rng(0), jnp.zeros(()).dtype

    def attend(x):
        return jax.nn.softmax(x @ x.T, axis=-1) @ x

    def call():  # as many short rows and long ones each time, which are not as long
        lengths = [*generator.permutation([2, 3, 4]), *generator.permutation([9, 11])]
        data, outs = generator.normal(size=(29, 3)).astype(float_type), []
        x = bx.Ragged(data, lengths)
        count = len(compilations(lambda: outs.append(bx.vmap(attend, buckets=2)(x))))
        rows = np.split(data, np.cumsum(lengths)[:-1])
        expected = np.concatenate(list(map(attended, rows)))
        np.testing.assert_allclose(outs[0].data, expected, rtol=1e-5, atol=1e-6)
        return count

    first = call()
    assert 2 <= first <= 15, first  # it has some 50 operations, for either bucket
    assert call() == 0


def attended(x):
    weights = np.exp(x @ x.T)
    return weights / weights.sum(1, keepdims=True) @ x
