"""Some rows of a unit, computed at a time, some of them in the places of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchax.datasets.inputs import rows_of
from batchax.datasets.outputs import nothing, of_no_rows
from batchax.datasets.parts import Rows, Unit
from batchax.datasets.program import Program, fetched


def tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What `work` returns, or the error that it raises: of the user's, if a callback fails."""
    try:
        return work(), None
    except Exception as error:
        if last_line(error).startswith("KeyboardInterrupt"):  # raised while a callback ran
            raise KeyboardInterrupt from None
        return None, error


@dataclass(frozen=True)
class Batch:
    """Some rows of a unit, to be computed at a time.

    Attributes:
      program: computes them.
      unit: the unit.
      data: the rows of the unit.
      first: of these the first of the batch.
      count: how many there are; where that is less than the program takes, the last is repeated.
    """

    program: Program
    unit: Unit
    data: Sequence[np.ndarray | Rows]
    first: int
    count: int

    def start(self, instead: dict[int, int] | None = None) -> list[Any]:
        """Begins to compute it; `instead` says which rows of it others take the places of."""
        return self.program.start(*self._arguments(instead or {}))

    def reduced(self, instead: dict[int, int]) -> list[Any]:
        """What the rows whose places no others take are reduced to."""
        real = np.arange(self.program.batch_size) < self.count
        real[list(instead)] = False
        return self.program.reduced(*self._arguments(instead), real)

    def parts(self) -> Iterator[Batch]:
        """Its rows in smaller batches, computed by a smaller program."""
        program, stop = self.program.smaller, self.first + self.count
        for first in range(self.first, stop, program.batch_size):
            count = min(program.batch_size, stop - first)
            yield replace(self, program=program, first=first, count=count)

    @property
    def is_full(self) -> bool:
        return self.count == self.program.batch_size

    def places_of(self, rows: Iterable[int]) -> list[int]:
        """Where these rows of the dataset are in the batch, of those that are in it."""
        places = (row - self.unit.start - self.first for row in rows)
        return sorted(place for place in places if 0 <= place < self.count)

    def row(self, place: int) -> int:
        """The number of a row in the dataset."""
        return self.unit.start + self.first + place

    def _arguments(self, instead: dict[int, int]) -> tuple[np.ndarray, list[Any], int]:
        mapped = self.program.function.inputs.mapped
        if self.is_full and not instead and not any(isinstance(x, Rows) for x in self.data):
            data: Sequence[Any] = self.data
            stop = self.first + self.count  # what most batches are: rows as they lie
            parts = [
                x[(slice(None),) * m.axis + (slice(self.first, stop),)]
                for m, x in zip(mapped, data, strict=True)
            ]
            start = self.unit.start
            return np.arange(start + self.first, start + stop), parts, 0
        places = np.minimum(np.arange(self.program.batch_size), self.count - 1)
        index = np.array([instead.get(int(p), int(p)) for p in places]) if instead else places
        index, places = index + self.first, places + self.first
        rows = [rows_of(x, m.axis, index, places) for m, x in zip(mapped, self.data, strict=True)]
        # By the rows that are there, whichever others take their places: so bits do not change.
        elements = [int(x.elements[places].sum()) if isinstance(x, Rows) else 0 for x in self.data]
        return index + self.unit.start, rows, self.program.room_for(elements)


Waiting = tuple[Batch, Callable[[], list[Any]]]
"""A batch that was begun, and what waits for its results."""


def batches_of(program: Program, unit: Unit, data: Sequence[Any]) -> Iterator[Batch]:
    for first in range(0, unit.rows, program.batch_size):
        yield Batch(program, unit, data, first, min(program.batch_size, unit.rows - first))


def ahead(batches: Iterator[Batch]) -> Iterator[Waiting]:
    """Each batch, and its results once they are there; the next is begun before they are read."""
    waiting: list[Waiting] = []
    for batch in batches:
        waiting.append((batch, begun(batch)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def begun(batch: Batch) -> Callable[[], list[Any]]:
    """Begins to compute a batch; returns what waits for its results."""
    outputs = batch.program.function.outputs
    arrays, error = tried(batch.start)  # some errors are known at once, others when it is read
    if error is not None:

        def fail() -> list[Any]:
            raise error

        return fail
    if any(o.reduces for o in outputs) and not batch.is_full:
        return lambda: fetched(outputs, _with_reduced(batch, arrays, {}), batch.count)
    return lambda: fetched(outputs, arrays, batch.count)


def _with_reduced(batch: Batch, arrays: list[Any], instead: dict[int, int]) -> list[Any]:
    """`arrays`, with reductions over the rows of the batch that count."""
    outputs = batch.program.function.outputs
    if not any(o.reduces for o in outputs):
        return arrays
    reduced = iter(batch.reduced(instead))
    return [next(reduced) if o.reduces else x for o, x in zip(outputs, arrays, strict=True)]


def recomputed(batch: Batch, failing: dict[int, Any]) -> list[Any]:
    """The results of a batch, and in place of failing rows those of one that does not fail."""
    outputs, good = batch.program.function.outputs, set(range(batch.count)) - set(failing)
    if not good:
        return [without_rows(o, batch.count) for o in outputs]
    instead = dict.fromkeys(failing, min(good))
    arrays = _with_reduced(batch, batch.start(instead), instead)
    results = fetched(outputs, arrays, batch.count)
    return [
        x if o.reduces else _blanked(o, x, sorted(failing))
        for o, x in zip(outputs, results, strict=True)
    ]


def _blanked(output: Any, x: Any, places: list[int]) -> Any:
    """Results with none for some rows."""
    if isinstance(x, Rows):
        kept = np.ones(len(x.lengths), bool)
        kept[places] = False
        lengths = np.where(kept.reshape(-1, *[1] * (x.lengths.ndim - 1)), x.lengths, 0)
        return Rows(x.data[np.repeat(kept, x.elements)], lengths)
    x = np.array(x)
    x[(slice(None),) * output.leaf.axis + (places,)] = nothing(x.dtype)
    return x


def without_rows(output: Any, rows: int) -> Any:
    """The results of so many rows, none of which has one."""
    leaf = output.leaf
    if output.reduces:
        return of_no_rows(output)
    if leaf.ragged is not None:
        return leaf.without_elements(rows)
    shape = list(leaf.shape)
    shape[leaf.axis] = rows
    return np.full(shape, nothing(leaf.dtype))


def last_line(error: Exception) -> str:
    """The error in a line. JAX hands on what a callback raised as a text that ends with it."""
    text = str(error).strip().splitlines() or [""]
    return text[-1] if len(text) > 1 else f"{type(error).__name__}: {text[0]}"
