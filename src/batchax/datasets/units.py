"""A unit computed: batch after batch, and the rows found for which that cannot be done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from batchax.datasets.bad_rows import (
    Policy,
    failing_rows,
    row_error,
    without_failing,
    without_nonfinite,
)
from batchax.datasets.one_batch import Waiting, ahead, batches_of, tried, without_rows
from batchax.datasets.outputs import combined, named_parts
from batchax.datasets.parts import Bad, Rows, Unit
from batchax.datasets.program import Program
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class Computed:
    """A unit that was computed.

    Attributes:
      unit: its rows.
      results: of each output that has rows.
      reduced: of each output that has none, by names: what the rows of the unit come to.
      bad: the rows without a result.
      seconds: how long it took.
    """

    unit: Unit
    results: list[np.ndarray | Rows]
    reduced: dict[str, np.ndarray]
    bad: list[Bad] = field(default_factory=list)
    seconds: float = 0.0


def begin_unit(
    program: Program,
    unit: Unit,
    data: Sequence[np.ndarray | Rows],
    policy: Policy,
) -> Callable[[], Computed]:
    """Begins to compute the rows of a unit, so that the device has something to do meanwhile.

    Args:
      program: of a batch.
      unit: which rows.
      data: these rows of each mapped argument.
      policy: what becomes of rows that fail.

    Returns:
      A function that waits for the results, and returns them. It raises a RowError if a row fails,
      and `policy` does not say to go on without it.
    """
    begun = time.monotonic()
    batches = ahead(batches_of(program, unit, data))
    first = next(batches, None)
    return lambda: _computed(program, unit, first, batches, policy, begun)


def _computed(
    program: Program,
    unit: Unit,
    first: Waiting | None,
    batches: Iterator[Waiting],
    policy: Policy,
    begun: float,
) -> Computed:
    outputs = program.function.outputs
    of_batches: list[list[Any]] = []
    bad: list[Bad] = []
    for batch, arrays in itertools.chain([] if first is None else [first], batches):
        results, error = tried(arrays)
        if error is not None:
            results, failed = without_failing(batch, error, policy)
            bad += failed
        else:
            policy.streak.end()
        if policy.on_nonfinite:
            results, failed = without_nonfinite(batch, results, policy, {b.row for b in bad})
            bad += failed
        of_batches.append(results)
    columns = list(zip(*of_batches, strict=True))
    joined = [_joined(o, column) for o, column in zip(outputs, columns, strict=True)]
    bad.sort(key=lambda b: b.row)
    return _unit_of(outputs, unit, joined, bad, time.monotonic() - begun)


def not_computed(outputs: Sequence[Any], unit: Unit, why: str) -> Computed:
    """A unit of which no row has a result."""
    bad = [Bad(row, why) for row in range(unit.start, unit.stop)]
    return _unit_of(outputs, unit, [without_rows(o, unit.rows) for o in outputs], bad, 0.0)


def _unit_of(
    outputs: Sequence[Any], unit: Unit, results: list[Any], bad: list[Bad], seconds: float
) -> Computed:
    both = list(zip(outputs, results, strict=True))
    parts = [named_parts(o, x) for o, x in both if o.reduces]
    reduced = {name: part for each in parts for name, part in each.items()}
    return Computed(unit, [x for o, x in both if not o.reduces], reduced, bad, seconds)


def begin_batch(
    program: Program, unit: Unit, data: Sequence[np.ndarray | Rows]
) -> Callable[[], list[Any]]:
    """Begins to compute a unit of one batch.

    Returns:
      A function that waits for the results, and returns them as they are on the device, without
      those of rows that fill the batch up. It raises a RowError if a row fails.
    """
    (batch,) = batches_of(program, unit, data)
    begun, error = tried(batch.start)

    def results() -> list[Any]:
        arrays, failed = (begun, error) if error else tried(lambda: jax.block_until_ready(begun))
        if failed is not None:
            bad = failing_rows(batch, failed, 1)
            raise row_error(batch, bad, None, failed) from failed
        outputs = program.function.outputs
        return [_first(o, x, batch.count) for o, x in zip(outputs, arrays, strict=True)]

    return results


def _first(output: Any, x: Any, rows: int) -> Any:
    if isinstance(x, Ragged):
        if len(x) == rows:
            return x
        return Ragged(x.data, [n[:rows] for n in x.each_length], x.each_bound, axis=x.axes)
    axis = output.leaf.axis
    return x if x.shape[axis] == rows else x[(slice(None),) * axis + (slice(rows),)]


def _joined(output: Any, parts: Sequence[Any]) -> Any:
    if output.reduces:
        return combined(output, parts)
    if isinstance(parts[0], Rows):
        return Rows(*map(np.concatenate, zip(*parts, strict=True)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, output.leaf.axis)
