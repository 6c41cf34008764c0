"""Options that `map` and `map_batches` share."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.in_axes import is_position
from batchax.frontend.options import is_word
from batchax.jaxprs.spoken import brief, name_of


def check_batch_size(batch_size: Any) -> None:
    """Refuses what is no number of rows, nor "auto"."""
    if not is_word(batch_size, "auto") and not (is_position(batch_size) and batch_size > 0):
        raise AxisError(f'batch_size must be a positive int or "auto", got {brief(batch_size)}.')


def of_this_process(mesh: Any) -> Any:
    """A mesh of devices of this process alone."""
    if isinstance(mesh, str) and mesh == "all" and jax.process_count() > 1:
        return jax.sharding.Mesh(jax.local_devices(), ("devices",))
    if getattr(mesh, "is_multi_process", False):
        raise UnsupportedError(
            "mesh has devices of several processes, and each process that calls this does the "
            "whole dataset. Give a mesh of this process's own: jax.local_devices()."
        )
    return mesh


def check_key(fun: Callable[..., Any], key: Any, count: int) -> None:
    """Refuses a `key` that is not one random key, or that the function has no parameter for."""
    if key is None:
        return
    try:
        single = jax.random.key_data(key).ndim == 1
    except TypeError:
        single = False
    if not single:
        raise ArgumentTypeError(
            f"key must be one random key, of which each row gets its own, as jax.random.key(0) "
            f"makes it; got {brief(key)}."
        )
    with contextlib.suppress(ValueError):  # no signature
        parameters = inspect.signature(fun).parameters.values()
        kinds = [p.kind for p in parameters]
        if len(kinds) <= count and inspect.Parameter.VAR_POSITIONAL not in kinds:
            name = name_of(fun)
            raise ArgumentTypeError(
                f"key is given, and {name} has no parameter for the key of a row beside those for "
                f"its {count} arrays: it comes first, or is called key."
            )
