"""What a `Ragged` holds, along one axis and along several, how it is made, and what it shows."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import batchax as bx

LENGTHS = [2, 0, 3, 1]
SIZES = [(2, 3), (1, 4), (0, 2), (3, 0), (3, 1)]


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


def kind(shape, axis=0, sizes=LENGTHS, dtype=np.float32):
    """An axis or several, and NumPy's rows, of a shape for each of the sizes."""
    return axis, [values(shape(*np.atleast_1d(s)), dtype) for s in sizes]


KINDS = {
    "vectors": kind(lambda n: (n,)),
    "trailing axes": kind(lambda n: (n, 3, 2)),
    "along axis 1": kind(lambda n: (3, n), 1),
    "along the last axis": kind(lambda n: (2, 3, n), 2),
    "bool": kind(lambda n: (n, 2), dtype=bool),
    "int8": kind(lambda n: (n,), dtype=np.int8),
    "bfloat16": kind(lambda n: (n, 2), dtype=ml_dtypes.bfloat16),
    "complex": kind(lambda n: (n, 2), dtype=np.complex64),
    "all empty": kind(lambda n: (n, 2), sizes=[0, 0]),
    "one row": kind(lambda n: (n, 2), sizes=[4]),
    "rows without width": kind(lambda n: (n, 0)),
    "images": kind(lambda h, w: (h, w), (0, 1), SIZES),
    "with channels": kind(lambda h, w: (h, w, 2), (0, 1), SIZES),
    "channels first": kind(lambda h, w: (2, h, w), (1, 2), SIZES, np.int32),
    "apart": kind(lambda h, w: (h, 2, w), (0, 2), SIZES),
    "far apart": kind(lambda h, w: (2, h, 1, w, 2), (1, 3), SIZES, np.complex64),
    "of which one is": kind(lambda h, w: (2, h), (1,), SIZES),
    "three": kind(lambda h, w: (h, w, h + 1), (0, 1, 2), SIZES),
}


def same_rows(x, rows):
    x = jax.device_get(x)  # slices of NumPy's arrays are not compiled
    assert len(x) == len(rows) == len(x.rows()) == len(list(x))
    for i, row in enumerate(rows):
        for mine in (x[i], x[i - len(x)], x.rows()[i], list(x)[i]):
            assert mine.dtype == row.dtype
            np.testing.assert_array_equal(mine, row)


def padded(rows, fill):
    shape = np.max([row.shape for row in rows], axis=0)
    out = np.full((len(rows), *shape), fill, rows[0].dtype)
    for mine, row in zip(out, rows, strict=True):
        mine[tuple(map(slice, row.shape))] = row
    return out


@pytest.mark.parametrize("name", KINDS)
def test_rows_come_back_as_they_were(name):
    axis, rows = KINDS[name]
    x, axes = made(name), np.atleast_1d(axis)
    sizes = np.array([[row.shape[k] for k in axes] for row in rows])
    assert x.data.shape[axes[0]] == sizes.prod(1).sum()
    np.testing.assert_array_equal(x.offsets, [0, *sizes.prod(1).cumsum()])
    assert x.offsets.dtype == np.int32
    assert x.shape == (len(rows), *(None if k in axes else n for k, n in enumerate(rows[0].shape)))
    if len(axes) == 1:
        np.testing.assert_array_equal(x.data, np.concatenate(rows, axes[0]))
    same_rows(x, rows)
    same_rows(bx.Ragged(x.data, x.lengths, axis=x.axis), rows)
    same_rows(x.astype(jnp.complex64), [row.astype(np.complex64) for row in rows])
    for mine, row in zip(bx.unstack(jax.device_get(x)), rows, strict=True):
        np.testing.assert_array_equal(mine, row)


def made(name):
    axis, rows = KINDS[name]
    return bx.Ragged.from_rows(rows, axis=axis)


def through(x):
    """Padded rows, and the same rows made of these, and of offsets."""
    again = [bx.Ragged.from_padded(x.to_padded(), x.lengths, axis=x.axis)]
    if isinstance(x.axis, int):
        again.append(bx.Ragged.from_offsets(x.data, x.offsets, x.max_length, axis=x.axis))
    return x.to_padded(1), again


@functools.cache
def all_through():
    every = {name: made(name).with_capacity(50) for name in KINDS}
    return jax.jit(lambda every: {name: through(x) for name, x in every.items()})(every)


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_and_offsets_make_the_same_rows_again(name):
    axis, rows = KINDS[name]
    x, expected = made(name), padded(rows, 1)
    for there, back in (through(x), all_through()[name]):
        assert there.dtype == x.dtype
        np.testing.assert_array_equal(there, expected)
        for again in back:
            assert (again.max_length, again.axis) == (x.max_length, x.axis)
            same_rows(again, rows)
    longer = bx.Ragged.from_padded(expected, x.lengths, 20, axis=x.axis)
    assert longer.max_length == (20 if isinstance(x.axis, int) else (20,) * len(axis))


def test_no_rows():
    x = bx.Ragged(values((0, 2)), [])
    again = bx.Ragged.from_padded(x.to_padded(), x.lengths)
    assert x.to_padded().shape == (0, 0, 2)
    assert (len(x), len(again), x.rows(), again.max_length) == (0, 0, [], 0)


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
    "a copy": copy.deepcopy,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "a device": jax.device_put,
    "more room": lambda x: x.with_capacity(40),
    "a greater bound": lambda x: x.with_max_length(9),
    "NumPy": lambda x: jax.tree.map(np.asarray, x),
    "an inner jit with known lengths": lambda x: jax.jit(lambda: x)(),
    "donation": lambda x: jax.jit(lambda x: x, donate_argnums=0)(jax.tree.map(jnp.array, x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c, None), jax.tree.map(jnp.array, x), length=2)[0],
    "cond": lambda x: jax.lax.cond(True, lambda x: x, lambda x: x, jax.tree.map(jnp.array, x)),
    "checkpoint": jax.checkpoint(lambda x: x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["vectors", "along axis 1", "far apart"])
def test_a_ragged_is_the_same_after(way, name):
    axis, rows = KINDS[name]
    x = bx.Ragged.from_rows(rows, 4, axis=axis)
    got = WAYS[way](x)
    assert (type(got), got.axis) == (bx.Ragged, x.axis)
    assert way == "a greater bound" or got.max_length == x.max_length
    same_rows(got, rows)


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


# Of several axes.


def test_some_rows_and_those_of_several():
    rows = KINDS["with channels"][1]
    x = bx.Ragged.from_rows(rows, (5, 6), axis=(0, -2))
    assert x.axis == (0, 1)
    same_rows(x[[3, 0, 0]], [rows[3], rows[0], rows[0]])
    same_rows(x[1:3], rows[1:3])
    same_rows(x[[]], [])
    assert x[:2].max_length == (5, 6)
    both = bx.Ragged.concatenate([x, x[:1]])
    same_rows(both, [*rows, rows[0]])
    assert both.max_length == (5, 6)
    other = bx.Ragged.from_rows(KINDS["apart"][1], axis=(0, 2))
    with pytest.raises(bx.AxisError, match=r"has rows of float32\[n, 2, n\], and batches\[0\]"):
        bx.Ragged.concatenate([x, other])


def test_several_axes_are_shown():
    x = bx.Ragged.from_rows(KINDS["apart"][1], axis=(0, 2))
    lengths = "lengths=([2, 1, 0, 3, 3], [3, 4, 2, 0, 1]), max_length=(3, 4)"
    assert repr(x) == f"Ragged(5 rows of float32[n, 2, m], {lengths})"
    shapes = repr(jax.eval_shape(lambda x: x, x))
    assert shapes == repr(x).replace(lengths, "lengths=(unknown, unknown), max_length=(3, 4)")
    shown = []
    jax.make_jaxpr(lambda x: shown.append(repr(x)))(x)
    assert shown == [repr(x).replace(lengths, "lengths=(traced, traced), max_length=(3, 4)")]
    g = jax.grad(lambda x: x.data.sum(), allow_int=True)(x)
    assert "lengths=(none, of a derivative, none, of a derivative)" in repr(g)
    with pytest.raises(bx.ArgumentTypeError, match="this is a derivative"):
        g.rows()
    same_rows(x.with_data(g.data), [np.ones_like(row) for row in KINDS["apart"][1]])


def test_derivatives_reach_rows_and_nothing_else():
    rows = KINDS["images"][1]
    x = bx.Ragged.from_rows(rows, axis=(0, 1)).with_capacity(20)
    weights = np.random.default_rng(1).normal(size=(5, 3, 4)).astype(np.float32)
    data = jax.jit(jax.grad(lambda data: (x.with_data(data).to_padded() * weights).sum()))(x.data)
    same_rows(
        x.with_data(data), [w[: len(r), : r.shape[1]] for w, r in zip(weights, rows, strict=True)]
    )
    assert not np.asarray(data)[x.offsets[-1] :].any()
