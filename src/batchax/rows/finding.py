"""`compress`, `nonzero`, `unique`: results of a size that a function finds, one for each lane."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value
from batchax.rows.comparisons import ASKED_FOR_NUMBERS, agreed
from batchax.rows.found_sizes import finding_sizes


@_compat.api_boundary
def compress(
    condition: Any, x: Any, axis: int | None = None, *, max_size: int | None = None
) -> Any:
    """The elements of `x` where `condition` is true, as ``numpy.compress``.

    In a function under `vmap` each lane has as many as there are: the result has a size of its own,
    and may be used as a row of a `Ragged` is. What has that size and is returned comes back as a
    `Ragged`. Results of one condition, the same array and not one that is computed again, have one
    size, and may be added to each other.

    Args:
      condition: an array of shape ``(n,)``, of bools or what is true unless it is zero.
      x: an array. Without `axis` its elements are taken one after another.
      axis: the axis of `x` to choose along, of size `n` or more.
      max_size: an int that is known to be enough, so that less room is needed than for all `n`.

    Returns:
      An array as `x`, with as many elements along `axis` as are true. Differentiable with respect
      to `x`.

    Raises:
      ArgumentTypeError: `max_size` is no int, or `x` or `condition` no array.
      AxisError: `condition` has not one axis, or is longer than `x`; or, outside of ``jax.jit``,
        more is true than `max_size`. Under ``jax.jit``, in loops and branches, and where rows are
        dealt out to devices, what is beyond that is left out.
      UnsupportedError: `condition` is traced, outside of `vmap`.

    Example:
      >>> x = jnp.array([[3, -1, 2], [-5, -6, 4]])
      >>> y = bx.vmap(lambda x: bx.compress(x > 0, x))(x)
      >>> [row.tolist() for row in y.rows()]
      [[3, 2], [4]]
      >>> print(bx.vmap(lambda x: bx.compress(x > 0, x).mean())(x))
      [2.5 4. ]
    """
    called = "batchax.compress"
    given = condition
    condition = _array(condition, called, "condition")
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise _no_array(x, called, "x") from None
    if condition.ndim != 1:
        raise AxisError(
            f"{called}: condition must have one axis, got the shape {condition.shape}. To choose "
            "elements of an array of more axes, ravel both."
        )
    if axis is None:
        x, axis = jnp.ravel(x), 0
    elif not is_position(axis) or not -x.ndim <= axis < x.ndim:
        raise AxisError(f"{called}: axis {brief(axis)} is out of range for x, of shape {x.shape}.")
    count, size = condition.shape[0], x.shape[axis]
    if not agreed(size, count):
        raise AxisError(
            f"{called}: condition has {count} elements, and x, of shape {x.shape}, {size} along "
            f"axis {axis}. Sizes that are found are one where one condition found them: compute it "
            "once."
        )
    places = _places(condition != 0, max_size, called, given)
    return _taken(x, places, axis)


@_compat.api_boundary
def nonzero(condition: Any, *, max_size: int | None = None) -> tuple[Any, ...]:
    """The indices where `condition` is true, or not zero, as ``numpy.nonzero``.

    In a function under `vmap` each lane has as many as there are, as with `compress`.

    Args:
      condition: an array of one axis or more.
      max_size: as for `compress`.

    Returns:
      For each axis of `condition` an array of ints, with an entry for each element that is true.

    Raises:
      ArgumentTypeError: `condition` is no array, or `max_size` no int.
      AxisError: `condition` is a number; or, outside of ``jax.jit``, more is true than `max_size`.
      UnsupportedError: `condition` is traced, outside of `vmap`.

    Example:
      >>> edges = jnp.array([[[0, 1], [1, 0]], [[0, 0], [0, 1]]])
      >>> senders, receivers = bx.vmap(bx.nonzero)(edges)
      >>> [row.tolist() for row in senders.rows()], [row.tolist() for row in receivers.rows()]
      ([[0, 1], [1]], [[1, 0], [1]])
    """
    called = "batchax.nonzero"
    given = condition
    condition = _array(condition, called, "condition")
    if condition.ndim == 0:
        raise AxisError(f"{called}: condition must have an axis, and is a number.")
    rest = _places(condition.reshape(-1) != 0, max_size, called, given).astype(int)
    indices = []
    for size in condition.shape[:0:-1]:
        size = jnp.asarray(size, rest.dtype)
        indices.append(rest % size)
        rest = rest // size
    return (rest, *indices[::-1])


@_compat.api_boundary
def unique(x: Any, *, max_size: int | None = None) -> Any:
    """The different elements of `x`, in order, as ``numpy.unique``. NaN is there once.

    In a function under `vmap` each lane has as many as there are, as with `compress`.

    Args:
      x: an array, whose elements are taken one after another.
      max_size: as for `compress`.

    Raises:
      ArgumentTypeError: `x` is no array, or `max_size` no int.
      AxisError: outside of ``jax.jit`` there are more than `max_size`.
      UnsupportedError: `x` is traced, outside of `vmap`.

    Example:
      >>> y = bx.vmap(bx.unique)(jnp.array([[3, 1, 3, 2], [5, 5, 5, 5]]))
      >>> [row.tolist() for row in y.rows()]
      [[1, 2, 3], [5]]
    """
    called = "batchax.unique"
    x = _array(x, called, "x")
    if not isinstance(x, Tracer):
        with jax.ensure_compile_time_eval():
            different = jnp.unique(x)
        _check_max_size(max_size, called)
        _check_enough(different.size, max_size, called)
        return different
    ordered = jnp.sort(x.reshape(-1))
    at = jnp.arange(ordered.shape[0])
    before = _taken(ordered, at - 1)
    alike = (ordered == before) | ((ordered != ordered) & (before != before))
    new = (at == 0) | ~alike
    return _taken(ordered, _places(new, max_size, called, new))


def _taken(x: Any, places: Any, axis: int = 0) -> Any:
    if not _has_elements(x.shape[axis]):  # JAX takes nothing of what may have none, as `x[1:]` may
        shape = list(x.shape)
        shape[axis] = 1
        x = jnp.concatenate([x, jnp.full(shape, 0, x.dtype)], axis)
    return jnp.take(x, places, axis, mode="clip")


def _has_elements(size: Any) -> bool:
    """Whether JAX takes it that there are some."""
    try:
        return size >= 1
    except ASKED_FOR_NUMBERS:
        return False


def _places(condition: Any, max_size: int | None, called: str, given: Any) -> Any:
    """Where a vector of bools is true, as int32."""
    _check_max_size(max_size, called)
    if isinstance(condition, Tracer):
        finding = finding_sizes()
        if finding is None:
            raise UnsupportedError(
                f"{called}: how many elements there are is known when it runs, and so it needs "
                "values outside of jax.jit and jax.vmap. Call it in a function under batchax.vmap, "
                "or batchax.map without out=, where a result may have a size of its own for each "
                "lane; of one example, use jax.numpy with size=."
            )
        return finding.places_of(condition, max_size, called, given)
    (places,) = np.nonzero(condition)
    _check_enough(len(places), max_size, called)
    return jnp.asarray(places, np.int32)


def _check_max_size(max_size: Any, called: str) -> None:
    if max_size is not None and not (is_position(max_size) and max_size >= 0):
        raise ArgumentTypeError(
            f"{called}: max_size must be a non-negative int, got {brief(max_size)}."
        )


def _check_enough(count: int, max_size: int | None, called: str) -> None:
    if max_size is not None and count > max_size:
        raise AxisError(f"{called}: max_size is {max_size}, and there are {count} elements.")


def _array(x: Value, called: str, name: str) -> Any:
    """An array, of NumPy if its values are known: what is computed of it is known, too."""
    try:
        x = x if isinstance(x, Tracer) else np.asarray(x)
        jax.typeof(x)
        return x
    except (TypeError, ValueError):
        raise _no_array(x, called, name) from None


def _no_array(x: Any, called: str, name: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{called}: {name} must be an array, got {type(x).__name__}.")
