"""Batches of other libraries: stand-ins with their methods, and the libraries where installed."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

ROWS = [np.arange(2.0), np.arange(0.0), np.arange(5.0, 8.0)]
WIDE = [np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3) for n in (2, 0, 3)]
DTYPES = [np.float32, np.int32, np.int8, bool]


def same_rows(x, rows, dtype=None):
    assert len(x) == len(rows)
    for mine, row in zip(jax.device_get(x).rows(), rows, strict=True):
        assert mine.shape == np.shape(row)
        assert dtype is None or mine.dtype == dtype
        wide = np.complex64 if np.iscomplexobj(row) else np.float32  # NumPy has no bfloat16
        np.testing.assert_array_equal(np.asarray(mine, wide), np.asarray(row, wide))


# Stand-ins.


class Tensor:
    """What is used of a torch.Tensor."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.array


class Nested(Tensor):
    is_nested = True

    def __init__(self, values, offsets, lengths=None):
        self.parts = Tensor(values), Tensor(offsets), lengths and Tensor(lengths)

    def values(self):
        return self.parts[0]

    def offsets(self):
        return self.parts[1]

    def lengths(self):
        return self.parts[2]


def test_a_jagged_tensor_is_its_values_and_offsets():
    x = bx.Ragged.from_torch(Nested(np.concatenate(ROWS), [0, 2, 2, 5]))
    same_rows(x, ROWS)
    x = bx.Ragged.from_torch(Nested(np.concatenate(WIDE), [0, 2, 2, 5]), 7)
    same_rows(x, WIDE, np.float32)
    assert x.max_length == 7
    x = bx.Ragged.from_torch(Nested(np.arange(9.0), [0, 3, 6, 9], [2, 0, 3]))  # with gaps
    same_rows(x, [[0, 1], [], [6, 7, 8]])
    transposed = Nested(np.concatenate(ROWS)[None], [0, 2, 2, 5])
    transposed._ragged_idx = 2
    same_rows(bx.Ragged.from_torch(transposed), [row[None] for row in ROWS])


def test_values_that_numpy_has_no_dtype_for_come_through_dlpack():
    class Brain(Tensor):
        def numpy(self):
            raise TypeError("Got unsupported ScalarType BFloat16")

        def contiguous(self):  # an array of JAX has __dlpack__, as a tensor has
            return jnp.asarray(np.concatenate(ROWS), jnp.bfloat16)

    nested = Nested([], [0, 2, 2, 5])
    nested.parts = (Brain([]), *nested.parts[1:])
    same_rows(bx.Ragged.from_torch(nested), ROWS, jnp.bfloat16)


def test_a_tensorflow_tensor_is_its_values_and_row_splits():
    values = np.concatenate(WIDE)
    tensor = SimpleNamespace(flat_values=values, row_splits=np.array([0, 2, 2, 5]), ragged_rank=1)
    same_rows(bx.Ragged.from_tensorflow(tensor), WIDE, np.float32)


IMAGES = [np.arange(h * w, dtype=np.float32).reshape(h, w) for h, w in [(2, 3), (0, 0), (1, 2)]]


def test_a_tensorflow_tensor_with_several_ragged_axes():
    flat = np.concatenate([row.ravel() for row in IMAGES])
    splits = [np.array([0, 2, 2, 3]), np.array([0, 3, 6, 8])]
    tensor = SimpleNamespace(flat_values=flat, row_splits=splits[0], nested_row_splits=splits)
    tensor.ragged_rank = 2
    same_rows(bx.Ragged.from_tensorflow(tensor), IMAGES, np.float32)
    tensor.nested_row_splits = [splits[0], np.array([0, 4, 6, 8])]
    with pytest.raises(bx.ArgumentTypeError, match="from_tensorflow: row 0 has lists of different"):
        bx.Ragged.from_tensorflow(tensor)


def test_a_strided_nested_tensor_is_ragged_where_its_rows_differ():
    def strided(rows):
        unbind = lambda: list(map(Tensor, rows))
        return SimpleNamespace(is_nested=True, layout="torch.strided", unbind=unbind)

    same_rows(bx.Ragged.from_torch(strided(IMAGES), 5), IMAGES)
    assert bx.Ragged.from_torch(strided(IMAGES)).axis == (0, 1)
    assert bx.Ragged.from_torch(strided([row.T[:, :1] for row in WIDE[::2]])).axis == 2
    assert bx.Ragged.from_torch(strided(IMAGES[:1])).axis == 0


@pytest.mark.parametrize("library", ["arrow", "awkward"])
def test_lists_of_lists_are_rows_along_several_axes(library):
    pytest.importorskip({"arrow": "pyarrow"}.get(library, library))
    there, back = f"to_{library}", f"from_{library}"
    wide = [np.arange(h * w * 2.0).reshape(h, w, 2) for h, w in [(2, 3), (0, 0), (3, 0), (1, 2)]]
    for rows, axis in [(IMAGES, (0, 1)), (wide, (0, 1)), (wide, (0, 1, 2)), (wide[:1], (0, 1))]:
        x = bx.Ragged.from_rows(rows, axis=axis)
        again = getattr(bx.Ragged, back)(getattr(x, there)())
        assert again.axis == axis
        # Nothing says how long lists would be that are not there.
        said = [
            row if row.size else row.reshape(*row.shape[:2], *[0] * (row.ndim - 2)) for row in rows
        ]
        same_rows(again, said if len(axis) == 3 else rows)
        some = getattr(bx.Ragged, back)(getattr(x, there)()[1:])
        same_rows(some, (said if len(axis) == 3 else rows)[1:]) if len(rows) > 1 else None
    empty = bx.Ragged.from_rows([np.zeros((0, 5)), np.ones((1, 2))], axis=(0, 1))
    assert [row.shape for row in getattr(bx.Ragged, back)(getattr(empty, there)()).rows()] == [
        (0, 0),
        (1, 2),
    ]
    with pytest.raises(bx.AxisError, match="only the first axes of a row"):
        getattr(bx.Ragged.from_rows([np.ones((2, 3, 4))], axis=(1, 2)), there)()


@pytest.mark.parametrize("name", ["torch", "tensorflow", "arrow", "awkward"])
def test_what_is_of_another_kind_is_refused(name):
    with pytest.raises(bx.ArgumentTypeError, match=rf"from_{name} takes .*, got list.*from_rows"):
        getattr(bx.Ragged, f"from_{name}")([[1.0], [2.0, 3.0]])


@pytest.mark.parametrize("name", ["torch", "arrow", "awkward"])
def test_what_cannot_leave_jax_says_so(name):
    method = f"to_{name}"
    x = bx.Ragged.from_rows(ROWS)
    with pytest.raises(bx.ArgumentTypeError, match=rf"{method}\(\) needs rows whose values"):
        jax.jit(lambda x: getattr(x, method)())(x)
    with pytest.raises(bx.ArgumentTypeError, match=rf"{method}\(\) needs rows whose values"):
        jax.jit(lambda data: getattr(x.with_data(data), method)())(x.data)
    keys = bx.Ragged(jax.random.split(jax.random.key(0), 5), [2, 3])
    with pytest.raises(bx.ArgumentTypeError, match=r"random keys.*jax\.random\.key_data"):
        getattr(keys, method)()
    if name != "torch":
        with pytest.raises(bx.AxisError, match="ragged along axis 1"):
            getattr(bx.Ragged(np.ones((2, 5)), [2, 3], axis=1), method)()


def test_a_jagged_tensor_is_made_of_the_values_and_offsets_of_rows(monkeypatch):
    made = lambda *args, **options: (args, options)
    torch = SimpleNamespace(
        from_numpy=lambda array: array, nested=SimpleNamespace(nested_tensor_from_jagged=made)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    spare = bx.Ragged(np.arange(9.0), [2, 0, 3])
    (values, offsets), options = spare.to_torch()
    np.testing.assert_array_equal(values, np.arange(5.0))
    np.testing.assert_array_equal(offsets, [0, 2, 2, 5])
    assert offsets.dtype == np.int64
    assert values.flags.writeable
    assert options == {}
    assert bx.Ragged(np.ones((2, 5)), [2, 3], axis=1).to_torch()[1] == {"jagged_dim": 2}


# The libraries themselves.


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.bfloat16, np.complex64], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_torch_and_back(dtype, axis):
    torch = pytest.importorskip("torch")
    x = bx.Ragged(np.ones((2, 2)).cumsum(axis).astype(dtype), [2, 0], axis=axis)
    nested = x.to_torch()
    assert nested.layout == torch.jagged
    for mine, row in zip(x.rows(), nested.unbind(), strict=True):
        assert mine.shape == tuple(row.shape)
    again = bx.Ragged.from_torch(nested)
    same_rows(again, x.rows(), x.dtype)


def test_torch_tensors_of_rows():
    torch = pytest.importorskip("torch")
    make = torch.nested.nested_tensor
    nested = make(list(map(torch.from_numpy, WIDE)), layout=torch.jagged, requires_grad=True)
    same_rows(bx.Ragged.from_torch(nested), WIDE, np.float32)
    padded = torch.arange(12.0).reshape(3, 4)
    start, length = torch.tensor([1, 0, 2]), torch.tensor([2, 0, 1])
    narrowed = torch.nested.narrow(padded, 1, start, length, layout=torch.jagged)
    same_rows(bx.Ragged.from_torch(narrowed), [[1, 2], [], [10]])


@pytest.mark.parametrize("library", ["arrow", "awkward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, WIDE], ids=["vectors", "trailing axes"])
def test_lists_and_back(library, dtype, rows):
    pytest.importorskip({"arrow": "pyarrow"}.get(library, library))
    rows = [row.astype(dtype) for row in rows]
    x = bx.Ragged.from_rows(rows)
    array, back = getattr(x, f"to_{library}")(), getattr(bx.Ragged, f"from_{library}")
    assert array.tolist() == [row.tolist() for row in rows]
    same_rows(back(array), rows, x.dtype)
    same_rows(back(array[1:]), rows[1:], x.dtype)
    same_rows(back(array[:1]), rows[:1], x.dtype)
    same_rows(back(array[3:]), [], x.dtype)


def test_arrow_arrays_of_lists():
    arrow = pytest.importorskip("pyarrow")
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


@pytest.mark.parametrize("library", ["pyarrow", "awkward"])
def test_rows_that_another_library_has_no_form_for(library):
    pytest.importorskip(library)
    method = "to_" + library.removeprefix("py")
    rows = bx.Ragged(jnp.ones(3, jnp.bfloat16), [2, 1])
    with pytest.raises(bx.ArgumentTypeError, match=rf"{method}: rows of bfloat16\[n\]"):
        getattr(rows, method)()


def test_awkward_arrays_out_of_order_and_of_other_kinds():
    awkward = pytest.importorskip("awkward")
    array = bx.Ragged.from_rows(ROWS).to_awkward()
    same_rows(bx.Ragged.from_awkward(array[[2, 0]]), [ROWS[2], ROWS[0]])
    for rows in ([[1.0, None], [2.0]], [[[1.0], [2.0, 3.0]], []], [{"a": 1.0}], [1.0]):
        with pytest.raises(bx.ArgumentTypeError, match=r"Ragged\.from_awkward"):
            bx.Ragged.from_awkward(awkward.Array(rows))
