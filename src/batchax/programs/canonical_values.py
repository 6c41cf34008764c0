"""What programs in canonical form are made of: nodes, in a table, and values that see them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from batchax import _compat
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import Aval, Eqn, Value

LEAVES = frozenset({"argument", "constant", "captured", "carried", "shard", "result", "effect"})
"""Names of nodes that are no operations: where values enter, and results of several."""


@dataclass(frozen=True)
class CanonicalValue:
    """A value of a program: dimension `d` is axis `axes[d]` of the node.

    Where that is None, the value is the same at each of the `shape[d]` places. Every axis of
    the node is seen once.
    """

    node: int
    axes: tuple[int | None, ...]
    shape: tuple[Any, ...]
    eqn: Eqn | None = field(default=None, compare=False, repr=False)

    def see(self, dims: Sequence[int | None], shape: Sequence[Any], eqn: Eqn) -> CanonicalValue:
        """This value with its dimensions `dims`; where one is None, it is broadcast."""
        axes = tuple(
            None if d is None or size == 1 else self.axes[d]
            for d, size in zip(dims, shape, strict=True)
        )
        return CanonicalValue(self.node, axes, tuple(shape), eqn)


@dataclass(frozen=True)
class Node:
    """An operation of the canonical form; `reads` are the numbers of the nodes it needs."""

    name: str
    params: Hashable
    refs: tuple[Hashable, ...]
    reads: tuple[int, ...]
    shape: tuple[Any, ...]
    dtype: Any


class Table:
    """The nodes of all programs that are compared with each other, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._arrays: dict[Hashable, list[Any]] = {}  # by dtype and shape, the large constants

    def number(self, node: Node) -> int:
        """The number of this node, a new one if there is none like it."""
        n = self._numbers.setdefault(node, len(self.nodes))
        if n == len(self.nodes):
            self.nodes.append(node)
        return n

    def contents(self, x: Value) -> Hashable:
        """A key equal for arrays that hold the same."""
        if isinstance(x, Tracer) or _compat.is_reference(x):
            return value_key(x)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(jax.random.key_impl(x)), self.contents(jax.random.key_data(x))
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        kind = x.dtype, x.shape
        if x.nbytes <= _SMALL:
            return *kind, np.asarray(x).tobytes()
        # Few are of one shape, and to compare two of them takes less than to digest one. Most are
        # the same object in all programs.
        alike = self._arrays.setdefault(kind, [])
        same = (k for k, other in enumerate(alike) if x is other or _same_bytes(x, other))
        number = next(same, len(alike))
        if number == len(alike):
            alike.append(x)
        return *kind, number


_SMALL = 1024  # bytes of an array that is part of its key; larger ones are compared


def _same_bytes(x: Value, y: Value) -> bool:
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (x, y))
    return np.array_equal(a, b)


def whole(node: int, shape: Sequence[Any]) -> CanonicalValue:
    """A node seen as it is, with the axes of size one that it leaves out."""
    count, axes = 0, []
    for size in shape:
        axes.append(None if size == 1 else count)
        count += size != 1
    return CanonicalValue(node, tuple(axes), tuple(shape))


def without_ones(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The sizes that are not one: the shape of a node."""
    return tuple(s for s in shape if s != 1)


def typed(aval: Aval) -> tuple[tuple[Any, ...], Any]:
    """Shape and dtype of a type; types of other things than arrays count as dtypes."""
    if hasattr(aval, "dtype") and not hasattr(aval, "inner_aval"):
        return tuple(aval.shape), aval.dtype
    return (), value_key(aval)


def is_placed(sharding: Any) -> bool:
    """Whether a sharding says anything of a type: only axes of type Explicit are in types."""
    types = getattr(getattr(sharding, "mesh", None), "axis_types", (AxisType.Explicit,))
    return sharding is not None and AxisType.Explicit in types
