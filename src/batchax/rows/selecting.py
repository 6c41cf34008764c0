"""Rows of a `Ragged` one by one, some of them, or those of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.spoken import show
from batchax.jaxprs.words import Value
from batchax.rows.checks import elements_of

S = TypeVar("S", bound="Selecting")


@_compat.api_boundary
class Selecting:
    """The methods of `Ragged` that take rows out, and put rows together; lengths must be known."""

    data: Any
    lengths: Any
    axis: Any
    max_length: Any

    def __init__(self, data: Any, lengths: Any, max_length: Any = None, *, axis: Any = 0) -> None:
        raise NotImplementedError

    @property
    def element_axis(self) -> int:
        raise NotImplementedError

    @property
    def axes(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def each_length(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def each_bound(self) -> tuple[int, ...]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def __getitem__(self, i: Any) -> Any:
        """Row `i` as an array of its own length, for an int; for others a `Ragged` of some rows.

        Args:
          i: an int; a slice; a sequence or array of ints, or of a bool for each row.

        Raises:
          IndexError: there is no such row.
          ArgumentTypeError: `i` is nothing of these, or lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> print(x[1], x[-2:].lengths, x[[2, 0]].lengths)
          [1 2 3] [3 2] [2 1]
        """
        ends = self._known_ends()
        if isinstance(i, slice):
            return self._some(ends, range(len(ends))[i])
        is_indices = isinstance(i, (int, list, tuple, range)) or hasattr(i, "__array__")
        chosen = np.asarray(i if is_indices else None)
        if chosen.ndim == 0 and np.issubdtype(chosen.dtype, np.integer):
            return self._row(ends, _place(int(chosen), len(ends)))
        if chosen.ndim == 1:
            if chosen.dtype == bool and len(chosen) == len(ends):
                return self._some(ends, np.flatnonzero(chosen))
            if np.issubdtype(chosen.dtype, np.integer) or not chosen.size:
                return self._some(ends, [_place(int(k), len(ends)) for k in chosen])
        raise ArgumentTypeError(
            f"Ragged: x[i] is row i, for an int; some rows, for a slice, or a list of ints or of a "
            f"bool for each row; got {show(i)}."
        )

    @classmethod
    def concatenate(cls: type[S], batches: Sequence[S]) -> S:
        """The rows of several, one after another.

        Args:
          batches: at least one `Ragged`. Rows differ in their length only.

        Raises:
          AxisError: there are none, or their rows differ in dtype, or in another axis than the
            ragged one.
          ArgumentTypeError: one is no `Ragged`, or lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> bx.Ragged.concatenate([x, x[:1]]).lengths.tolist()
          [1, 3, 2, 1]
        """
        batches = list(batches)
        if not batches:
            raise AxisError("Ragged.concatenate needs at least one Ragged.")
        for k, x in enumerate(batches):
            if not isinstance(x, Selecting):
                raise ArgumentTypeError(
                    f"Ragged.concatenate: batches[{k}] must be a Ragged, got {type(x).__name__}. "
                    "Of rows Ragged.from_rows(rows) makes one."
                )
        first = batches[0]
        kinds = [_kind(x) for x in batches]
        for k, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise AxisError(
                    f"Ragged.concatenate: batches[{k}] has rows of {kind}, and batches[0] of "
                    f"{kinds[0]}. Rows may differ in their length only."
                )
        parts = [x._packed(x._known_ends()) for x in batches]
        every = zip(*(x.each_length for x in batches), strict=True)
        lengths = [np.concatenate(list(map(np.asarray, each))) for each in every]
        most = tuple(map(max, zip(*(x.each_bound for x in batches), strict=True)))
        return cls(_one_after_another(parts, first.element_axis), lengths, most, axis=first.axes)

    def rows(self) -> list[Any]:
        """The rows, as a list of arrays.

        Raises:
          ArgumentTypeError: lengths are traced.

        Example:
          >>> [row.tolist() for row in bx.Ragged(jnp.arange(6), [1, 3, 2]).rows()]
          [[0], [1, 2, 3], [4, 5]]
        """
        ends = self._known_ends()
        return [self._row(ends, i) for i in range(len(ends))]

    def _some(self: S, ends: np.ndarray, chosen: Sequence[int] | np.ndarray) -> S:
        parts = [self._elements(ends, int(i)) for i in chosen] or [self._packed(ends[:0])]
        lengths = [np.asarray(x)[np.asarray(chosen, int)] for x in self.each_length]
        data = _one_after_another(parts, self.element_axis)
        return type(self)(data, lengths, self.each_bound, axis=self.axes)

    def _packed(self, ends: np.ndarray) -> Any:
        """The elements of rows, without room behind the last."""
        return self._part(0, int(ends[-1]) if len(ends) else 0)

    def _known_ends(self) -> np.ndarray:
        self.check_is_one_batch()
        elements = elements_of(self.lengths)
        if elements is None:
            raise ArgumentTypeError(
                "Ragged: a row has a shape of its own, for which lengths must be known, but these "
                "are traced: take rows outside of jit, or use to_padded()."
            )
        return np.cumsum(elements)

    def _row(self, ends: np.ndarray, i: int) -> Any:
        sizes = [int(np.asarray(x)[i]) for x in self.each_length]
        return as_row(self._elements(ends, i), self.axes, sizes)

    def _elements(self, ends: np.ndarray, i: int) -> Any:
        return self._part(int(ends[i - 1]) if i else 0, int(ends[i]))

    def _part(self, start: int, stop: int) -> Any:
        part = [slice(None)] * self.data.ndim
        part[self.element_axis] = slice(start, stop)
        return self.data[tuple(part)]

    def check_is_one_batch(self, called: str = "Ragged") -> None:
        raise NotImplementedError


def as_row(elements: Any, axes: Sequence[int], lengths: Sequence[int]) -> Any:
    """The elements of a row, which follow one another along the first of its ragged axes, as it."""
    if len(axes) == 1:
        return elements
    at = axes[0]
    shape = (*elements.shape[:at], *lengths, *elements.shape[at + 1 :])
    numpy = np if isinstance(elements, np.ndarray) else jnp
    return numpy.moveaxis(elements.reshape(shape), range(at, at + len(axes)), axes)


def as_elements(row: Any, axes: Sequence[int]) -> Any:
    """The reverse of `as_row`."""
    if len(axes) == 1:
        return row
    numpy, at = np if isinstance(row, np.ndarray) else jnp, axes[0]
    row = numpy.moveaxis(row, axes, range(at, at + len(axes)))
    shape = row.shape
    size = int(np.prod(shape[at : at + len(axes)]))
    return row.reshape(*shape[:at], size, *shape[at + len(axes) :])


def _one_after_another(parts: Sequence[Any], axis: int) -> Any:
    """Joined along an axis: of NumPy if all are, as rows may be that were never on a device."""
    numpy = np if all(isinstance(x, np.ndarray) for x in parts) else jnp
    return numpy.concatenate(parts, axis=axis)


def _place(i: int, count: int) -> int:
    if not -count <= i < count:
        raise IndexError(f"Ragged: there is no row {i} of {count} rows")
    return i % count


def _kind(x: Value) -> str:
    shape = ["n" if n is None else str(n) for n in x.shape[1:]]
    return f"{x.data.dtype}[{', '.join(shape)}]"
