"""Rows in buckets of few sizes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.compiled import compilations
from support.known_lengths import with_known_lengths
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


def test_thousands_of_lengths_are_put_into_buckets_at_once():
    lengths = np.arange(3000)
    buckets = bx.bucket(lengths, 3)
    assert buckets.sizes == (999, 1999, 2999)


def test_every_row_is_in_one_bucket_and_fits_it():
    buckets = bx.bucket(ragged(2, lengths=LENGTHS), 3)
    assert sorted(np.concatenate(buckets.rows).tolist()) == list(range(7))
    assert list(buckets.sizes) == sorted(set(buckets.sizes))
    for size, rows in zip(buckets.sizes, buckets.rows, strict=True):
        assert list(rows) == sorted(rows)
        assert max(LENGTHS[i] for i in rows) == size


def test_waste_is_elements_with_padding_for_each_true_one():
    buckets = bx.bucket([3, 1, 8, 8], 2)
    assert buckets.sizes == (3, 8)
    assert buckets.waste == 22 / 20
    assert buckets.waste_unbucketed == 32 / 20
    x = bx.Ragged(np.zeros(20), [3, 1, 8, 8], 10)
    assert bx.bucket(x, 2).waste_unbucketed == 40 / 20
    assert bx.bucket([4, 4]).waste == bx.bucket([]).waste == 1.0
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


def test_what_is_computed_in_buckets_by_hand_is_joined_in_row_order():
    x = ragged(2, lengths=LENGTHS)
    buckets = bx.bucket(x, 3)
    parts = buckets.split(x)
    run = with_known_lengths(bx.vmap(lambda r: (r.sum(0), r[1:])))
    sums, shorter = map(buckets.join, zip(*map(run, parts), strict=True))
    rows = jax.device_get(x).rows()
    np.testing.assert_allclose(sums, [row.sum(0) for row in rows], rtol=1e-5)
    for mine, row in zip(jax.device_get(shorter).rows(), rows, strict=True):
        np.testing.assert_array_equal(mine, row[1:])
    np.testing.assert_allclose(bx.vmap(lambda r: r.sum(0))(parts[0]), sums[buckets.rows[0]])


# A function run in buckets.


def same(got, expected):
    is_rows = lambda leaf: isinstance(leaf, bx.Ragged)
    got, expected = jax.device_get((got, expected))
    for mine, theirs in zip(
        jax.tree.leaves(got, is_leaf=is_rows),
        jax.tree.leaves(expected, is_leaf=is_rows),
        strict=True,
    ):
        assert isinstance(mine, bx.Ragged) == isinstance(theirs, bx.Ragged)
        assert mine.dtype == theirs.dtype
        if isinstance(mine, bx.Ragged):
            for a, b in zip(mine.rows(), theirs.rows(), strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


FUNCTIONS = {
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "a sum and its rows": lambda x: (x.sum(0), {"rows": x, "shorter": x[1:, 0]}),
    "integers": lambda x: (jnp.arange(x.shape[0]), jnp.int32(x.shape[0])),
    "grouped by length inside": lambda x: (jnp.fft.fft(x, axis=0).real, x.sum()),
}
LAYOUTS = {"padded": {"layout": "padded"}, "auto": {}, "in chunks": {"batch_size": 2}}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.each_commit(4, "in chunks-integers", "in chunks-grouped by length inside")
def test_rows_in_buckets_are_computed_as_without(name, layout):
    fun, x = FUNCTIONS[name], ragged(2, lengths=LENGTHS)
    compiled = with_known_lengths
    same(compiled(bx.vmap(fun, buckets=3, **LAYOUTS[layout]))(x), compiled(bx.vmap(fun))(x))


def test_each_bucket_has_its_own_bound():
    x = ragged(2, lengths=LENGTHS)
    buckets = bx.bucket(x, 3)
    run = bx.vmap(lambda x: x.sum(0), buckets=buckets, layout="padded")
    text = str(jax.make_jaxpr(lambda data: run(x.with_data(data)))(x.data))
    for size, rows in zip(buckets.sizes, buckets.rows, strict=True):
        assert f"[{len(rows)},{size},2]" in text
    assert f"[7,{x.max_length},2]" not in text


def test_derivatives_in_buckets_are_those_without():
    x, w = ragged(2, lengths=LENGTHS), jnp.ones((2, 3))
    fun = lambda x, w: jnp.log1p(jnp.abs(x @ w)).sum()

    def loss(run):
        return lambda data, w: (run(fun, in_axes=(0, None))(x.with_data(data), w) ** 2).sum()

    of_buckets = lambda fun, **options: bx.vmap(fun, buckets=3, **options)
    got = jax.jit(jax.grad(loss(of_buckets), (0, 1)))(x.data, w)
    expected = jax.jit(jax.grad(loss(bx.vmap), (0, 1)))(x.data, w)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not np.isnan(got[0]).any()


def test_arguments_of_other_kinds_go_with_the_rows():
    x = ragged(2, lengths=LENGTHS)
    y = ragged(lengths=(2, 0, 1, 1, 3, 2, 1), seed=1)
    lanes, w = jnp.arange(14.0).reshape(2, 7), jnp.arange(2.0)
    fun = lambda x, y, lane, w: (x @ (lane + w), y * 2, y.sum() * x.sum())
    options = dict(in_axes=(0, 0, 1, None))
    runs = bx.vmap(fun, buckets=2, **options), bx.vmap(fun, **options)
    same(*(with_known_lengths(run)(x, y, lanes, w) for run in runs))


def test_outputs_go_where_out_axes_says():
    x, w = ragged(2, lengths=LENGTHS), jnp.ones(2)
    reductions = tuple(map(bx.Reduce, ["sum", "mean", "max", "min", "prod"]))
    fun = lambda x: (x.sum(0), jnp.sin(w), x, jnp.sin(w), *[x.sum(0)] * len(reductions))
    options = dict(out_axes=(1, None, bx.AUTO, bx.AUTO, *reductions))
    got, expected = bx.vmap(fun, buckets=3, **options)(x), bx.vmap(fun, **options)(x)
    same(got, expected)
    assert got[2].max_length == x.max_length
    assert got[0].shape == (2, 7)
    assert got[1].shape == got[3].shape == (2,)


def test_no_rows_are_no_buckets():
    x = ragged(2, lengths=())
    fun = lambda x: (x.sum(0), x * 2)
    total, same = bx.vmap(fun, buckets=3)(x)
    assert total.shape == (0, 2)
    assert len(same) == 0


# Messages.


def traced(x):
    return jax.jit(lambda x: bx.bucket(x).waste)(x)


X = ragged(2, lengths=LENGTHS)
BUCKETS = bx.bucket(X, 2)
MISTAKES = {
    "traced lengths": (lambda: traced(X), bx.ArgumentTypeError, "bucket: the lengths are traced"),
    "floats": (lambda: bx.bucket([1.0]), bx.ArgumentTypeError, "integers with one axis.*float"),
    "no list": (lambda: bx.bucket(3), bx.ArgumentTypeError, r"got an array of shape \(\) and"),
    "nested": (lambda: bx.bucket([[1], [1, 2]]), bx.ArgumentTypeError, "integers with one axis"),
    "a negative length": (lambda: bx.bucket([2, -1]), bx.AxisError, r"lengths\[1\] is -1"),
    "no buckets": (lambda: bx.bucket([2], 0), bx.AxisError, "max_buckets must be a positive int"),
    "buckets by halves": (
        lambda: bx.bucket([2], 1.5),
        bx.ArgumentTypeError,
        r"max_buckets must be a positive int, got 1\.5 of type float",
    ),
    "multiples of zero": (
        lambda: bx.bucket([2], multiple_of=0),
        bx.AxisError,
        "multiple_of must be a positive int, got 0",
    ),
    "other lengths": (
        lambda: BUCKETS.split(ragged(2, lengths=(3, 9, 2, 8, 0, 2, 20))),
        bx.AxisError,
        "row 2 of x has 2 elements, but the buckets were made for one of 1",
    ),
    "another number of rows": (
        lambda: BUCKETS.split(ragged(2, lengths=(3, 9))),
        bx.AxisError,
        "x has 2 rows; it should have 7",
    ),
    "traced rows": (
        lambda: jax.jit(BUCKETS.split)(X),
        bx.ArgumentTypeError,
        "split: x has traced lengths",
    ),
    "an array of other rows": (
        lambda: BUCKETS.split(np.zeros((3, 7))),
        bx.AxisError,
        r"shape \(3, 7\), 3 rows along axis 0; it should have 7",
    ),
    "an axis that there is not": (
        lambda: BUCKETS.split(np.zeros(7), 1),
        bx.AxisError,
        "no axis 1",
    ),
    "no array": (lambda: BUCKETS.split("a"), bx.ArgumentTypeError, "a Ragged or an array, got str"),
    "too few parts": (
        lambda: BUCKETS.join([np.zeros(7)]),
        bx.AxisError,
        "there are 2 buckets, but 1 parts",
    ),
    "parts of other rows": (
        lambda: BUCKETS.join(BUCKETS.split(X)[::-1]),
        bx.AxisError,
        r"parts\[0\] has . rows; it should have .",
    ),
    "mixed parts": (
        lambda: BUCKETS.join([BUCKETS.split(X)[0], np.zeros(3)]),
        bx.ArgumentTypeError,
        r"parts\[1\] is no Ragged and parts\[0\] is",
    ),
    "nothing to join": (lambda: bx.bucket([]).join([]), bx.AxisError, "nothing to join"),
    "the option by halves": (
        lambda: bx.vmap(jnp.sum, buckets=1.5),
        bx.ArgumentTypeError,
        "buckets must be",
    ),
    "the option as bool": (
        lambda: bx.vmap(jnp.sum, buckets=True),
        bx.ArgumentTypeError,
        "buckets must be",
    ),
    "the option without rows": (
        lambda: bx.vmap(jnp.sum, buckets=2)(jnp.ones((2, 2))),
        bx.ArgumentTypeError,
        "no mapped argument is a batchax.Ragged",
    ),
    "the option zero": (lambda: bx.vmap(jnp.sum, buckets=0), bx.OptionError, "or None, got 0"),
    "a call with buckets and traced lengths": (
        lambda: jax.jit(bx.vmap(lambda x: x.sum(), buckets=BUCKETS))(X),
        bx.UnsupportedError,
        "buckets: the lengths of rows are traced.*buckets=2",
    ),
    "a call with the name of an axis": (
        lambda: bx.vmap(lambda x: x.sum(), buckets=2, axis_name="rows")(X),
        bx.UnsupportedError,
        "buckets does not support axis_name='rows'",
    ),
    "a call with buckets of other lengths": (
        lambda: bx.vmap(lambda x: x.sum(), buckets=bx.bucket([1, 2]))(X),
        bx.AxisError,
        r"made for other lengths than those of x",
    ),
    "an axis that is no int": (
        lambda: bx.bucket(X, 2).split(np.zeros((len(X), 2)), axis="rows"),
        bx.ArgumentTypeError,
        "axis must be an int, got 'rows'",
    ),
    "a reduction of rows": (
        lambda: bx.vmap(lambda x: x, buckets=2, out_axes=bx.Reduce("sum"))(X),
        bx.AxisError,
        r"Reduce\('sum'\) for out",
    ),
    "rows along another axis": (
        lambda: bx.vmap(lambda x: x, buckets=2, out_axes=1)(X),
        bx.AxisError,
        "gives 1 for out",
    ),
    "what depends on the row without an axis": (
        lambda: bx.vmap(lambda x: x.sum(), buckets=2, out_axes=None)(X),
        bx.AxisError,
        "out depends on the batch",
    ),
    "a number that depends on the bucket": (
        lambda: bx.vmap(lambda x: float(len(range(x.shape[0]))), buckets=9, out_axes=None)(X),
        bx.AxisError,
        "returns a number that depends on the row",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    make, error, match = MISTAKES[name]
    with pytest.raises(error, match=f"(?s){match}"):
        make()


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
        same(np.asarray(outs[0].data), np.concatenate(list(map(attended, rows))))
        return count

    first = call()
    assert 2 <= first <= 15, first  # it has some 50 operations, for either bucket
    assert call() == 0


def attended(x):
    weights = np.exp(x @ x.T)
    return weights / weights.sum(1, keepdims=True) @ x
