"""The specs of operands and results of a chunk loop: what one chunk sees of each, or adds to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import mapped_aval, unmapped_aval

from batchax.frontend import reducing
from batchax.frontend.reduction import Reduction
from batchax.jaxprs.words import Aval, Value


@dataclass(frozen=True)
class Whole:
    """An operand that each chunk sees as it is."""


@dataclass(frozen=True)
class Lanes:
    """A value with all lanes along `axis`, of which each chunk has its own."""

    axis: int


@dataclass(frozen=True)
class PerChunk:
    """A value with one entry for each chunk along `axis`."""

    axis: int


@dataclass(frozen=True)
class Sum:
    """A result added up over the chunks. Floats of fewer than 32 bits are added up in float32."""


@dataclass(frozen=True)
class Extreme:
    """The "max" or "min" over all lanes. Each chunk returns its lanes along `axis`."""

    kind: str
    axis: int


@dataclass(frozen=True)
class Combined:
    """An array of the state of a reduction, which is combined with that of each chunk in turn.

    The arrays of a state are results one after another.

    Attributes:
      reduction: which one.
      structure: of a state.
      number: of this array in it.
      neutral: what it is before the first chunk.
      outer: how many axes of outer vmaps come first.
    """

    reduction: Reduction
    structure: Any
    number: int
    neutral: Any
    outer: int = 0

    def combined(self, one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        """The arrays of the state of both."""
        return self._arrays(functools.partial(reducing.combined, self.reduction), 0, one, other)

    def folded(self, parts: Sequence[Any]) -> list[Any]:
        """The arrays of the state of all parts, which are along axis 0."""
        return self._arrays(functools.partial(reducing.folded, self.reduction), 1, parts)

    def _arrays(self, function: Callable[..., Any], axis: int, *states: Sequence[Any]) -> list[Any]:
        for _ in range(self.outer):
            function = jax.vmap(function, axis)
        state = function(*(jax.tree.unflatten(self.structure, x) for x in states))
        types = [x.dtype for x in states[0]]
        return list(map(lax.convert_element_type, jax.tree.leaves(state), types))


def of_states(
    specs: Sequence[Any], xs: Sequence[Value], function: Callable[[Combined, slice], Sequence[Any]]
) -> list[Any]:
    """`xs`, with what `function` makes of those that are arrays of a state, given their places."""
    xs = list(xs)
    for k, spec in enumerate(specs):
        if isinstance(spec, Combined) and not spec.number:
            places = slice(k, k + spec.structure.num_leaves)
            xs[places] = function(spec, places)
    return xs


@dataclass(frozen=True)
class ActiveMask:
    """A mask: for each lane, whether the loop runs for it. Always the first operand.

    It may be of integers, which say how long a lane takes: lanes that take about as long are in
    the same chunk, those of 0 in none.

    A chunk sees which of its lanes count. The last chunk may not be full: in place of each lane
    that it lacks it runs its first lane again, which does not count there.

    Attributes:
      most: the width of a chunk where there are many lanes. The loop's `chunk` was chosen from
        it, and may be narrower. Under an outer vmap there are more lanes, and it is chosen
        again. None: `chunk` stays as it is, however many lanes there are.
      first: whether it is known that the lanes which the loop runs for come before all others, so
        that nothing has to find them. A mask of both axes under an outer vmap is not such a one.
    """

    most: int | None = None
    first: bool = False


@dataclass(frozen=True)
class Gathered:
    """A value with all lanes along `axis`, of which a chunk sees those that are gathered for it.

    In a result, the entries of lanes that the mask leaves out are zero.
    """

    axis: int


@dataclass(frozen=True)
class GatheredOrZero:
    """An operand as `Gathered`, but zero in the lanes of a chunk that do not count.

    Cotangents have this spec: a lane that stands in for a missing one adds nothing.
    """

    axis: int


Operand = Whole | Lanes | PerChunk | ActiveMask | Gathered | GatheredOrZero
Result = Lanes | PerChunk | Sum | Extreme | Combined | Gathered

WHOLE, SUM = Whole(), Sum()


def cotangent_spec(spec: Operand) -> Result:
    """The spec of the cotangent of an operand, as a result of the loop in reverse mode."""
    match spec:
        case Whole():
            return SUM
        case GatheredOrZero(axis):
            return Gathered(axis)
        case _:
            assert not isinstance(spec, ActiveMask)
            return spec


def resized(aval: Aval, axis: int, size: int) -> Any:
    """An array type with another size along `axis`. That axis is not sharded any more."""
    return unmapped_aval(size, axis, mapped_aval(aval.shape[axis], axis, aval))
