"""`Ragged` with rows that are ragged along several axes: what it holds, and how it is made."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

SHAPES = [(2, 3), (1, 4), (0, 2), (3, 0), (3, 1)]
KINDS = {
    "images": ((0, 1), lambda h, w: (h, w), np.float32),
    "with channels": ((0, 1), lambda h, w: (h, w, 2), np.float32),
    "channels first": ((1, 2), lambda h, w: (2, h, w), np.int32),
    "apart": ((0, 2), lambda h, w: (h, 2, w), np.float32),
    "far apart": ((1, 3), lambda h, w: (2, h, 1, w, 2), np.complex64),
    "of which one is": ((1,), lambda h, w: (2, h), np.float32),
    "three": ((0, 1, 2), lambda h, w: (h, w, h + 1), np.float32),
}


def rows_of(name):
    _, shape, dtype = KINDS[name]
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape(*s)).astype(dtype) for s in SHAPES]


def same_rows(x, rows):
    assert len(x) == len(rows)
    x = jax.device_get(x)  # slices of NumPy's arrays are not compiled
    for i, row in enumerate(rows):
        for mine in (x.rows()[i], x[i]):
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
    axis, rows = KINDS[name][0], rows_of(name)
    x = bx.Ragged.from_rows(rows, axis=axis)
    sizes = np.array([[row.shape[k] for k in axis] for row in rows])
    assert x.data.shape[axis[0]] == sizes.prod(1).sum() == x.offsets[-1]
    np.testing.assert_array_equal(np.diff(x.offsets), sizes.prod(1))
    assert x.shape == (5, *(None if k in axis else n for k, n in enumerate(rows[0].shape)))
    same_rows(x, rows)
    same_rows(bx.Ragged(x.data, x.lengths, axis=x.axis), rows)
    for other in (
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        jax.device_put(x),
        jax.jit(lambda x: x)(x),
        x.with_capacity(40),
        x.with_max_length(9),
        jax.tree.map(np.asarray, x),
    ):
        assert other.axis == x.axis
        same_rows(other, rows)
    same_rows(x.astype(jnp.complex64), [row.astype(np.complex64) for row in rows])
    for mine, row in zip(bx.unstack(jax.device_get(x)), rows, strict=True):
        np.testing.assert_array_equal(mine, row)


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_and_back_again(name):
    axis, rows = KINDS[name][0], rows_of(name)
    x, expected = bx.Ragged.from_rows(rows, axis=axis), padded(rows, 7)

    def through(x):
        return x.to_padded(7), bx.Ragged.from_padded(x.to_padded(), x.lengths, axis=x.axis)

    for there, back in (through(x), jax.jit(through)(x.with_capacity(50))):
        np.testing.assert_array_equal(there, expected)
        same_rows(back, rows)
    shorter = bx.Ragged.from_padded(expected, x.lengths, 20, axis=x.axis)
    assert shorter.max_length == (20 if isinstance(x.axis, int) else (20,) * len(axis))


def test_some_rows_and_those_of_several():
    rows = rows_of("with channels")
    x = bx.Ragged.from_rows(rows, (5, 6), axis=(0, -2))
    assert x.axis == (0, 1)
    same_rows(x[[3, 0, 0]], [rows[3], rows[0], rows[0]])
    same_rows(x[1:3], rows[1:3])
    same_rows(x[[]], [])
    assert x[:2].max_length == (5, 6)
    both = bx.Ragged.concatenate([x, x[:1]])
    same_rows(both, [*rows, rows[0]])
    assert both.max_length == (5, 6)
    other = bx.Ragged.from_rows(rows_of("apart"), axis=(0, 2))
    with pytest.raises(bx.AxisError, match=r"has rows of float32\[n, 2, n\], and batches\[0\]"):
        bx.Ragged.concatenate([x, other])


def test_what_is_shown():
    x = bx.Ragged.from_rows(rows_of("apart"), axis=(0, 2))
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
    same_rows(x.with_data(g.data), [np.ones_like(row) for row in rows_of("apart")])


def test_derivatives_reach_rows_and_nothing_else():
    rows = rows_of("images")
    x = bx.Ragged.from_rows(rows, axis=(0, 1)).with_capacity(20)
    weights = np.random.default_rng(1).normal(size=(5, 3, 4)).astype(np.float32)
    data = jax.jit(jax.grad(lambda data: (x.with_data(data).to_padded() * weights).sum()))(x.data)
    same_rows(
        x.with_data(data), [w[: len(r), : r.shape[1]] for w, r in zip(weights, rows, strict=True)]
    )
    assert not np.asarray(data)[x.offsets[-1] :].any()
