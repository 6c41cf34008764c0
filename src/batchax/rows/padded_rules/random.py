"""Random keys and bits: each row gets exactly what it would get alone.

A counter-based generator makes each element from the key and the place of the element in the
whole, counted through. That place is the same for a padded row as long as only the first axis
is padded; where others are, the elements are drawn in one line and taken from there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule

_COUNTED = {"threefry2x32"}


@padded_rule("random_wrap", "random_unwrap", "random_clone", "random_seed", "random_fold_in")
def _each(op: Operation, *rows: Row, **params: Any) -> Any:
    return op.bind(*(row.value for row in rows))


@padded_rule("random_bits", "random_split")
def _drawn(op: Operation, keys: Row, *, shape: Any, **params: Any) -> Any:
    _check(op, keys)
    if not _padded_behind(op, shape):
        return op.bind(keys.value)
    count = functools.reduce(operator.mul, shape, 1)
    line = op.bind(keys.value, shape=(op.sizes.bound(count),))
    bounds, at = op.sizes.bounds_of(shape), jnp.asarray(0, np.int32)
    for axis, dim in enumerate(shape):
        places = lax.broadcasted_iota(np.int32, bounds, axis)
        at = at * jnp.asarray(op.sizes.size(dim), np.int32) + places
    return jnp.take(line, at, axis=len(keys.shape), mode="clip")


@padded_rule("random_gamma")
def _gamma(op: Operation, keys: Row, a: Row, **params: Any) -> Any:
    _check(op, keys)
    if _padded_behind(op, a.shape[len(keys.shape) :]):
        raise op.refuse(
            f"it draws an array of shape ({', '.join(map(str, a.shape))}), ragged behind the first "
            "axis. Draw an array whose first axis is the ragged one, and transpose it."
        )
    # It samples until a draw is accepted, which none ever is for a NaN.
    return op.bind(keys.value, op.filled(a, 1))


def _padded_behind(op: Operation, shape: Sequence[Any]) -> bool:
    """Whether an array of that shape has padding between its elements."""
    return any(axis > 0 for axis in op.sizes.padded_axes(shape))


def _check(op: Operation, keys: Row) -> None:
    """Refuses generators of which it is not known that elements are counted through."""
    impl = jax.random.key_impl(keys.value)
    counted = getattr(jax.config, "jax_threefry_partitionable", True)
    name = impl if isinstance(impl, str) else str(impl)
    if name not in _COUNTED:
        raise op.refuse(
            f"with keys of the implementation {name} what a row draws depends on how much it "
            "draws. Use keys of 'threefry2x32', the default of jax.random.key."
        )
    if not counted:
        raise op.refuse(
            "with jax_threefry_partitionable switched off what a row draws depends on how much it "
            "draws. Switch it on, as it is by default."
        )
