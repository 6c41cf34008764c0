"""What `Ragged.from_rows` is given: a row is an array, or a tree of arrays of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import is_container
from batchax.jaxprs.words import Value
from batchax.rows.checks import as_data, checked_axes, without
from batchax.rows.selecting import as_elements
from batchax.stack import structures_differ

_NAME = "Ragged.from_rows: rows"


def leaves_of_rows(rows: Sequence[Any]) -> tuple[list[tuple[str, list[Any]]], Any]:
    """For each leaf of the rows, its path and what the rows have there; and their structure.

    Raises:
      AxisError: two rows differ in structure.
    """
    flat = [jax.tree_util.tree_flatten_with_path(row, is_leaf=_is_leaf) for row in rows]
    first, structure = flat[0]
    if not first or any(isinstance(row, list) for row in rows):  # a list is an array, as for NumPy
        return [("", list(rows))], jax.tree.structure(0)
    for i, (_, other) in enumerate(flat):
        if other != structure:
            raise AxisError(structures_differ(_NAME, rows, i))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return [(jax.tree_util.keystr(at[0][0]), [x for _, x in at]) for at in columns], structure


def join(path: str, rows: Sequence[Any], axis: Any) -> tuple[Any, list[np.ndarray], Any]:
    """The elements of rows one after another, the lengths of rows along each axis, and the axes.

    Args:
      path: of the leaf of the user's rows that these are.
      rows: what each has there.
      axis: the ragged one, or several, as the user gave it.

    Raises:
      AxisError: two differ in another axis, or there is no axis.
      ArgumentTypeError: one is no array, or two differ in dtype.
    """
    for i, x in enumerate(rows):
        if is_container(x):
            raise ArgumentTypeError(f"{_NAME}[{i}]{path} must be an array, got {type(x).__name__}.")
    arrays = [as_data(x, f"rows[{i}]{path}") for i, x in enumerate(rows)]
    first = arrays[0]
    if not path and not first.ndim:
        raise AxisError(
            f"{_NAME}[0] is a number, which has no axis for the elements of a row. Give an array "
            "for each row, such as np.asarray([1.0])."
        )
    if path and not first.ndim:
        raise AxisError(
            f"{_NAME}[0]{path} is a number, which has no axis for the elements of a row. Stack "
            f"what each row has one of, jnp.stack([row{path} for row in rows]), and map it beside "
            "the rows."
        )
    checked = checked_axes(axis, first)
    axes = (checked,) if isinstance(checked, int) else checked
    for i, x in enumerate(arrays):
        if x.dtype != first.dtype:
            remedy = "Convert them to one dtype."
            if any(isinstance(row, (list, tuple)) for row in rows):
                both = jnp.result_type(x, first)
                remedy = f"Lists have the dtype of their numbers: give np.asarray(row, np.{both})."
            raise ArgumentTypeError(
                f"{_NAME}[{i}]{path} has dtype {x.dtype}, but rows[0]{path} has {first.dtype}. "
                f"{remedy}"
            )
        if x.ndim != first.ndim or without(x.shape, axes) != without(first.shape, axes):
            along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {checked}"
            raise AxisError(
                f"{_NAME}[{i}]{path} has shape {x.shape} and rows[0]{path} {first.shape}: rows may "
                f"differ along {along} only."
            )
    numpy = np if all(isinstance(x, np.ndarray) for x in rows) else jnp
    lengths = [np.array([x.shape[k] for x in arrays], np.int32) for k in axes]
    elements = [as_elements(numpy.asarray(x), axes) for x in arrays]
    return numpy.concatenate(elements, axis=axes[0]), lengths, axes


def check_same_lengths(
    first: tuple[str, Sequence[np.ndarray]], other: tuple[str, Sequence[np.ndarray]]
) -> None:
    """Refuses leaves of a row, by path and lengths in all rows, that differ in length.

    Raises:
      AxisError: they do; the first such row is named.
    """
    (path, every), (there, all_others) = first, other
    for lengths, others in zip(every, all_others, strict=True):
        if not (lengths != others).any():
            continue
        i = int(np.argmax(lengths != others))
        raise AxisError(
            f"{_NAME}[{i}]{there} has length {others[i]}, but rows[{i}]{path} has length "
            f"{lengths[i]}: the leaves of a row have one length. Others are a batch of their own, "
            f"Ragged.from_rows([row{there} for row in rows]); or, if all rows have as many, "
            f"jnp.stack([row{there} for row in rows])."
        )


def _is_leaf(x: Value) -> bool:
    """Whether `x` is one array, as `Ragged` takes it, by JAX's account of trees or not."""
    numbers = type(x) in (list, tuple) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))
    return numbers or is_container(x)
