"""Ragged batches of other libraries.

None of them is needed: what they hand over is known by its methods, and they are imported where
one of their own types is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.words import Value
from batchax.rows import arrow
from batchax.rows.building import RowBatch, as_row, elements_of

R = TypeVar("R", bound="Converters")


@_compat.api_boundary
class Converters(RowBatch):
    """The methods of `Ragged` for batches of other libraries."""

    @classmethod
    def from_torch(cls: type[R], nested: Any, max_length: int | None = None) -> R:
        """Builds a batch from a nested tensor of PyTorch.

        The tensor has the jagged or the strided layout. Its values are copied, without gradients.
        The ragged axes of a strided tensor are those along which its rows differ.

        Args:
          nested: The tensor.
          max_length: As for `Ragged`.

        Raises:
          ArgumentTypeError: It is not a nested tensor.
          OverflowError: An integer does not fit into the dtype of JAX.

        Example:
          >>> import torch  # doctest: +SKIP
          >>> rows = [torch.ones(3), torch.ones(1)]  # doctest: +SKIP
          >>> nested = torch.nested.nested_tensor(rows, layout=torch.jagged)  # doctest: +SKIP
          >>> x = bx.Ragged.from_torch(nested)  # doctest: +SKIP
        """
        if str(getattr(nested, "layout", None)) == "torch.strided" and nested.is_nested:
            return _from_rows(cls, list(map(_from_tensor, nested.unbind())), max_length)
        _check_has("from_torch", nested, "a nested tensor of layout torch.jagged", _TORCH)
        values, offsets = _from_tensor(nested.values()), _from_tensor(nested.offsets())
        lengths = nested.lengths() if hasattr(nested, "lengths") else None
        at = getattr(nested, "_ragged_idx", 1) - 1  # 1 except for transposed tensors
        if lengths is not None:  # there are gaps between rows
            index, offsets = arrow.without_gaps(offsets[:-1], _from_tensor(lengths))
            values = (np if isinstance(values, np.ndarray) else jnp).take(values, index, axis=at)
        return _from_offsets(cls, values, offsets, max_length, at)

    def to_torch(self) -> Any:
        """Converts the rows to a nested tensor of PyTorch, on the CPU.

        It has the jagged layout, or the strided one for several ragged axes.

        Raises:
          ArgumentTypeError: Values are traced, or random keys.

        Example:
          >>> nested = bx.Ragged(jnp.arange(6), [1, 3, 2]).to_torch()  # doctest: +SKIP
        """
        values, lengths = self._parts("to_torch")
        import torch  # pyright: ignore[reportMissingImports]

        def tensor(x: np.ndarray) -> Any:
            if x.dtype == jnp.bfloat16:  # which NumPy by itself does not have
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(x)

        if lengths.ndim > 1:
            parts = np.split(values, np.cumsum(lengths.prod(1))[:-1], self.element_axis)
            rows = [as_row(x, self.axis, n) for x, n in zip(parts, lengths, strict=False)]
            return torch.nested.nested_tensor([tensor(np.ascontiguousarray(x)) for x in rows])
        at = {} if self.axis == 0 else {"jagged_dim": self.axis + 1}
        offsets = torch.from_numpy(arrow.offsets_of(lengths))
        return torch.nested.nested_tensor_from_jagged(tensor(values), offsets, **at)

    @classmethod
    def from_tensorflow(cls: type[R], ragged: Any, max_length: int | None = None) -> R:
        """Builds a batch from a ``tf.RaggedTensor``.

        With several ragged axes, the lists in a row must have one length.

        Args:
          ragged: The tensor.
          max_length: As for `Ragged`.

        Raises:
          ArgumentTypeError: It is not such a tensor, or lists in a row differ in length.
          OverflowError: An integer does not fit into the dtype of JAX.

        Example:
          >>> import tensorflow as tf  # doctest: +SKIP
          >>> x = bx.Ragged.from_tensorflow(tf.ragged.constant([[1, 2], [3]]))  # doctest: +SKIP
        """
        _check_has("from_tensorflow", ragged, "a tf.RaggedTensor", ("flat_values", "row_splits"))
        values = np.asarray(ragged.flat_values)
        if getattr(ragged, "ragged_rank", 1) == 1:
            return _from_offsets(cls, values, np.asarray(ragged.row_splits), max_length)
        *outer, last = [np.diff(np.asarray(x)) for x in ragged.nested_row_splits]
        for counts in reversed(outer):
            last = arrow.of_lists(counts, last, "Ragged.from_tensorflow")
        return _from_lengths(cls, values, last, max_length)

    @classmethod
    def from_arrow(cls: type[R], array: Value, max_length: int | None = None) -> R:
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
        _check_has("from_arrow", array, "a pyarrow.ListArray", ("offsets", "values"))
        return _from_lengths(cls, *arrow.rows_of(array, "Ragged.from_arrow"), max_length)

    def to_arrow(self) -> Any:
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
        values, lengths = self._parts("to_arrow", first=True)
        with _refused("to_arrow", values):
            return arrow.from_rows(values, lengths)

    @classmethod
    def from_awkward(cls: type[R], array: Value, max_length: int | None = None) -> R:
        """Builds a batch from an ``awkward.Array`` with one or more axes of variable size.

        With several, the lists in a row must have one length.

        Args:
          array: The array.
          max_length: As for `Ragged`.

        Raises:
          ArgumentTypeError: It is of another kind, such as one with missing values or records.
          OverflowError: An integer does not fit into the dtype of JAX.

        Example:
          >>> import awkward
          >>> x = bx.Ragged.from_awkward(awkward.Array([[1, 2, 3], [], [4]]))
          >>> print(bx.vmap(jnp.sum)(x))
          [6 0 4]
        """
        _check_has("from_awkward", array, "an awkward.Array", ("layout",))
        layout = array.layout.to_packed()
        if not _is_list(layout):
            raise ArgumentTypeError(
                f"Ragged.from_awkward: the array is a {type(layout).__name__}, not a list of "
                "variable size for each row. Take it apart with awkward's own functions: "
                "ak.drop_none, ak.from_regular, or one field of a record."
            )
        return _from_lengths(cls, *_awkward_rows(layout), max_length)

    def to_awkward(self) -> Any:
        """Converts the rows to an ``awkward.Array`` with regular trailing axes.

        Several ragged axes are lists of lists, as for `to_arrow`.

        Raises:
          ArgumentTypeError: Values are traced, or awkward has no type for them.
          AxisError: The ragged axes are not the first axes of a row.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).to_awkward().to_list()
          [[0], [1, 2, 3], [4, 5]]
        """
        values, lengths = self._parts("to_awkward", first=True)
        import awkward  # pyright: ignore[reportMissingImports]

        with _refused("to_awkward", values):
            content = awkward.from_numpy(values, regulararray=True).layout
        for sizes in arrow.list_sizes(lengths):
            index = awkward.index.Index64(arrow.offsets_of(sizes))
            content = awkward.contents.ListOffsetArray(index, content)
        return awkward.Array(content)

    def _parts(self, method: str, first: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The elements of all rows, and their lengths: copies in NumPy arrays.

        Args:
          method: for messages.
          first: whether ragged axes must be the first ones of a row.
        """
        elements = elements_of(self.lengths)
        if elements is None or isinstance(self.data, Tracer):
            raise ArgumentTypeError(
                f"Ragged.{method}() needs rows whose values are known, but these are traced: call "
                "it outside of jit."
            )
        if first and self.axes != tuple(range(len(self.axes))):
            raise AxisError(
                f"Ragged.{method}: rows are ragged along axis {self.axis}, and there only the "
                f"first axes of a row can be. Build a Ragged from data with the axes moved."
            )
        if jnp.issubdtype(self.data.dtype, jax.dtypes.prng_key):
            raise ArgumentTypeError(
                f"Ragged.{method}: rows of random keys, of dtype {self.data.dtype}, have no form "
                "outside of JAX. Convert the numbers of the keys: jax.random.key_data(x.data)."
            )
        part = [slice(None)] * self.data.ndim
        part[self.element_axis] = slice(0, int(elements.sum()))
        each = [np.asarray(x).astype(np.int64) for x in self.each_length]
        return np.array(self.data[tuple(part)]), arrow.together(each)


_TORCH = ("values", "offsets", "is_nested")


def _from_offsets(cls: Any, flat: Any, offsets: Any, max_length: int | None, axis: int = 0) -> Any:
    return cls.from_offsets(flat, offsets, max_length, axis=axis)


def _from_lengths(cls: Any, flat: Any, lengths: np.ndarray, max_length: Any) -> Any:
    """Rows whose elements follow one another along axis 0, with lengths as `arrow.rows_of` has."""
    each = arrow.by_axis(lengths)
    return cls(flat, list(each.T), max_length, axis=tuple(range(each.shape[1])))


def _from_rows(cls: Any, rows: list[Any], max_length: Any) -> Any:
    shapes = np.array([x.shape for x in rows])
    return cls.from_rows(rows, max_length, axis=tuple(np.flatnonzero(np.ptp(shapes, 0))) or (0,))


def _check_has(method: str, x: Value, what: str, attributes: tuple[str, ...]) -> None:
    if not all(hasattr(x, name) for name in attributes):
        raise ArgumentTypeError(
            f"Ragged.{method} takes {what}, got {type(x).__name__}. For a list of rows use "
            "Ragged.from_rows(rows)."
        )


@contextlib.contextmanager
def _refused(method: str, values: np.ndarray) -> Iterator[None]:
    """Says of rows that another library refuses what they hold."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        row = ", ".join(map(str, ("n", *values.shape[1:])))
        raise ArgumentTypeError(
            f"Ragged.{method}: rows of {values.dtype}[{row}] have no form there ({error}). Convert "
            "them first, such as with x.with_data(x.data.astype(jnp.float32))."
        ) from None


def _from_tensor(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # a dtype that NumPy by itself does not have, such as bfloat16
        return jnp.from_dlpack(tensor.contiguous())


def _is_list(layout: Any) -> bool:
    """Whether it is one of lists of any size, or else the outermost."""
    has = lambda name: hasattr(layout, name)
    return has("offsets") and has("content")


def _awkward_rows(layout: Any) -> tuple[np.ndarray, np.ndarray]:
    """As `arrow.rows_of`."""
    counts = np.diff(np.asarray(layout.offsets))
    if not _is_list(layout.content) or hasattr(layout.content, "size"):  # of one size
        return _awkward_dense(layout.content), counts
    values, lengths = _awkward_rows(layout.content)
    return values, arrow.of_lists(counts, lengths, "Ragged.from_awkward")


def _awkward_dense(layout: Any) -> np.ndarray:
    """An array whose elements are numbers, or lists of one size of such elements."""
    if hasattr(layout, "data"):
        return np.asarray(layout.data)
    if not (hasattr(layout, "content") and hasattr(layout, "size")):
        raise ArgumentTypeError(
            f"Ragged.from_awkward: elements of the rows are a {type(layout).__name__}, not "
            "numbers or lists of one size. Make inner lists regular with ak.to_regular, or "
            "choose one field of a record."
        )
    inner = _awkward_dense(layout.content)
    return inner.reshape(len(layout), layout.size, *inner.shape[1:])
