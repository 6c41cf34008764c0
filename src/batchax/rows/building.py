"""A `Ragged` of rows as they come: one by one, padded, or in one array with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from batchax import _compat
from batchax.errors import AxisError
from batchax.rows.checks import (
    as_data,
    as_lengths,
    check_each,
    check_max_length,
    checked_axis,
    known_lengths,
    shown_lengths,
)
from batchax.rows.index import RowIndex, pack_rows
from batchax.rows.joining import check_same_lengths, join, leaves_of_rows

B = TypeVar("B", bound="Building")


@_compat.api_boundary
class Building:
    """The methods of `Ragged` that make one."""

    def __init__(
        self, data: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> None:
        raise NotImplementedError

    @overload
    @classmethod
    def from_rows(
        cls: type[B], rows: Sequence[ArrayLike], max_length: int | None = None, *, axis: int = 0
    ) -> B: ...
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
        cls: type[B], padded: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> B:
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
        values = known_lengths(lengths)
        if values is None:
            capacity, room = count * size, min(size, most)
            index = RowIndex.of(lengths, capacity, room)
            lengths = index.lengths
            padded = lax.slice_in_dim(padded, 0, room, axis=at + 1)
        else:
            check_each(values, size, f"the {size} elements that a row of `padded` has")
            check_each(values, most, f"max_length, {most}")
            capacity = int(values.sum())
            index = RowIndex.of(lengths, capacity, size)
        return cls(pack_rows(padded, index, at, capacity), lengths, most, axis=at)

    @classmethod
    def from_offsets(
        cls: type[B], flat: Any, offsets: Any, max_length: int | None = None, *, axis: int = 0
    ) -> B:
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
        values, size = known_lengths(offsets), flat.shape[at]
        if values is None:
            offsets = lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, size))
            flat = jnp.roll(flat, -offsets[0], axis=at)
            lengths = offsets[1:] - offsets[:-1]
        else:
            start, lengths = int(values[0]), np.diff(values)
            if start < 0 or (lengths < 0).any() or values[-1] > size:
                raise AxisError(
                    "Ragged.from_offsets: offsets must begin at 0 or later, never decrease, and "
                    f"end within the {size} elements of flat; got {shown_lengths(values)}."
                )
            part = [slice(None)] * flat.ndim
            part[at] = slice(start, None)
            flat = flat[tuple(part)] if start else flat
        return cls(flat, lengths, max_length, axis=at)
