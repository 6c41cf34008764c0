"""`ragged`: in `in_axes` and `out_axes`, rows whose size has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.parts import AxisSpec, Parts
from batchax.jaxprs.words import Value
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class RaggedSize(AxisSpec):
    """In `in_axes`: the batch is a `Ragged`, whose rows have a size of that name.

    In `out_axes`: the batch is to be a `Ragged`.
    """

    name: str
    names_rows = True

    def of_argument(self, value: Value, path: str) -> Parts:
        raise ArgumentTypeError(
            f"in_axes gives {self!r} for {path}, which is {type(value).__name__}: that kind of "
            "axis is for a batchax.Ragged. Make one, with Ragged.from_padded, say; or give an int."
        )

    def of_output(self, value: Value, path: str, size: Any) -> Parts:
        if not jnp.ndim(value):
            raise AxisError(
                f"out_axes gives {self!r} for {path}, which is a number for each lane: a row has "
                "an axis of its own. Give an int."
            )
        return Parts([value], [0], lambda outs: _rows_of(outs[0]))

    def __repr__(self) -> str:
        return f"batchax.ragged({self.name!r})"


class SizeAlone(RaggedSize):
    """Rows that nobody reads, for the size that they have."""


def _rows_of(batch: Any) -> Ragged:
    """Rows that all have one size, if they are not rows of their own already."""
    if isinstance(batch, Ragged):
        return batch
    count, size, *rest = batch.shape
    lengths = np.full(count, size, np.int32)
    return Ragged(jnp.reshape(batch, (count * size, *rest)), lengths, size)


@_compat.api_boundary
def ragged(name: str) -> RaggedSize:
    """In `in_axes`: the name of the size that the rows of a `Ragged` have.

    Arguments with the same name have rows of the same lengths, which the function may add to
    each other; arguments with different names have sizes of their own. Without names, arguments
    share a size if their lengths are one array or known to be equal.

    In `out_axes`: the output is to be a `Ragged`, also if its rows turn out to have one size.

    Args:
      name: a Python identifier, such as "n".

    Returns:
      What `in_axes` and `out_axes` of `vmap` take in place of an int.

    Raises:
      ArgumentTypeError: it is none.

    Example:
      >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
      >>> y = bx.Ragged(jnp.ones(6, int), [1, 3, 2])
      >>> print(bx.vmap(lambda x, y: (x * y).sum(), bx.ragged("n"))(x, y))
      [0 6 9]
    """
    check_size_name(name, "ragged")
    return RaggedSize(name)


def check_size_name(name: Any, maker: str) -> None:
    """Refuses what cannot be the name of a size.

    Raises:
      ArgumentTypeError: it is no identifier.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _OPERATIONS:
        raise ArgumentTypeError(
            f'{maker}() takes a name for the size of rows, such as {maker}("n"), got {name!r}.'
        )


_OPERATIONS = frozenset({"floordiv", "mod", "max", "min", "non_negative"})
