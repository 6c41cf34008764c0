"""Why rows of any length cannot run together, in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from batchax.errors import BatchaxError, UnsupportedError
from batchax.rows.arguments import SIZES_DIFFER, RowSize
from batchax.rows.comparisons import question_of
from batchax.rows.user_code import line_of


def cannot_stage(error: Exception, sizes: Sequence[RowSize], works_for_known: Any) -> Exception:
    """What to raise where a function fails for symbolic sizes, and lengths are not known.

    Args:
      error: how it failed.
      sizes: those of rows.
      works_for_known: whether it can be staged for rows of some known length.
    """
    asked = isinstance(error, ASKED_FOR_NUMBERS)
    if isinstance(error, BatchaxError) and not asked:
        return error
    names = ", ".join(size.name for size in sizes)
    if asked or works_for_known():
        line = line_of(error)
        if str(error).startswith(SIZES_DIFFER):  # and they are alike for rows of known lengths
            return UnsupportedError(f"{line + ': ' if line else ''}{error}")
        return UnsupportedError(
            f"{line + ': ' if line else ''}the function needs the length of a row as a number, and "
            f"here rows have a symbolic size ({names}), because their lengths are traced: "
            f"{question_of(error)}."
            "\nCall it outside of jit, or close over the Ragged, so that lengths are known: then "
            "rows of one length run together, and with buckets= those of which it holds alike. To "
            "compute with a size use jnp.asarray(x.shape[0])."
        )
    error.add_note(
        f"Rows have a symbolic size ({names}) in the function, as their lengths are traced."
        + (
            " Arguments whose rows have the same lengths share a size if in_axes says so: "
            'batchax.ragged("n") for each of them.'
            if len(sizes) > 1
            else ""
        )
    )
    return error


ASKED_FOR_NUMBERS = jax.errors.InconclusiveDimensionOperation


def cannot_pad(error: Exception, on_mesh: bool) -> Exception:
    """What to raise where padding cannot be exact, and lengths are not known."""
    return UnsupportedError(
        f"{error}\nRows of one length could run together, but the lengths are traced here: "
        "call it outside of jit, or close over the Ragged, so that they are known"
        + (", and leave mesh out." if on_mesh else ".")
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
