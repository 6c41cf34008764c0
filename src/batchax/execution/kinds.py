"""Of which kinds the operands and results of a chunk loop are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend.core import mapped_aval, unmapped_aval


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
    """A result added up over the chunks, in float32 if it has less precision."""


@dataclass(frozen=True)
class Extreme:
    """The "max" or "min" over all lanes, which are along `axis` of each chunk's result."""

    kind: str
    axis: int


@dataclass(frozen=True)
class Live:
    """The first operand of a loop over some lanes: for each lane, whether it is one of them.

    A chunk sees which of its lanes count: where there are too few, the first stands in.

    Attributes:
      most: how many lanes make a chunk where there are plenty; None: always those the loop
        says.
    """

    most: int | None = None


@dataclass(frozen=True)
class Picked:
    """A value with all lanes along `axis`, of which a chunk has those that were picked for it.

    Of a result, entries of lanes that were not picked are zero.
    """

    axis: int


@dataclass(frozen=True)
class PickedOrZero:
    """An operand as `Picked`, but zero in the lanes of a chunk that do not count."""

    axis: int


Operand = Whole | Lanes | PerChunk | Live | Picked | PickedOrZero
Result = Lanes | PerChunk | Sum | Extreme | Picked

WHOLE, SUM = Whole(), Sum()


def cotangent_kind(kind: Operand) -> Result:
    """The kind of the cotangent of an operand."""
    match kind:
        case Whole():
            return SUM
        case PickedOrZero(axis):
            return Picked(axis)
        case _:
            assert not isinstance(kind, Live)
            return kind


def resized(aval: Any, axis: int, size: int) -> Any:
    """An array type with another size along `axis`, which is then not sharded."""
    return unmapped_aval(size, axis, mapped_aval(aval.shape[axis], axis, aval))
