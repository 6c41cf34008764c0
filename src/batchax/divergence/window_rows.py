"""What the lanes of a window have of the arrays of all lanes: how it is read, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax.divergence.varying import alike
from batchax.execution.entries import entry_of, put_entry
from batchax.execution.gathered_lanes import put, taken_at
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position
from batchax.kernel.staged import while_loop
from batchax.programs.shapes import bytes_of

_SMALL = 1024  # bytes that a step of a loop over lanes touches at most, to be one function


def put_back(everyone: Sequence[Any], rows: Sequence[Any], lanes: Any) -> list[Any]:
    """The arrays of all lanes with the rows of a window; places where nobody is are the last.

    A processor is given a scatter as a function for each array, and a small loop as one for all.
    """
    moved = sum(2 * bytes_of([jax.typeof(x)]) // x.shape[0] for x in rows)
    if jax.default_backend() != "cpu" or moved > _SMALL:
        return [with_rows(x, r, lanes) for x, r in zip(everyone, rows, strict=True)]
    size, width = np.int32(everyone[0].shape[0]), np.int32(lanes.shape[0])

    def goes_on(state: Any) -> Any:
        place, _ = state
        here = lax.lt(entry_of(lanes, lax.min(place, lax.sub(width, np.int32(1)))), size)
        return lax.bitwise_and(lax.lt(place, width), here)

    def once(state: Any) -> Any:
        place, now = state
        lane = entry_of(lanes, place)
        now = [put_entry(x, entry_of(r, place), lane) for x, r in zip(now, rows, strict=True)]
        return lax.add(place, np.int32(1)), now

    start = alike((np.int32(0), list(everyone)), [lanes, *everyone, *rows])
    return while_loop(goes_on, once, start)[1]


def rows_of(x: Value, position: Position, lanes: Any) -> Any:
    """What these lanes have of an array of all lanes; `lanes` may repeat some."""
    if position is None:
        return x
    return taken_at(x, lanes, position)


def with_rows(x: Value, rows: Any, target: Any) -> Any:
    """`x` with `rows` for the lanes `target`; those that are out of bounds are dropped."""
    return put(x, rows, target, 0)
