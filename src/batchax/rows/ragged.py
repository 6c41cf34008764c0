"""`Ragged`: a batch of rows of different lengths, held without padding."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import BatchOfRows
from batchax.rows.building import Building
from batchax.rows.checks import (
    as_data,
    as_lengths,
    check_lengths,
    check_max_length,
    checked_axis,
    known_lengths,
    shown_lengths,
)
from batchax.rows.converters import Converters
from batchax.rows.index import RowIndex, pad_rows
from batchax.rows.no_array import NoArray
from batchax.rows.selecting import Selecting


@_compat.api_boundary
@jax.tree_util.register_pytree_with_keys_class
class Ragged(Building, Converters, Selecting, NoArray, BatchOfRows):
    """Rows of different lengths: their elements one after another in one array.

    A pytree with the leaves `data` and `lengths`: it goes through ``jax.jit``, ``jax.grad``,
    ``jax.device_put`` and libraries that save arrays. As an argument of `vmap` it is a batch of
    rows, of which the function sees one, as an array that has the row's own length. ``len(x)`` is
    the number of rows, ``x[i]`` row `i`, and ``x[1:3]``, ``x[[0, 2]]`` or a mask some of them.

    Derivatives are with respect to `data`. ``jax.grad`` refuses the integers in `lengths` unless
    told otherwise (``allow_int=True``), and what it then returns is a Ragged whose lengths hold
    nothing (dtype float0). `with_data` makes a Ragged of gradients of it that has lengths.

    Args:
      data: array of any dtype, random keys included. Along `axis` it has the elements of row 0,
        then those of row 1, and so on: ``sum(lengths)`` of them, or more, of which the rest
        belongs to no row.
      lengths: integers of shape ``(B,)``: the number of elements of each row.
      max_length: an int that no length exceeds, known while a program is compiled. If not
        given: the greatest length; where lengths are traced, all that `data` has room for.
      axis: the axis of a row that is ragged: the rows of a Ragged with data of shape
        ``(3, 100)`` and axis 1 have the shapes ``(3, n)``.

    Raises:
      ArgumentTypeError: (a TypeError) `data` is no array, or `lengths` are no integers.
      AxisError: (a ValueError) `lengths` is not one-dimensional, has a negative entry, or one
        beyond `max_length`; or they add up to more than `data` has; or `axis` is out of range.
        Where `lengths` are traced their values are not known, and nothing is raised for those:
        each is clipped to ``[0, max_length]``, and rows end where `data` ends.

    Example:
      >>> x = bx.Ragged(jnp.arange(6.0), lengths=[1, 3, 2])
      >>> print(bx.vmap(jnp.sum)(x))
      [0. 6. 9.]
      >>> print(bx.vmap(lambda row: row - row.mean())(x)[1])
      [-1.  0.  1.]
    """

    data: Any
    lengths: Any
    max_length: int
    axis: int

    def __init__(
        self, data: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> None:
        self.data = as_data(data)
        self.lengths = as_lengths(lengths)
        self.axis = checked_axis(axis, self.data)
        capacity = self.data.shape[self.axis]
        check_max_length(max_length)
        values = known_lengths(self.lengths)
        if values is not None:
            check_lengths(values, capacity, max_length, self.data, self.axis)
        greatest = capacity if values is None else int(values.max(initial=0))
        self.max_length = greatest if max_length is None else int(max_length)

    @property
    def shape(self) -> tuple[Any, ...]:
        """``(B, ...)`` with the shape of a row, in which None is the ragged size."""
        shape = [len(self), *self.data.shape]
        shape[self.axis + 1] = None
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.data.dtype

    @property
    def offsets(self) -> Any:
        """Where each row begins and the last one ends, as int32 of shape ``(B + 1,)``."""
        index = self.index
        numpy = np if isinstance(index.starts, np.ndarray) else jnp
        ends = index.starts + index.lengths
        return numpy.concatenate([numpy.zeros(1, np.int32), ends])

    @property
    def index(self) -> RowIndex:
        """Where the elements of each row are.

        :meta private:
        """
        self._check_has_lengths()
        return RowIndex.of(self.lengths, self.data.shape[self.axis], self.max_length)

    def __len__(self) -> int:
        """The number of rows."""
        return self.lengths.shape[0]

    def to_padded(self, fill_value: Any = 0) -> Any:
        """An array of shape ``(B, ..., max_length, ...)``, with `fill_value` after each row.

        Args:
          fill_value: of the dtype of the elements. What comes after rows of random keys are keys
            of zeros, whatever this is.

        Example:
          >>> print(bx.Ragged(jnp.arange(6), [1, 3, 2]).to_padded(-1))
          [[ 0 -1 -1]
           [ 1  2  3]
           [ 4  5 -1]]
        """
        return pad_rows(self.data, self.index, self.axis, fill_value)

    def _check_has_lengths(self) -> None:
        if self.lengths.dtype == jax.dtypes.float0:
            raise ArgumentTypeError(
                "Ragged: this is a derivative, whose lengths JAX leaves empty (dtype float0). "
                "Its rows are those of x.with_data(derivative.data), for the x it belongs to."
            )

    def with_data(self, data: Any) -> Ragged:
        """Rows of the same lengths with other elements, which share the size under `vmap`.

        Args:
          data: an array with as many elements along the ragged axis.

        Example:
          >>> x = bx.Ragged(jnp.arange(6.0), [1, 3, 2])
          >>> loss = lambda x: bx.vmap(lambda row: jnp.sum(row**2))(x).sum()
          >>> g = jax.grad(loss, allow_int=True)(x)
          >>> print(x.with_data(g.data)[1])
          [2. 4. 6.]
        """
        return Ragged(data, self.lengths, self.max_length, axis=self.axis)

    def astype(self, dtype: Any) -> Ragged:
        """The same rows with elements of another dtype.

        Args:
          dtype: as for ``jax.Array.astype``.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).astype("float32")
          Ragged(3 rows of float32[n,], lengths=[1, 3, 2], max_length=3)
        """
        return self.with_data(self.data.astype(dtype))

    def with_capacity(self, capacity: int) -> Ragged:
        """The same rows in an array with room for `capacity` elements along the ragged axis.

        A compiled function is compiled once for batches of one capacity, as many rows, and one
        `max_length`, whatever the lengths.

        Args:
          capacity: the size of `data` along the ragged axis.

        Raises:
          AxisError: the rows have more elements.
          ArgumentTypeError: `capacity` is no int.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2]).with_capacity(100)
          >>> x.data.shape, len(x)
          ((100,), 3)
        """
        try:
            capacity = operator.index(capacity)
        except TypeError:
            raise ArgumentTypeError(
                f"Ragged.with_capacity: capacity must be an int, got {capacity!r} of type "
                f"{type(capacity).__name__}."
            ) from None
        size = self.data.shape[self.axis]
        values = known_lengths(self.lengths)
        least = size if values is None else int(values.sum())
        if capacity < least:
            raise AxisError(
                f"Ragged.with_capacity: the rows have {least} elements, and capacity is {capacity}."
            )
        part = [slice(None)] * self.data.ndim
        part[self.axis] = slice(0, capacity)
        room = list(self.data.shape)
        room[self.axis] = max(0, capacity - size)
        numpy = np if isinstance(self.data, np.ndarray) else jnp
        parts = [self.data[tuple(part)], numpy.zeros(room, self.dtype)]
        return self.with_data(numpy.concatenate(parts, axis=self.axis))

    def with_max_length(self, max_length: int) -> Ragged:
        """The same rows with another bound on their lengths.

        Args:
          max_length: as for `Ragged`.

        Raises:
          AxisError: a row is longer.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2]).with_max_length(16)
          >>> x.to_padded().shape
          (3, 16)
        """
        return Ragged(self.data, self.lengths, max_length, axis=self.axis)

    def tree_flatten_with_keys(self) -> Any:
        keys = jax.tree_util.GetAttrKey("data"), jax.tree_util.GetAttrKey("lengths")
        leaves = zip(keys, (self.data, self.lengths), strict=True)
        return tuple(leaves), (self.max_length, self.axis)

    def tree_flatten(self) -> Any:
        return (self.data, self.lengths), (self.max_length, self.axis)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Ragged:
        # Leaves may be anything here: transformations put placeholders into pytrees.
        ragged = object.__new__(cls)
        ragged.data, ragged.lengths = leaves
        ragged.max_length, ragged.axis = static
        return ragged

    def __repr__(self) -> str:
        shape = getattr(self.data, "shape", None)
        if shape is None or len(shape) <= self.axis or not hasattr(self.lengths, "dtype"):
            return f"Ragged(data={self.data!r}, lengths={self.lengths!r})"
        row = [*map(str, shape)]
        row[self.axis] = "n"
        values = known_lengths(self.lengths)
        if self.lengths.dtype == jax.dtypes.float0:
            lengths = "none, of a derivative"
        elif values is None:
            lengths = "traced"
        else:  # in a tree of shapes there is a shape
            lengths = shown_lengths(values) if values.ndim == 1 else "unknown"
        comma = "," if len(row) == 1 else ""
        return (
            f"Ragged({len(self)} rows of {self.data.dtype}[{', '.join(row)}{comma}], "
            f"lengths={lengths}, max_length={self.max_length})"
        )
