"""Buckets: rows in groups of which each is padded to a size of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.in_axes import is_position
from batchax.frontend.rows import GroupsOfRows
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value
from batchax.rows.boxes import find_boxes
from batchax.rows.checks import as_tuple, elements_of
from batchax.rows.groups import join_lanes, join_rows, split_lanes, split_rows
from batchax.rows.ragged import Ragged


@_compat.api_boundary
@dataclass(frozen=True, eq=False, repr=False)
class Buckets(GroupsOfRows):
    """Rows in groups, each with a size that its rows are padded to.

    Attributes:
      lengths: the length of each row; along each axis, where rows are ragged along several.
      sizes: the size of each bucket, increasing; of several axes, tuples.
      rows: the indices of the rows in each, increasing. Every row is in one.
      max_length: what all rows would be padded to without buckets.

    Example:
      >>> buckets = bx.bucket([1, 2, 2, 9, 10], max_buckets=2)
      >>> buckets
      Buckets(5 rows in 2 sizes, waste 1.08; 2.08 in one size of 10)
        size  rows  elements  waste
           2     3         5   1.20
          10     2        19   1.05
      >>> [rows.tolist() for rows in buckets.rows]
      [[0, 1, 2], [3, 4]]
    """

    lengths: Any
    sizes: tuple[Any, ...]
    rows: tuple[np.ndarray, ...]
    max_length: Any

    @property
    def waste(self) -> float:
        """How many elements the padded rows have for each one that is not padding; 1.0 is best."""
        sizes = map(_places, self.sizes)
        padded = sum(size * len(rows) for size, rows in zip(sizes, self.rows, strict=True))
        return self._waste(padded)

    @property
    def waste_unbucketed(self) -> float:
        """The same, if all rows were padded to `max_length`."""
        return self._waste(_places(self.max_length) * len(self._elements))

    @property
    def _elements(self) -> np.ndarray:
        """How many elements each row has."""
        elements = elements_of(self.lengths)
        assert elements is not None
        return elements

    def _waste(self, padded: int) -> float:
        true = int(self._elements.sum())
        return padded / true if true else 1.0 if not padded else float("inf")

    def split(self, x: Value, axis: int = 0) -> list[Any]:
        """The rows of each bucket.

        Args:
          x: a `Ragged` with these lengths, or an array with an entry for each row.
          axis: of an array: where its rows are.

        Returns:
          A `Ragged` for each bucket, with the size of the bucket as its `max_length`; or arrays.

        Raises:
          AxisError: `x` has other rows.
          ArgumentTypeError: its lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> for part in bx.bucket(x, 2).split(x):
          ...     print(part.lengths.tolist(), part.max_length)
          [1] 1
          [3, 2] 3
        """
        if isinstance(x, Ragged):
            self._check_lengths(x)
            parts = split_rows(x, self.rows)
            return [
                part.with_max_length(size) for part, size in zip(parts, self.sizes, strict=True)
            ]
        x = _as_array(x, "Buckets.split: x")
        axis = _checked(axis, x, len(self._elements), "Buckets.split: x")
        return split_lanes(x, self.rows, axis) if self.rows else []

    def join(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """What `split` took apart, or what was computed from it: rows in their order.

        Args:
          parts: for each bucket a `Ragged`, or an array, with an entry for each of its rows.
          axis: of arrays: where their rows are.

        Returns:
          A `Ragged` if the parts are, otherwise an array.

        Raises:
          AxisError: there is not one part for each bucket, or one has another number of rows.
          ArgumentTypeError: parts are neither all `Ragged` nor all arrays.

        Example:
          >>> buckets = bx.bucket([1, 9, 2], max_buckets=2)
          >>> print(buckets.join([np.array([1, 2]), np.array([9])]))
          [1 9 2]
        """
        parts = list(parts)
        if len(parts) != len(self.sizes):
            raise AxisError(
                f"Buckets.join: there are {len(self.sizes)} buckets, but {len(parts)} parts. Give "
                "one part for each bucket, in their order."
            )
        if not parts:
            raise AxisError("Buckets.join: there are no rows, and so nothing to join.")
        ragged = [isinstance(part, Ragged) for part in parts]
        if any(ragged) and not all(ragged):
            raise ArgumentTypeError(
                "Buckets.join: parts must be all Ragged or all arrays; "
                f"parts[{ragged.index(False)}] is no Ragged and parts[{ragged.index(True)}] is."
            )
        for i, (part, rows) in enumerate(zip(parts, self.rows, strict=True)):
            if ragged[0]:
                _check_rows(part, len(rows), f"Buckets.join: parts[{i}]")
                continue
            parts[i] = _as_array(part, f"Buckets.join: parts[{i}]")
            _checked(axis, parts[i], len(rows), f"Buckets.join: parts[{i}]")
        if not ragged[0]:
            return join_lanes(parts, self.rows, axis % parts[0].ndim)
        joined = join_rows(parts, self.rows)
        if self.are_of(joined):
            return Ragged(joined.data, self.lengths, self.max_length, axis=joined.axis)
        return joined

    def are_of(self, x: Ragged) -> bool:
        """Whether rows of known lengths have those that the buckets are for.

        :meta private:
        """
        own = as_tuple(self.lengths)
        return len(own) == len(x.axes) and all(map(np.array_equal, own, x.each_length))

    def _check_lengths(self, x: Ragged) -> None:
        _check_rows(x, len(self._elements), "Buckets.split: x")
        if self.are_of(x):
            return
        own = as_tuple(self.lengths)
        if len(own) != len(x.axes):
            raise AxisError(
                f"Buckets.split: x has {len(x.axes)} ragged axes, but the buckets were made for "
                f"{len(own)}. Make buckets for x: bucket(x)."
            )
        for lengths, mine in zip(x.each_length, own, strict=True):
            if np.array_equal(lengths, mine):
                continue
            i = int(np.argmax(np.asarray(lengths) != mine))
            raise AxisError(
                f"Buckets.split: row {i} of x has {lengths[i]} elements, but the buckets were "
                f"made for one of {mine[i]}. Make buckets for these lengths: bucket(x)."
            )

    def __repr__(self) -> str:
        lines = [
            f"Buckets({len(self._elements)} rows in {len(self.sizes)} sizes, waste "
            f"{self.waste:.2f}; {self.waste_unbucketed:.2f} in one size of "
            f"{_shown(self.max_length)})"
        ]
        table = [("size", "rows", "elements", "waste")]
        for size, rows in zip(self.sizes, self.rows, strict=True):
            true = int(self._elements[rows].sum())
            waste = f"{_places(size) * len(rows) / true:.2f}" if true else "-"
            table.append((_shown(size), str(len(rows)), str(true), waste))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.rjust, row, widths)) for row in table]
        return "\n".join(lines)


@_compat.api_boundary
def bucket(ragged_or_lengths: Any, max_buckets: int = 8, *, multiple_of: int = 1) -> Buckets:
    """Groups rows by length into few sizes, with as little padding as possible.

    Runs on the host. Among all ways to give each row one of at most `max_buckets` sizes no less
    than its length, it finds the one in which rows have the fewest elements in all, and among
    those one of the fewest sizes. Rows that are ragged along several axes get a size along each;
    which rows are together is found by merging the two groups that grow least, again and again.

    Args:
      ragged_or_lengths: a `Ragged` whose lengths are known, or integers, one for each row; or a
        tuple of those, along each ragged axis.
      max_buckets: the most sizes; each is compiled for by itself.
      multiple_of: sizes are multiples of it.

    Returns:
      The `Buckets`. They are what `buckets` of `vmap` takes.

    Raises:
      ArgumentTypeError: (a TypeError) lengths are traced or no integers, or an option is none.
      AxisError: (a ValueError) a length is negative, or an option is less than 1.

    References:
      Grouping on a line by a dynamic programme: W. D. Fisher, On grouping for maximum
      homogeneity, 1958; R. Bellman, 1973.

    Example:
      >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
      >>> buckets = bx.bucket(x, 2)
      >>> parts = [jax.jit(bx.vmap(jnp.sum))(part) for part in buckets.split(x)]
      >>> print(buckets.join(parts))
      [0 6 9]
    """
    for name, value in (("max_buckets", max_buckets), ("multiple_of", multiple_of)):
        if not is_position(value):
            raise ArgumentTypeError(f"bucket: {name} must be a positive int, got {show(value)}.")
        if value < 1:
            raise AxisError(f"bucket: {name} must be a positive int, got {value}.")
    every = _lengths_of(ragged_or_lengths)
    ragged = isinstance(ragged_or_lengths, Ragged)
    if len(every) > 1:
        needed = np.maximum(-(-np.stack(every, 1) // multiple_of), 1) * multiple_of
        groups = find_boxes(needed, int(max_buckets)) if len(needed) else []
        sizes = tuple(tuple(map(int, needed[rows].max(0))) for rows in groups)
        greatest = tuple(int(x.max(initial=0)) for x in every)
        most = ragged_or_lengths.max_length if ragged else greatest
        return Buckets(every, sizes, tuple(groups), most)
    lengths = next(iter(every))
    # A row of no elements takes room too: many operations have no meaning for size zero.
    needed = np.maximum(-(-lengths // multiple_of), 1) * multiple_of
    candidates, number, counts = np.unique(needed, return_inverse=True, return_counts=True)
    chosen = cheapest_ends(candidates, counts, int(max_buckets))
    of_candidate = np.searchsorted(chosen, np.arange(len(candidates)))
    of_row = of_candidate[number.reshape(-1)]
    rows = tuple(np.flatnonzero(of_row == i) for i in range(len(chosen)))
    most = ragged_or_lengths.max_length if ragged else int(lengths.max(initial=0))
    return Buckets(lengths, tuple(int(candidates[i]) for i in chosen), rows, most)


def _places(size: Any) -> int:
    """How many elements a row of that size has."""
    return math.prod(as_tuple(size))


def _shown(size: Any) -> str:
    return " x ".join(map(str, as_tuple(size)))


def _lengths_of(x: Value) -> tuple[np.ndarray, ...]:
    """The lengths along each ragged axis."""
    if isinstance(x, Ragged):
        return tuple(_checked_lengths(x, lengths) for lengths in x.each_length)
    several = isinstance(x, tuple) and len(x) > 1 and all(map(np.ndim, x))
    every = tuple(_checked_lengths(x, lengths) for lengths in (x if several else (x,)))
    if len(set(map(len, every))) > 1:
        raise AxisError(
            "bucket: lengths along several axes must be of as many rows, got "
            f"{', '.join(map(str, map(len, every)))}."
        )
    return every


def _checked_lengths(x: Value, lengths: Any) -> np.ndarray:
    if isinstance(lengths, Tracer):
        raise ArgumentTypeError(
            "bucket: the lengths are traced, and rows are put into buckets by what they are: call "
            "it outside of jit."
        )
    try:
        lengths = np.asarray(lengths)
    except ValueError:
        lengths = np.zeros((), object)
    if lengths.ndim == 1 and not lengths.size:
        lengths = lengths.astype(np.int32)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ArgumentTypeError(
            "bucket: ragged_or_lengths must be a Ragged, or integers with one axis and an entry "
            f"for each row, got {show(lengths)}."
        )
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise AxisError(f"bucket: lengths[{i}] is {lengths[i]}; a length cannot be negative.")
    return lengths.astype(np.int64)


def cheapest_ends(weights: np.ndarray, counts: np.ndarray, most: int) -> list[int]:
    """The last length of each group, of at most so many, for the least weight in all.

    The dynamic programme that `bucket` refers to: the best use of k sizes for the first j lengths
    ends in one group after the best use of k - 1 for those before. Where that group begins does
    not decrease with j, since what a group costs is Monge, which saves looking at earlier ones.

    Args:
      weights: of a row that is padded to each length, increasing: elements, or time.
      counts: how many rows have each length.
      most: how many groups there may be.
    """
    count = len(weights)
    before = np.concatenate([[0], np.cumsum(counts)])  # rows among the first j sizes
    cost = np.concatenate([[0], weights * before[1:]])  # of the first j sizes in one group
    totals, begins = [cost[count]], [np.zeros(count + 1, np.int64)]
    for _ in range(1, min(most, count)):
        best, begin = np.zeros_like(cost), np.zeros(count + 1, np.int64)
        for j in range(1, count + 1):
            first = begin[j - 1]
            with_last = cost[first:j] + weights[j - 1] * (before[j] - before[first:j])
            at = int(np.argmin(with_last))
            best[j], begin[j] = with_last[at], first + at
        cost = best
        totals.append(cost[count])
        begins.append(begin)
    used, end = int(np.argmin(totals)), count
    chosen = []
    while end:
        chosen.append(end - 1)
        end = int(begins[used][end])
        used -= 1
    return chosen[::-1]


def _as_array(x: Value, what: str) -> Any:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{what} must be a Ragged or an array, got {type(x).__name__}."
        ) from None


def _checked(axis: Any, x: Value, rows: int, what: str) -> int:
    if not is_position(axis):
        raise ArgumentTypeError(f"{what}: axis must be an int, got {brief(axis)}.")
    if not -x.ndim <= axis < x.ndim:
        raise AxisError(f"{what} has shape {x.shape}, and no axis {axis} for its rows.")
    if x.shape[axis] != rows:
        raise AxisError(
            f"{what} has shape {x.shape}, {x.shape[axis]} rows along axis {axis}; it should have "
            f"{rows}."
        )
    return axis % x.ndim


def _check_rows(x: Ragged, rows: int, what: str) -> None:
    if elements_of(x.lengths) is None:
        raise ArgumentTypeError(
            f"{what} has traced lengths: rows can be moved between buckets only where lengths are "
            "known, outside of jit or for a Ragged that is closed over."
        )
    if len(x) != rows:
        raise AxisError(f"{what} has {len(x)} rows; it should have {rows}.")
