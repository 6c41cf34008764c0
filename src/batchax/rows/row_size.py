"""`ragged`: in `in_axes` and `out_axes`, rows whose size has a name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import AxisSpec, Parts
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class RaggedSize(AxisSpec):
    """In `in_axes`: the batch is a `Ragged`, whose rows have sizes of these names.

    In `out_axes`: the batch is to be a `Ragged`.
    """

    names: tuple[str, ...]
    names_rows = True

    def of_argument(self, value: Value, path: str) -> Parts:
        raise ArgumentTypeError(
            f"in_axes gives {self!r} for {path}, which is {show(value)}: that kind of "
            "axis is for a batchax.Ragged. Make one, with Ragged.from_padded, say; or give an int."
        )

    def of_output(self, value: Value, path: str, size: Any) -> Parts:
        if jnp.ndim(value) < len(self.names):
            what = "a number" if not jnp.ndim(value) else "an array of one axis"
            raise AxisError(
                f"out_axes gives {self!r} for {path}, which is {what} for each lane: a row has "
                f"{'an axis' if len(self.names) == 1 else 'axes'} of its own. Give an int."
            )
        return Parts([value], [0], lambda outs: _rows_of(outs[0], len(self.names)))

    def __repr__(self) -> str:
        return f"batchax.ragged({', '.join(map(repr, self.names))})"


class SizeAlone(RaggedSize):
    """Rows that nobody reads, for the size that they have."""


def _rows_of(batch: Any, axes: int) -> Ragged:
    """Rows that all have one size, if they are not rows of their own already."""
    if isinstance(batch, Ragged):
        return batch
    count, *rest = batch.shape
    sizes, rest = rest[:axes], rest[axes:]
    lengths = [np.full(count, size, np.int32) for size in sizes]
    data = jnp.reshape(batch, (math.prod((count, *sizes)), *rest))
    return Ragged(data, lengths, tuple(sizes), axis=tuple(range(axes)))


@_compat.api_boundary
def ragged(*names: str) -> RaggedSize:
    """In `in_axes`: the name of the size that the rows of a `Ragged` have, or of each of several.

    Arguments with the same name have rows of the same lengths, which the function may add to
    each other; arguments with different names have sizes of their own. Without names, arguments
    share a size if their lengths are one array or known to be equal.

    A `Ragged` with two ragged axes has two sizes: ``ragged("h", "w")`` for images, ``ragged("n",
    "n")`` for matrices that are square.

    In `out_axes`: the output is to be a `Ragged`, also if its rows turn out to have one size.

    Args:
      *names: Python identifiers, such as "n": one for each ragged axis.

    Returns:
      What `in_axes` and `out_axes` of `vmap` take in place of an int.

    Raises:
      ArgumentTypeError: one is none, or there are none.

    Example:
      >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
      >>> y = bx.Ragged(jnp.ones(6, int), [1, 3, 2])
      >>> print(bx.vmap(lambda x, y: (x * y).sum(), bx.ragged("n"))(x, y))
      [0 6 9]
      >>> images = bx.Ragged.from_rows([jnp.ones((2, 3)), jnp.ones((4, 1))], axis=(0, 1))
      >>> bx.vmap(lambda x: x @ x.T, bx.ragged("h", "w"))(images)
      Ragged(2 rows of float32[n, n], lengths=([2, 4], [2, 4]), max_length=(4, 4))
    """
    if not names:
        raise ArgumentTypeError(
            'ragged() takes a name for the size of rows, such as ragged("n"), or for each of '
            'several, ragged("h", "w"); none is given.'
        )
    for name in names:
        check_size_name(name, "ragged")
    return RaggedSize(names)


def check_size_name(name: Any, maker: str) -> None:
    """Refuses what cannot be the name of a size.

    Raises:
      ArgumentTypeError: it is no identifier.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _OPERATIONS:
        raise ArgumentTypeError(
            f'{maker}() takes a name for the size of rows, such as {maker}("n"), got {brief(name)}.'
        )


_OPERATIONS = frozenset({"floordiv", "mod", "max", "min", "non_negative"})
