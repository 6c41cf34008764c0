"""Ragged batches as arrays of Arrow and back, and arrays of Arrow as arrays of NumPy.

Arrow is not needed: its objects are recognized by their methods, and it is imported where one of
them is made. `who` is the name of what the user called, for messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.rows.building import Building, elements_of, part_along

if TYPE_CHECKING:
    import pyarrow  # pyright: ignore[reportMissingImports]

R = TypeVar("R", bound="Converters")


@_compat.api_boundary
class Converters(Building):
    """The methods of `Ragged` for arrays of Arrow."""

    @classmethod
    def from_arrow(cls: type[R], array: pyarrow.Array, max_length: int | None = None) -> R:
        """Builds a batch from a ``pyarrow.ListArray``, also large, sliced, chunked, or a view.

        Its values may be lists of a fixed size, which are trailing axes of the rows; or lists of
        one length in each row, for rows with several ragged axes.

        Args:
          array: The array.
          max_length: As for `Ragged`.

        Raises:
          ArgumentTypeError: It is of another kind, or has nulls or values that are not numbers.
          OverflowError: An integer does not fit into the dtype of JAX.

        Example:
          >>> import pyarrow
          >>> x = bx.Ragged.from_arrow(pyarrow.array([[1, 2, 3], [], [4]]))
          >>> print(bx.vmap(jnp.sum)(x))
          [6 0 4]
        """
        if hasattr(array, "combine_chunks"):
            array = array.combine_chunks()
        if not (hasattr(array, "offsets") and hasattr(array, "values")):
            raise ArgumentTypeError(
                f"Ragged.from_arrow takes a pyarrow.ListArray, got {type(array).__name__}. For a "
                "list of rows use Ragged.from_rows(rows)."
            )
        flat, lengths = rows_of(array, "Ragged.from_arrow")
        each = by_axis(lengths)
        return cls(flat, list(each.T), max_length, axis=tuple(range(each.shape[1])))

    def to_arrow(self) -> pyarrow.ListArray:
        """Converts the rows to a ``pyarrow.ListArray``.

        Trailing axes become lists of a fixed size, and several ragged axes lists of lists. A row of
        shape ``(0, 5)`` then has no lists, and is read back as one of shape ``(0, 0)``.

        Raises:
          ArgumentTypeError: Values are traced, or Arrow has no type for them.
          AxisError: The ragged axes are not the first axes of a row.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).to_arrow().to_pylist()
          [[0], [1, 2, 3], [4, 5]]
        """
        values, lengths = self._parts()
        try:
            return lists_of_rows(values, lengths)
        except (TypeError, ValueError, NotImplementedError) as error:
            row = ", ".join(map(str, ("n", *values.shape[1:])))
            raise ArgumentTypeError(
                f"Ragged.to_arrow: rows of {values.dtype}[{row}] have no form there ({error}). "
                "Convert them first, such as with x.with_data(x.data.astype(jnp.float32))."
            ) from None

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The elements of all rows, and their lengths: copies in NumPy arrays."""
        elements = elements_of(self.lengths)
        if elements is None or isinstance(self.data, Tracer):
            raise ArgumentTypeError(
                "Ragged.to_arrow() needs rows whose values are known, but these are traced. Call "
                "it outside of jit."
            )
        if self.axes != tuple(range(len(self.axes))):
            raise AxisError(
                f"Ragged.to_arrow: rows are ragged along axis {self.axis}, and there only the "
                "first axes of a row can be. Build a Ragged from data with the axes moved."
            )
        if jnp.issubdtype(self.data.dtype, jax.dtypes.prng_key):
            raise ArgumentTypeError(
                f"Ragged.to_arrow: rows of random keys, of dtype {self.data.dtype}, have no form "
                "outside of JAX. Convert the numbers of the keys: jax.random.key_data(x.data)."
            )
        part = part_along(self.data, self.element_axis, 0, int(elements.sum()))
        each = [np.asarray(x).astype(np.int64) for x in self.each_length]
        return np.array(part), each[0] if len(each) == 1 else np.stack(each, 1)


def dense(array: pyarrow.Array, who: str) -> np.ndarray:
    """An array whose elements are numbers, or lists of one size of such elements."""
    _check_no_nulls(array, who)
    size = getattr(array.type, "list_size", None)
    if size is None:
        return _numbers(array, who)
    inner = dense(array.flatten(), who)
    return inner.reshape(len(array), size, *inner.shape[1:])


def rows_of(array: pyarrow.Array, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Of an array of lists, large or sliced or a view too: all elements, and the lengths of lists.

    The elements may be lists of one size, which become trailing axes. Lists of lists are rows that
    are ragged along several axes: those of a row are of one length, and lengths are of shape
    (rows, axes). A row without lists has the length 0 along the inner axes.
    """
    _check_no_nulls(array, who)
    offsets, inner = _numbers(array.offsets, who).astype(np.int64), array.values
    if hasattr(array, "sizes"):  # a view: lists in any order, with gaps, or overlapping
        counts = _numbers(array.sizes, who).astype(np.int64)
        inner = inner.take(without_gaps(offsets, counts)[0])
    else:
        counts = np.diff(offsets)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        inner = inner.slice(first, last - first)
    if not is_lists(inner.type):
        return dense(inner, who), counts
    values, lengths = rows_of(inner, who)
    return values, of_lists(counts, lengths, who)


def of_lists(counts: np.ndarray, lengths: np.ndarray, who: str) -> np.ndarray:
    """The lengths of rows along each ragged axis, of rows that are lists of lists.

    Each row has so many lists (`counts`), of these `lengths`, which are as `rows_of` returns them.
    """
    lengths, starts = by_axis(lengths), np.cumsum(counts) - counts
    if not len(lengths):
        return np.zeros((len(counts), lengths.shape[1] + 1), np.int64)
    of_first = lengths[np.minimum(starts, len(lengths) - 1)] * (counts > 0)[:, None]
    row = np.repeat(np.arange(len(counts)), counts)
    differs = (lengths != of_first[row]).any(1)
    if differs.any():
        i = int(row[differs.argmax()])
        raise ArgumentTypeError(
            f"{who}: row {i} has lists of different lengths: a row that is ragged along several "
            "axes is an array, whose lists have one. Pad them, or pass lists of numbers as rows."
        )
    return np.concatenate([counts[:, None], of_first], 1)


def by_axis(lengths: np.ndarray) -> np.ndarray:
    """Lengths of shape (rows, axes), also where there is one axis."""
    return lengths[:, None] if lengths.ndim == 1 else lengths


def is_lists(kind: pyarrow.DataType) -> bool:
    return hasattr(kind, "value_field") and getattr(kind, "list_size", None) is None


def plain_parts(array: pyarrow.Array) -> list[np.ndarray]:
    """Which elements of an array of Arrow are not null, and the bytes of these: not of lists."""
    valid, values = np.asarray(array.is_valid()), array.drop_null()
    kind, (_, *buffers) = values.type, values.buffers()
    start, stop = values.offset, values.offset + len(values)
    if len(buffers) == 2:  # offsets, and bytes
        wide = np.int64 if str(kind).startswith("large") else np.int32
        offsets = np.frombuffer(buffers[0] or b"", wide)[start : stop + 1]
        whole = np.frombuffer(buffers[1] or b"", np.uint8)
        part = whole[offsets[0] : offsets[-1]] if len(offsets) else whole[:0]
        return [valid, np.diff(offsets).astype(np.int64), part]
    if kind == "bool":
        return [valid, np.asarray(values)]
    width = kind.bit_width // 8 if buffers else 0
    return [valid, np.frombuffer(buffers[0] or b"", np.uint8)[start * width : stop * width]]


def from_dense(values: np.ndarray) -> pyarrow.Array:
    import pyarrow  # pyright: ignore[reportMissingImports]

    array = pyarrow.array(values.reshape(-1))
    for i in range(values.ndim - 1, 0, -1):
        array = pyarrow.FixedSizeListArray.from_arrays(array, values.shape[i])
    return array


def lists_of_rows(values: np.ndarray, lengths: np.ndarray) -> pyarrow.Array:
    """An array of lists, of elements as `from_dense` makes them; lists of lists along several axes.

    Lengths are of shape (rows,), or (rows, axes).
    """
    import pyarrow  # pyright: ignore[reportMissingImports]

    array = from_dense(np.ascontiguousarray(values))
    for sizes in list_sizes(lengths):
        offsets = pyarrow.array(offsets_of(sizes).astype(np.int32))
        array = pyarrow.ListArray.from_arrays(offsets, array)
    return array


def list_sizes(lengths: np.ndarray) -> list[np.ndarray]:
    """The sizes of all lists, those of the innermost axis first, of rows of such lengths."""
    each = by_axis(lengths)  # there are as many lists as the axes before have places
    return [np.repeat(each[:, k], each[:, :k].prod(1)) for k in reversed(range(each.shape[1]))]


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def without_gaps(starts: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of rows are that begin anywhere, and where they begin put together."""
    offsets = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
    return np.repeat(starts - offsets[:-1], count) + np.arange(offsets[-1]), offsets


def _check_no_nulls(array: pyarrow.Array, who: str) -> None:
    if array.null_count:
        raise ArgumentTypeError(
            f"{who}: {array.null_count} entries are null, which is not a number. Drop them "
            "(drop_null), or fill them (fill_null)."
        )


def _numbers(array: pyarrow.Array, who: str) -> np.ndarray:
    numbers = np.asarray(array.to_numpy(zero_copy_only=False))
    if numbers.dtype.kind not in "biufc":
        raise ArgumentTypeError(
            f"{who}: the elements of the rows are of Arrow's type {array.type}, not numbers or "
            "lists of one size of numbers. Convert them with cast, or choose one field."
        )
    return numbers
