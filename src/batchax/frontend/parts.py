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
    """In the place of an array that a container is made of: the index of each lane.

    What `to_arrays` of `register_container` returns may have it, with axis 0. What `to_example` is
    then given is an int32 scalar: 0 in the first lane, whatever the chunks or the mesh that it runs
    in. How many lanes there are, arrays say, or ``axis_size``.

    Example:
      >>> class Grid:  # points from `start`, a step apart, which nobody stores
      ...     def __init__(self, start, step, size):
      ...         self.start, self.step, self.size = start, step, size
      >>> bx.register_container(
      ...     Grid,
      ...     to_arrays=lambda g, axis: ([jnp.zeros(g.size), bx.LANE_INDEX], [0, 0]),
      ...     to_example=lambda g, axis, arrays: g.start + g.step * arrays[1],
      ...     from_example=lambda g, axis: [],
      ...     to_batch=lambda g, axis, arrays: g,
      ... )
      >>> print(bx.vmap(lambda x: x**2)(Grid(1.0, 0.5, 4)))
      [1.   2.25 4.   6.25]
    """

    def __repr__(self) -> str:
        return "batchax.LANE_INDEX"


LANE_INDEX = _LaneIndex()
