"""Rows of a batch for which the function fails, or is not finite: which, and what is left."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.datasets.one_batch import Batch, begun, last_line, recomputed, tried
from batchax.datasets.parts import NOT_FINITE, Bad, Rows, alike
from batchax.errors import MemoryLimitError, RowError


class OutageError(RowError):
    """So many rows in succession fail with one type of error that they are not to blame.

    Attributes:
      kind: that type, by its name.
    """

    kind = ""


class Streak:
    """Rows that fail in succession, with no row between them that does not, with one type of error.

    Args:
      most: how many may be quarantined; None: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.end()

    def end(self) -> None:
        """A row did not fail."""
        self._kind, self._rows = "", list[int]()

    def add(self, batch: Batch, bad: Bad) -> None:
        """A row failed.

        Raises:
          OutageError: with it there are too many.
        """
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
    """What becomes of rows for which the function fails.

    Attributes:
      on_error: "raise" or "quarantine".
      on_nonfinite: the same of rows with results that are not finite; None: nothing.
      streak: rows that failed last, in this process.
    """

    on_error: str
    on_nonfinite: str | None
    streak: Streak = field(default_factory=Streak, compare=False)


_TIMES = 2  # that the rows of a batch which fail are looked for: an error may be gone by then


def without_failing(batch: Batch, error: Exception, policy: Policy) -> tuple[list[Any], list[Bad]]:
    """The results of a batch that fails, and the rows that it fails for."""
    raises, bad = policy.on_error == "raise", dict[int, Bad]()
    for _ in range(_TIMES):
        streak = None if raises else policy.streak
        bad |= {b.row: b for b in failing_rows(batch, error, 1 if raises else batch.count, streak)}
        if raises and bad:
            break
        failing = dict.fromkeys(batch.places_of(bad))
        work = functools.partial(recomputed, batch, failing) if failing else begun(batch)
        results, again = tried(work)
        if again is None:
            return results, sorted(bad.values(), key=lambda b: b.row)
        error = again
    raise row_error(batch, [*bad.values()] if raises else [], "on_error", error) from error


def failing_rows(
    batch: Batch, error: Exception, most: int, streak: Streak | None = None
) -> list[Bad]:
    """The rows that a batch fails for, so many at most.

    Raises:
      MemoryLimitError: it does not fit the memory, and no row is to blame.
    """
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        raise MemoryLimitError(
            f"rows {batch.row(0)} to {batch.row(batch.count - 1)} of {_sources(batch)}: a batch of "
            f"batch_size={batch.program.batch_size} rows does not fit the memory of the device "
            f'({str(error).splitlines()[0]}). Pass a smaller batch_size, or batch_size="auto" '
            "with a memory_limit; an out= that was begun keeps its batches, so give another one."
        ) from error
    bad: list[Bad] = []
    with _compat.callbacks_fail_silently():  # the same one, again and again
        for row, why in itertools.islice(_failing(batch, error, streak), most):
            bad.append(Bad(row, last_line(why), str(why)))
            if streak is not None:
                streak.add(batch, bad[-1])
    return alike(bad)


def _failing(
    batch: Batch, error: Exception, streak: Streak | None
) -> Iterator[tuple[int, Exception]]:
    """The rows that fail by themselves, of a batch that fails, and their errors.

    They are looked for by programs of fewer and fewer rows: of a batch of `n` rows with one that
    fails, about `n` are computed again, and not `n` for each part that is tried.
    """
    if batch.count == 1:
        yield batch.row(0), error
        return
    for part in batch.parts():
        again = tried(lambda part=part: jax.block_until_ready(part.start()))[1]
        if again is not None:
            yield from _failing(part, again, streak)
        elif streak is not None:
            streak.end()


def without_nonfinite(
    batch: Batch, results: list[Any], policy: Policy, bad_rows: set[int]
) -> tuple[list[Any], list[Bad]]:
    """The same for rows whose results are not finite."""
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
    return recomputed(batch, {**dict.fromkeys(batch.places_of(bad_rows)), **wrong}), bad


def _not_finite_in_sums(
    batch: Batch, results: list[Any], without: set[int], policy: Policy
) -> dict[int, Exception]:
    """Rows that make a reduction over the batch not finite, which keeps none of what rows have."""
    outputs = batch.program.function.outputs
    reduces = [o for o in outputs if o.reduces]
    states = [x for o, x in zip(outputs, results, strict=True) if o.reduces]

    def error_of(states: Sequence[Any]) -> Exception | None:
        for output, state in zip(reduces, states, strict=True):
            if not all(map(_is_finite, jax.tree.leaves(state))):
                return FloatingPointError(f"{output.path}{NOT_FINITE}")
        return None

    def tried(part: Sequence[int]) -> Exception | None:
        return error_of(batch.reduced(dict.fromkeys(set(range(batch.count)) - set(part), part[0])))

    good = [place for place in range(batch.count) if place not in without]
    error = error_of(states)
    if error is None or not good or tried(good) is None:
        return {}
    return _fail_alone(good, error, tried, 1 if policy.on_nonfinite == "raise" else len(good))


def _fail_alone(
    rows: Sequence[int],
    error: Exception,
    tried: Callable[[Sequence[int]], Exception | None],
    most: int,
) -> dict[int, Exception]:
    """Of rows that fail together those that fail by themselves, each with its error, by halves.

    Args:
      rows: the rows.
      error: what they fail with.
      tried: runs some of them; returns what they fail with, or None.
      most: how many to look for.
    """
    if len(rows) == 1:
        return {rows[0]: error}
    alone: dict[int, Exception] = {}
    half = len(rows) // 2
    for part in (rows[:half], rows[half:]):
        again = tried(part)
        if again is not None:
            alone |= _fail_alone(part, again, tried, most - len(alone))
        if len(alone) >= most:
            break
    return alone


def _is_finite(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(x).all())


def _places_not_finite(x: np.ndarray | Rows, axis: int) -> np.ndarray:
    """Which rows have elements that are not finite."""
    data = x.data if isinstance(x, Rows) else np.moveaxis(x, axis, 0)
    places = np.flatnonzero(~np.isfinite(data).all(tuple(range(1, data.ndim))))
    return (
        np.repeat(np.arange(len(x.lengths)), x.elements)[places] if isinstance(x, Rows) else places
    )


def row_error(
    batch: Batch, bad: Sequence[Bad], option: str | None, error: Exception | None = None
) -> RowError:
    names = _sources(batch)
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


def _sources(batch: Batch) -> str:
    return ", ".join(m.source.name for m in batch.program.function.inputs.mapped)
