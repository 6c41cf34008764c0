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
from batchax.rows.checks import elements_of

R = TypeVar("R", bound="Converters")


@_compat.api_boundary
class Converters:
    """The methods of `Ragged` for batches of other libraries."""

    data: Any
    lengths: Any
    axis: Any

    @classmethod
    def from_torch(cls: type[R], nested: Any, max_length: int | None = None) -> R:
        """From a nested tensor of PyTorch in the jagged layout.

        Its values are copied from the host's memory, without PyTorch's gradients.

        Args:
          nested: the tensor.
          max_length: as for `Ragged`.

        Raises:
          ArgumentTypeError: it is of another kind.

        Example:
          >>> import torch  # doctest: +SKIP
          >>> rows = [torch.ones(3), torch.ones(1)]  # doctest: +SKIP
          >>> nested = torch.nested.nested_tensor(rows, layout=torch.jagged)  # doctest: +SKIP
          >>> x = bx.Ragged.from_torch(nested)  # doctest: +SKIP
        """
        _check_has("from_torch", nested, "a nested tensor of layout torch.jagged", _TORCH)
        values, offsets = _from_tensor(nested.values()), _from_tensor(nested.offsets())
        lengths = nested.lengths() if hasattr(nested, "lengths") else None
        at = getattr(nested, "_ragged_idx", 1) - 1  # 1 but for transposed tensors
        if lengths is not None:  # there are gaps between rows
            index, offsets = arrow.without_gaps(offsets[:-1], _from_tensor(lengths))
            values = jnp.take(values, index, axis=at)
        return _from_offsets(cls, values, offsets, max_length, at)

    def to_torch(self) -> Any:
        """A nested tensor of PyTorch in the jagged layout, on the CPU.

        Raises:
          ArgumentTypeError: values are traced, or random keys.

        Example:
          >>> nested = bx.Ragged(jnp.arange(6), [1, 3, 2]).to_torch()  # doctest: +SKIP
        """
        values, offsets = self._parts("to_torch")
        import torch  # pyright: ignore[reportMissingImports]

        if values.dtype == jnp.bfloat16:  # which NumPy by itself does not have
            values = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        else:
            values = torch.from_numpy(values)
        at = {} if self.axis == 0 else {"jagged_dim": self.axis + 1}
        offsets = torch.from_numpy(offsets)
        return torch.nested.nested_tensor_from_jagged(values, offsets, **at)

    @classmethod
    def from_tensorflow(cls: type[R], ragged: Any, max_length: int | None = None) -> R:
        """From a ``tf.RaggedTensor`` with one ragged axis.

        Args:
          ragged: the tensor.
          max_length: as for `Ragged`.

        Raises:
          ArgumentTypeError: it is no such tensor.
          AxisError: several of its axes are ragged.

        Example:
          >>> import tensorflow as tf  # doctest: +SKIP
          >>> x = bx.Ragged.from_tensorflow(tf.ragged.constant([[1, 2], [3]]))  # doctest: +SKIP
        """
        _check_has("from_tensorflow", ragged, "a tf.RaggedTensor", ("flat_values", "row_splits"))
        rank = getattr(ragged, "ragged_rank", 1)
        if rank != 1:
            raise AxisError(
                f"Ragged.from_tensorflow: the tensor has {rank} ragged axes; a Ragged has one. "
                "Make the others dense with to_tensor()."
            )
        values, splits = np.asarray(ragged.flat_values), np.asarray(ragged.row_splits)
        return _from_offsets(cls, values, splits, max_length)

    @classmethod
    def from_arrow(cls: type[R], array: Value, max_length: int | None = None) -> R:
        """From a ``pyarrow.ListArray``, large or sliced or chunked or a view too.

        Its values may be lists of a fixed size, which are trailing axes of the rows.

        Args:
          array: the array.
          max_length: as for `Ragged`.

        Raises:
          ArgumentTypeError: it is of another kind, or has nulls or what is no number.

        Example:
          >>> import pyarrow
          >>> x = bx.Ragged.from_arrow(pyarrow.array([[1, 2, 3], [], [4]]))
          >>> print(bx.vmap(jnp.sum)(x))
          [6 0 4]
        """
        if hasattr(array, "combine_chunks"):
            array = array.combine_chunks()
        _check_has("from_arrow", array, "a pyarrow.ListArray", ("offsets", "values"))
        values, offsets = arrow.lists(array, "Ragged.from_arrow")
        return _from_offsets(cls, values, offsets, max_length)

    def to_arrow(self) -> Any:
        """A ``pyarrow.ListArray``; trailing axes of the rows are lists of a fixed size.

        Raises:
          ArgumentTypeError: values are traced, or have no form in Arrow.
          AxisError: the ragged axis is not the first of a row.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).to_arrow().to_pylist()
          [[0], [1, 2, 3], [4, 5]]
        """
        values, offsets = self._parts("to_arrow", axis=0)
        with _refused("to_arrow", values):
            return arrow.from_lists(values, offsets)

    @classmethod
    def from_awkward(cls: type[R], array: Value, max_length: int | None = None) -> R:
        """From an ``awkward.Array`` with one axis of variable size, the second.

        Args:
          array: the array.
          max_length: as for `Ragged`.

        Raises:
          ArgumentTypeError: it is of another kind, such as one with missing values or records.

        Example:
          >>> import awkward
          >>> x = bx.Ragged.from_awkward(awkward.Array([[1, 2, 3], [], [4]]))
          >>> print(bx.vmap(jnp.sum)(x))
          [6 0 4]
        """
        _check_has("from_awkward", array, "an awkward.Array", ("layout",))
        layout = array.layout.to_packed()
        if not (hasattr(layout, "offsets") and hasattr(layout, "content")):
            raise ArgumentTypeError(
                f"Ragged.from_awkward: the array is a {type(layout).__name__}, not a list of "
                "variable size for each row. Take it apart with awkward's own functions: "
                "ak.drop_none, ak.from_regular, or one field of a record."
            )
        offsets = np.asarray(layout.offsets)
        values = _awkward_dense(layout.content)
        return _from_offsets(cls, values, offsets, max_length)

    def to_awkward(self) -> Any:
        """An ``awkward.Array``; trailing axes of the rows are regular.

        Raises:
          ArgumentTypeError: values are traced, or have no form in awkward.
          AxisError: the ragged axis is not the first of a row.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).to_awkward().to_list()
          [[0], [1, 2, 3], [4, 5]]
        """
        values, offsets = self._parts("to_awkward", axis=0)
        import awkward  # pyright: ignore[reportMissingImports]

        with _refused("to_awkward", values):
            content = awkward.from_numpy(values, regulararray=True).layout
        index = awkward.index.Index64(offsets)
        return awkward.Array(awkward.contents.ListOffsetArray(index, content))

    def _parts(self, method: str, axis: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The elements of all rows, and where rows begin, copied into NumPy arrays."""
        lengths = elements_of(self.lengths)
        if not isinstance(self.axis, int):
            raise AxisError(
                f"Ragged.{method}: rows are ragged along the axes {self.axis}, and there only one "
                "axis can be. Take them one by one, x.rows(), or padded, x.to_padded()."
            )
        if lengths is None or isinstance(self.data, Tracer):
            raise ArgumentTypeError(
                f"Ragged.{method}() needs rows whose values are known, but these are traced: call "
                "it outside of jit."
            )
        if axis is not None and self.axis != axis:
            raise AxisError(
                f"Ragged.{method}: rows are ragged along axis {self.axis}, and there only the "
                f"first axis of a row can be. Build a Ragged from data with the axes moved."
            )
        if jnp.issubdtype(self.data.dtype, jax.dtypes.prng_key):
            raise ArgumentTypeError(
                f"Ragged.{method}: rows of random keys, of dtype {self.data.dtype}, have no form "
                "outside of JAX. Convert the numbers of the keys: jax.random.key_data(x.data)."
            )
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        part = [slice(None)] * self.data.ndim
        part[self.axis] = slice(0, int(offsets[-1]))
        return np.array(self.data[tuple(part)]), offsets


_TORCH = ("values", "offsets", "is_nested")


def _from_offsets(cls: Any, flat: Any, offsets: Any, max_length: int | None, axis: int = 0) -> Any:
    return cls.from_offsets(flat, offsets, max_length, axis=axis)


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
