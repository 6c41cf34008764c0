"""`Ragged`: a batch of rows of different lengths, held without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax.engine.containers import BatchOfRows, add_spec_type
from batchax.errors import ArgumentTypeError, AxisError
from batchax.rows.index import RowIndex, pack_rows, pad_rows


@jax.tree_util.register_pytree_with_keys_class
class Ragged(BatchOfRows):
    """Rows of different lengths: their elements one after another in one array.

    A pytree with the leaves `data` and `lengths`: it goes through ``jax.jit``, ``jax.grad``,
    ``jax.device_put`` and libraries that save arrays. As an argument of `vmap` it is a batch of
    rows, of which the function sees one, as an array that has the row's own length.

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
    """

    data: Any
    lengths: Any
    max_length: int
    axis: int

    def __init__(
        self, data: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> None:
        self.data = _as_data(data)
        self.lengths = _as_lengths(lengths)
        self.axis = _checked_axis(axis, self.data)
        capacity = self.data.shape[self.axis]
        if max_length is not None and (
            not isinstance(max_length, (int, np.integer)) or isinstance(max_length, bool)
        ):
            raise ArgumentTypeError(
                f"Ragged: max_length must be an int, got {max_length!r} of type "
                f"{type(max_length).__name__}."
            )
        known = known_lengths(self.lengths)
        if known is not None:
            _check_lengths(known, capacity, max_length, self.data, self.axis)
            greatest = int(known.max(initial=0))
        else:
            greatest = capacity
        if max_length is not None and max_length < 0:
            raise AxisError(f"Ragged: max_length is {max_length}; give the length of no row less.")
        self.max_length = greatest if max_length is None else int(max_length)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], max_length: int | None = None, *, axis: int = 0
    ) -> Ragged:
        """From arrays that differ in their size along `axis` only.

        Raises:
          AxisError: there is no row, or two differ in another axis.
          ArgumentTypeError: a row is no array, or two differ in dtype.
        """
        rows = list(rows)
        if not rows:
            raise AxisError(
                "Ragged.from_rows needs at least one row: without any, neither dtype nor shape "
                "are known. For a batch of no rows give Ragged(data, lengths) with empty arrays."
            )
        arrays = [_as_data(row, f"rows[{i}]") for i, row in enumerate(rows)]
        at = _checked_axis(axis, arrays[0])
        first = arrays[0]
        for i, x in enumerate(arrays):
            if x.dtype != first.dtype:
                raise ArgumentTypeError(
                    f"Ragged.from_rows: rows[{i}] has dtype {x.dtype}, but rows[0] has "
                    f"{first.dtype}. Convert them to one dtype."
                )
            if _without(x.shape, at) != _without(first.shape, at) or x.ndim != first.ndim:
                raise AxisError(
                    f"Ragged.from_rows: rows[{i}] has shape {x.shape} and rows[0] {first.shape}: "
                    f"rows may differ along axis {at} only."
                )
        concatenate = np.concatenate if all(isinstance(x, np.ndarray) for x in rows) else None
        data = (concatenate or jnp.concatenate)(arrays, axis=at)
        return cls(data, np.array([x.shape[at] for x in arrays], np.int32), max_length, axis=at)

    @classmethod
    def from_padded(
        cls, padded: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> Ragged:
        """From rows that are padded to one size.

        Args:
          padded: shape ``(B, ..., N, ...)``: a row for each entry of `lengths`, with the ragged
            axis at `axis` of a row. What lies beyond a row's length is dropped.
          lengths: shape ``(B,)``. Where they are traced, `data` of the result has room for
            ``B * N`` elements.
          max_length: default N.
          axis: the ragged axis of a row.
        """
        padded, lengths = _as_data(padded, "padded"), _as_lengths(lengths)
        if padded.ndim < 2:
            raise AxisError(
                f"Ragged.from_padded: padded has shape {padded.shape}; it needs an axis for the "
                "rows and one for the elements of a row."
            )
        at = _checked_axis(axis, _Row(padded))
        count, size = padded.shape[0], padded.shape[at + 1]
        if lengths.shape != (count,):
            raise AxisError(
                f"Ragged.from_padded: padded has {count} rows, shape {padded.shape}, but lengths "
                f"has shape {lengths.shape}. Give one length for each row."
            )
        known = known_lengths(lengths)
        if known is not None:
            _check_each(known, size, f"the {size} elements that a row of `padded` has")
        capacity = count * size if known is None else int(known.sum())
        index = RowIndex.of(lengths, capacity, size)
        data = pack_rows(padded, index, at, capacity)
        return cls(data, lengths, size if max_length is None else max_length, axis=at)

    @classmethod
    def from_offsets(
        cls, flat: Any, offsets: Any, max_length: int | None = None, *, axis: int = 0
    ) -> Ragged:
        """From an array and where its rows begin, as TensorFlow, PyTorch and Arrow hold them.

        Args:
          flat: the elements of all rows along `axis`.
          offsets: integers of shape ``(B + 1,)`` that do not decrease: row `i` has the elements
            ``offsets[i]:offsets[i + 1]``.
          max_length: as for `Ragged`.
          axis: the ragged axis of a row.
        """
        flat, offsets = _as_data(flat, "flat"), _as_lengths(offsets, "offsets")
        at = _checked_axis(axis, flat)
        if offsets.shape[0] < 1:
            raise AxisError(
                "Ragged.from_offsets: offsets must have one entry more than there are rows; it "
                "is empty."
            )
        lengths = offsets[1:] - offsets[:-1]
        known = known_lengths(offsets)
        if known is None:
            flat = jnp.roll(flat, -offsets[0], axis=at)
        else:
            start, size = int(known[0]), flat.shape[at]
            if start < 0 or (np.diff(known) < 0).any() or known[-1] > size:
                raise AxisError(
                    "Ragged.from_offsets: offsets must begin at 0 or later, never decrease, and "
                    f"end within the {size} elements of flat; got {_shown(known)}."
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
        """Of the elements."""
        return self.data.dtype

    @property
    def offsets(self) -> Any:
        """Where each row begins and the last one ends: int32 of shape ``(B + 1,)``."""
        index = self.index
        return jnp.concatenate([index.starts, jnp.sum(index.lengths, keepdims=True)])

    @property
    def index(self) -> RowIndex:
        """Where the elements of each row are."""
        return RowIndex.of(self.lengths, self.data.shape[self.axis], self.max_length)

    def __len__(self) -> int:
        """The number of rows."""
        return self.lengths.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def __getitem__(self, i: int) -> Any:
        """Row `i`, as an array of its own length; lengths must be known."""
        return self.rows()[i]

    def to_padded(self, fill_value: Any = 0) -> Any:
        """An array of shape ``(B, ..., max_length, ...)``, with `fill_value` after each row.

        Random keys have no such value: pass None, and padding holds keys of some row.
        """
        return pad_rows(self.data, self.index, self.axis, fill_value)

    def rows(self) -> list[Any]:
        """The rows, as a list of arrays; lengths must be known.

        Raises:
          ArgumentTypeError: lengths are traced.
        """
        known = known_lengths(self.lengths)
        if known is None:
            raise ArgumentTypeError(
                "Ragged.rows() needs lengths whose values are known, but these are traced: call "
                "it outside of jit, or use to_padded()."
            )
        ends = np.cumsum(known)
        part = [slice(None)] * self.data.ndim
        rows = []
        for length, end in zip(known, ends, strict=True):
            part[self.axis] = slice(int(end - length), int(end))
            rows.append(self.data[tuple(part)])
        return rows

    def with_data(self, data: Any) -> Ragged:
        """Rows of the same lengths with other elements, which share the size under `vmap`."""
        return Ragged(data, self.lengths, self.max_length, axis=self.axis)

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
        if shape is None or not hasattr(self.lengths, "shape"):
            return f"Ragged(data={self.data!r}, lengths={self.lengths!r})"
        row = [*map(str, shape)]
        row[self.axis] = "n"
        known = known_lengths(self.lengths)
        lengths = "traced" if known is None else _shown(known)
        comma = "," if len(row) == 1 else ""
        return (
            f"Ragged({len(self)} rows of {self.data.dtype}[{', '.join(row)}{comma}], "
            f"lengths={lengths}, max_length={self.max_length})"
        )


@dataclass(frozen=True)
class RaggedSize:
    """In `in_axes`: the batch is a `Ragged`, whose rows have a size of that name."""

    name: str


add_spec_type(RaggedSize)


def ragged(name: str) -> RaggedSize:
    """In `in_axes`: the name of the size that the rows of a `Ragged` have.

    Arguments with the same name have rows of the same lengths, which the function may add to
    each other; arguments with different names have sizes of their own. Without names, arguments
    share a size if their lengths are one array or known to be equal.

    Args:
      name: a Python identifier, such as "n".

    Raises:
      ArgumentTypeError: it is none.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _OPERATIONS:
        raise ArgumentTypeError(
            f'ragged() takes a name for the size of rows, such as ragged("n"), got {name!r}.'
        )
    return RaggedSize(name)


_OPERATIONS = frozenset({"floordiv", "mod", "max", "min", "non_negative"})


def known_lengths(lengths: Any) -> np.ndarray | None:
    """`lengths` as a NumPy array, or None where their values are not known."""
    return None if isinstance(lengths, Tracer) else np.asarray(lengths)


class _Row:
    """What a row of a padded array looks like."""

    def __init__(self, padded: Any) -> None:
        self.shape, self.ndim = padded.shape[1:], padded.ndim - 1


def _as_data(data: Any, what: str = "data") -> Any:
    if isinstance(data, (jax.Array, Tracer)):
        return data
    try:
        return jnp.asarray(data)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"Ragged: {what} must be an array, got {type(data).__name__}. For a list of rows use "
            "Ragged.from_rows(rows)."
        ) from None


def _as_lengths(lengths: Any, what: str = "lengths") -> Any:
    if not isinstance(lengths, (jax.Array, Tracer)):
        try:
            lengths = np.asarray(lengths)
        except ValueError:
            lengths = np.zeros((), object)
        if lengths.size == 0 and lengths.ndim == 1:
            lengths = lengths.astype(np.int32)
        if np.issubdtype(lengths.dtype, np.integer):
            lengths = lengths.astype(np.int32)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"Ragged: {what} must be integers, one for each row, got dtype {lengths.dtype}."
        )
    if lengths.ndim != 1:
        raise AxisError(
            f"Ragged: {what} must have one axis, with an entry for each row; its shape is "
            f"{lengths.shape}."
        )
    return lengths


def _checked_axis(axis: Any, array: Any) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ArgumentTypeError(f"Ragged: axis must be an int, got {axis!r}.")
    if not -array.ndim <= axis < array.ndim:
        raise AxisError(
            f"Ragged: axis is {axis}, but a row has {array.ndim} axes; its array has shape "
            f"{tuple(array.shape)}."
        )
    return int(axis) % array.ndim


def _check_lengths(known: np.ndarray, capacity: int, most: int | None, data: Any, at: int) -> None:
    if (known < 0).any():
        i = int(np.argmax(known < 0))
        raise AxisError(f"Ragged: lengths[{i}] is {known[i]}; a length cannot be negative.")
    total = int(known.sum())
    if total > capacity:
        raise AxisError(
            f"Ragged: the lengths add up to {total}, but data, of shape {tuple(data.shape)}, has "
            f"{capacity} elements along axis {at}. Give the rows one after another, without "
            "padding; for padded rows use Ragged.from_padded(padded, lengths)."
        )
    if most is not None:
        _check_each(known, int(most), f"max_length, {most}")


def _check_each(known: np.ndarray, most: int, what: str) -> None:
    if (known > most).any():
        i = int(np.argmax(known > most))
        raise AxisError(f"Ragged: lengths[{i}] is {known[i]}, more than {what}.")


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _shown(lengths: np.ndarray) -> str:
    values = [*map(str, lengths)]
    return "[" + ", ".join(values if len(values) < 9 else [*values[:6], "...", values[-1]]) + "]"
