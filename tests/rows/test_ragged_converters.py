"""Batches of other libraries: lists of Arrow, and what other libraries convert or store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

ROWS = [np.arange(2.0), np.arange(0.0), np.arange(5.0, 8.0)]
WIDE = [np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3) for n in (2, 0, 3)]
IMAGES = [np.arange(h * w, dtype=np.float32).reshape(h, w) for h, w in [(2, 3), (0, 0), (1, 2)]]
DTYPES = [np.float32, np.int32, np.int8, bool]

arrow = pytest.importorskip("pyarrow")


def same_rows(x, rows, dtype=None):
    assert len(x) == len(rows)
    for mine, row in zip(jax.device_get(x).rows(), rows, strict=True):
        assert mine.shape == np.shape(row)
        assert dtype is None or mine.dtype == dtype
        np.testing.assert_array_equal(mine, row)


def test_lists_of_lists_are_rows_along_several_axes():
    back = bx.Ragged.from_arrow
    wide = [np.arange(h * w * 2.0).reshape(h, w, 2) for h, w in [(2, 3), (0, 0), (3, 0), (1, 2)]]
    for rows, axis in [(IMAGES, (0, 1)), (wide, (0, 1)), (wide, (0, 1, 2)), (wide[:1], (0, 1))]:
        there = bx.Ragged.from_rows(rows, axis=axis).to_arrow()
        again = back(there)
        assert again.axis == axis
        # Nothing says how long lists would be that are not there.
        said = [
            row if row.size else row.reshape(*row.shape[:2], *[0] * (row.ndim - 2)) for row in rows
        ]
        same_rows(again, said if len(axis) == 3 else rows)
        same_rows(back(there[1:]), (said if len(axis) == 3 else rows)[1:]) if rows[1:] else None
    empty = bx.Ragged.from_rows([np.zeros((0, 5)), np.ones((1, 2))], axis=(0, 1))
    assert [row.shape for row in back(empty.to_arrow()).rows()] == [(0, 0), (1, 2)]
    with pytest.raises(bx.AxisError, match="only the first axes of a row"):
        bx.Ragged.from_rows([np.ones((2, 3, 4))], axis=(1, 2)).to_arrow()


def test_what_is_of_another_kind_is_refused():
    with pytest.raises(bx.ArgumentTypeError, match=r"from_arrow takes .*, got list.*from_rows"):
        bx.Ragged.from_arrow([[1.0], [2.0, 3.0]])


def test_what_cannot_leave_jax_says_so():
    x = bx.Ragged.from_rows(ROWS)
    with pytest.raises(bx.ArgumentTypeError, match=r"to_arrow\(\) needs rows whose values"):
        jax.jit(lambda x: x.to_arrow())(x)
    with pytest.raises(bx.ArgumentTypeError, match=r"to_arrow\(\) needs rows whose values"):
        jax.jit(lambda data: x.with_data(data).to_arrow())(x.data)
    keys = bx.Ragged(jax.random.split(jax.random.key(0), 5), [2, 3])
    with pytest.raises(bx.ArgumentTypeError, match=r"random keys.*jax\.random\.key_data"):
        keys.to_arrow()
    with pytest.raises(bx.AxisError, match="ragged along axis 1"):
        bx.Ragged(np.ones((2, 5)), [2, 3], axis=1).to_arrow()
    rows = bx.Ragged(jnp.ones(3, jnp.bfloat16), [2, 1])
    with pytest.raises(bx.ArgumentTypeError, match=r"to_arrow: rows of bfloat16\[n\]"):
        rows.to_arrow()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, WIDE], ids=["vectors", "trailing axes"])
def test_lists_and_back(dtype, rows):
    rows = [row.astype(dtype) for row in rows]
    x = bx.Ragged.from_rows(rows)
    array, back = x.to_arrow(), bx.Ragged.from_arrow
    assert array.tolist() == [row.tolist() for row in rows]
    same_rows(back(array), rows, x.dtype)
    same_rows(back(array[1:]), rows[1:], x.dtype)
    same_rows(back(array[:1]), rows[:1], x.dtype)
    same_rows(back(array[3:]), [], x.dtype)


def test_arrow_arrays_of_lists():
    lists = [row.tolist() for row in ROWS]
    for kind in (arrow.list_, arrow.large_list):
        same_rows(bx.Ragged.from_arrow(arrow.array(lists, kind(arrow.float32()))), ROWS, np.float32)
    view = arrow.ListViewArray.from_arrays([3, 0, 1], [2, 2, 3], arrow.array(np.arange(5.0)))
    same_rows(bx.Ragged.from_arrow(view), [[3, 4], [0, 1], [1, 2, 3]])
    same_rows(bx.Ragged.from_arrow(view[1:]), [[0, 1], [1, 2, 3]])
    chunked = arrow.chunked_array([arrow.array(lists), arrow.array(lists[2:])])
    same_rows(bx.Ragged.from_arrow(chunked), [*ROWS, ROWS[2]])
    with pytest.raises(bx.ArgumentTypeError, match="1 entries are null"):
        bx.Ragged.from_arrow(arrow.array([[1.0], None, [2.0]]))
    with pytest.raises(bx.ArgumentTypeError, match="1 entries are null"):
        bx.Ragged.from_arrow(arrow.array([[1.0], [None, 2.0]]))
    with pytest.raises(bx.ArgumentTypeError, match="row 1 has lists of different lengths"):
        bx.Ragged.from_arrow(arrow.array([[], [[1.0], [2.0, 3.0]]]))
    for rows in ([["a"]], [[{"a": 1.0}]]):
        with pytest.raises(bx.ArgumentTypeError, match="rows are of Arrow's type"):
            bx.Ragged.from_arrow(arrow.array(rows))


def test_awkward_arrays_and_back():
    """By awkward's own conversions, as the guide says."""
    awkward = pytest.importorskip("awkward")
    array = awkward.from_arrow(bx.Ragged.from_rows(ROWS).to_arrow())
    assert array.to_list() == [row.tolist() for row in ROWS]
    some = awkward.to_arrow(array[[2, 0]], extensionarray=False)
    same_rows(bx.Ragged.from_arrow(some), [ROWS[2], ROWS[0]])


def test_values_and_offsets_of_a_nested_tensor():
    torch = pytest.importorskip("torch")
    rows = list(map(torch.from_numpy, WIDE))
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    same_rows(bx.Ragged.from_offsets(nested.values(), nested.offsets()), WIDE, np.float32)
