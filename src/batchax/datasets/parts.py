"""What the modules of this room hand each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

NOT_FINITE = " is not finite"
ENDLESS = np.iinfo(np.int32).max  # rows of a stream, as far as anybody knows


class Unit(NamedTuple):
    """Rows that are committed at once.

    Attributes:
      number: its place in the plan.
      start: its first row.
      stop: the row after its last.
    """

    number: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


@dataclass(frozen=True)
class Leaf:
    """An array of results, for all rows.

    Attributes:
      name: its path in what the function returns: "" if it returns one array, else "y", "0", "a/b".
      shape: of all rows; of rows of different lengths, without the axis along which these differ.
      dtype: of its elements.
      axis: along which the rows lie.
      ragged: the axis of a row along which rows have different lengths, or several; None if they do
        not.
      grows: whether rows are counted as they come. By `shape` there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int = 0
    ragged: int | tuple[int, ...] | None = None
    grows: bool = False

    def of_rows(self, rows: int) -> tuple[int, ...]:
        """The shape if there are so many rows."""
        return *self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]

    def without_elements(self, rows: int) -> Rows:
        """So many rows, of those that have different lengths, without elements."""
        axes = (len(self.ragged),) if isinstance(self.ragged, tuple) else ()
        return Rows(np.zeros((0, *self.shape[1:]), self.dtype), np.zeros((rows, *axes), np.int64))


class Rows(NamedTuple):
    """Rows of different lengths.

    Attributes:
      data: the elements of one row after another along axis 0, shape (elements, ...).
      lengths: of each row, shape (rows,). Along several axes, the last of which is the fastest:
        shape (rows, axes).
    """

    data: np.ndarray
    lengths: np.ndarray

    @property
    def elements(self) -> np.ndarray:
        """How many elements each row has."""
        return elements_in(self.lengths)


def elements_in(lengths: np.ndarray) -> np.ndarray:
    """How many elements rows of such lengths have, as `Rows` has lengths."""
    return lengths if lengths.ndim == 1 else lengths.prod(1)


@dataclass(frozen=True, slots=True)  # there may be millions
class Bad:
    """A row whose result could not be had.

    Attributes:
      row: its index in the dataset.
      error: what went wrong, in a line.
      traceback: where, if that is known.
    """

    row: int
    error: str
    traceback: str = ""

    @property
    def kind(self) -> str:
        """The name of the type of its error."""
        return self.error.partition(":")[0]

    @property
    def is_nonfinite(self) -> bool:
        """Whether it has results that are not finite."""
        return self.error.endswith(NOT_FINITE) and not self.traceback


def alike(bad: Iterable[Bad]) -> list[Bad]:
    """The same rows; those that fail in one way have one traceback, that of the first of them.

    A traceback takes kilobytes, and ends with what is told of its own row.
    """
    first: dict[str, str] = {}
    rows = []
    for b in bad:
        told = first.setdefault(b.traceback.removesuffix(b.error), b.traceback)
        rows.append(b if told is b.traceback else replace(b, traceback=told))
    return rows


def packed(bad: Iterable[Bad]) -> dict[str, list[Any]]:
    """Rows without a result, for JSON, with each traceback once."""
    places: dict[str, int] = {}
    rows = [[b.row, b.error, places.setdefault(b.traceback, len(places))] for b in bad]
    return {"rows": rows, "tracebacks": list(places)}


def unpacked(entry: dict[str, list[Any]]) -> list[Bad]:
    """What `packed` was given."""
    texts = entry["tracebacks"]
    return [Bad(row, error, texts[place]) for row, error, place in entry["rows"]]


@dataclass(frozen=True)
class Record:
    """What the journal says of a unit that is done.

    Attributes:
      unit: its rows.
      checksums: crc32c of the results, one for each leaf.
      attempt: how many times it was begun before, by anyone.
      seconds: how long it took to compute.
      quarantined: the rows that have no result.
      reduced: for each reduction over the rows, the part of this unit.
      ended: when that was written down, in seconds since 1970; the journal sets it.
      ids: by which it is withdrawn, of all attempts that wrote the same; the journal sets them.
      writer: whose journal says it, if it was read there.
      read: crc32c of the rows of a stream that it was computed of, one for each array of them.
    """

    unit: Unit
    checksums: Sequence[int]
    attempt: int = 0
    seconds: float = 0.0
    quarantined: Sequence[Bad] = ()
    reduced: Mapping[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    ids: Sequence[Any] = field(default=(), compare=False)
    writer: str = field(default="", compare=False)
    read: Sequence[int] = ()
