"""`local`: rows that a process has by itself, of a batch that several processes share."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.frontend.containers import BatchOfRows, is_container
from batchax.jaxprs.words import Value


class LocalRows:
    """An array with this process's own rows of a batch.

    Attributes:
      array: the rows.
      shape: that of `array`, and once all processes have said how many rows they have, that of the
        rows of all.
      first: the index of the first of them among those of all.
    """

    def __init__(self, array: Value, shape: tuple[int, ...], first: int = 0) -> None:
        self.array, self.shape, self.first = array, shape, first

    @property
    def ndim(self) -> int:
        """As of an array."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """As of an array."""
        return self.array.dtype

    def __jax_array__(self) -> NoReturn:
        raise only_mapped("it was used as an array")


@_compat.api_boundary
def local(tree: Any) -> Any:
    """Says of an argument of `vmap` that its rows are this process's own.

    Where several processes run one program, an array of NumPy given to ``vmap(..., mesh="all")`` is
    the whole batch on each of them. Of ``local(x)`` each process has its own rows, as many as it
    happens to have, or none; they run on its own devices, and the batch is those of process 0, then
    those of process 1, and so on.

    How many rows each has the processes tell each other, so all of them must make the call.
    With one process it is the whole batch.

    Args:
      tree: a pytree of arrays, which `in_axes` goes by as if they were given themselves.

    Returns:
      What to pass to a function of `vmap` with `mesh`, outside of `jit`.

    Raises:
      ArgumentTypeError: a leaf is no array.
      UnsupportedError: it is traced (inside of `jit` arrays are those of all processes), or
        is spread over several processes already.

    Example:
      >>> rows = np.arange(4.0) + 4 * jax.process_index()  # what this process has read
      >>> mean = bx.vmap(jnp.square, out_axes=bx.Reduce("mean"), mesh="all")
      >>> print(mean(bx.local(rows)))  # over the rows of all processes, here of one
      3.5
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    return structure.unflatten([_local(f"x{jax.tree_util.keystr(k)}", x) for k, x in leaves])


def _local(path: str, x: Value) -> LocalRows:
    if isinstance(x, Tracer):
        raise UnsupportedError(
            f"local: {path} is traced. Inside of jit an array is that of all processes, and nobody "
            "knows yet how many rows each has. Call the function of vmap outside of jit."
        )
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise UnsupportedError(
            f"local: {path} is an array of several processes already: pass it as it is."
        )
    if isinstance(x, BatchOfRows):
        raise ArgumentTypeError(
            f"local: {path} is of type {type(x).__name__}. Rows of different lengths are dealt out "
            "to devices by lengths that all processes must know: give all rows on all processes, "
            "without local, or pad a process's own: local(x.to_padded())."
        )
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentTypeError(
            f"local: {path} is of type {type(x).__name__}, not an array of NumPy or JAX."
        )
    return LocalRows(x, x.shape)


def only_mapped(what: str) -> ArgumentTypeError:
    """The error for rows that are no argument that lanes of a mesh are taken from."""
    return ArgumentTypeError(
        f"batchax.local(x) is for an argument that vmap maps, with mesh=, but {what}."
    )
