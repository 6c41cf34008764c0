"""`map_batches`: a function of one row over a dataset, and its results batch after batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from batchax import _compat
from batchax.datasets.inputs import NoRowsError
from batchax.datasets.pipeline import Batches, of_sources, of_streams
from batchax.datasets.row_function import RowFunction, fitting, program_of
from batchax.datasets.run import check_batch_size, check_key, of_this_process
from batchax.divergence.compact import Compact
from batchax.divergence.runner import resolved
from batchax.errors import UnsupportedError
from batchax.frontend.in_axes import check_in_axes
from batchax.frontend.options import (
    check_callable,
    check_count,
    check_flags,
    check_one_of,
    check_small_matrices,
    translate_argument_names,
)
from batchax.frontend.outputs import check_out_axes
from batchax.jaxprs.types import AxesTree, Tree


@_compat.api_boundary
@translate_argument_names
def map_batches(
    fun: Callable[..., Any],
    *sources: Tree,
    in_axes: AxesTree = 0,
    out_axes: AxesTree = 0,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    batched: bool = False,
    last: Literal["short", "drop"] = "short",
    start: int = 0,
    ahead: int = 2,
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None = None,
    key: jax.Array | None = None,
    divergence: Literal["auto", "predicate", "compact", "serial"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    retries: int = 2,
) -> Batches:
    """Applies a function of one row to a dataset, and yields batches of results.

    Example:
      >>> def lengths():
      ...     for n in range(5):
      ...         yield {"x": [n, 2 * n], "weight": 1.0}
      >>> dot = lambda row: jnp.sum(jnp.array(row["x"])) * row["weight"]
      >>> for batch in bx.map_batches(dot, lengths(), batch_size=2):
      ...     print(batch)
      [0. 3.]
      [6. 9.]
      [12.]

    For training loops that use results at once. Later batches are read and computed in the
    background. Row `i` has the same result as in `map`.

    Args:
      fun: A function of one row, as for `vmap`.
      *sources: Arrays with rows, or paths, as for `map`. Or all mapped arguments are streams:
        iterables whose items are rows (pytrees of arrays, numbers, or lists of numbers), such as
        iterators, datasets of Hugging Face and Grain, and with `batched` loaders of PyTorch and
        Grain.
      in_axes: The axis of the rows, as for `vmap`; 0 for streams. None for shared arguments.
      out_axes: The axis of the rows in results, as for `vmap`.
      batch_size: The number of rows of a batch. "auto" (default): the number that fits
        `memory_limit`; for batches of a stream, that of its first.
      memory_limit: Bytes, or a string such as "2GiB". Default: the free memory of the device.
      batched: Whether each item of a stream is a batch, of any size, with rows along axis 0.
      last: Whether a last batch with fewer rows is returned ("short", default) or dropped ("drop").
      start: The number of rows to skip: `Batches.rows` of an earlier loop. Rows of arrays and of
        indexable datasets (``x[i]``) are not read; other rows are taken and dropped.
      ahead: The number of batches that are read, and that are computed, in advance.
      mesh: The devices that a batch is sharded over, as for `vmap`.
      key: A random key. Row `i` gets ``jax.random.fold_in(key, i)``, as for `map`.
      divergence, small_matrices: As for `vmap`.
      retries: How often a failed read is tried again.

    Returns:
      `Batches`: an iterator over results, on the device, with rows along `out_axes`. It can be
      closed, and counts the returned rows.

    Raises:
      ArgumentTypeError: An argument has the wrong type, or items of a stream differ in type.
      AxisError: An axis is out of range, or numbers of rows differ.
      OptionError: An option is an unknown word or a number out of range.
      UnsupportedError: An output is to be reduced, or streams and arrays are mapped together.
      RowError: The function fails for a row; raised at its batch.
      StorageError: A source cannot be read; raised at its batch, as are exceptions of a stream.
    """
    check_callable("map_batches", "a function of one row", fun)
    check_out_axes(out_axes)
    check_batch_size(batch_size)
    check_one_of("last", last, "short", "drop")
    for name, value in (("start", start), ("ahead", ahead), ("retries", retries)):
        check_count(name, value)
    check_flags(batched=batched)
    check_key(fun, key, len(sources))
    check_small_matrices(small_matrices)
    check_in_axes(fun, in_axes)
    start = int(start)
    options = {"divergence": resolved(divergence), "small_matrices": small_matrices}
    options |= {"mesh": of_this_process(mesh)}
    try:
        function = RowFunction.of(fun, sources, in_axes, out_axes, key, options, batched, start)
    except NoRowsError:
        return Batches(None, iter(()), 1, start, int(ahead))
    for output in function.outputs:
        if output.reduces:
            raise UnsupportedError(
                f"out_axes reduces {output.path} over all rows, and map_batches hands out batches. "
                "Use map, or reduce each batch."
            )
    if function.flat:
        raise UnsupportedError(
            "the function returns OutputRows, and a batch of map_batches has one row for each. Use "
            'map with out="y.parquet", or return batchax.compress(...), rows of any length.'
        )
    streams = function.inputs.streams
    if batch_size == "auto":
        batch_size = streams[0].size if batched else fitting(function, memory_limit)
    size = max(1, min(int(batch_size), function.inputs.rows))
    _ = program_of(function, size)  # compiled here, where JAX is set as the caller has it
    if streams:
        read = of_streams(function, size, start, last)
    else:
        read = of_sources(function, size, start, last, int(retries))
    return Batches(function, read, size, start, int(ahead))
