"""Arrays of Arrow as arrays of NumPy, and back: numbers, lists of one size, lists of any size.

Only methods of the arrays are used; the library is imported where one of its own is made. `who`
is the name of what the user called, for messages.
"""

from __future__ import annotations

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


def from_dense(values: np.ndarray) -> Any:
    """An array of Arrow; all axes but the first are lists of a fixed size."""
    import pyarrow  # pyright: ignore[reportMissingImports]

    array = pyarrow.array(values.reshape(-1))
    for i in range(values.ndim - 1, 0, -1):
        array = pyarrow.FixedSizeListArray.from_arrays(array, values.shape[i])
    return array


def from_lists(values: np.ndarray, offsets: np.ndarray) -> Any:
    """An array of lists, of elements as `from_dense` makes them."""
    import pyarrow  # pyright: ignore[reportMissingImports]

    return pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets.astype(np.int32)), from_dense(values)
    )


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
