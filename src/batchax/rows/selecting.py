"""Rows of a `Ragged` one by one, some of them, or those of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.words import Value
from batchax.rows.checks import known_lengths

S = TypeVar("S", bound="Selecting")


@_compat.api_boundary
class Selecting:
    """The methods of `Ragged` that take rows out, and put rows together; lengths must be known."""

    data: Any
    lengths: Any
    max_length: int
    axis: int

    def __init__(
        self, data: Any, lengths: Any, max_length: int | None = None, *, axis: int = 0
    ) -> None:
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
            f"bool for each row; got {i!r} of type {type(i).__name__}."
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
        lengths = np.concatenate([np.asarray(x.lengths) for x in batches])
        most = max(x.max_length for x in batches)
        return cls(_one_after_another(parts, first.axis), lengths, most, axis=first.axis)

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
        parts = [self._row(ends, int(i)) for i in chosen] or [self._packed(ends[:0])]
        lengths = np.asarray(self.lengths)[np.asarray(chosen, int)]
        data = _one_after_another(parts, self.axis)
        return type(self)(data, lengths, self.max_length, axis=self.axis)

    def _packed(self, ends: np.ndarray) -> Any:
        """The elements of rows, without room behind the last."""
        part = [slice(None)] * self.data.ndim
        part[self.axis] = slice(0, int(ends[-1]) if len(ends) else 0)
        return self.data[tuple(part)]

    def _known_ends(self) -> np.ndarray:
        self._check_has_lengths()
        lengths = known_lengths(self.lengths)
        if lengths is None:
            raise ArgumentTypeError(
                "Ragged: a row has a shape of its own, for which lengths must be known, but these "
                "are traced: take rows outside of jit, or use to_padded()."
            )
        return np.cumsum(lengths)

    def _row(self, ends: np.ndarray, i: int) -> Any:
        part = [slice(None)] * self.data.ndim
        part[self.axis] = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
        return self.data[tuple(part)]

    def _check_has_lengths(self) -> None:
        raise NotImplementedError


def _one_after_another(parts: Sequence[Any], axis: int) -> Any:
    """Joined along an axis: of NumPy if all are, as rows may be that were never on a device."""
    numpy = np if all(isinstance(x, np.ndarray) for x in parts) else jnp
    return numpy.concatenate(parts, axis=axis)


def _place(i: int, count: int) -> int:
    if not -count <= i < count:
        raise IndexError(f"Ragged: there is no row {i} of {count} rows")
    return i % count


def _kind(x: Value) -> str:
    shape = [str(n) for n in x.data.shape]
    shape[x.axis] = "n"
    return f"{x.data.dtype}[{', '.join(shape)}]"
