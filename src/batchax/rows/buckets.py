"""Groups of rows: chosen, split by row, joined in the order of the rows.

Whole rows, or the elements of rows, move to positions that are known while a program is staged. So
each move is one gather, and its transpose is the gather that takes everything back; JAX's own
transpose of a gather would be a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.in_axes import is_position
from batchax.frontend.rows import GroupsOfRows
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Value, Values
from batchax.rows.building import as_tuple, elements_of
from batchax.rows.index import moved
from batchax.rows.ragged import Ragged

_MOST_SHAPES = 256  # that are merged two by two; of more, those that are nearly equal are one


Weight = Callable[[np.ndarray], np.ndarray]
"""What a row weighs that is padded to each of some shapes, an array of shape (shapes, axes)."""


def lightest_groups(needed: np.ndarray, most: int, weight: Weight) -> list[np.ndarray]:
    """The rows, of sizes of shape (rows, axes), in at most so many groups of least weight.

    Each group is padded to its greatest size along each axis.
    """
    if not len(needed):
        return []
    if needed.shape[1] > 1:
        return next(fewer_boxes(needed, most, weight))
    candidates, number, counts = np.unique(needed[:, 0], return_inverse=True, return_counts=True)
    ends = cheapest_ends(weight(candidates[:, None]), counts, most)
    group = np.searchsorted(ends, number.reshape(-1))
    return [np.flatnonzero(group == g) for g in range(len(ends))]


def fewer_boxes(needed: np.ndarray, most: int, weight: Weight) -> Iterator[list[np.ndarray]]:
    """Rows in at most so many groups of little weight; then in one group less, and so on.

    Two groups at a time become one, those whose rows weigh least more for it. Along one axis
    the best groups are found by a dynamic programme (`cheapest_ends`); for several axes that is a
    hard problem.
    """
    shapes, number, counts = _few(needed)
    merged = np.arange(len(shapes))  # the group of each shape
    sizes = shapes.copy()
    weights = weight(sizes).astype(float)
    alive = np.ones(len(shapes), bool)
    growth = np.full((len(shapes), len(shapes)), np.inf)

    def update(i: int) -> None:
        together = weight(np.maximum(sizes, sizes[i])) * (counts + counts[i])
        grown = together - weights * counts - weights[i] * counts[i]
        grown[~alive] = np.inf
        grown[i] = np.inf
        growth[i], growth[:, i] = grown, grown

    for i in range(len(shapes)):
        update(i)
    while True:
        i, j = np.unravel_index(np.argmin(growth), growth.shape)
        if alive.sum() <= most and growth[i, j] > 0:
            yield [np.flatnonzero(merged[number] == k) for k in np.flatnonzero(alive)]
        if alive.sum() <= 1:
            return
        sizes[i], counts[i] = np.maximum(sizes[i], sizes[j]), counts[i] + counts[j]
        weights[i] = weight(sizes[i : i + 1])[0]
        merged[merged == j] = i
        alive[j] = False
        growth[j], growth[:, j] = np.inf, np.inf
        update(int(i))


def _few(needed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shapes that rows have, rounded up if they are many; the one of each row; how many have it."""
    step = 1
    while True:
        shapes, number, counts = np.unique(
            -(-needed // step) * step, axis=0, return_inverse=True, return_counts=True
        )
        if len(shapes) <= _MOST_SHAPES:
            return shapes, number.reshape(-1), counts
        step *= 2


def split_rows(x: Ragged, groups: Sequence[np.ndarray]) -> list[Ragged]:
    """The rows of each group, whose lengths must be known; its longest gives the bound."""
    datas = split_elements(x.data, known_elements(x), groups, x.element_axis)
    lengths = [np.asarray(each) for each in x.each_length]
    return [
        Ragged(
            data,
            [each[rows] for each in lengths],
            (None,) * len(lengths) if len(rows) else x.each_bound,
            axis=x.axes,
        )
        for data, rows in zip(datas, groups, strict=True)
    ]


def join_rows(parts: Sequence[Ragged], groups: Sequence[np.ndarray]) -> Ragged:
    """The reverse of `split_rows`."""
    axis, order = parts[0].element_axis, np.concatenate(groups)
    place = _inverse(order, len(order))
    elements = np.concatenate([known_elements(part) for part in parts])[place]
    data = join_elements([part.data for part in parts], elements, groups, axis)
    every = zip(*(part.each_length for part in parts), strict=True)
    lengths = [np.concatenate(list(map(np.asarray, each)))[place] for each in every]
    bounds = tuple(map(max, zip(*(part.each_bound for part in parts), strict=True)))
    return Ragged(data, lengths, bounds, axis=parts[0].axes)


def split_elements(
    x: Value, lengths: np.ndarray, groups: Sequence[np.ndarray], axis: int
) -> list[Any]:
    """The elements of the rows of each group, of packed rows of these lengths along `axis`."""
    starts = np.cumsum(lengths) - lengths
    index = [_elements(starts, lengths, rows) for rows in groups]
    return _regroup([x], np.concatenate(index), [len(i) for i in index], axis)


def join_elements(
    parts: Values, lengths: np.ndarray, groups: Sequence[np.ndarray], axis: int
) -> jax.Array:
    """The reverse of `split_elements`. Parts may have elements behind their last row."""
    capacities = [part.shape[axis] for part in parts]
    counts = [lengths[rows] for rows in groups]
    within = [np.cumsum(count) - count for count in counts]
    offsets = np.cumsum(capacities) - capacities
    starts = np.concatenate([at + offset for at, offset in zip(within, offsets, strict=True)])
    place = _inverse(np.concatenate(groups), len(lengths))
    index = _elements(starts, np.concatenate(counts), place)
    return _regroup(parts, index, [len(index)], axis)[0]


def split_lanes(x: Value, groups: Sequence[np.ndarray], axis: int) -> list[Any]:
    return _regroup([x], np.concatenate(groups), [len(rows) for rows in groups], axis)


def join_lanes(parts: Sequence[Any], groups: Sequence[np.ndarray], axis: int = 0) -> jax.Array:
    index = np.concatenate(groups)
    return _regroup(parts, _inverse(index, len(index)), [len(index)], axis)[0]


def known_elements(x: Ragged | Buckets) -> np.ndarray:
    elements = elements_of(x.lengths)
    assert elements is not None, "checked by those who make groups"
    return elements


def _elements(starts: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where the elements of `rows` are, one row after another."""
    count = lengths[rows]
    first = np.cumsum(count) - count
    return np.repeat(starts[rows] - first, count) + np.arange(count.sum())


def _inverse(index: np.ndarray, size: int) -> np.ndarray:
    """Where in `index` each number below `size` is; -1 for those that are not."""
    places = np.full(size, -1)
    places[index] = np.arange(len(index))
    return places


def _regroup(parts: Sequence[Any], index: np.ndarray, sizes: Sequence[int], axis: int) -> list[Any]:
    """The elements `index` of all parts together, in new parts of these sizes, along `axis`."""
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
    count = x.shape[axis]
    if not np.array_equal(index, np.arange(count)):
        x = moved(x, axis, index.astype(np.int32), _inverse(index, count).astype(np.int32))
    return [x] if len(sizes) == 1 else list(lax.split(x, sizes, axis))


def groups_of(*lengths: np.ndarray) -> list[np.ndarray]:
    """The rows in groups of which each has equal lengths, in the order of those."""
    together = np.stack(lengths, 1)
    _, number = np.unique(together, axis=0, return_inverse=True)
    number = number.reshape(-1)
    order = np.argsort(number, kind="stable")
    ends = np.flatnonzero(np.diff(number[order])) + 1
    return np.split(order, ends)


@_compat.api_boundary
@dataclass(frozen=True, eq=False, repr=False)
class Buckets(GroupsOfRows):
    """Holds rows in groups, each with a size that its rows are padded to.

    Attributes:
      lengths: The length of each row; along each axis, if rows are ragged along several.
      sizes: The size of each bucket, increasing; tuples for several axes.
      rows: The indices of the rows of each bucket, increasing. Every row is in one bucket.
      max_length: The size that all rows would be padded to without buckets.

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
        """The number of padded elements for each element that is not padding; 1.0 is best."""
        sizes = map(_places, self.sizes)
        padded = sum(size * len(rows) for size, rows in zip(sizes, self.rows, strict=True))
        return self._waste(padded)

    @property
    def waste_unbucketed(self) -> float:
        """The waste if all rows were padded to `max_length`."""
        return self._waste(_places(self.max_length) * len(self._elements))

    @property
    def _elements(self) -> np.ndarray:
        """How many elements each row has."""
        return known_elements(self)

    def _waste(self, padded: int) -> float:
        true = int(self._elements.sum())
        return padded / true if true else 1.0 if not padded else float("inf")

    def split(self, x: Value, axis: int = 0) -> list[Any]:
        """Splits rows into the buckets.

        Args:
          x: A `Ragged` with these lengths, or an array with an entry for each row.
          axis: The axis of the rows of an array.

        Returns:
          A `Ragged` for each bucket, with the size of the bucket as its `max_length`; or arrays.

        Raises:
          AxisError: `x` has other rows.
          ArgumentTypeError: Its lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> for part in bx.bucket(x, 2).split(x):
          ...     print(part.lengths.tolist(), part.max_length)
          [1] 1
          [3, 2] 3
        """
        if isinstance(x, Ragged):
            _check_rows(x, len(self._elements), "Buckets.split: x")
            if not self.are_of(x):
                raise AxisError(
                    "Buckets.split: the buckets were made for other lengths than those of x, which "
                    f"is {x}. Make buckets for these lengths: bucket(x)."
                )
            parts = split_rows(x, self.rows)
            return [
                part.with_max_length(size) for part, size in zip(parts, self.sizes, strict=True)
            ]
        x = _as_array(x, "Buckets.split: x")
        axis = _checked(axis, x, len(self._elements), "Buckets.split: x")
        return split_lanes(x, self.rows, axis) if self.rows else []

    def join(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Joins results of the parts of `split`, in the order of the rows.

        Args:
          parts: For each bucket, a `Ragged` or an array with an entry for each of its rows.
          axis: The axis of the rows of arrays.

        Returns:
          A `Ragged` if the parts are, otherwise an array.

        Raises:
          AxisError: There is not one part for each bucket, or one has another number of rows.
          ArgumentTypeError: The parts are neither all `Ragged` nor all arrays.

        Example:
          >>> buckets = bx.bucket([1, 9, 2], max_buckets=2)
          >>> print(buckets.join([np.array([1, 2]), np.array([9])]))
          [1 9 2]
        """
        parts = list(parts)
        if len(parts) != len(self.sizes):
            raise AxisError(
                f"Buckets.join: there are {len(self.sizes)} buckets, but {len(parts)} parts. Pass "
                "one part for each bucket, in their order."
            )
        if not parts:
            raise AxisError("Buckets.join: the batch has no rows, so there is nothing to join.")
        ragged = [isinstance(part, Ragged) for part in parts]
        if any(ragged) and not all(ragged):
            raise ArgumentTypeError(
                "Buckets.join: parts must be all Ragged or all arrays; "
                f"parts[{ragged.index(False)}] is not a Ragged and parts[{ragged.index(True)}] is."
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
def bucket(ragged_or_lengths: Value, max_buckets: int = 8, *, multiple_of: int = 1) -> Buckets:
    """Groups rows by length into a few sizes with the least padding.

    Example:
      >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
      >>> buckets = bx.bucket(x, 2)
      >>> parts = [jax.jit(bx.vmap(jnp.sum))(part) for part in buckets.split(x)]
      >>> print(buckets.join(parts))
      [0 6 9]

    It runs on the host. For one ragged axis, no other choice of at most `max_buckets` sizes has
    fewer padded elements. For several axes, it repeatedly merges the two groups that grow least.

    Args:
      ragged_or_lengths: A `Ragged` with known lengths, or integers, one for each row; or a tuple of
        these, one for each ragged axis.
      max_buckets: The largest number of sizes. Each is compiled separately.
      multiple_of: A divisor of all sizes.

    Returns:
      The `Buckets`, a value for the option `buckets` of `vmap`.

    Raises:
      ArgumentTypeError: (a TypeError) Lengths are traced or not integers, or an option is not an
        int.
      AxisError: (a ValueError) A length is negative, or an option is less than 1.

    References:
      Grouping on a line by dynamic programming: W. D. Fisher, On grouping for maximum
      homogeneity, 1958; R. Bellman, 1973.
    """
    for name, value in (("max_buckets", max_buckets), ("multiple_of", multiple_of)):
        if not is_position(value):
            raise ArgumentTypeError(f"bucket: {name} must be a positive int, got {show(value)}.")
        if value < 1:
            raise AxisError(f"bucket: {name} must be a positive int, got {value}.")
    every = _lengths_of(ragged_or_lengths)
    # Empty rows are padded to one element: many operations are undefined for size zero.
    needed = np.maximum(-(-np.stack(every, 1) // multiple_of), 1) * multiple_of
    groups = lightest_groups(needed, int(max_buckets), lambda sizes: sizes.prod(1))
    groups.sort(key=lambda rows: int(needed[rows].max(0).prod()))
    of_axes = lambda values: tuple(values) if len(every) > 1 else next(iter(values))
    sizes = tuple(of_axes(map(int, needed[rows].max(0))) for rows in groups)
    most = of_axes(int(x.max(initial=0)) for x in every)
    if isinstance(ragged_or_lengths, Ragged):
        most = ragged_or_lengths.max_length
    return Buckets(of_axes(every), sizes, tuple(groups), most)


def _places(size: int | tuple[int, ...]) -> int:
    return math.prod(as_tuple(size))


def _shown(size: int | tuple[int, ...]) -> str:
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


def _checked_lengths(x: Value, lengths: Value) -> np.ndarray:
    if isinstance(lengths, Tracer):
        raise ArgumentTypeError(
            "bucket: the lengths are traced, and buckets are chosen by their values. Call it "
            "outside of jit."
        )
    try:
        lengths = np.asarray(lengths)
    except ValueError:
        lengths = np.zeros((), object)
    if not lengths.size:
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

    `weights` are those of a row that is padded to each length, increasing, and `counts` how many
    rows have it.
    """
    # Rows of a bucket are padded to its longest. So buckets that are intervals of the sorted
    # lengths cost no more than others, since `weights` increase: what is to be chosen is where each
    # interval ends.
    #
    # Invariants, after k turns:
    # - ``cost[j]`` is the least weight of the rows of the first j lengths in at most k groups that
    #   end with length j;
    # - ``begins[k - 1][j]`` is where the last of these groups begins; with it the groups are found
    #   again from the end.
    #
    # The weight of a group from i to j is ``w[j] * (rows of i..j)``. For i <= i' <= j <= j' it is
    # ``w(i, j) + w(i', j') <= w(i, j') + w(i', j)``: the quadrangle inequality (Monge). So the
    # best beginning does not decrease with j (Yao, "Efficient dynamic programming using quadrangle
    # inequalities", 1980), and the search for it starts at that of j - 1.
    #
    # Bound: O(most * n**2) for n different lengths in the worst case, in `n * most` NumPy calls.
    # More groups never weigh more; the least number of groups of the least weight is taken.
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


def _as_array(x: Value, what: str) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{what} must be a Ragged or an array, got {type(x).__name__}."
        ) from None


def _checked(axis: int, x: Value, rows: int, what: str) -> int:
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
