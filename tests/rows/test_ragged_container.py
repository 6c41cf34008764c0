import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import batchax as bx

LENGTHS = [2, 0, 3, 1]


def values(shape, dtype=np.float32):
    generator = np.random.default_rng(0)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (generator.normal(size=shape) + 1j * generator.normal(size=shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return generator.normal(size=shape).astype(dtype)
    return generator.integers(0, 2, size=shape).astype(dtype)


def example(*trailing, dtype=np.float32, axis=0, lengths=LENGTHS, **options):
    shape = list(trailing)
    shape.insert(axis, sum(lengths))
    return bx.Ragged(values(shape, dtype), lengths, axis=axis, **options)


def rows_of(x):
    """The rows of a Ragged by NumPy, from what it is documented to hold."""
    data, ends = np.asarray(x.data), np.cumsum(np.asarray(x.lengths))
    return np.split(data, ends, axis=x.axis)[: len(ends)]


def same_ragged(got, expected):
    assert isinstance(got, bx.Ragged)
    assert (got.max_length, got.axis) == (expected.max_length, expected.axis)
    assert got.data.dtype == expected.data.dtype
    np.testing.assert_array_equal(got.lengths, expected.lengths)
    np.testing.assert_array_equal(got.data, expected.data)


KINDS = {
    "vectors": example(),
    "trailing axes": example(3, 2),
    "along axis 1": example(3, axis=1),
    "along the last axis": example(2, 3, axis=2),
    "bool": example(2, dtype=bool),
    "int8": example(dtype=np.int8),
    "bfloat16": example(2, dtype=ml_dtypes.bfloat16),
    "complex": example(2, dtype=np.complex64),
    "spare room": bx.Ragged(values((9, 2)), LENGTHS, 5),
    "no rows": bx.Ragged(values((0, 2)), []),
    "all empty": bx.Ragged(values((0, 2)), [0, 0]),
    "all empty, with a bound": bx.Ragged(values((0, 2)), [0, 0], 3),
    "one row": example(2, lengths=[4]),
    "rows without width": example(0),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_parts_of_the_data(name):
    x = KINDS[name]
    expected = rows_of(x)
    again = bx.Ragged.from_rows(x.rows(), x.max_length, axis=x.axis) if len(x) else x
    assert (again.lengths.dtype, again.max_length) == (np.int32, x.max_length)
    assert len(x) == len(expected) == len(x.rows())
    for i, row in enumerate(expected):
        for mine in (x[i], x[i - len(x)], x.rows()[i], list(x)[i], again[i]):
            assert mine.dtype == x.dtype
            np.testing.assert_array_equal(mine, row)


def forms(x):
    """Padded rows, and the same rows made of these, and of offsets."""
    padded = x.to_padded()
    again = bx.Ragged.from_padded(padded, x.lengths, axis=x.axis)
    of_offsets = bx.Ragged.from_offsets(x.data, x.offsets, x.max_length, axis=x.axis)
    return x.to_padded(1), again, of_offsets


@functools.cache
def traced_forms():
    return jax.jit(lambda kinds: {name: forms(x) for name, x in kinds.items()})(KINDS)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("traced", [False, True])
def test_padded_rows_and_offsets_make_the_same_rows_again(name, traced):
    x = KINDS[name]
    padded, *made = traced_forms()[name] if traced else forms(x)
    shape = list(x.data.shape)
    shape[x.axis] = x.max_length
    expected = np.ones((len(x), *shape), x.dtype)
    for i, row in enumerate(rows_of(x)):
        part = [i, *[slice(None)] * row.ndim]
        part[x.axis + 1] = slice(0, row.shape[x.axis])
        expected[tuple(part)] = row
    assert padded.dtype == x.dtype
    np.testing.assert_array_equal(padded, expected)
    np.testing.assert_array_equal(x.offsets, [0, *np.cumsum(np.asarray(x.lengths))])
    assert x.offsets.dtype == np.int32
    for again in made:
        assert (again.max_length, again.axis) == (x.max_length, x.axis)
        for mine, row in zip(rows_of(again), rows_of(x), strict=True):
            assert mine.dtype == x.dtype
            np.testing.assert_array_equal(mine, row)


@pytest.mark.parametrize("traced", [False, True])
def test_offsets_may_begin_after_the_start_and_end_before_the_end(traced):
    flat, offsets = jnp.arange(10.0), jnp.array([2, 4, 4, 7])
    make = bx.Ragged.from_offsets
    x = jax.jit(make)(flat, offsets) if traced else make(flat, offsets)
    for row, expected in zip(x.rows(), [[2, 3], [], [4, 5, 6]], strict=True):
        np.testing.assert_array_equal(row, expected)


def test_random_keys_are_rows_too():
    keys = jax.random.split(jax.random.key(0), 6)
    x = bx.Ragged(keys, LENGTHS)
    numbers = jax.random.key_data
    np.testing.assert_array_equal(numbers(x[2]), numbers(keys[2:5]))
    padded = x.to_padded()
    assert padded.shape == (4, 3)
    assert not numbers(padded[1]).any()
    np.testing.assert_array_equal(numbers(x.to_padded(1)), numbers(padded))
    np.testing.assert_array_equal(numbers(padded[2]), numbers(keys[2:5]))
    again = bx.Ragged.from_padded(padded, LENGTHS)
    np.testing.assert_array_equal(numbers(again.data), numbers(keys))
    again = bx.Ragged.from_rows(x.rows())
    np.testing.assert_array_equal(numbers(again.data), numbers(keys))
    again = jax.jit(lambda x: bx.Ragged.from_padded(x.to_padded(), x.lengths))(x)
    np.testing.assert_array_equal(numbers(again[2]), numbers(keys[2:5]))


def test_keys_of_rows_that_are_all_empty_are_rows_too():
    x = bx.Ragged(jax.random.split(jax.random.key(0), 2)[:0], [0, 0], 3)
    assert x.to_padded().shape == (2, 3)
    assert x.to_padded().dtype == x.dtype
    again = bx.Ragged.from_padded(x.to_padded(), x.lengths)
    assert (again.data.shape, again.dtype) == ((0,), x.dtype)


# What a Ragged goes through as a tree of arrays.


WAYS = {
    "an inner jit with known lengths": lambda x: jax.jit(lambda: x)(),
    "donation": lambda x: jax.jit(lambda x: x, donate_argnums=0)(jax.tree.map(jnp.array, x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c, None), jax.tree.map(jnp.array, x), length=2)[0],
    "cond": lambda x: jax.lax.cond(True, lambda x: x, lambda x: x, jax.tree.map(jnp.array, x)),
    "checkpoint": jax.checkpoint(lambda x: x),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_ragged_is_the_same_after(name, axis):
    x = example(2, axis=axis, max_length=4)
    same_ragged(WAYS[name](x), x)


def test_trees_may_hold_placeholders_in_place_of_arrays():
    x = example(2)
    for leaf in (object(), None, "a", 1):
        same = jax.tree.unflatten(jax.tree.structure(x), [leaf, leaf])
        assert repr(leaf) in repr(same)
    shapes = jax.eval_shape(lambda x: x, x)
    assert shapes.data.shape == (6, 2)
    assert repr(shapes) == "Ragged(4 rows of float32[n, 2], lengths=unknown, max_length=3)"


# Derivatives.


@pytest.mark.parametrize("use", [lambda g: g.rows(), lambda g: g[0], lambda g: g.to_padded()])
def test_what_needs_the_lengths_of_a_derivative_says_that_it_has_none(use):
    g = jax.grad(lambda x: x.data.sum(), allow_int=True)(example())
    with pytest.raises(bx.ArgumentTypeError, match=r"derivative.*x\.with_data\(derivative\.data\)"):
        use(g)


USES = [lambda x: x.rows(), lambda x: x[0], lambda x: x.to_padded(), bx.vmap(jnp.sum)]


@pytest.mark.parametrize("use", USES)
def test_a_stack_of_batches_is_none(use):
    stacked = jax.vmap(lambda i: example())(jnp.arange(2))
    with pytest.raises(bx.ArgumentTypeError, match=r"stack of batches of rows, which jax\.vmap"):
        use(stacked)


# Lengths that are wrong: where they are traced, what happens is documented.

BAD = {
    "negative": ([2, -3, 3, 1], 6, None, [2, 0, 3, 1]),
    "over the bound": ([2, 9, 1, 0], 9, 3, [2, 3, 1, 0]),
    "more than there are": ([2, 3, 4, 5], 6, None, [2, 3, 1, 0]),
    "all of them": ([-1, 9, 9, 9], 6, 4, [0, 4, 2, 0]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lengths_that_are_traced_are_clipped(name):
    lengths, capacity, bound, meant = BAD[name]
    data = jnp.arange(1.0, capacity + 1)
    meant = bx.Ragged(data, meant, capacity if bound is None else bound)

    @jax.jit
    def of_rows(data, lengths):
        x = bx.Ragged(data, lengths, bound)
        return x.to_padded(), x.offsets, bx.vmap(lambda row: (row.sum(), row.shape[0] * 1.0))(x)

    padded, offsets, (sums, counts) = of_rows(data, jnp.array(lengths))
    np.testing.assert_array_equal(padded, meant.to_padded())
    np.testing.assert_array_equal(offsets, meant.offsets)
    np.testing.assert_array_equal(sums, [row.sum() for row in meant])
    np.testing.assert_array_equal(counts, [len(row) for row in meant])


# How it is shown.

REPRS = {
    "Ragged(4 rows of float32[n, 2], lengths=[2, 0, 3, 1], max_length=3)": example(2),
    "Ragged(4 rows of float32[n,], lengths=[2, 0, 3, 1], max_length=3)": example(),
    "Ragged(4 rows of int8[2, n], lengths=[2, 0, 3, 1], max_length=7)": example(
        2, axis=1, dtype=np.int8, max_length=7
    ),
    "Ragged(0 rows of float32[n,], lengths=[], max_length=0)": bx.Ragged(values((0,)), []),
    "Ragged(20 rows of float32[n,], lengths=[1, 1, 1, 1, 1, 1, ..., 1], max_length=1)": example(
        lengths=[1] * 20
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_it_is_shown_by_what_a_row_is(text):
    assert repr(REPRS[text]) == text
