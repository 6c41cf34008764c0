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
from batchax.divergence.option import resolved
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.frontend.in_axes import check_in_axes, is_position
from batchax.frontend.options import (
    check_callable,
    check_flags,
    check_one_of,
    check_small_matrices,
    translate_argument_names,
)
from batchax.frontend.outputs import check_out_axes
from batchax.jaxprs.spoken import brief


@_compat.api_boundary
@translate_argument_names
def map_batches(
    fun: Callable[..., Any],
    *sources: Any,
    in_axes: Any = 0,
    out_axes: Any = 0,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    batched: bool = False,
    last: Literal["short", "drop"] = "short",
    start: int = 0,
    ahead: int = 2,
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None = None,
    key: Any = None,
    divergence: Literal["auto", "predicate", "compact"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    retries: int = 2,
) -> Batches:
    """Applies a function of one row to rows of a dataset, and hands out results batch after batch.

    So a training loop reads what a map makes, and nothing of it needs a disk. While one batch is
    used, the next ones are read and computed. Row `i` has the result that it has in `map`.

    Args:
      fun: a function of one row, as for `vmap`.
      *sources: arrays with rows, or paths, as for `map`; or all that are mapped are streams:
        whatever Python iterates over, and each item is a row (a tree of arrays, numbers or lists
        of numbers). Iterators, datasets of Hugging Face and of Grain; with `batched` also loaders
        (``torch.utils.data.DataLoader``, ``grain.DataLoader``).
      in_axes: along which axis rows lie, as for `vmap`; None for what all rows share. For
        streams 0.
      out_axes: where the rows of results go, as for `vmap`.
      batch_size: how many rows a batch has; "auto": as many as fit `memory_limit`, and in
        batches of a stream as many as its first has.
      memory_limit: bytes, or a string such as "2GiB"; by default what the device has free.
      batched: whether each item of a stream is a batch, with rows along axis 0 of all arrays. They
        need not have the size of the batches that are handed out.
      last: what becomes of the last batch, if it has fewer rows: "short", or "drop".
      start: how many rows are passed over: what `Batches.rows` said when a loop was ended. Those of
        datasets with numbers (``x[i]``) and of arrays are not read, others are taken and dropped.
      ahead: how many batches are read, and as many computed, before they are asked for.
      mesh: devices to spread a batch over, as for `vmap`.
      key: a random key; row `i` gets ``jax.random.fold_in(key, i)``, as for `map`.
      divergence, small_matrices: as for `vmap`.
      retries: how many times reading an array is tried again if it fails.

    Returns:
      `Batches`: an iterator of what the function returns, with rows along `out_axes`, on the
      device. It can be closed, and says how many rows it has handed out.

    Raises:
      ArgumentTypeError: an argument has the wrong type, or items of a stream are not alike.
      AxisError: an axis is out of range, or numbers of rows differ.
      UnsupportedError: an output is to be reduced, or streams and arrays are mapped together.
      RowError: the function fails for a row; when the batch with it is asked for.
      StorageError: something cannot be read; likewise. What a stream raises is raised likewise.

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
    """
    check_callable("map_batches", "a function of one row", fun)
    check_out_axes(out_axes)
    check_batch_size(batch_size)
    check_one_of("last", last, "short", "drop")
    for name, value, least in (("start", start, 0), ("ahead", ahead, 0), ("retries", retries, 0)):
        if not (is_position(value) and value >= least):
            raise ArgumentTypeError(f"{name} must be a non-negative int, got {brief(value)}.")
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
