"""Arrays of Arrow as arrays of NumPy, and back: numbers, lists of one size, lists of any size.

Only methods of the arrays are used; the library is imported where one of its own is made. `who`
is the name of what the user called, for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.words import Value


def dense(array: Value, who: str) -> np.ndarray:
    """An array whose elements are numbers, or lists of one size of such elements.

    Raises:
      ArgumentTypeError: it has nulls, or what is no number.
    """
    _check_no_nulls(array, who)
    size = getattr(array.type, "list_size", None)
    if size is None:
        return _numbers(array, who)
    inner = dense(array.flatten(), who)
    return inner.reshape(len(array), size, *inner.shape[1:])


def lists(array: Value, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Of an array of lists, large or sliced or a view too: all elements, and where lists begin.

    The elements may be lists of one size, which become trailing axes. There is one offset more than
    there are lists; the first is 0.

    Raises:
      ArgumentTypeError: it has nulls, or what is no number.
    """
    _check_no_nulls(array, who)
    offsets = _numbers(array.offsets, who)
    if hasattr(array, "sizes"):  # a view: lists in any order, with gaps, or overlapping
        index, offsets = without_gaps(offsets, _numbers(array.sizes, who))
        return dense(array.values.take(index), who), offsets
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return dense(array.values.slice(first, last - first), who), offsets - first


def rows_of(array: Value, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Of an array of lists, as of `lists`: all elements, and the lengths of lists.

    Lists of lists are rows that are ragged along several axes: those of a row are of one length,
    and lengths are of shape (rows, axes). Of a row that has no lists nobody knows how long they
    would be: that is 0.

    Raises:
      ArgumentTypeError: it has nulls, or what is no number, or lists in a list differ in length.
    """
    if not is_lists(array.values.type):
        values, offsets = lists(array, who)
        return values, np.diff(offsets).astype(np.int64)
    _check_no_nulls(array, who)
    offsets = _numbers(array.offsets, who).astype(np.int64)
    counts, inner = np.diff(offsets), array.values
    if hasattr(array, "sizes"):
        counts = _numbers(array.sizes, who).astype(np.int64)
        inner = inner.take(without_gaps(offsets, counts)[0])
    elif len(offsets):
        inner = inner.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    values, lengths = rows_of(inner, who)
    return values, of_lists(counts, lengths, who)


def of_lists(counts: np.ndarray, lengths: np.ndarray, who: str) -> np.ndarray:
    """The lengths of rows along each ragged axis, of rows that are lists of lists.

    Args:
      counts: how many lists each row has.
      lengths: of these lists, one after another, as `rows_of` returns them.
      who: what the user called.

    Raises:
      ArgumentTypeError: lists in a row differ in length.
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


def together(each: Sequence[np.ndarray]) -> np.ndarray:
    """The reverse: lengths along each axis as one array, of shape (rows,) if there is one axis."""
    return each[0] if len(each) == 1 else np.stack(each, 1)


def is_lists(kind: Any) -> bool:
    return hasattr(kind, "value_field") and getattr(kind, "list_size", None) is None


def plain_parts(array: Value) -> list[np.ndarray]:
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


def from_dense(values: np.ndarray) -> Any:
    """An array of Arrow; all axes but the first are lists of a fixed size."""
    import pyarrow  # pyright: ignore[reportMissingImports]

    array = pyarrow.array(values.reshape(-1))
    for i in range(values.ndim - 1, 0, -1):
        array = pyarrow.FixedSizeListArray.from_arrays(array, values.shape[i])
    return array


def from_rows(values: np.ndarray, lengths: np.ndarray) -> Any:
    """An array of lists, of elements as `from_dense` makes them; lists of lists along several axes.

    Args:
      values: the elements of one row after another.
      lengths: of rows, shape (rows,); or (rows, axes), along each ragged axis.
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
    """Where lists of these sizes begin, and the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def without_gaps(starts: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of rows are that begin anywhere, and where they begin put together."""
    offsets = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
    return np.repeat(starts - offsets[:-1], count) + np.arange(offsets[-1]), offsets


def _check_no_nulls(array: Value, who: str) -> None:
    if array.null_count:
        raise ArgumentTypeError(
            f"{who}: {array.null_count} entries are null, which stands for no number. Drop them "
            "(drop_null), or fill them (fill_null)."
        )


def _numbers(array: Value, who: str) -> np.ndarray:
    numbers = np.asarray(array.to_numpy(zero_copy_only=False))
    if numbers.dtype.kind not in "biufc":
        raise ArgumentTypeError(
            f"{who}: the elements of the rows are of Arrow's type {array.type}, not numbers or "
            "lists of one size of numbers. Convert them with cast, or choose one field."
        )
    return numbers
