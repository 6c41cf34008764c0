"""`gather`: what is spread over devices of several processes, as arrays of NumPy."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import OptionError, UnsupportedError
from batchax.execution.devices.meetings import of_this_process
from batchax.execution.devices.processes import from_all
from batchax.frontend.options import is_word, not_one_of
from batchax.jaxprs.types import Tree

_BLOCK = 64 * 2**20  # bytes that all processes together send at a time


@_compat.api_boundary
def gather(tree: Tree, to: Literal["all"] | int = "all") -> Tree:
    """Copies arrays to the host, also those that are sharded over several processes.

    Example:
      >>> losses = bx.vmap(jnp.square, mesh="all")(jnp.arange(4))
      >>> bx.gather(losses).tolist()
      [0, 1, 4, 9]

    Results of ``vmap(..., mesh=)`` stay on their devices, where ``np.asarray`` cannot read those of
    other processes. This is a collective: all processes must call it, in the same order. Devices
    send a block at a time, and nothing that the process can already read.

    Args:
      tree: A pytree. Leaves that are not a ``jax.Array`` are returned unchanged.
      to: "all", or the index of the one process that receives it.

    Returns:
      The pytree with NumPy arrays; random keys stay key arrays. None on other processes.

    Raises:
      ArgumentTypeError: `to` is neither.
      OptionError: `to` is another word, or not the index of a process.
      ProcessesError: The processes do not all make the same call.
      UnsupportedError: An array is traced.
    """
    count = jax.process_count()
    if not is_word(to, "all"):
        if isinstance(to, bool) or not isinstance(to, (int, np.integer)):
            raise not_one_of("gather: to", to, "all", other="the index of a process")
        if not 0 <= to < count:
            raise OptionError(f"gather: to={to}, but the processes are 0 to {count - 1}.")
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(x, Tracer) for x in leaves):
        raise UnsupportedError(
            "gather: an array is traced, and has no values to be brought anywhere yet. Call it "
            "outside of jit, on what the function returned."
        )
    keep = is_word(to, "all") or to == jax.process_index()
    sent = [x for x in leaves if isinstance(x, jax.Array) and not _is_here(x)]
    text = "\n".join([f"to: {to}", *(f"{x.dtype}{list(x.shape)}" for x in sent)])
    with of_this_process().call("gather", text) if sent else contextlib.nullcontext():
        gathered = [_gathered(x, keep) if isinstance(x, jax.Array) else x for x in leaves]
    return jax.tree.unflatten(structure, gathered) if keep else None


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def _gathered(x: jax.Array, keep: bool) -> np.ndarray | jax.Array | None:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        data = _gathered(jax.random.key_data(x), keep)
        return (
            jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
            if keep
            else None
        )
    if _is_here(x):
        return np.asarray(x) if keep else None
    # Of each part of the array one device sends it; all processes know which.
    parts: dict[Any, Any] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        parts.setdefault(tuple(s.indices(n) for s, n in zip(index, x.shape, strict=True)), device)
    sent: list[list[Any]] = [[] for _ in range(jax.process_count())]
    for place, device in parts.items():
        sent[device.process_index].append((tuple(slice(*s) for s in place), device))
    own = {shard.device: shard.data for shard in x.addressable_shards}
    shape = x.sharding.shard_shape(x.shape)
    row = x.dtype.itemsize * int(np.prod(shape[1:])) * len(sent)
    rows = max(1, _BLOCK // max(row, 1))
    out = np.empty(x.shape, x.dtype) if keep else None
    for turn in range(max(map(len, sent))):
        mine = sent[jax.process_index()][turn:][:1]
        data = np.asarray(own[mine[0][1]]) if mine else np.zeros(shape, x.dtype)
        for start in range(0, shape[0], rows):
            block = from_all(data[start : start + rows])
            for process, places in enumerate(sent):
                if out is not None and turn < len(places):
                    out[places[turn][0]][start : start + rows] = block[process]
    return out
