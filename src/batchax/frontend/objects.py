"""Leaves of trees that are no arrays: the activation of a model, an object that configures it.

An axis given for a whole tree is for its arrays. What else there is in it all lanes share, and if
a function returns the very same object each time that it is traced, it comes out as it is.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.words import Value


def is_object(value: Value) -> bool:
    """Whether a leaf is an object that is no array, and does not look as if it should be one.

    A string, a number of a type that JAX does not know, a path or a collection may have been meant
    as an array: an axis for it is refused.
    """
    if callable(value) or isinstance(value, np.dtype):
        return True
    meant = (str, bytes, numbers.Number, os.PathLike, np.ndarray, np.generic, Iterable)
    if isinstance(value, meant) or any(hasattr(value, name) for name in _OF_ARRAYS):
        return False
    return not is_array(value)


_OF_ARRAYS = ("shape", "dtype", "__array__", "__jax_array__", "__len__", "__dlpack__")


def is_array(value: Value) -> bool:
    """Whether `value` is an array to JAX, or a number."""
    try:
        jax.typeof(value)
    except (TypeError, ValueError):  # of what has a `__jax_array__`, as a batch of rows does
        return False
    return True


def is_flag(value: Value, path: str) -> bool:
    """Whether a leaf of a tree is a bool of Python's, by which a model says how it is to run.

    One in a list or tuple may be meant as an entry of an array.
    """
    return isinstance(value, bool) and _ENTRY.search(path) is None


_ENTRY = re.compile(r"\[\d+\]$")


def without_objects(tree: Any) -> Any:
    """`tree` with None in place of its objects, for who looks at arrays."""
    # Of leaves alone: a model may be called, and holds arrays.
    return jax.tree.map(lambda x: None if is_object(x) else x, tree)


def check_same(
    objects: Sequence[tuple[str, Any]], again: Callable[[], Sequence[tuple[str, Any]]]
) -> None:
    """Refuses objects in outputs that are others when the function is traced once more.

    Another object may hold values of a trace, or of a lane.

    Args:
      objects: those of the first time, with what messages call them.
      again: traces the function, and returns those of that time.

    Raises:
      ArgumentTypeError: names the first that is another.
    """
    if not objects:
        return
    second: list[tuple[str, Any]] = []
    jax.eval_shape(lambda: second.extend(again()))
    same = dict(second)
    for path, x in objects:
        if same.get(path) is not x:
            raise ArgumentTypeError(
                f"the function returned {path} of type {type(x).__name__}, which is not an array, "
                "and is another object each time that the function is traced. Every output of a "
                "batched function must be an array or a number, or the same for all lanes, as a "
                "function is that is defined outside of it."
            )
