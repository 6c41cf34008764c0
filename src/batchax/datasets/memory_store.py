"""Results in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.parts import Leaf, Rows, Unit
from batchax.datasets.store import Results, Store, part_of
from batchax.errors import JobError, StorageError


class MemoryStore(Store):
    """Arrays of NumPy, filled unit by unit. Of rows of different lengths, `Rows`."""

    kind = "memory"
    lasts = False
    can_grow = True

    def __init__(self, out: Path, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._arrays: list[np.ndarray | None] = []
        self._parts: dict[tuple[int, int], Any] = {}  # of no array: by unit and leaf

    def prepare(self) -> None:
        self._arrays = [
            None if leaf.grows or leaf.ragged is not None else np.empty(leaf.shape, leaf.dtype)
            for leaf in self.leaves
        ]

    def check(self) -> None:
        raise JobError("results in memory are gone with their process: there is no job to go on.")

    def put(self, unit: Unit, results: Results) -> None:
        for i, (leaf, array, result) in enumerate(
            zip(self.leaves, self._arrays, results, strict=True)
        ):
            if isinstance(result, Rows):
                self._parts[unit.number, i] = Rows(result.data.copy(), result.lengths.copy())
            elif array is None:
                self._parts[unit.number, i] = result.copy()
            else:
                array[part_of(leaf, unit)] = result

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        if any((unit.number, i) not in self._parts for i in self._leaves_in_parts()):
            raise StorageError(f"rows {unit.start} to {unit.stop} were not written.")
        return [
            self._parts[unit.number, i] if array is None else array[part_of(leaf, unit)].copy()
            for i, (leaf, array) in enumerate(zip(self.leaves, self._arrays, strict=True))
        ]

    def result(self) -> Any:
        return self.each(
            [self._joined(i) if array is None else array for i, array in enumerate(self._arrays)]
        )

    def _leaves_in_parts(self) -> list[int]:
        return [i for i, array in enumerate(self._arrays) if array is None]

    def _joined(self, i: int) -> Any:
        """The rows of all units."""
        leaf = self.leaves[i]
        units = [self._parts[key] for key in sorted(self._parts) if key[1] == i]
        if leaf.ragged is None:
            return np.concatenate([np.empty(leaf.shape, leaf.dtype), *units], leaf.axis)
        return Rows(*map(np.concatenate, zip(leaf.without_elements(0), *units, strict=True)))
