"""What shards compute, for all lanes: sums, extremes and chunks of all shards, on each of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.execution.chunk_results import of_only_chunk
from batchax.execution.devices.shards import Shards
from batchax.execution.operand_specs import Combined, Extreme, PerChunk, Result, Sum, of_states
from batchax.jaxprs.neutral import NEUTRAL, accumulator
from batchax.jaxprs.words import Value
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose


def combined(
    shards: Shards, kinds: Sequence[Result], xs: Sequence[Value], returned: Sequence[bool]
) -> list[Any]:
    """Inside: results of a chunk loop for all lanes, from those for each shard's.

    `returned`: which are results of all shards, and nothing else is made of them.
    """
    sums = [i for i, kind in enumerate(kinds) if isinstance(kind, Sum) and returned[i]]
    summed = dict(zip(sums, _summed(shards, [xs[i] for i in sums]), strict=True))
    of_all = [
        summed[i] if i in summed else _combined(shards, kind, x)
        for i, (kind, x) in enumerate(zip(kinds, xs, strict=True))
    ]
    return of_states(kinds, of_all, lambda spec, places: spec.folded(of_all[places]))


def _combined(shards: Shards, kind: Result, x: Value) -> Any:
    match kind:
        case Sum():
            return lax.psum(x, shards.names)
        case Extreme():
            return _extreme(shards, kind, x)
        case PerChunk(axis):
            return shards.gathered(x, axis)
        case Combined():
            return shards.gathered(x[None], 0)
        case _:
            return x


def _summed(shards: Shards, xs: Sequence[Value]) -> Sequence[Any]:
    """Sums over shards that each of them returns.

    Of such a result JAX gives each shard an equal share of the cotangent. The transpose of
    ``lax.psum`` would add these shares up, by an exchange; they are known to be equal.
    """

    def ahead(_: Any, xs: Sequence[Value]) -> list[Any]:
        return list(lax.psum(tuple(xs), shards.names))

    def back(_: Any, shares: Sequence[Any]) -> list[Any]:
        return [x * np.asarray(shards.count, x.dtype) for x in shares]

    if not all(map(is_inexact, xs)):
        parts = [[x for x in xs if is_inexact(x) == inexact] for inexact in (True, False)]
        inexact, exact = iter(_summed(shards, parts[0])), iter(ahead((), parts[1]))
        return [next(inexact) if is_inexact(x) else next(exact) for x in xs]
    key = "sums over shards", shards.names, shards.count
    return linear_with_transpose(ahead, back, [], xs, key) if xs else []


def _extreme(shards: Shards, kind: Extreme, x: Value) -> Any:
    """The extreme of all shards' extremes: NaN if one of them is.

    An all-reduce may drop NaN (on CPUs it does), so whether there is one is exchanged beside
    the numbers. Of complex numbers and truth values not all devices have one: these are
    gathered.
    """
    truth_or_complex = x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating)
    if truth_or_complex:
        return _gathered_extreme(shards, kind, x)
    exchange, missing = (lax.pmax, 1) if kind.kind == "max" else (lax.pmin, -1)

    @jax.custom_jvp
    def extreme(x: Value) -> Any:
        if not is_inexact(x):
            return exchange(x, shards.names)
        wide = x.astype(accumulator(x.dtype))
        marks = jnp.where(jnp.isnan(wide), missing, 0).astype(wide.dtype)
        number = jnp.where(marks != 0, NEUTRAL[kind.kind](wide.dtype), wide)
        number, marks = exchange(jnp.stack([number, marks]), shards.names)
        return jnp.where(marks != 0, np.nan, number).astype(x.dtype)

    @extreme.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Only where all shards' values are in one array it is known which of them are equal: a
        # compiler may compute what it compares anew, with another last bit.
        return jax.jvp(functools.partial(_gathered_extreme, shards, kind), primals, tangents)

    return extreme(x)


def _gathered_extreme(shards: Shards, kind: Extreme, x: Value) -> Any:
    return of_only_chunk(shards.gathered(x[None], 0), replace(kind, axis=0))
