"""`Ragged`: a batch of rows of different lengths, held without padding."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import BatchOfRows
from batchax.rows.checks import (
    as_data,
    as_lengths,
    check_each,
    check_lengths,
    check_max_length,
    checked_axis,
    known_lengths,
    shown_lengths,
)
from batchax.rows.converters import Converters
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.joining import check_same_lengths, join, leaves_of_rows
from batchax.rows.selecting import Selecting


@_compat.api_boundary
@jax.tree_util.register_pytree_with_keys_class
class Ragged(Converters, Selecting, BatchOfRows):
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
        known = known_lengths(self.lengths)
        if known is not None:
            check_lengths(known, capacity, max_length, self.data, self.axis)
        greatest = capacity if known is None else int(known.max(initial=0))
        self.max_length = greatest if max_length is None else int(max_length)

    @overload
    @classmethod
    def from_rows(
        cls, rows: Sequence[ArrayLike], max_length: int | None = None, *, axis: int = 0
    ) -> Ragged: ...
    @overload
    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], max_length: int | None = None, *, axis: int = 0
    ) -> Any: ...
    @classmethod
    def from_rows(cls, rows: Sequence[Any], max_length: int | None = None, *, axis: int = 0) -> Any:
        """From arrays that differ in their size along `axis` only, or from trees of such arrays.

        Args:
          rows: the rows, arrays of one dtype; or trees of one structure, whose leaves are such
            arrays and have one length in each row: dicts, for several features of each element.
          max_length: as for `Ragged`.
          axis: the ragged axis of a row, or of each leaf of one.

        Returns:
          A `Ragged` of these rows. Of trees: a tree like them with a `Ragged` for each leaf, all
          of the same lengths, of which `vmap` takes rows; `unstack` makes the list of rows of it
          again.

        Raises:
          AxisError: there is no row; two differ in structure or in another axis; a leaf has
            another length than the rest of its row, or is a number.
          ArgumentTypeError: a row, or a leaf, is no array, or two differ in dtype.

        Example:
          >>> x = bx.Ragged.from_rows([jnp.arange(3), jnp.arange(1)])
          >>> print(bx.vmap(jnp.sum)(x))
          [3 0]
          >>> rows = [{"x": np.ones((n, 2)), "w": np.arange(n)} for n in (3, 1)]
          >>> print(bx.vmap(lambda row: row["w"] @ row["x"])(bx.Ragged.from_rows(rows)))
          [[3. 3.]
           [0. 0.]]
        """
        rows = list(rows)
        if not rows:
            raise AxisError(
                "Ragged.from_rows needs at least one row: without any, neither dtype nor shape "
                "are known. For a batch of no rows give Ragged(data, lengths) with empty arrays."
            )
        leaves, structure = leaves_of_rows(rows)
        joined = [(path, *join(path, values, axis)) for path, values in leaves]
        first, _, lengths, _ = joined[0]
        for path, _, others, _ in joined[1:]:
            check_same_lengths((first, lengths), (path, others))
        batches = [cls(data, lengths, max_length, axis=at) for _, data, _, at in joined]
        return jax.tree.unflatten(structure, batches)

    @classmethod
    def from_padded(
        cls, padded: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> Ragged:
        """From rows that are padded to one size.

        Args:
          padded: shape ``(B, ..., N, ...)``: a row for each entry of `lengths`, with the ragged
            axis at `axis` of a row. What lies beyond a row's length is dropped.
          lengths: shape ``(B,)``. Where they are traced, `data` of the result has room for
            ``B * N`` elements, and each length is clipped to what a row has room for.
          max_length: default N.
          axis: the ragged axis of a row.

        Returns:
          A `Ragged` of B rows, without the padding.

        Raises:
          AxisError: shapes do not fit, or a known length is more than a row has.

        Example:
          >>> x = bx.Ragged.from_padded(jnp.array([[1, 2, 3], [4, 0, 0]]), lengths=[3, 1])
          >>> print(x.data)
          [1 2 3 4]
        """
        padded, lengths = as_data(padded, "padded"), as_lengths(lengths)
        if padded.ndim < 2:
            raise AxisError(
                f"Ragged.from_padded: padded has shape {padded.shape}; it needs an axis for the "
                "rows and one for the elements of a row."
            )
        at = checked_axis(axis, jax.ShapeDtypeStruct(padded.shape[1:], padded.dtype))
        count, size = padded.shape[0], padded.shape[at + 1]
        if lengths.shape != (count,):
            raise AxisError(
                f"Ragged.from_padded: padded has {count} rows, shape {padded.shape}, but lengths "
                f"has shape {lengths.shape}. Give one length for each row."
            )
        check_max_length(max_length)
        most = size if max_length is None else int(max_length)
        known = known_lengths(lengths)
        if known is None:
            capacity, room = count * size, min(size, most)
            index = RowIndex.of(lengths, capacity, room)
            lengths = index.lengths
            padded = lax.slice_in_dim(padded, 0, room, axis=at + 1)
        else:
            check_each(known, size, f"the {size} elements that a row of `padded` has")
            check_each(known, most, f"max_length, {most}")
            capacity = int(known.sum())
            index = RowIndex.of(lengths, capacity, size)
        return cls(pack_rows(padded, index, at, capacity), lengths, most, axis=at)

    @classmethod
    def from_offsets(
        cls, flat: Any, offsets: Any, max_length: int | None = None, *, axis: int = 0
    ) -> Ragged:
        """From an array and where its rows begin, as TensorFlow, PyTorch and Arrow hold them.

        Args:
          flat: the elements of all rows along `axis`.
          offsets: integers of shape ``(B + 1,)`` that do not decrease: row `i` has the elements
            ``offsets[i]:offsets[i + 1]``. Where they are traced, one that is less than one
            before it counts as that one, and each is clipped to the elements that `flat` has.
          max_length: as for `Ragged`.
          axis: the ragged axis of a row.

        Returns:
          A `Ragged` of B rows.

        Raises:
          AxisError: known offsets decrease, or are not within `flat`.

        Example:
          >>> x = bx.Ragged.from_offsets(jnp.arange(6), [0, 1, 4, 6])
          >>> print(x[1])
          [1 2 3]
        """
        flat, offsets = as_data(flat, "flat"), as_lengths(offsets, "offsets")
        at = checked_axis(axis, flat)
        if offsets.shape[0] < 1:
            raise AxisError(
                "Ragged.from_offsets: offsets must have one entry more than there are rows; it "
                "is empty."
            )
        known, size = known_lengths(offsets), flat.shape[at]
        if known is None:
            offsets = lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, size))
            flat = jnp.roll(flat, -offsets[0], axis=at)
            lengths = offsets[1:] - offsets[:-1]
        else:
            start, lengths = int(known[0]), np.diff(known)
            if start < 0 or (lengths < 0).any() or known[-1] > size:
                raise AxisError(
                    "Ragged.from_offsets: offsets must begin at 0 or later, never decrease, and "
                    f"end within the {size} elements of flat; got {shown_lengths(known)}."
                )
            part = [slice(None)] * flat.ndim
            part[at] = slice(start, None)
            flat = flat[tuple(part)] if start else flat
        return cls(flat, lengths, max_length, axis=at)

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
        known = known_lengths(self.lengths)
        least = size if known is None else int(known.sum())
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
        known = known_lengths(self.lengths)
        if self.lengths.dtype == jax.dtypes.float0:
            lengths = "none, of a derivative"
        elif known is None:
            lengths = "traced"
        else:  # in a tree of shapes there is a shape
            lengths = shown_lengths(known) if known.ndim == 1 else "unknown"
        comma = "," if len(row) == 1 else ""
        return (
            f"Ragged({len(self)} rows of {self.data.dtype}[{', '.join(row)}{comma}], "
            f"lengths={lengths}, max_length={self.max_length})"
        )
