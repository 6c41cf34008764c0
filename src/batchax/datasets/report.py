"""What a map has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchax.datasets.parts import Bad
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
