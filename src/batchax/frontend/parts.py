"""What a value is made of, where its type or its axis specification has its own idea of that.

To the front end a key for each lane, a tile of an array, a container of the user's and a sparse
matrix of JAX's are one thing: *parts*, each with a specification of its own, and a way to make the
whole of them. Parts are arrays, or values that have parts in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.words import Value


@dataclass(frozen=True)
class Parts:
    """What a value is made of.

    Attributes:
      values: its parts: those of an argument are of all lanes, those of an output of one lane.
      specs: what `in_axes`, or `out_axes`, says of each.
      join: makes the whole again, of what the parts have become meanwhile: an argument of those
        of one lane, an output of those of all lanes.
      names: what messages call each part; by default as the whole, and numbered if there are
        several.
    """

    values: Sequence[Value]
    specs: Sequence[Any]
    join: Callable[[Sequence[Any]], Any]
    names: Sequence[str] = ()

    def named(self, path: str) -> list[tuple[str, Any, Any]]:
        """Of each part its name in messages, where `path` is that of the whole; value; spec."""
        many = len(self.values) > 1
        numbered = [f"{path} (array {i})" if many else path for i in range(len(self.values))]
        return list(zip(self.names or numbered, self.values, self.specs, strict=True))


class AxisSpec:
    """Base of kinds of axis, in `in_axes` and `out_axes`, that say what a value is made of.

    A kind of axis for arguments alone, or for outputs alone, overrides one of the methods.
    """

    def of_argument(self, value: Value, path: str) -> Parts:
        """What an argument is made of, for which `in_axes` gives this."""
        raise ArgumentTypeError(
            f"in_axes gives {self!r} for {path}: that kind of axis is for outputs, in out_axes."
        )

    def of_output(self, value: Value, path: str, size: Any) -> Parts:
        """What an output of one of `size` lanes is made of, for which `out_axes` gives this."""
        raise ArgumentTypeError(
            f"out_axes gives {self!r} for {path}: that kind of axis is for arguments, in in_axes."
        )


class _LaneIndex:
    """The type of `LANE_INDEX`."""

    def __repr__(self) -> str:
        return "the index of the lane"


LANE_INDEX = _LaneIndex()
"""A part that is the index of a lane: an int32 scalar. Its axis is 0."""
