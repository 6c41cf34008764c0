"""Rows of a batch for which the function fails, or is not finite: which, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.datasets.halving import fail_alone
from batchax.datasets.one_batch import Batch, last_line, recomputed, tried
from batchax.datasets.parts import Bad, Rows, alike
from batchax.errors import RowError


@dataclass(frozen=True)
class Policy:
    """What becomes of rows for which the function fails.

    Attributes:
      on_error: "raise" or "quarantine".
      on_nonfinite: the same of rows with results that are not finite; None: nothing.
    """

    on_error: str
    on_nonfinite: str | None


def without_failing(batch: Batch, error: Exception, policy: Policy) -> tuple[list[Any], list[Bad]]:
    """The results of a batch that fails, and the rows that it fails for."""
    bad = failing_rows(batch, error, 1 if policy.on_error == "raise" else batch.count)
    if policy.on_error == "raise" or not bad:
        raise row_error(batch, bad, "on_error", error) from error
    failing = {b.row - batch.row(0): None for b in bad}
    return recomputed(batch, failing), bad


def failing_rows(batch: Batch, error: Exception, most: int) -> list[Bad]:
    """The rows that a batch fails for, so many at most."""

    def alone(part: Sequence[int]) -> Exception | None:
        others = dict.fromkeys(set(range(batch.count)) - set(part), part[0])
        return tried(lambda: jax.block_until_ready(batch.start(others)))[1]

    with _compat.callbacks_fail_silently():  # the same one, again and again
        failing = fail_alone(range(batch.count), error, alone, most)
    return alike(
        Bad(batch.row(place), last_line(why), str(why)) for place, why in sorted(failing.items())
    )


def without_nonfinite(
    batch: Batch, results: list[Any], policy: Policy, bad_rows: set[int]
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


def row_error(
    batch: Batch, bad: Sequence[Bad], option: str | None, error: Exception | None = None
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
