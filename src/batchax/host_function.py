"""`host_function`: a Python function that runs on the host, for one lane or many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, cast

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.batched import Batched
from batchax.frontend.options import check_callable, check_count, wraps
from batchax.jaxprs.types import Tree, Value, Values

P = ParamSpec("P")


@_compat.api_boundary
def host_function(
    fun: Callable[P, Any], out_type: Tree, *, threads: int = 1
) -> Batched[P, Any, Any]:
    """Makes a Python function of one example callable from JAX, over any batch.

    Example:
      >>> import math
      >>> gamma = bx.host_function(math.gamma, jax.ShapeDtypeStruct((), jnp.float32), threads=4)
      >>> print(bx.vmap(gamma)(jnp.arange(1.0, 6.0)))
      [ 1.  1.  2.  6. 24.]

    For libraries that compute outside of JAX (NumPy, SciPy, a simulator). For a batch, the host is
    called once (``jax.pure_callback``), and `fun` for each lane, in order or in threads. Threads
    help where `fun` waits or releases Python's lock, as most compiled libraries do.

    Args:
      fun: A pure function of NumPy arrays for one example, which returns arrays or numbers of
        `out_type`.
      out_type: A pytree of ``jax.ShapeDtypeStruct`` or of arrays like the results; or a function of
        the arguments that returns one.
      threads: The number of lanes that run at a time.

    Returns:
      A function of pytrees of arrays. It has no derivative; add one with
      ``custom_vmap(...).def_jvp`` or `def_vjp`, or ``jax.custom_jvp``.

    Raises:
      ArgumentTypeError: (a TypeError) `fun` is not callable, `threads` is not an int, or `out_type`
        has a dtype that is not one of numbers.
      AxisError: (a ValueError) a result does not have the structure or shape of `out_type`, which
        JAX reports with its own type.
      OptionError: (a ValueError) `threads` is less than one.

    References:
      JAX issue 24756.
    """
    check_callable("host_function", "a function of one example", fun)
    check_count("threads", threads, 1)

    @wraps(fun)
    @_compat.api_boundary
    def on_host(*args: Any) -> Tree:
        # A model is a pytree of types that may be called.
        called = callable(out_type) and jax.tree_util.all_leaves([out_type])
        out_types = out_type(*args) if called else out_type
        out_types = jax.tree.map(_type, out_types)
        ranks = [np.ndim(x) for x in jax.tree.leaves(args)]
        on_batch = functools.partial(_on_lanes, fun, threads, ranks, out_types)
        return jax.pure_callback(on_batch, out_types, *args, vmap_method="expand_dims")

    # Parameters that are not given are up to the function alone. From 2.4 on NumPy's functions have
    # a signature among their attributes, once it has been read.
    for says_parameters in ("__wrapped__", "__signature__"):
        vars(on_host).pop(says_parameters, None)
    return cast(Any, on_host)


def _type(x: Value) -> jax.ShapeDtypeStruct:
    t = x if hasattr(x, "dtype") else jax.typeof(x)
    if not (jnp.issubdtype(t.dtype, np.number) or t.dtype == bool):
        raise ArgumentTypeError(
            f"out_type of host_function has the dtype {t.dtype}. The host returns numbers and "
            "truth values: pass one of their dtypes, for random keys that of jax.random.key_data."
        )
    return jax.ShapeDtypeStruct(t.shape, t.dtype)


def _on_lanes(
    fun: Callable[..., Any], threads: int, ranks: Sequence[int], out_types: Tree, *args: Any
) -> Tree:
    """`fun` for each lane of arguments with any number of batch axes in front."""
    leaves, structure = jax.tree.flatten(args)
    leaves = [np.asarray(x) for x in leaves]
    fronts = [x.shape[: x.ndim - rank] for x, rank in zip(leaves, ranks, strict=True)]
    batch = np.broadcast_shapes(*fronts)
    leaves = [
        np.broadcast_to(x, batch + x.shape[len(front) :])
        for x, front in zip(leaves, fronts, strict=True)
    ]
    types, out_structure = jax.tree.flatten(out_types)
    outs = [np.empty(batch + t.shape, t.dtype) for t in types]

    def run(lane: tuple[int, ...]) -> None:
        try:
            result = fun(*jax.tree.unflatten(structure, [x[lane] for x in leaves]))
            _store(fun, outs, lane, result, out_structure)
        except Exception as error:
            if lane:
                error.add_note(f"batchax: raised for lane {lane[0] if len(lane) == 1 else lane}.")
            raise

    if threads == 1:
        for lane in np.ndindex(batch):
            run(lane)
    else:
        with ThreadPoolExecutor(threads) as pool:
            _finish(pool.map(run, np.ndindex(batch)))
    return jax.tree.unflatten(out_structure, outs)


def _store(
    fun: Callable[..., Any],
    outs: Values,
    lane: tuple[int, ...],
    result: Tree,
    structure: object,
) -> None:
    name = getattr(fun, "__name__", "the function")
    leaves, got = jax.tree.flatten(result)
    if got != structure:
        raise AxisError(f"{name} must return what has the structure {structure}, but it was {got}.")
    for out, x in zip(outs, leaves, strict=True):
        expected = out.shape[len(lane) :]
        if np.shape(x) != expected:
            raise AxisError(
                f"{name} must return an array of shape {expected}, but it was {np.shape(x)}. "
                "Is out_type what it returns for one example?"
            )
        out[lane] = x


def _finish(results: Iterator[Value]) -> None:
    for _ in results:  # raises what a lane raised
        pass
