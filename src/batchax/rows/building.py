"""A `Ragged` of rows as they come: one by one, padded, or in one array with offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from batchax import _compat
from batchax.errors import AxisError
from batchax.frontend.options import checked_list
from batchax.rows.checks import (
    as_bounds,
    as_data,
    as_lengths,
    as_lengths_of,
    check_each,
    checked_axes,
    checked_axis,
    elements_of,
    known_lengths,
    length_name,
    shown_lengths,
)
from batchax.rows.index import Axes, RowIndex, pack_rows
from batchax.rows.joining import check_same_lengths, join, leaves_of_rows
from batchax.rows.ragged_dict import RaggedDict

B = TypeVar("B", bound="Building")

Bounds = int | tuple[int | None, ...] | None


@_compat.api_boundary
class Building:
    """The methods of `Ragged` that make one."""

    def __init__(
        self, data: Any, lengths: Any, max_length: Bounds = None, *, axis: Axes = 0
    ) -> None:
        raise NotImplementedError

    @overload
    @classmethod
    def from_rows(
        cls: type[B], rows: Sequence[ArrayLike], max_length: Bounds = None, *, axis: Axes = 0
    ) -> B: ...
    @overload
    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], max_length: Bounds = None, *, axis: Axes = 0
    ) -> Any: ...
    @classmethod
    def from_rows(cls, rows: Sequence[Any], max_length: Bounds = None, *, axis: Axes = 0) -> Any:
        """From arrays that differ in their size along `axis` only, or from trees of such arrays.

        Args:
          rows: the rows, arrays of one dtype; or trees of one structure, whose leaves are such
            arrays and have one length in each row: dicts, for several features of each element.
          max_length: as for `Ragged`.
          axis: the ragged axis of a row, or of each leaf of one; several, ``(0, 1)``, for images.

        Returns:
          A `Ragged` of these rows. Of trees: a tree like them with a `Ragged` for each leaf, all
          of the same lengths, of which `vmap` takes rows; `unstack` makes the list of rows of it
          again. Of dicts: a dict whose entries share their lengths under ``jax.jit``, too. It is a
          subclass of dict, and for JAX a pytree of another type.

        Raises:
          AxisError: there is no row; two differ in structure or in another axis; a leaf has
            another length than the rest of its row, or is a number.
          ArgumentTypeError: a row, or a leaf, is no array, or two differ in dtype.
          OverflowError: an integer does not fit into the dtype that JAX computes with.

        Example:
          >>> x = bx.Ragged.from_rows([jnp.arange(3), jnp.arange(1)])
          >>> print(bx.vmap(jnp.sum)(x))
          [3 0]
          >>> rows = [{"x": np.ones((n, 2)), "w": np.arange(n)} for n in (3, 1)]
          >>> print(bx.vmap(lambda row: row["w"] @ row["x"])(bx.Ragged.from_rows(rows)))
          [[3. 3.]
           [0. 0.]]
          >>> images = [np.ones((2, 3)), np.ones((1, 4))]
          >>> bx.Ragged.from_rows(images, axis=(0, 1))
          Ragged(2 rows of float32[n, m], lengths=([2, 1], [3, 4]), max_length=(2, 4))
        """
        rows = checked_list("Ragged.from_rows", "rows", rows)
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
        batches: list[Any] = [cls(data, lengths, max_length, axis=at) for _, data, _, at in joined]
        for batch in batches:
            batch.lengths = batches[0].lengths
        tree = jax.tree.unflatten(structure, batches)
        return RaggedDict(tree) if type(tree) is dict else tree

    @classmethod
    def from_padded(
        cls: type[B], padded: Any, lengths: Any, max_length: Bounds = None, *, axis: Axes = 0
    ) -> B:
        """From rows that are padded to one size.

        Args:
          padded: shape ``(B, ..., N, ...)``: a row for each entry of `lengths`, with the ragged
            axis at `axis` of a row. What lies beyond a row's length is dropped.
          lengths: shape ``(B,)``; a tuple, for several axes. Where they are traced, `data` of the
            result has room for ``B * N`` elements (``B * H * W``), and each length is clipped to
            what a row has room for.
          max_length: default N.
          axis: the ragged axis of a row, or several, in order.

        Returns:
          A `Ragged` of B rows, without the padding.

        Raises:
          AxisError: shapes do not fit, or a known length is more than a row has.

        Example:
          >>> x = bx.Ragged.from_padded(jnp.array([[1, 2, 3], [4, 0, 0]]), lengths=[3, 1])
          >>> print(x.data)
          [1 2 3 4]
        """
        padded = as_data(padded, "padded")
        if padded.ndim < 2:
            raise AxisError(
                f"Ragged.from_padded: padded has shape {padded.shape}; it needs an axis for the "
                "rows and one for the elements of a row."
            )
        at = checked_axes(axis, jax.ShapeDtypeStruct(padded.shape[1:], padded.dtype))
        given = as_lengths_of(at, lengths)
        each, axes = ((given,), (at,)) if isinstance(at, int) else (given, at)
        count, sizes = padded.shape[0], [padded.shape[k + 1] for k in axes]
        for k, x in enumerate(each):
            if x.shape != (count,):
                raise AxisError(
                    f"Ragged.from_padded: padded has {count} rows, shape {padded.shape}, but "
                    f"{length_name(k, len(each))} has shape {x.shape}. Give one length for each "
                    "row."
                )
        bounds = zip(as_bounds(at, max_length), sizes, strict=True)
        most = tuple(size if bound is None else bound for bound, size in bounds)
        elements = elements_of(given)
        if elements is None:
            sizes = list(map(min, sizes, most))
            capacity = count * math.prod(padded.shape[k + 1] for k in axes)
            each = [_clipped(x, size) for x, size in zip(each, sizes, strict=True)]
            for k, size in zip(axes, sizes, strict=True):
                padded = lax.slice_in_dim(padded, 0, size, axis=k + 1)
        else:
            for k, (x, size, bound) in enumerate(zip(each, sizes, most, strict=True)):
                x, name = np.asarray(x), length_name(k, len(each))
                check_each(x, size, f"the {size} elements that a row of `padded` has", name)
                check_each(x, bound, f"max_length, {bound}", name)
            capacity = int(elements.sum())
        index = RowIndex.of_axes(each, capacity, sizes)
        return cls(pack_rows(padded, index, at, capacity), each, most, axis=axes)

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


def _clipped(lengths: Any, size: int) -> Any:
    """Lengths of rows that have room for `size` elements: known ones are what they are."""
    if not isinstance(lengths, Tracer):
        return lengths
    return jnp.clip(lengths.astype(jnp.int32), 0, size)
