"""Leaves of trees that are not arrays: the activation of a model, an object that configures it.

An axis for a whole tree is for its arrays. All lanes share the other leaves. If a function returns
the very same object each time that it is traced, the object comes out as it is.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import jax
import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.words import Value


def is_object(value: Value, path: str = "") -> bool:
    """Whether a leaf is an object that is not an array, and was not meant as one.

    In a list, tuple or dict, `path` ends with an index or key. There a collection, a path, or a
    number of a type that JAX does not know, may be meant as a batch, and so may a string in a
    list: these are not objects, and an axis for them raises. A field of a module, and what is
    below one, is what the module says it is, as in ``equinox.filter_vmap``.
    """
    if looks_like_array(value):
        return False
    if callable(value) or isinstance(value, np.dtype) or _FIELD.match(path):
        return True
    if isinstance(value, (str, bytes)):
        return path.endswith("]") and _ENTRY.search(path) is None
    meant = (numbers.Number, os.PathLike, Iterable, Sized)
    return not isinstance(value, meant)


def looks_like_array(value: Value) -> bool:
    """Whether `value` is an array or a number to JAX, or an array or table of another library."""
    if callable(value) or isinstance(value, np.dtype):  # ``jnp.float32`` has a dtype
        return False
    return is_array(value) or any(hasattr(value, name) for name in _OF_ARRAYS)


_OF_ARRAYS = ("shape", "dtype", "__array__", "__jax_array__", "__dlpack__")
_FIELD = re.compile(r"\w*(\[[^\]]*\])*\.")  # a dot that is not in a key


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
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: None if is_object(x, jax.tree_util.keystr(keys)) else x, tree
    )


def is_same(x: Value, y: Value) -> bool:
    """Whether two objects are one, or equal strings, which hold no values of a trace."""
    return x is y or (isinstance(x, (str, bytes)) and type(x) is type(y) and x == y)


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
        if not is_same(x, same.get(path)):
            raise ArgumentTypeError(
                f"the function returned {path} of type {type(x).__name__}, which is not an array, "
                "and is another object each time that the function is traced. Every output of a "
                "batched function must be an array or a number, or the same for all lanes, as a "
                "function is that is defined outside of it."
            )
