"""Rows of known lengths in groups: each is padded to the longest row of its group.

What `size_classes` does where lengths are traced. Here it is known, while a program is staged,
which row is in which group: nothing is left empty, and rows move by gathers from known places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.inner import batch_function
from batchax.rows.arguments import with_room
from batchax.rows.groups import join_elements, join_lanes, split_elements, split_lanes
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.merged import Names, names_of
from batchax.rows.packed import Packed, PackedRows
from batchax.rows.sizes import Sizes, ragged_axes
from batchax.rules.in_turn import in_turn


@dataclass(frozen=True)
class KnownGroups:
    """Which rows are padded to which bounds.

    Attributes:
      rows: the indices of the rows of each group. Each row is in one.
      lengths: for each group, those of its rows, for each size.
    """

    rows: tuple[np.ndarray, ...]
    lengths: tuple[Mapping[str, np.ndarray], ...]

    @classmethod
    def of(cls, lengths: Mapping[str, np.ndarray], rows: Sequence[np.ndarray]) -> KnownGroups:
        """Such groups of rows that have these lengths."""
        own = tuple({name: x[each] for name, x in lengths.items()} for each in rows)
        return cls(tuple(rows), own)

    def sizes(self, g: int, values: Mapping[str, Any]) -> Sizes:
        """What symbols stand for in group `g`."""
        bounds, exact = self.bounds(g), exact_sizes(self.lengths[g], self.bounds(g))
        own = {n: np.int32(bounds[n]) if n in exact else x for n, x in values.items()}
        return Sizes(bounds, own, exact)

    def bounds(self, g: int) -> dict[str, int]:
        """The bound of each size in group `g`: many operations have no meaning for size zero."""
        return {name: max(int(x.max()), 1) for name, x in self.lengths[g].items()}

    def run(
        self,
        rows: PackedRows,
        one_row: Callable[..., list[Any]],
        arguments: Sequence[Packed],
        shapes: Sequence[tuple[Any, ...]],
    ) -> list[Packed]:
        """The results of a function of one padded row for all rows: see `regions.RunPadded`."""
        parts = [self._split(x) for x in arguments]
        outs: list[list[tuple[Value, Position]]] = []
        for g in range(len(self.rows)):
            given = [part[g] for part in parts]
            if outs:  # no two groups at once: each may call a library
                given, before = self._after(outs[-1], given, arguments)
                outs[-1] = before
            outs.append(self._run_group(g, rows, one_row, given, arguments, shapes))
        results = zip(*outs, strict=True) if shapes else ()
        return [self._join(rows, list(x), s) for x, s in zip(results, shapes, strict=True)]

    def _run_group(
        self,
        g: int,
        rows: PackedRows,
        one_row: Callable[..., list[Any]],
        given: Sequence[Value],
        arguments: Sequence[Packed],
        shapes: Sequence[tuple[Any, ...]],
    ) -> list[tuple[Value, Position]]:
        lengths, lanes = self.lengths[g], replace(rows.axis, size=len(self.rows[g]))
        names = list(lengths)

        def padded_row(*values: Any) -> list[Any]:
            sizes = self.sizes(g, dict(zip(names, values, strict=False)))
            return one_row(sizes, *values[len(names) :])

        padded = [self._padded(g, x, each) for x, each in zip(given, arguments, strict=True)]
        values = [*(jnp.asarray(lengths[name]) for name in names), *(x for x, _ in padded)]
        axes: list[Position] = [*[0] * len(names), *(a for _, a in padded)]
        results = zip(*batch_function(lanes, padded_row, values, axes), shapes, strict=True)
        return [
            self._packed(g, lanes, x, a, shape)
            if rows.holds(shape)
            else (axis_to_front(lanes, x, a), 0)
            for x, a, shape in results
        ]

    def _split(self, x: Packed) -> list[Any]:
        """The part of a value that each group takes."""
        at = ragged_axes(x.shape)
        if x.axis is not None:
            return split_lanes(x.value, self.rows, x.axis)
        if not at:
            return [x.value] * len(self.rows)
        elements = self._elements(_names(x.shape))
        return split_elements(x.value, elements, self.rows, at[0])

    def _elements(self, names: Names) -> np.ndarray:
        """How many elements each row has along axes of these sizes, in the order of rows."""
        together = np.concatenate([_elements_of(own, names) for own in self.lengths])
        elements = np.zeros_like(together)
        elements[np.concatenate(self.rows)] = together
        return elements

    def _after(
        self,
        outs: Sequence[tuple[Value, Position]],
        given: Sequence[Value],
        arguments: Sequence[Packed],
    ) -> tuple[list[Value], list[tuple[Value, Position]]]:
        """What a group is given, later than the results of the one before it."""
        own = [i for i, x in enumerate(arguments) if x.axis is not None or ragged_axes(x.shape)]
        before, waiting = in_turn([x for x, _ in outs], [given[i] for i in own])
        later = dict(zip(own, waiting, strict=True))
        firsts = [(x, axis) for x, (_, axis) in zip(before, outs, strict=True)]
        return [later.get(i, x) for i, x in enumerate(given)], firsts

    def _index(self, g: int, names: Names) -> RowIndex:
        own, bounds = self.lengths[g], self.bounds(g)
        along = [own[name] for name in names], [bounds[name] for name in names]
        return RowIndex.of_axes(along[0], int(_elements_of(own, names).sum()), along[1])

    def _padded(self, g: int, x: Value, given: Packed) -> tuple[Any, Position]:
        """An argument for a group, and where it has the rows of that."""
        at = tuple(ragged_axes(given.shape))
        if not at:
            return x, given.axis
        if given.axis is None:
            return pad_rows(x, self._index(g, _names(given.shape)), at), 0
        sizes = self.sizes(g, self.lengths[g])
        for k in at:
            x = lax.slice_in_dim(x, 0, sizes.bound(given.shape[k]), axis=k + 1)
        return x, given.axis

    def _packed(
        self, g: int, lanes: Axis, x: Value, axis: Position, shape: tuple[Any, ...]
    ) -> tuple[Value, Position]:
        """A result of a group, which is held packed."""
        at = tuple(ragged_axes(shape))
        if not at:
            return x, axis
        x, index = axis_to_front(lanes, x, axis), self._index(g, _names(shape))
        capacity = int(_elements_of(self.lengths[g], _names(shape)).sum())
        return pack_rows(x, index, at, capacity), None

    def _join(
        self, rows: PackedRows, parts: Sequence[tuple[Value, Position]], shape: tuple[Any, ...]
    ) -> Packed:
        """A result for all rows, of what groups returned."""
        at = ragged_axes(shape)
        like = functools.partial(_weak_as, parts[0][0])
        if at and rows.holds(shape):
            names = _names(shape)
            x = join_elements([x for x, _ in parts], self._elements(names), self.rows, at[0])
            return Packed(like(with_room(x, at[0], rows.along(names).capacity)), shape)
        if not at and all(axis is None for _, axis in parts):
            return Packed(parts[0][0], shape)  # what rows share is the same in each group
        lanes = [replace(rows.axis, size=len(own)) for own in self.rows]
        xs = [axis_to_front(own, x, axis) for own, (x, axis) in zip(lanes, parts, strict=True)]
        whole = Sizes({name: s.index.bound for name, s in rows.segments.items()}, {})
        return Packed(
            like(join_lanes([_wider(x, at, whole, shape) for x in xs], self.rows)), shape, 0
        )


def _names(shape: Sequence[Any]) -> Names:
    """The sizes of a value that is held packed."""
    names = names_of(shape)
    assert names is not None
    return names


def _elements_of(lengths: Mapping[str, np.ndarray], names: Names) -> np.ndarray:
    """How many elements rows of these lengths have along axes of sizes `names`."""
    return np.prod([lengths[name] for name in names], 0, dtype=np.int64)


def exact_sizes(lengths: Mapping[str, Any], bounds: Mapping[str, int]) -> frozenset[str]:
    """Which sizes are those bounds in every row, as is known: nothing is padded along them."""
    of_numpy = {name: x for name, x in lengths.items() if isinstance(x, np.ndarray)}
    return frozenset(name for name, x in of_numpy.items() if (x == bounds[name]).all())


def _wider(x: Value, at: Sequence[int], whole: Sizes, shape: Sequence[Any]) -> Any:
    """Padded rows of a group with the room that those of all rows have along axes `at`."""
    for k in at:
        x = with_room(x, k + 1, whole.bound(shape[k]))
    return x


def _weak_as(x: Value, joined: Value) -> Any:
    return _compat.weakly(joined) if getattr(x, "weak_type", False) else joined
