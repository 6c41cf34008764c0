"""Rows of a `Ragged` as people use data: some of them, those of several, of another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

FLOAT = jax.dtypes.canonicalize_dtype(float)
LENGTHS = [3, 0, 2, 4]


def batch(axis=0, device=False):
    shape = [(n, 2) if axis == 0 else (2, n) for n in LENGTHS]
    rows = [np.full(s, k, FLOAT) for k, s in enumerate(shape)]
    ragged = bx.Ragged.from_rows(rows, max_length=5, axis=axis)
    return (ragged.with_data(jnp.asarray(ragged.data)) if device else ragged), rows


def same(got, rows):
    assert isinstance(got, bx.Ragged)
    assert got.max_length == 5
    assert len(got) == len(rows)
    for a, b in zip(got.rows(), rows, strict=True):
        np.testing.assert_array_equal(a, b)


CHOICES = {
    "slice": (slice(1, 3), [1, 2]),
    "backwards": (slice(None, None, -1), [3, 2, 1, 0]),
    "list": ([0, 2], [0, 2]),
    "again": ((3, 3, -4), [3, 3, 0]),
    "array of JAX": (jnp.array([2, 1]), [2, 1]),
    "mask": ([True, False, False, True], [0, 3]),
    "none": ([], []),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_some_rows(name, device, axis):
    ragged, rows = batch(axis, device)
    chosen, places = CHOICES[name]
    got = ragged[chosen]
    same(got, [rows[i] for i in places])
    assert type(got.data) is type(ragged.data)


@pytest.mark.parametrize(
    ("i", "error", "message"),
    [
        (4, IndexError, "there is no row 4 of 4"),
        ([0, -5], IndexError, "there is no row -5 of 4"),
        (True, bx.ArgumentTypeError, "x.i. is row i"),
        (1.5, bx.ArgumentTypeError, "x.i. is row i"),
        ([True, False], bx.ArgumentTypeError, "a bool for each row"),
        ((slice(1), 2), bx.ArgumentTypeError, "x.i. is row i"),
        ([[0, 1]], bx.ArgumentTypeError, "x.i. is row i"),
        ("0", bx.ArgumentTypeError, "x.i. is row i"),
    ],
)
def test_what_is_no_row(i, error, message):
    ragged, _ = batch()
    with pytest.raises(error, match=message):
        ragged[i]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_several(axis):
    ragged, rows = batch(axis)
    roomy = ragged.with_capacity(20)
    same(bx.Ragged.concatenate([roomy, ragged[:1], ragged[[]]]), [*rows, rows[0]])
    other = bx.Ragged.from_rows([np.zeros((7, 2) if axis == 0 else (2, 7), FLOAT)], axis=axis)
    assert bx.Ragged.concatenate([ragged, other]).max_length == 7
    with pytest.raises(bx.AxisError, match="Rows may differ in their length only"):
        bx.Ragged.concatenate([ragged, batch(1 - axis)[0]])
    with pytest.raises(bx.AxisError, match="at least one"):
        bx.Ragged.concatenate([])
    with pytest.raises(bx.AxisError, match=r"batches\[1\] has rows of int32"):
        bx.Ragged.concatenate([ragged, ragged.astype(np.int32)])
    with pytest.raises(bx.ArgumentTypeError, match=r"batches\[0\] must be a Ragged, got"):
        bx.Ragged.concatenate(ragged)  # whose rows are arrays


def test_one_capacity_is_one_compilation():
    compiled = []

    @jax.jit
    def sums(x):
        compiled.append(1)
        return bx.vmap(lambda row: row.sum())(x)

    for lengths in ([3, 1, 2], [0, 5, 4], [1, 1, 1]):
        rows = [np.arange(n, dtype=FLOAT) for n in lengths]
        x = bx.Ragged.from_rows(rows, max_length=5).with_capacity(12)
        np.testing.assert_allclose(sums(x), [row.sum() for row in rows])
    assert len(compiled) == 1
    with pytest.raises(bx.AxisError, match="have 9 elements, and capacity is 8"):
        batch()[0].with_capacity(8)
    same(batch()[0].with_capacity(9).with_capacity(30).with_capacity(9), batch()[1])
