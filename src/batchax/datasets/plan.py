"""Which rows are committed at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any

import numpy as np

from batchax.datasets.parts import Unit
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.spoken import brief

# Of work, by an estimate, that a unit is worth committing for: engines add 0.3 to 1.0% to so much
# (benchmark: `cluster`).
_SECONDS = 0.5
# Of rows and results that a unit may take. Several are in memory at a time; and of so few the
# allocator keeps the memory, while larger ones are mapped anew, and every page of them is cleared.
_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Plan:
    """Rows in units: of one size, but for the last; or, of rows of different lengths, of whole
    batches with about the same number of elements.

    It depends on sizes and arguments alone: the same call makes the same plan, wherever it runs and
    whatever was done before.

    Attributes:
      rows: of the dataset.
      batch_size: rows that the program computes at a time.
      unit_rows: rows of a unit, a multiple of `batch_size`; of units that differ, on average.
      ends: the row after each unit, if they differ.
      open: whether rows are counted as they come: there are not more than `rows`.
    """

    rows: int
    batch_size: int
    unit_rows: int
    ends: tuple[int, ...] | None = None
    open: bool = False

    def __len__(self) -> int:
        return -(-self.rows // self.unit_rows) if self.ends is None else len(self.ends)

    @property
    def units(self) -> Iterator[Unit]:
        """All of them."""
        return map(self.unit, range(len(self)))

    @property
    def chunk_rows(self) -> int:
        """Rows that stores may keep together: units are whole numbers of those, but the last."""
        return self.unit_rows if self.ends is None else self.batch_size

    def unit(self, number: int) -> Unit:
        """The unit with this number."""
        if not 0 <= number < len(self):
            raise IndexError(f"unit {number} of a plan of {len(self)}")
        if self.ends is not None:
            return Unit(number, self.ends[number - 1] if number else 0, self.ends[number])
        start = number * self.unit_rows
        return Unit(number, start, min(start + self.unit_rows, self.rows))

    def has(self, unit: Unit) -> bool:
        """Whether this is one of its units."""
        if not 0 <= unit.number < len(self):
            return False
        whole = self.unit(unit.number)
        return unit == whole or (self.open and unit.start == whole.start < unit.stop < whole.stop)

    def ended(self, rows: int) -> Plan:
        """The plan, now that all rows are counted."""
        return replace(self, rows=rows, open=False)

    def by_elements(self, elements: np.ndarray) -> Plan:
        """As many units, about, of as many elements each, of rows that have so many."""
        if len(self) < 2:
            return self
        ends = np.append(np.arange(self.batch_size, self.rows, self.batch_size), self.rows)
        done = np.cumsum(elements, dtype=np.int64)[ends - 1]  # after each batch
        # A batch belongs to the unit in whose share of all elements its last one is.
        share = (done - 1).clip(0) * len(self) // max(1, int(done[-1]))
        last = np.append(share[1:] != share[:-1], True)
        return replace(self, ends=tuple(ends[last].tolist()))

    @classmethod
    def of(
        cls,
        rows: int,
        batch_size: int,
        row_bytes: float,
        row_seconds: float,
        commit_rows: int | None = None,
    ) -> Plan:
        """A plan of units that are worth committing, and of which several fit memory.

        Args:
          rows: of the dataset.
          batch_size: rows that the program computes at a time.
          row_bytes: what a row and its results take.
          row_seconds: how long a row takes, estimated from the program: if it was measured, another
            machine would make another plan.
          commit_rows: the rows of a unit, if the user said so.
        """
        if commit_rows is not None:
            return cls(rows, batch_size, whole_batches(commit_rows, batch_size))
        batches = _SECONDS / (row_seconds * batch_size) if row_seconds > 0 else math.inf
        fit = _BYTES / (row_bytes * batch_size) if row_bytes > 0 else math.inf
        least = max(1, -(-rows // batch_size))  # that hold all rows
        count = min(math.ceil(min(batches, least)), math.floor(min(fit, least)))
        return cls(rows, batch_size, batch_size * max(1, count))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, plan: dict[str, Any]) -> Plan:
        """The plan that `to_json` described."""
        ends = plan.get("ends")
        made = cls(**{**plan, "ends": None if ends is None else tuple(ends)})
        rows, sizes = made.rows, [made.batch_size, made.unit_rows]
        good = all(type(n) is int for n in (rows, *sizes)) and rows >= 0 and min(sizes) > 0
        if good and ends is not None:
            stops = [0, *ends]
            good = stops[-1] == rows and all(a < b for a, b in itertools.pairwise(stops))
        if not good:
            raise ValueError("the units of its plan do not divide its rows")
        return made


def whole_batches(commit_rows: Any, batch_size: int) -> int:
    """The rows of a unit, as the user asked for.

    Raises:
      ArgumentTypeError, AxisError: they are no whole number of batches.
    """
    try:
        asked = index(commit_rows)
    except TypeError:
        raise ArgumentTypeError(
            f"commit_rows must be a whole number of rows, and is {brief(commit_rows)}."
        ) from None
    below = asked // batch_size * batch_size
    if asked != below or asked < 1:
        fitting = f"{below} or {below + batch_size}" if below > 0 else f"{batch_size}"
        raise AxisError(
            f"commit_rows={asked} is not a multiple of batch_size={batch_size}: rows are committed "
            f"in whole batches. Use commit_rows={fitting}, or another batch_size."
        )
    return asked
