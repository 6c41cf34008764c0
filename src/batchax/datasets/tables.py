"""Results as tables of other libraries, and arrays of xarray with the coordinates of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchax.datasets.failures import needed
from batchax.datasets.labels import Labels
from batchax.datasets.parts import Rows
from batchax.datasets.ragged_parts import kept, one_row
from batchax.datasets.sources import as_source
from batchax.errors import ArgumentTypeError
from batchax.rows.arrow import from_dense, from_rows
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class Results:
    """Results that have rows.

    Attributes:
      names: of each array, by its path in what the function returns: "" if it is alone.
      values: the array, or the path of it, or None of what was reduced.
      axes: along which rows lie.
      labels: of the rows.
    """

    names: Sequence[str]
    values: Sequence[Any]
    axes: Sequence[int]
    labels: Labels

    def columns(self) -> dict[str, np.ndarray | Rows]:
        """Each with rows along axis 0; what is on a disk is read."""
        return {
            name or "result": x if isinstance(x, Rows) else np.moveaxis(x, axis, 0)
            for name, x, axis in self._read()
        }

    def to_arrow(self) -> Any:
        """A table of Arrow."""
        arrow = needed("pyarrow", "to_arrow")
        made = {name: _in_arrow(name, x) for name, x in self.columns().items()}
        if not made:
            raise ArgumentTypeError("all results are reduced, so there are no rows for a table.")
        return arrow.table(made)

    def to_pandas(self) -> Any:
        """A data frame of pandas, with the rows' coordinate as its index."""
        pandas = needed("pandas", "to_pandas")
        made = {name: _in_pandas(x) for name, x in self.columns().items()}
        index = self.labels.coordinates.get(self.labels.dimension)
        frame = pandas.DataFrame(made, index=None if index is None else index.to_index())
        for name, coordinate in self.labels.coordinates.items():
            if name != self.labels.dimension and name not in frame and coordinate.dims:
                frame[name] = np.asarray(coordinate)
        return frame

    def to_xarray(self) -> Any:
        """An array of xarray, or a dataset of such."""
        xarray = needed("xarray", "to_xarray")
        arrays = {name: self._in_xarray(xarray, *rest) for name, *rest in self._read()}
        if set(arrays) == {""}:
            return arrays[""].assign_coords(self.labels.coordinates)
        return xarray.Dataset(arrays, coords=self.labels.coordinates)

    def _read(self) -> list[tuple[str, Any, int]]:
        triples = zip(self.names, self.values, self.axes, strict=True)
        return [(name, _whole(x), axis) for name, x, axis in triples if x is not None]

    def _in_xarray(self, xarray: Any, x: Any, axis: int) -> Any:
        if isinstance(x, Rows):
            raise ArgumentTypeError(
                "a result has rows of different lengths, for which xarray has no array. Use "
                "to_arrow."
            )
        # By number, so that equal sizes need not mean the same axis.
        names = [f"dim_{i}" for i in range(x.ndim)]
        names[axis] = self.labels.dimension
        return xarray.DataArray(x, dims=names)


def _whole(x: Any) -> Any:
    if isinstance(x, Ragged):
        return kept(x, len(x))
    return as_source(x, "the output").whole() if isinstance(x, str) else x


def _in_arrow(name: str, x: np.ndarray | Rows) -> Any:
    values = x.data if isinstance(x, Rows) else x
    if values.dtype.kind not in "biuf" or values.dtype.isbuiltin != 1:
        raise ArgumentTypeError(f"{name} is of dtype {values.dtype}, for which Arrow has no type.")
    if isinstance(x, Rows):
        return from_rows(*x)
    return from_dense(np.ascontiguousarray(x))


def _in_pandas(x: np.ndarray | Rows) -> Any:
    """A column: numbers, or an array for each row."""
    if isinstance(x, Rows):
        parts = np.split(x.data, np.cumsum(x.elements)[:-1]) if len(x.lengths) else []
        return list(map(one_row, parts, x.lengths))
    return x if x.ndim == 1 else [*x]
