"""Why rows of any length cannot run together, in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchax import _compat
from batchax.errors import BatchaxError, UnsupportedError
from batchax.rows.arguments import SIZES_DIFFER, RowSize
from batchax.rows.comparisons import asked_for_number, question_of
from batchax.rows.padded import CannotPad
from batchax.rows.user_code import line_of, names_of


def cannot_stage(error: Exception, sizes: Sequence[RowSize], works_for_known: Any) -> Exception:
    """What to raise where a function fails for symbolic sizes, and lengths are not known.

    Args:
      error: how it failed.
      sizes: those of rows.
      works_for_known: whether it can be staged for rows of some known length.
    """
    asked = asked_for_number(error)
    if isinstance(error, BatchaxError) and not asked:
        return error
    names = ", ".join(size.name for size in sizes)
    words = _words(sizes)
    row, length = words.row, words.length
    if asked or works_for_known():
        line = line_of(error)
        if str(error).startswith(SIZES_DIFFER):  # and they are alike for rows of known lengths
            return UnsupportedError(f"{line + ': ' if line else ''}{error}")
        before = _compat.looked_up_before(names_of(error))
        return UnsupportedError(
            f"{line + ': ' if line else ''}the function needs the {length} of a {row} as a number, "
            f"and here {row}s have a symbolic size ({names}), because their {length}s are traced: "
            f"{question_of(error)}."
            f"\nCall it outside of jit, or close over the {words.batch}, so that {length}s are "
            f"known: then {row}s of one {length} run together, and with buckets= those of which it "
            f"holds alike. To compute with a size use jnp.asarray({words.size})."
            + (
                f"\n{before[0]} was looked up beforehand, so that it is JAX's own. Call it as "
                f"{before[1]}, which takes symbolic sizes while {row}s are staged."
                if before
                else ""
            )
        )
    error.add_note(
        f"{row.capitalize()}s have a symbolic size ({names}) in the function, as their {length}s "
        "are traced."
        + (
            " Arguments whose rows have the same lengths share a size if in_axes says so: "
            'batchax.ragged("n") for each of them.'
            if len(sizes) > 1 and words is _ROWS
            else ""
        )
    )
    return error


@dataclass(frozen=True)
class _Words:
    """How messages speak of what has a size: the user may have given rows, or sizes alone."""

    row: str
    length: str
    batch: str
    size: str


_ROWS = _Words("row", "length", "Ragged", "x.shape[0]")
_LANES = _Words("lane", "size", "array of sizes", "n")


def _words(sizes: Sequence[RowSize]) -> _Words:
    return _LANES if all(size.of_lanes for size in sizes) else _ROWS


def cannot_pad(error: Exception, sizes: Sequence[RowSize], on_mesh: bool) -> Exception:
    """What to raise where padding cannot be exact, and lengths are not known."""
    words = _words(sizes)
    return UnsupportedError(
        f"{error}\n{words.row.capitalize()}s of one {words.length} could run together, but the "
        f"{words.length}s are traced here: call it outside of jit, or close over the "
        f"{words.batch}, so that they are known" + (", and leave mesh out." if on_mesh else ".")
    )


def why_grouped(error: Exception) -> str:
    """Why rows run grouped by their known lengths: the operation, and the user's line."""
    if isinstance(error, CannotPad):
        return str(error).rstrip(".")
    line = line_of(error)
    return f"{line + ': ' if line else ''}the function needs a length as a number: " + question_of(
        error
    )


def works_for_known(stage: Callable[[Sequence[int]], Any], sizes: Sequence[RowSize]) -> bool:
    """Whether rows of some lengths could be staged, where rows of any length cannot."""
    most = max(size.bound for size in sizes)
    for length in (most, most - 1, 4, 3, 2, 1):
        # Sizes of different names may differ, so they do here. None is 1 if there are several: JAX
        # repeats a single element along any number of others.
        lengths = [min(length - i, size.bound) for i, size in enumerate(sizes)]
        if min(lengths) < min(len(lengths), 2):
            continue
        try:
            stage(lengths)
        except Exception:
            continue
        return True
    return False
