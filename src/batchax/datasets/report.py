"""What a map has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchax.datasets.parts import Bad
from batchax.datasets.tables import Results
from batchax.errors import StorageError
from batchax.progress import duration


@dataclass(frozen=True)
class Report:
    """What `batchax.map` returns.

    Attributes:
      rows: how many rows there are.
      reused: how many of them an earlier call had done.
      quarantined: how many of them have no result; `bad` says which.
      outputs: where results are: what the function returns, with a path in place of each array;
        if they were kept in memory, an array of NumPy, or a `Ragged`. None for what is reduced.
      reduced: what the function returns, with what `batchax.Reduce` makes of all rows in place of
        each array that is reduced, and None in place of others.
      seconds: how long this call took.
      left: how many rows are left to other shards of the job.
      bad: the rows without a result, each with its number `row`, its `error` and a `traceback`.

    Example:
      >>> x = np.array([1.0, -1.0, 4.0])
      >>> report = bx.map(jnp.log, x, on_nonfinite="quarantine", progress=False)
      >>> print(report)
      3 rows, 1 quarantined, ...
      >>> report.bad[0].row
      1
    """

    rows: int
    reused: int
    quarantined: int
    outputs: Any
    reduced: Any
    seconds: float
    bad: Sequence[Bad] = field(default=(), repr=False)
    left: int = 0
    _results: Results | None = field(default=None, repr=False, compare=False)

    def to_arrow(self) -> Any:
        """The results as a table of Arrow, with a column for each.

        Columns are named by the path of the result in what the function returns, and "result" if it
        is alone. Results with axes of their own are lists. What is on a disk is read.

        Example:
          >>> bx.map(jnp.sum, np.ones((2, 3)), progress=False).to_arrow().to_pydict()
          {'result': [3.0, 3.0]}
        """
        return self._table.to_arrow()

    def to_pandas(self) -> Any:
        """The same as a data frame of pandas.

        If an argument of `batchax.map` was an array of xarray, the index of the frame is the
        coordinate of its rows, and other coordinates of rows are columns.

        Example:
          >>> frame = bx.map(jnp.sum, np.ones((2, 3)), progress=False).to_pandas()
          >>> frame["result"].tolist()
          [3.0, 3.0]
        """
        return self._table.to_pandas()

    def to_xarray(self) -> Any:
        """The same as an array of xarray, or a dataset with a variable for each result.

        The axis of rows has the name and the coordinates that it has in the first argument of
        `batchax.map` that is an array of xarray, and is called "row" if there is none.

        Example:
          >>> import xarray
          >>> x = xarray.DataArray(np.ones((2, 3)), dims=["day", "x"], coords={"day": [1, 4]})
          >>> sums = bx.map(jnp.sum, x, progress=False).to_xarray()
          >>> float(sums.sel(day=4)), sums.dims
          (3.0, ('day',))
        """
        return self._table.to_xarray()

    @property
    def _table(self) -> Results:
        if self._results is None or self.left:
            raise StorageError("some rows are left to other shards, so there is no table of all.")
        return self._results

    def __str__(self) -> str:
        new = self.rows - self.reused - self.left
        whole = f"{self.rows:,} rows"
        parts = [f"{self.rows - self.left:,} of {whole}" if self.left else whole]
        if self.reused:
            parts.append(f"{self.reused:,} reused")
        if self.quarantined:
            parts.append(f"{self.quarantined:,} quarantined")
        if self.left:
            parts.append(f"{self.left:,} left to other shards")
        parts.append(duration(self.seconds))
        if new and self.seconds:
            parts.append(f"{new / self.seconds:,.0f} rows/s")
        return ", ".join(parts)
