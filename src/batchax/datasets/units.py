"""Units computed batch by batch, and the rows of them that fail."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.datasets.inputs import rows_of
from batchax.datasets.plan import NOT_FINITE, Bad, Data, Rows, Unit, alike
from batchax.datasets.row_function import Output, Program, fetched, nothing
from batchax.errors import MemoryLimitError, RowError
from batchax.jaxprs.types import Tree, Value
from batchax.rows.ragged import Ragged


def tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        if last_line(error).startswith("KeyboardInterrupt"):  # raised while a callback ran
            raise KeyboardInterrupt from None
        return None, error


@dataclass(frozen=True)
class Batch:
    program: Program  # computes them
    unit: Unit  # the unit
    data: Sequence[Data]  # the rows of the unit
    first: int  # of these the first of the batch
    # how many there are; where that is less than the program takes, the last is repeated
    count: int

    def start(self, instead: dict[int, int] | None = None) -> list[Any]:
        """Starts the computation; `instead` replaces rows by others of the batch."""
        return self.program.start(*self._arguments(instead or {}))

    def reduced(self, instead: dict[int, int]) -> list[Any]:
        real = np.arange(self.program.batch_size) < self.count
        real[list(instead)] = False
        return self.program.reduced(*self._arguments(instead), real)

    def parts(self) -> Iterator[Batch]:
        program, stop = self.program.smaller, self.first + self.count
        for first in range(self.first, stop, program.batch_size):
            count = min(program.batch_size, stop - first)
            yield replace(self, program=program, first=first, count=count)

    @property
    def is_full(self) -> bool:
        return self.count == self.program.batch_size

    def places_of(self, rows: Iterable[int]) -> list[int]:
        places = (row - self.unit.start - self.first for row in rows)
        return sorted(place for place in places if 0 <= place < self.count)

    def row(self, place: int) -> int:
        return self.unit.start + self.first + place

    def _arguments(self, instead: dict[int, int]) -> tuple[np.ndarray, list[Any]]:
        mapped = self.program.function.inputs.mapped
        if self.is_full and not instead and not any(isinstance(x, Rows) for x in self.data):
            data: Sequence[Any] = self.data
            stop = self.first + self.count  # what most batches are: rows as they lie
            parts = [
                x[(slice(None),) * m.axis + (slice(self.first, stop),)]
                for m, x in zip(mapped, data, strict=True)
            ]
            start = self.unit.start
            return np.arange(start + self.first, start + stop), parts
        # A program has a fixed size: missing rows repeat the last one.
        places = np.minimum(np.arange(self.program.batch_size), self.count - 1)
        index = np.array([instead.get(int(p), int(p)) for p in places]) if instead else places
        index, places = index + self.first, places + self.first
        rows = [rows_of(x, m.axis, index, places) for m, x in zip(mapped, self.data, strict=True)]
        return index + self.unit.start, rows


Waiting = tuple[Batch, Callable[[], list[Any]]]
"""A batch that was begun, and what waits for its results."""


def batches_of(program: Program, unit: Unit, data: Sequence[Any]) -> Iterator[Batch]:
    for first in range(0, unit.rows, program.batch_size):
        yield Batch(program, unit, data, first, min(program.batch_size, unit.rows - first))


def ahead(batches: Iterator[Batch]) -> Iterator[Waiting]:
    """Yields each batch with its results; the next one begins before they are read."""
    waiting: list[Waiting] = []
    for batch in batches:
        waiting.append((batch, begun(batch)))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def begun(batch: Batch) -> Callable[[], list[Any]]:
    outputs = batch.program.function.outputs
    arrays, error = tried(batch.start)  # some errors are known at once, others when it is read
    if error is not None:

        def fail() -> list[Any]:
            raise error

        return fail
    if any(o.reduces for o in outputs) and not batch.is_full:
        return lambda: fetched(outputs, _with_reduced(batch, arrays, {}), batch.count)
    return lambda: fetched(outputs, arrays, batch.count)


def _with_reduced(batch: Batch, arrays: Sequence[Any], instead: dict[int, int]) -> Sequence[Any]:
    outputs = batch.program.function.outputs
    if not any(o.reduces for o in outputs):
        return arrays
    reduced = iter(batch.reduced(instead))
    return [next(reduced) if o.reduces else x for o, x in zip(outputs, arrays, strict=True)]


def without(batch: Batch, results: Sequence[Any], failing: Iterable[int]) -> list[Any]:
    """Removes rows that fail from results of a batch; reductions exclude them."""
    outputs, places = batch.program.function.outputs, sorted(failing)
    good = set(range(batch.count)) - set(places)
    if not good:
        return [without_rows(o, batch.count) for o in outputs]
    # A failing row is replaced by a good one, whose result is then masked.
    results = _with_reduced(batch, results, dict.fromkeys(places, min(good)))
    return [
        x if o.reduces else _blanked(o, x, places) for o, x in zip(outputs, results, strict=True)
    ]


def _blanked(output: Output, x: Data, places: list[int]) -> Data:
    if isinstance(x, Rows):
        kept = np.ones(len(x.lengths), bool)
        kept[places] = False
        return Rows(x.data[np.repeat(kept, x.lengths)], np.where(kept, x.lengths, 0))
    x = np.array(x)
    x[(slice(None),) * output.leaf.axis + (places,)] = nothing(x.dtype)
    return x


def without_rows(output: Output, rows: int) -> Tree:
    leaf = output.leaf
    if output.reduces:
        return output.of_no_rows()
    if leaf.ragged is not None:
        return leaf.without_elements(rows)
    shape = list(leaf.shape)
    shape[leaf.axis] = rows
    return np.full(shape, nothing(leaf.dtype))


def last_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return text[-1] if len(text) > 1 else f"{type(error).__name__}: {text[0]}"


class OutageError(RowError):
    """Signals that too many rows in succession fail alike, so they are not the cause."""

    kind = ""


class Streak:
    """Tracks rows that fail in succession with one type of error; raises after `most`."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.end()

    def end(self) -> None:
        self._kind, self._rows = "", list[int]()

    def add(self, batch: Batch, bad: Bad) -> None:
        kind = bad.kind
        if kind != self._kind:
            self.end()
        self._kind = kind
        self._rows.append(bad.row)
        if self._most is None or len(self._rows) <= self._most:
            return
        error = OutageError(
            f"{len(self._rows)} rows of {_sources(batch)} fail in succession with {kind}, rows "
            f"{self._rows[0]} to {self._rows[-1]}, the last with: {bad.error}\nA service may be "
            "away, or memory full, so the job stopped and did not quarantine these rows. The same "
            "call resumes it. If the rows are bad, pass max_consecutive_errors=None, or a larger "
            "number."
        )
        error.kind = kind
        raise error


@dataclass(frozen=True)
class Policy:
    on_error: str  # "raise" or "quarantine"
    on_nonfinite: str | None  # the same of rows with results that are not finite; None: nothing
    # rows that failed last, in this process
    streak: Streak = field(default_factory=Streak, compare=False)


_TIMES = 2  # that the rows of a batch which fail are looked for: an error may be gone by then


def without_failing(batch: Batch, error: Exception, policy: Policy) -> tuple[list[Any], list[Bad]]:
    """Returns the results of a batch that fails, and its failing rows."""
    raises, outputs = policy.on_error == "raise", batch.program.function.outputs
    most, streak = (1, None) if raises else (batch.count, policy.streak)
    bad: list[Bad] = []
    for _ in range(_TIMES):
        parts: dict[int, list[Any]] = {}
        # Rows that fail only together fail no more in parts: then the batch runs once more.
        bad = failing_rows(batch, error, most, streak, parts)
        if bad and not raises:
            for b in bad:
                parts[b.row - batch.unit.start] = [without_rows(o, 1) for o in outputs]
            columns = zip(*(parts[first] for first in sorted(parts)), strict=True)
            return [_joined(o, column) for o, column in zip(outputs, columns, strict=True)], bad
        if bad:
            break
        results, again = tried(begun(batch))
        if again is None:
            return results, []
        error = again
    raise row_error(batch, bad, "on_error", error) from error


def failing_rows(
    batch: Batch,
    error: Exception,
    most: int,
    streak: Streak | None = None,
    parts: dict[int, list[Any]] | None = None,
) -> list[Bad]:
    """Finds the rows for which a batch fails, at most `most`.

    `parts` receives results of parts that do not fail, by their first row.
    """
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        raise MemoryLimitError(
            f"rows {batch.row(0)} to {batch.row(batch.count - 1)} of {_sources(batch)}: a batch of "
            f"batch_size={batch.program.batch_size} rows does not fit the memory of the device "
            f'({str(error).splitlines()[0]}). Pass a smaller batch_size, or batch_size="auto" '
            "with a memory_limit; an out= that was begun keeps its batches, so pass another one."
        ) from error
    bad: list[Bad] = []

    def tried_again(part: Batch) -> Exception | None:
        results, again = tried(begun(part))
        if again is None and streak is not None:
            streak.end()
        if again is None and parts is not None:
            parts[part.first] = results
        return again

    with _compat.callbacks_fail_silently():  # the same one, again and again
        for row, why in itertools.islice(_failing(batch, error, tried_again), most):
            bad.append(Bad(row, last_line(why), str(why)))
            if streak is not None:
                streak.add(batch, bad[-1])
    return alike(bad)


def _failing(
    batch: Batch, error: Exception, tried_again: Callable[[Batch], Exception | None]
) -> Iterator[tuple[int, Exception]]:
    """Yields failing rows, found by programs of fewer and fewer rows."""
    if batch.count == 1:
        yield batch.row(0), error
        return
    # Parts without failing rows run once more each, and not the whole batch.
    for part in batch.parts():
        again = tried_again(part)
        if again is not None:
            yield from _failing(part, again, tried_again)


def without_nonfinite(
    batch: Batch, results: list[Any], policy: Policy, bad_rows: set[int]
) -> tuple[list[Any], list[Bad]]:
    outputs = batch.program.function.outputs
    wrong: dict[int, Exception] = {}
    for output, x in zip(outputs, results, strict=True):
        if output.reduces or not jnp.issubdtype(output.leaf.dtype, jnp.inexact):
            continue
        error = FloatingPointError(f"{output.path}{NOT_FINITE}")
        for place in _places_not_finite(x, output.leaf.axis).tolist():
            if batch.row(place) not in bad_rows:
                wrong.setdefault(place, error)
    wrong |= _not_finite_in_sums(batch, results, {*batch.places_of(bad_rows), *wrong}, policy)
    if not wrong:
        return results, []
    bad = [Bad(batch.row(place), str(error)) for place, error in sorted(wrong.items())]
    if policy.on_nonfinite == "raise":
        raise row_error(batch, bad, "on_nonfinite")
    return without(batch, results, {*batch.places_of(bad_rows), *wrong}), bad


def _not_finite_in_sums(
    batch: Batch, results: list[Any], without: set[int], policy: Policy
) -> dict[int, Exception]:
    """Finds rows that make a reduction over the batch non-finite."""
    outputs = batch.program.function.outputs
    reduces = [o for o in outputs if o.reduces]
    states = [x for o, x in zip(outputs, results, strict=True) if o.reduces]
    bad_rows = set(map(batch.row, without))

    def error_of(states: Sequence[Any]) -> Exception | None:
        for output, state in zip(reduces, states, strict=True):
            if not all(map(_is_finite, jax.tree.leaves(state))):
                return FloatingPointError(f"{output.path}{NOT_FINITE}")
        return None

    def tried_again(part: Batch) -> Exception | None:
        good = [place for place in range(part.count) if part.row(place) not in bad_rows]
        if not good:
            return None
        return error_of(part.reduced(dict.fromkeys(set(range(part.count)) - {*good}, good[0])))

    error = error_of(states)
    # Without the rows that are known to fail, the reduction may be finite.
    if error is None or tried_again(batch) is None:
        return {}
    failing = _failing(batch, error, tried_again)
    most = 1 if policy.on_nonfinite == "raise" else batch.count
    return {row - batch.row(0): why for row, why in itertools.islice(failing, most)}


def _is_finite(x: np.ndarray) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(x).all())


def _places_not_finite(x: Data, axis: int) -> np.ndarray:
    data = x.data if isinstance(x, Rows) else np.moveaxis(x, axis, 0)
    places = np.flatnonzero(~np.isfinite(data).all(tuple(range(1, data.ndim))))
    if isinstance(x, Rows):
        return np.repeat(np.arange(len(x.lengths)), x.lengths)[places]
    return places


def row_error(
    batch: Batch, bad: Sequence[Bad], option: str | None, error: Exception | None = None
) -> RowError:
    names = _sources(batch)
    if not bad:
        return RowError(
            f"rows {batch.row(0)} to {batch.row(batch.count - 1)} of {names} fail together, "
            f"but each succeeds alone: {error}"
        )
    message = f"row {bad[0].row} of {names} fails: {bad[0].error}"
    if option is None:
        return RowError(message)
    return RowError(
        f"{message}\nFinished units are kept, and the same call resumes; with "
        f'{option}="quarantine" without such rows.'
    )


def _sources(batch: Batch) -> str:
    return ", ".join(m.source.name for m in batch.program.function.inputs.mapped)


@dataclass(frozen=True)
class Computed:
    unit: Unit  # its rows
    results: list[Data]  # of each output that has rows
    # of each output that has none, by names: what the rows of the unit come to
    reduced: dict[str, np.ndarray]
    bad: list[Bad] = field(default_factory=list)  # the rows without a result
    seconds: float = 0.0  # how long it took


def begin_unit(
    program: Program,
    unit: Unit,
    data: Sequence[Data],
    policy: Policy,
) -> Callable[[], Computed]:
    """Begins to compute a unit, so that the device is busy meanwhile."""
    begun = time.monotonic()
    batches = ahead(batches_of(program, unit, data))
    first = next(batches, None)

    def computed() -> Computed:
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

    return computed


def not_computed(outputs: Sequence[Any], unit: Unit, why: str) -> Computed:
    bad = [Bad(row, why) for row in range(unit.start, unit.stop)]
    return _unit_of(outputs, unit, [without_rows(o, unit.rows) for o in outputs], bad, 0.0)


def _unit_of(
    outputs: Sequence[Any], unit: Unit, results: list[Any], bad: list[Bad], seconds: float
) -> Computed:
    both = list(zip(outputs, results, strict=True))
    parts = [o.named_parts(x) for o, x in both if o.reduces]
    reduced = {name: part for each in parts for name, part in each.items()}
    return Computed(unit, [x for o, x in both if not o.reduces], reduced, bad, seconds)


def begin_batch(program: Program, unit: Unit, data: Sequence[Data]) -> Callable[[], list[Any]]:
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


def _first(output: Output, x: Value, rows: int) -> Value:
    if isinstance(x, Ragged):
        if len(x) == rows:
            return x
        return Ragged(x.data, x.lengths[:rows], x.max_length, axis=x.axis)
    axis = output.leaf.axis
    return x if x.shape[axis] == rows else x[(slice(None),) * axis + (slice(rows),)]


def _joined(output: Output, parts: Sequence[Any]) -> Tree:
    if output.reduces:
        return output.combined(parts)
    if isinstance(parts[0], Rows):
        return Rows(*map(np.concatenate, zip(*parts, strict=True)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, output.leaf.axis)
