"""What a `Ragged` is made of, checked: messages name what the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.words import Value


def known_lengths(lengths: Any) -> np.ndarray | None:
    """`lengths` as a NumPy array, or None where their values are not known."""
    return None if isinstance(lengths, Tracer) else np.asarray(lengths)


def as_data(data: Any, what: str = "data") -> Any:
    if isinstance(data, (jax.Array, Tracer)):
        return data
    try:
        return jnp.asarray(data)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"Ragged: {what} must be an array, got {type(data).__name__}. For a list of rows use "
            "Ragged.from_rows(rows)."
        ) from None


def as_lengths(lengths: Any, what: str = "lengths") -> Any:
    if not isinstance(lengths, (jax.Array, Tracer)):
        try:
            lengths = np.asarray(lengths)
        except ValueError:
            lengths = np.zeros((), object)
        if lengths.size == 0 and lengths.ndim == 1:
            lengths = lengths.astype(np.int32)
        if np.issubdtype(lengths.dtype, np.integer):
            # A length that int32 cannot hold becomes its largest number: still more than `data` has
            # room for, and so refused where lengths are checked.
            lengths = np.clip(lengths, -(2**31), 2**31 - 1).astype(np.int32)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"Ragged: {what} must be integers, one for each row, got dtype {lengths.dtype}."
        )
    if lengths.ndim != 1:
        raise AxisError(
            f"Ragged: {what} must have one axis, with an entry for each row; its shape is "
            f"{lengths.shape}."
        )
    return lengths


def checked_axis(axis: Any, array: Value) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ArgumentTypeError(f"Ragged: axis must be an int, got {axis!r}.")
    if not -array.ndim <= axis < array.ndim:
        raise AxisError(
            f"Ragged: axis is {axis}, but a row has {array.ndim} axes; its array has shape "
            f"{tuple(array.shape)}."
        )
    return int(axis) % array.ndim


def check_lengths(lengths: np.ndarray, capacity: int, most: int | None, data: Any, at: int) -> None:
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise AxisError(f"Ragged: lengths[{i}] is {lengths[i]}; a length cannot be negative.")
    total = int(lengths.sum())
    if total > capacity:
        raise AxisError(
            f"Ragged: the lengths add up to {total}, but data, of shape {tuple(data.shape)}, has "
            f"{capacity} elements along axis {at}. Give the rows one after another, without "
            "padding; for padded rows use Ragged.from_padded(padded, lengths)."
        )
    if most is not None:
        check_each(lengths, int(most), f"max_length, {most}")


def check_each(lengths: np.ndarray, most: int, what: str) -> None:
    if (lengths > most).any():
        i = int(np.argmax(lengths > most))
        raise AxisError(f"Ragged: lengths[{i}] is {lengths[i]}, more than {what}.")


def check_max_length(most: Any) -> None:
    if most is None:
        return
    if not isinstance(most, (int, np.integer)) or isinstance(most, bool):
        raise ArgumentTypeError(
            f"Ragged: max_length must be an int, got {most!r} of type {type(most).__name__}."
        )
    if most < 0:
        raise AxisError(f"Ragged: max_length is {most}; no row has fewer than 0 elements.")


def without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def shown_lengths(lengths: np.ndarray) -> str:
    values = [*map(str, lengths)]
    return "[" + ", ".join(values if len(values) < 9 else [*values[:6], "...", values[-1]]) + "]"
