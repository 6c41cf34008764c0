"""Symbolic sizes: how large they may be, and how large they are in each row.

A function of one row is staged with a symbolic leading size such as ``n``. What follows from it
is an expression, ``n - 1`` or ``2*n``. Arrays that hold a row have the *bound* of the
expression; how much of that belongs to the row its *size* says, which is known when rows are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.words import Eqn

is_symbolic = jax.export.is_symbolic_dim

_MOST_COMBINATIONS = 1 << 22  # of lengths that are tried, to see what an expression comes to


@dataclass(frozen=True)
class Limited:
    """A size that a program finds, and how large it may be.

    Attributes:
      called: what found it.
      limit: how large it may be.
      count: how large it is.
    """

    called: str
    limit: int
    count: Any


@dataclass
class Sizes:
    """What the symbols of a program stand for.

    Attributes:
      bounds: the greatest value of each symbol.
      values: its value in the row at hand: an int32 scalar, traced or known.
      exact: symbols whose value is known to be the bound: nothing is padded along those.
      found_of: for each symbol that the program finds, the size that it is at most.
      limited: those of them for which a limit was given.
      again: whether the program may be one that is computed again, and finds what was found.
    """

    bounds: Mapping[str, int]
    values: Mapping[str, Any]
    exact: frozenset[str] = frozenset()
    found_of: Mapping[str, Any] = field(default_factory=dict)
    limited: list[Limited] = field(default_factory=list)
    again: bool = False
    _bounds: dict[Any, int] = field(default_factory=dict)
    _sizes: dict[Any, Any] = field(default_factory=dict)

    def bound(self, dim: Any) -> int:
        """The greatest size that the expression `dim` may have."""
        if not is_symbolic(dim):
            return int(dim)
        if dim not in self._bounds:
            self._bounds[dim] = self._find_bound(dim)
        return self._bounds[dim]

    def find(self, name: str, most: Any, count: Any, limited: Limited | None) -> int:
        """Enters a size that the program has found: `count`, and what it is at most.

        Returns:
          Its bound.
        """
        bound = self.bound(most) if limited is None else min(self.bound(most), limited.limit)
        self.bounds = {**self.bounds, name: bound}
        self.values = {**self.values, name: jnp.minimum(count, bound)}
        self.found_of = {**self.found_of, name: most}
        self.limited += [] if limited is None else [limited]
        return bound

    def _check_has(self, dim: Any) -> None:
        if not _compat.symbols(dim) <= self.bounds.keys():
            raise UnsupportedError(
                f"the size {dim} was found in a loop, a branch or a derivative rule, and is used "
                "outside of it; or it is of another function around this one. Return from there "
                "what does not have that size."
            )

    def _find_bound(self, dim: Any) -> int:
        self._check_has(dim)
        if str(dim) in self.bounds:
            return self.bounds[str(dim)]
        values = self.in_every_row(dim)
        if values is not None:
            return max(int(np.max(values[0])), 0)
        # Sizes too long to try all lengths. An expression that only grows with each symbol is
        # greatest where all of them are; of others nothing is known.
        names = sorted(_compat.symbols(dim))
        falls = "-" in str(dim) and len(names) > 1
        if "floordiv" in str(dim) or "mod" in str(dim) or falls:
            raise UnsupportedError(
                f"the size {dim} depends on ragged sizes of up to "
                f"{', '.join(str(self.bounds[name]) for name in names)}: its greatest value "
                "cannot be found. Give the Ragged a smaller max_length."
            )
        return max(int(_compat.evaluate_size(dim, {n: self.bounds[n] for n in names})), 0)

    def in_every_row(self, *dims: Any) -> list[Any] | None:
        """What `dims` come to in each row there may be; None where those are too many."""
        symbolic = [dim for dim in dims if is_symbolic(dim)]
        names = sorted(frozenset().union(*map(_compat.symbols, symbolic)))
        if math.prod(self.bounds[name] + 1 for name in names) > _MOST_COMBINATIONS:
            return None
        ranges = [np.arange(self.bounds[name] + 1, dtype=np.int64) for name in names]
        values = dict(zip(names, np.meshgrid(*ranges, indexing="ij"), strict=True))
        return [_compat.evaluate_size(dim, values) if is_symbolic(dim) else dim for dim in dims]

    def size(self, dim: Any) -> Any:
        """The size of `dim` in the row at hand: an int, or an int32 scalar; never negative."""
        if not is_symbolic(dim):
            return int(dim)
        if dim not in self._sizes:
            own = self.values.get(str(dim))
            size = jnp.maximum(self.value(dim), 0).astype(np.int32) if own is None else own
            self._sizes[dim] = size
        return self._sizes[dim]

    def value(self, dim: Any) -> Any:
        """What the expression `dim` comes to in the row at hand, as arithmetic."""
        if not is_symbolic(dim):
            return int(dim)
        self._check_has(dim)
        return _compat.evaluate_size(dim, dict(self.values))

    def inside(self, values: Mapping[str, Any] | None = None) -> Sizes:
        """These for a program that is staged within another.

        Sizes computed while that is staged are its tracers, and are not kept for the outer one.
        """
        kept = dict(self._sizes) if values is None else {}
        values = self.values if values is None else values
        return replace(self, values=values, limited=[], _sizes=kept, _bounds=dict(self._bounds))

    def is_exact(self, dim: Any) -> bool:
        """Whether arrays have no padding along a dimension of that size."""
        return not is_symbolic(dim) or _compat.symbols(dim) <= self.exact

    def bounds_of(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """The shape of the array that holds a value of shape `shape`."""
        return tuple(map(self.bound, shape))

    def padded_axes(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """The axes along which such an array may have padding."""
        return tuple(i for i, dim in enumerate(shape) if not self.is_exact(dim))

    def mask(self, shape: Sequence[Any], axes: Sequence[int]) -> Any:
        """Which elements of such an array are within the row along `axes`; None for all."""
        bounds = self.bounds_of(shape)
        mask = None
        for axis in axes:
            if self.is_exact(shape[axis]):
                continue
            places = lax.iota(np.int32, bounds[axis])
            valid = lax.lt(places, jnp.asarray(self.size(shape[axis]), np.int32))
            valid = lax.broadcast_in_dim(valid, bounds, (axis,))
            mask = valid if mask is None else lax.bitwise_and(mask, valid)
        return mask

    def filled_in(self, params: Any) -> Any:
        """Parameters of an equation with each size replaced by its bound."""
        if isinstance(params, dict):
            return {k: self.filled_in(v) for k, v in params.items()}
        if isinstance(params, (tuple, list)):
            plain = type(params) in (tuple, list)
            return type(params)(self.filled_in(v) for v in params) if plain else params
        return self.bound(params) if is_symbolic(params) else params


def _speaks_of_sizes(eqn: Eqn) -> bool:
    atoms = itertools.chain(eqn.invars, eqn.outvars)
    if any(has_symbols(getattr(v.aval, "shape", ())) for v in atoms):
        return True
    return _in_params(eqn.params)


depends_on_sizes = Anywhere(_speaks_of_sizes).in_equation
"""Whether an equation, or a program inside it, speaks of a symbolic size."""


def has_symbols(shape: Sequence[Any]) -> bool:
    """Whether a shape has a symbolic size."""
    return any(map(is_symbolic, shape))


def ragged_axis(shape: Sequence[Any]) -> int | None:
    """Where a shape has its ragged size; it must have one at most."""
    return next((i for i, dim in enumerate(shape) if is_symbolic(dim)), None)


def ragged_axes(shape: Sequence[Any]) -> list[int]:
    """Where a shape has ragged sizes."""
    return [i for i, dim in enumerate(shape) if is_symbolic(dim)]


def _in_params(params: Any) -> bool:
    if isinstance(params, dict):
        return any(map(_in_params, params.values()))
    parts: Any = params if type(params) in (tuple, list) else ()
    return any(map(_in_params, parts)) or (parts == () and is_symbolic(params))
