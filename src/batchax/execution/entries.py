"""Entries of an array along one of its axes, by numbers that are known when the program runs."""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax.jaxprs.words import Value


def entry_of(x: Value, t: Any, axis: int) -> Any:
    """Entry `t` along an axis."""
    return lax.dynamic_index_in_dim(x, t, axis, keepdims=False, allow_negative_indices=False)


def put_entry(array: Value, entry: Any, t: Any, axis: int) -> Any:
    """`array` with another entry `t` along an axis."""
    return lax.dynamic_update_index_in_dim(array, entry, t, axis, allow_negative_indices=False)
