"""`size`: the size of each lane as a dimension that its function may make arrays of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.arguments import LocalRows
from batchax.frontend.containers import AxisSpec, Parts
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value
from batchax.rows.checks import as_lengths, known_lengths, shown_lengths
from batchax.rows.ragged import Ragged
from batchax.rows.row_size import SizeAlone, check_size_name


@dataclass(frozen=True)
class LaneSize(AxisSpec):
    """In `in_axes`: an array of ints holds the size of each lane."""

    name: str
    max_size: int | None

    def of_argument(self, value: Value, path: str) -> Parts:
        sizes = self._checked(value, path)
        values = known_lengths(sizes)
        count = sizes.shape[0]
        if values is None:
            room, bound = count * (self.max_size or 0), self.max_size
        else:
            room, bound = int(values.sum()), self.max_size or int(values.max(initial=0))
        # Rows of those lengths that nobody reads. What the function is given is their size.
        rows = Ragged(jnp.zeros(room, bool), sizes, bound)
        return Parts([rows], [SizeAlone((self.name,))], lambda examples: examples[0].shape[0])

    def _checked(self, value: Value, path: str) -> Any:
        if isinstance(value, LocalRows):
            raise UnsupportedError(
                f"in_axes gives {self!r} for {path}, which is batchax.local(x): lanes of different "
                "sizes are dealt out to devices by sizes that all processes must know. Give all "
                "sizes on all processes, without local."
            )
        try:
            shape, dtype = np.shape(value), jnp.result_type(value)
        except (TypeError, ValueError):
            shape, dtype = None, type(value).__name__
        if shape is None or len(shape) != 1 or not jnp.issubdtype(dtype, np.integer):
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, of shape {shape} and dtype {dtype}: give an "
                "array of ints of shape (lanes,), the size of each lane."
            )
        if not isinstance(shape[0], int):
            raise UnsupportedError(
                f"in_axes gives {self!r} for {path}, of which there are {shape[0]}, a symbolic "
                "number, which must be known. Export the function for a known number of lanes."
            )
        sizes = as_lengths(value)
        values = known_lengths(sizes)
        if values is None and self.max_size is None:
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, whose values are traced here: give a bound "
                f"for them, batchax.size({self.name!r}, max_size=...)."
            )
        most = np.inf if self.max_size is None else self.max_size
        if values is not None and len(values) and not (0 <= values.min() <= values.max() <= most):
            raise AxisError(
                f"in_axes gives {self!r} for {path}, whose sizes are {shown_lengths(values)}: each "
                f"must be {'0 or more' if self.max_size is None else f'in [0, {most}]'}."
            )
        return sizes

    def __repr__(self) -> str:
        bound = "" if self.max_size is None else f", max_size={self.max_size}"
        return f"batchax.size({self.name!r}{bound})"


@_compat.api_boundary
def size(name: str, max_size: int | None = None) -> LaneSize:
    """In `in_axes`: an array of ints holds a size for each lane, which the function is given.

    The function sees a dimension, of which it may make arrays, as those of a row of a `Ragged`.
    What has that size in every lane comes back as a `Ragged`.

    Args:
      name: a Python identifier, such as "n". Rows that `in_axes` says ``batchax.ragged(name)`` of
        have this size.
      max_size: an int that no size exceeds; needed where sizes are traced, in ``jax.jit`` say.
        A traced size beyond it counts as `max_size`, and one below zero as zero.

    Returns:
      What `in_axes` of `vmap` takes in place of an int.

    Raises:
      ArgumentTypeError: `name` is no identifier, or `max_size` no int.

    Example:
      >>> sizes = jnp.array([3, 0, 5])
      >>> print(bx.vmap(lambda n: jnp.arange(n).sum(), bx.size("n", max_size=5))(sizes))
      [ 3  0 10]
    """
    check_size_name(name, "size")
    if max_size is not None and not (is_position(max_size) and max_size >= 0):
        raise ArgumentTypeError(
            f"size(): max_size must be a non-negative int, got {brief(max_size)}."
        )
    return LaneSize(name, max_size)
