"""What a `Ragged` is made of, checked: messages name what the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.options import converted
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value


def known_lengths(lengths: Any) -> np.ndarray | None:
    """`lengths` as a NumPy array, or None where their values are not known."""
    return None if isinstance(lengths, (Tracer, jax.ShapeDtypeStruct)) else np.asarray(lengths)


def same_lengths(a: Any, b: Any) -> bool:
    """Whether lengths are one array, or known to be equal."""
    if a is b:
        return True
    x, y = known_lengths(a), known_lengths(b)
    return x is not None and y is not None and np.array_equal(x, y)


def as_data(data: Any, what: str = "data") -> Any:
    if isinstance(data, (jax.Array, Tracer, jax.ShapeDtypeStruct)):
        return data
    try:
        if isinstance(data, np.ndarray):
            converted(data, jax.dtypes.canonicalize_dtype(data.dtype))  # JAX keeps the last bits
        return jnp.asarray(data)
    except OverflowError as error:
        raise OverflowError(f"Ragged: {what}: {error}.") from None
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"Ragged: {what} must be an array, got {type(data).__name__}. For a list of rows use "
            "Ragged.from_rows(rows)."
        ) from None


def as_lengths(lengths: Any, what: str = "lengths") -> Any:
    if not isinstance(lengths, (jax.Array, Tracer, jax.ShapeDtypeStruct)):
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


def check_fill_value(fill_value: Any, data: Value) -> None:
    """Refuses what elements like those of `data` cannot be: NaN among integers, say."""
    of_numbers = not jnp.issubdtype(data.dtype, jax.dtypes.prng_key)
    if fill_value is None or isinstance(fill_value, Tracer) or not of_numbers:
        return
    given = np.asarray(fill_value)
    fits = given.ndim == 0 and given.dtype.kind not in "OSUMm"
    if fits and jnp.issubdtype(data.dtype, jnp.integer):
        with np.errstate(invalid="ignore"):
            fits = given.dtype.kind != "c" and given.astype(data.dtype) == given
    elif fits and not jnp.issubdtype(data.dtype, jnp.complexfloating):
        fits = given.dtype.kind != "c"
    if not fits:
        raise ArgumentTypeError(
            f"Ragged.to_padded: fill_value must be a number of dtype {data.dtype}, which elements "
            f"of rows have, got {show(fill_value)}."
        )


def checked_axis(axis: Any, array: Value, more: int = 0) -> int:
    """An axis of rows that have so many axes more than their array, not negative."""
    ndim = array.ndim + more
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ArgumentTypeError(f"Ragged: axis must be an int, got {brief(axis)}.")
    if not -ndim <= axis < ndim:
        raise AxisError(
            f"Ragged: axis is {axis}, but a row has {ndim} axes; its array has shape "
            f"{tuple(array.shape)}."
        )
    return int(axis) % ndim


def checked_axes(axis: Any, array: Value, packed: bool = False) -> int | tuple[int, ...]:
    """The ragged axis of a row, or its ragged axes, none of them negative.

    Args:
      axis: what the user gave.
      array: a row; or rows, `packed`, which have one axis for all that are ragged.

    Raises:
      ArgumentTypeError: it is neither an int nor a sequence of ints.
      AxisError: one is out of range, or they are in no order.
    """
    if not isinstance(axis, (tuple, list)):
        return checked_axis(axis, array)
    more = len(axis) - 1 if packed and array.ndim else 0
    axes = tuple(checked_axis(each, array, more) for each in axis)
    if not axes or list(axes) != sorted(set(axes)):
        raise AxisError(
            f"Ragged: axis is {brief(axis)}; ragged axes are different ones, and in order, such as "
            "(0, 1)."
        )
    return axes[0] if len(axes) == 1 else axes


def as_lengths_of(axis: int | tuple[int, ...], lengths: Any) -> Any:
    """The lengths along the ragged axis, or a tuple of those along each of several.

    Raises:
      AxisError: there are not lengths for each axis, or not of as many rows.
      ArgumentTypeError: they are no integers.
    """
    if isinstance(axis, int):
        return as_lengths(lengths)
    try:
        each = list(lengths)
    except TypeError:
        each = []
    if len(each) != len(axis):
        raise AxisError(
            f"Ragged: axis is {brief(axis)}, {len(axis)} ragged axes, but lengths are "
            f"{len(each)}. Give "
            "the lengths along each, lengths=(heights, widths), say, each with an entry for each "
            "row."
        )
    each = tuple(as_lengths(x, f"lengths[{k}]") for k, x in enumerate(each))
    for k, x in enumerate(each):
        if x.shape != each[0].shape:
            raise AxisError(
                f"Ragged: lengths[0] is of {each[0].shape[0]} rows, and lengths[{k}] of "
                f"{x.shape[0]}. Give each with an entry for each row."
            )
    return each


def as_bounds(axis: int | tuple[int, ...], max_length: Any) -> tuple[int | None, ...]:
    """The bound of the lengths along each ragged axis, None for those that have none.

    Raises:
      ArgumentTypeError: one is no int.
      AxisError: one is negative, or there is not one for each.
    """
    count = 1 if isinstance(axis, int) else len(axis)
    bounds: tuple[Any, ...] = (max_length,) * count
    if isinstance(max_length, (tuple, list)) and not isinstance(axis, int):
        bounds = tuple(max_length)
    if len(bounds) != count:
        raise AxisError(
            f"Ragged: max_length is {brief(max_length)}, for the ragged axes {brief(axis)}. Give "
            "a bound for each, or one int."
        )
    for each in bounds:
        check_max_length(each)
    return tuple(None if each is None else int(each) for each in bounds)


def as_tuple(x: Any) -> tuple[Any, ...]:
    """What is said of each ragged axis, of which there may be one."""
    return x if isinstance(x, tuple) else (x,)


def elements_of(lengths: Any) -> np.ndarray | None:
    """How many elements each row has, or None where that is not known.

    Args:
      lengths: those along the ragged axis, or a tuple of those along each of several.
    """
    each = [known_lengths(x) for x in as_tuple(lengths)]
    if any(x is None for x in each):
        return None
    return np.prod([x for x in each if x is not None], axis=0, dtype=np.int64)


def check_lengths(
    lengths: Sequence[np.ndarray],
    capacity: int,
    most: Sequence[int | None],
    data: Any,
    at: int,
) -> None:
    """Refuses lengths, those along each ragged axis, that are negative or too many.

    Raises:
      AxisError: some are.
    """
    for k, each in enumerate(lengths):
        name = length_name(k, len(lengths))
        if (each < 0).any():
            i = int(np.argmax(each < 0))
            raise AxisError(f"Ragged: {name}[{i}] is {each[i]}; a length cannot be negative.")
    elements = elements_of(tuple(lengths))
    assert elements is not None
    total = int(elements.sum())
    if total > capacity:
        have = "the lengths add up to" if len(lengths) == 1 else "rows of these lengths have"
        raise AxisError(
            f"Ragged: {have} {total}{'' if len(lengths) == 1 else ' elements'}, but data, of shape "
            f"{tuple(data.shape)}, has {capacity} elements along axis {at}. Give the rows one "
            "after another, without padding; for padded rows use "
            "Ragged.from_padded(padded, lengths)."
        )
    for k, (each, bound) in enumerate(zip(lengths, most, strict=True)):
        if bound is not None:
            check_each(each, bound, f"max_length, {bound}", length_name(k, len(lengths)))


def length_name(k: int, count: int) -> str:
    """What messages call the lengths along the ragged axis `k` of so many."""
    return "lengths" if count == 1 else f"lengths[{k}]"


def check_each(lengths: np.ndarray, most: int, what: str, name: str = "lengths") -> None:
    if (lengths > most).any():
        i = int(np.argmax(lengths > most))
        raise AxisError(f"Ragged: {name}[{i}] is {lengths[i]}, more than {what}.")


def check_max_length(most: Any) -> None:
    if most is None:
        return
    if not isinstance(most, (int, np.integer)) or isinstance(most, bool):
        raise ArgumentTypeError(f"Ragged: max_length must be an int, got {show(most)}.")
    if most < 0:
        raise AxisError(f"Ragged: max_length is {most}; no row has fewer than 0 elements.")


def without(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for k, size in enumerate(shape) if k not in axes)


def shown_lengths(lengths: np.ndarray) -> str:
    values = [*map(str, lengths)]
    return "[" + ", ".join(values if len(values) < 9 else [*values[:6], "...", values[-1]]) + "]"
