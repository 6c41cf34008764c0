"""A unit computed: batch after batch, and the rows found for which that cannot be done."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.datasets.halving import fail_alone
from batchax.datasets.inputs import rows_of
from batchax.datasets.outputs import combined, named_parts, nothing, of_no_rows
from batchax.datasets.parts import Bad, Rows, Unit, alike
from batchax.datasets.program import Program, fetched
from batchax.errors import RowError
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


@dataclass(frozen=True)
class Policy:
    """What becomes of rows for which the function fails.

    Attributes:
      on_error: "raise" or "quarantine".
      on_nonfinite: the same of rows with results that are not finite; None: nothing.
    """

    on_error: str
    on_nonfinite: str | None


def begin_unit(
    program: Program,
    unit: Unit,
    data: Sequence[np.ndarray | Rows],
    policy: Policy,
    left_out: Sequence[Bad] = (),
) -> Callable[[], Computed]:
    """Begins to compute the rows of a unit, so that the device has something to do meanwhile.

    Args:
      program: of a batch.
      unit: which rows.
      data: these rows of each mapped argument.
      policy: what becomes of rows that fail.
      left_out: rows that are not to be computed.

    Returns:
      A function that waits for the results, and returns them. It raises a RowError if a row fails,
      and `policy` does not say to go on without it.
    """
    begun = time.monotonic()
    batches = _ahead(_batches(program, unit, data), {b.row for b in left_out})
    first = next(batches, None)
    return lambda: _computed(program, unit, first, batches, policy, left_out, begun)


def _computed(
    program: Program,
    unit: Unit,
    first: _Waiting | None,
    batches: Iterator[_Waiting],
    policy: Policy,
    left_out: Sequence[Bad],
    begun: float,
) -> Computed:
    outputs = program.function.outputs
    of_batches: list[list[Any]] = []
    bad = list(left_out)
    for batch, arrays in itertools.chain([] if first is None else [first], batches):
        results, error = _tried(arrays)
        if error is not None:
            results, failed = _without_failing(batch, error, policy)
            bad += failed
        if policy.on_nonfinite:
            results, failed = _without_nonfinite(batch, results, policy, {b.row for b in bad})
            bad += failed
        of_batches.append(results)
    columns = list(zip(*of_batches, strict=True))
    joined = [_joined(o, column) for o, column in zip(outputs, columns, strict=True)]
    return Computed(
        unit,
        [x for o, x in zip(outputs, joined, strict=True) if not o.reduces],
        {
            name: part
            for o, x in zip(outputs, joined, strict=True)
            if o.reduces
            for name, part in named_parts(o, x).items()
        },
        sorted(bad, key=lambda b: b.row),
        time.monotonic() - begun,
    )


def begin_batch(
    program: Program, unit: Unit, data: Sequence[np.ndarray | Rows]
) -> Callable[[], list[Any]]:
    """Begins to compute a unit of one batch.

    Returns:
      A function that waits for the results, and returns them as they are on the device, without
      those of rows that fill the batch up. It raises a RowError if a row fails.
    """
    (batch,) = _batches(program, unit, data)
    begun, error = _tried(batch.start)

    def results() -> list[Any]:
        arrays, failed = (begun, error) if error else _tried(lambda: jax.block_until_ready(begun))
        if failed is not None:
            bad = _failing(batch, failed, 1)
            raise _row_error(batch, bad, None, failed) from failed
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


def probe(
    program: Program, unit: Unit, data: Sequence[np.ndarray | Rows], rows: Iterable[int]
) -> None:
    """Computes these rows of a unit, and none of its others."""
    for batch in _batches(program, unit, data):
        places = batch.places_of(rows)
        if places:
            others = set(range(batch.count)) - set(places)
            jax.block_until_ready(batch.start(dict.fromkeys(others, places[0])))


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What `work` returns, or the error that it raises: of the user's, if a callback fails."""
    try:
        return work(), None
    except Exception as error:
        if _last_line(error).startswith("KeyboardInterrupt"):  # raised while a callback ran
            raise KeyboardInterrupt from None
        return None, error


def _joined(output: Any, parts: Sequence[Any]) -> Any:
    if output.reduces:
        return combined(output, parts)
    if isinstance(parts[0], Rows):
        return Rows(*map(np.concatenate, zip(*parts, strict=True)))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, output.leaf.axis)


@dataclass(frozen=True)
class _Batch:
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


_Waiting = tuple[_Batch, Callable[[], list[Any]]]
"""A batch that was begun, and what waits for its results."""


def _batches(program: Program, unit: Unit, data: Sequence[Any]) -> Iterator[_Batch]:
    for first in range(0, unit.rows, program.batch_size):
        yield _Batch(program, unit, data, first, min(program.batch_size, unit.rows - first))


def _ahead(batches: Iterator[_Batch], left_out: set[int]) -> Iterator[_Waiting]:
    """Each batch, and its results once they are there; the next is begun before they are read."""
    waiting: list[_Waiting] = []
    for batch in batches:
        gone = dict.fromkeys(batch.places_of(left_out))
        get = functools.partial(_recomputed, batch, gone) if gone else _begun(batch)
        waiting.append((batch, get))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _begun(batch: _Batch) -> Callable[[], list[Any]]:
    outputs = batch.program.function.outputs
    arrays, error = _tried(batch.start)  # some errors are known at once, others when it is read
    if error is not None:

        def fail() -> list[Any]:
            raise error

        return fail
    if any(o.reduces for o in outputs) and not batch.is_full:
        return lambda: fetched(outputs, _with_reduced(batch, arrays, {}), batch.count)
    return lambda: fetched(outputs, arrays, batch.count)


def _with_reduced(batch: _Batch, arrays: list[Any], instead: dict[int, int]) -> list[Any]:
    """`arrays`, with reductions over the rows of the batch that count."""
    outputs = batch.program.function.outputs
    if not any(o.reduces for o in outputs):
        return arrays
    reduced = iter(batch.reduced(instead))
    return [next(reduced) if o.reduces else x for o, x in zip(outputs, arrays, strict=True)]


def _without_failing(
    batch: _Batch, error: Exception, policy: Policy
) -> tuple[list[Any], list[Bad]]:
    """The results of a batch that fails, and the rows that it fails for."""
    bad = _failing(batch, error, 1 if policy.on_error == "raise" else batch.count)
    if policy.on_error == "raise" or not bad:
        raise _row_error(batch, bad, "on_error", error) from error
    failing = {b.row - batch.row(0): None for b in bad}
    return _recomputed(batch, failing), bad


def _failing(batch: _Batch, error: Exception, most: int) -> list[Bad]:
    """The rows that a batch fails for, so many at most."""

    def tried(part: Sequence[int]) -> Exception | None:
        others = dict.fromkeys(set(range(batch.count)) - set(part), part[0])
        return _tried(lambda: jax.block_until_ready(batch.start(others)))[1]

    with _compat.callbacks_fail_silently():  # the same one, again and again
        failing = fail_alone(range(batch.count), error, tried, most)
    return alike(
        Bad(batch.row(place), _last_line(why), str(why)) for place, why in sorted(failing.items())
    )


def _recomputed(batch: _Batch, failing: dict[int, Any]) -> list[Any]:
    """The results of a batch, and in place of failing rows those of one that does not fail."""
    outputs, good = batch.program.function.outputs, set(range(batch.count)) - set(failing)
    if not good:
        return [_of_no_rows(o, batch) for o in outputs]
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


def _of_no_rows(output: Any, batch: _Batch) -> Any:
    leaf = output.leaf
    if output.reduces:
        return of_no_rows(output)
    if leaf.ragged is not None:
        return leaf.without_elements(batch.count)
    shape = list(leaf.shape)
    shape[leaf.axis] = batch.count
    return np.full(shape, nothing(leaf.dtype))


def _without_nonfinite(
    batch: _Batch, results: list[Any], policy: Policy, bad_rows: set[int]
) -> tuple[list[Any], list[Bad]]:
    """The same for rows whose results are not finite."""
    outputs = batch.program.function.outputs
    wrong: dict[int, Exception] = {}
    for output, x in zip(outputs, results, strict=True):
        if output.reduces or not jnp.issubdtype(output.leaf.dtype, jnp.inexact):
            continue
        error = FloatingPointError(f"{output.path} is not finite")
        for place in _places_not_finite(x, output.leaf.axis).tolist():
            if batch.row(place) not in bad_rows:
                wrong.setdefault(place, error)
    wrong |= _not_finite_in_sums(batch, results, {*batch.places_of(bad_rows), *wrong}, policy)
    if not wrong:
        return results, []
    bad = [Bad(batch.row(place), str(error)) for place, error in sorted(wrong.items())]
    if policy.on_nonfinite == "raise":
        raise _row_error(batch, bad, "on_nonfinite")
    return _recomputed(batch, {**dict.fromkeys(batch.places_of(bad_rows)), **wrong}), bad


def _not_finite_in_sums(
    batch: _Batch, results: list[Any], without: set[int], policy: Policy
) -> dict[int, Exception]:
    """Rows that make a reduction over the batch not finite, which keeps none of what rows have."""
    outputs = batch.program.function.outputs
    reduces = [o for o in outputs if o.reduces]
    states = [x for o, x in zip(outputs, results, strict=True) if o.reduces]

    def error_of(states: Sequence[Any]) -> Exception | None:
        for output, state in zip(reduces, states, strict=True):
            if not all(map(_is_finite, jax.tree.leaves(state))):
                return FloatingPointError(f"{output.path} is not finite")
        return None

    def tried(part: Sequence[int]) -> Exception | None:
        return error_of(batch.reduced(dict.fromkeys(set(range(batch.count)) - set(part), part[0])))

    good = [place for place in range(batch.count) if place not in without]
    error = error_of(states)
    if error is None or not good or tried(good) is None:
        return {}
    return fail_alone(good, error, tried, 1 if policy.on_nonfinite == "raise" else len(good))


def _is_finite(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(x).all())


def _places_not_finite(x: np.ndarray | Rows, axis: int) -> np.ndarray:
    """Which rows have elements that are not finite."""
    data = x.data if isinstance(x, Rows) else np.moveaxis(x, axis, 0)
    places = np.flatnonzero(~np.isfinite(data).all(tuple(range(1, data.ndim))))
    return (
        np.repeat(np.arange(len(x.lengths)), x.elements)[places] if isinstance(x, Rows) else places
    )


def _last_line(error: Exception) -> str:
    """The error in a line. JAX hands on what a callback raised as a text that ends with it."""
    text = str(error).strip().splitlines() or [""]
    return text[-1] if len(text) > 1 else f"{type(error).__name__}: {text[0]}"


def _row_error(
    batch: _Batch, bad: Sequence[Bad], option: str | None, error: Exception | None = None
) -> RowError:
    names = ", ".join(m.source.name for m in batch.program.function.inputs.mapped)
    if not bad:
        return RowError(
            f"rows {batch.row(0)} to {batch.row(batch.count - 1)} of {names} fail together, and "
            f"none of them by itself: {error}"
        )
    told = f"row {bad[0].row} of {names} fails: {bad[0].error}"
    if option is None:
        return RowError(told)
    return RowError(
        f"{told}\nWhat was done is kept, and the same call goes on from there; with "
        f'{option}="quarantine" without such rows.'
    )
