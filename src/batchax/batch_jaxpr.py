"""`batch_jaxpr`: the engine without a front door, for authors of interpreters and rules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.arguments import check_axis_size, count, is_position
from batchax.frontend.outputs import AUTO
from batchax.kernel.axis import Axis
from batchax.kernel.inner import ANYWHERE, batch_inner


def batch_jaxpr(
    closed_jaxpr: _compat.ClosedJaxpr,
    axis_size: int,
    in_axes: Sequence[int | None] | int | None,
    out_axes: Any = AUTO,
    axis_name: Hashable | None = None,
) -> tuple[_compat.ClosedJaxpr, tuple[int | None, ...]]:
    """Batches a closed jaxpr.

    Args:
      closed_jaxpr: a per-example program, as ``jax.make_jaxpr`` returns it.
      axis_size: number of lanes.
      in_axes: for each input, or one for all, the non-negative position of its
        batch axis, or None for an input that is the same in every lane.
      out_axes: for each output, or one for all, an int or ``batchax.AUTO``. AUTO
        leaves an output where the program makes it: unbatched if it does
        not depend on the batch, and at any position otherwise.
      axis_name: the name that collectives in the program use for the axis.

    Returns:
      The batched program, and where each of its outputs carries the batch axis
      (None for an output that does not depend on the batch).

    Raises:
      ArgumentTypeError: the first argument is not a closed jaxpr, or `axis_size`
        is not a size.
      AxisError: `in_axes` or `out_axes` does not fit the program.
    """
    if not isinstance(closed_jaxpr, _compat.ClosedJaxpr):
        raise ArgumentTypeError(
            "batch_jaxpr expects a closed jaxpr, as jax.make_jaxpr(f)(*args) returns it, got "
            f"{type(closed_jaxpr).__name__}."
        )
    check_axis_size(axis_size, required=True)
    in_axes = _positions("in_axes", in_axes, closed_jaxpr.in_avals, None)
    out_axes = _positions("out_axes", out_axes, closed_jaxpr.out_avals, AUTO)
    wanted = [ANYWHERE if p is AUTO else p for p in out_axes]
    return batch_inner(Axis(axis_size, axis_name), closed_jaxpr, in_axes, wanted)


def _positions(what: str, given: Any, avals: Sequence[Any], unplaced: Any) -> list[Any]:
    """A position, or `unplaced`, for each value."""
    if given is unplaced or is_position(given):
        given = [given] * len(avals)
    elif not isinstance(given, (tuple, list)):
        raise ArgumentTypeError(
            f"{what} must be an int, {unplaced!r}, or a tuple or list of those; got {given!r}."
        )
    if len(given) != len(avals):
        raise AxisError(
            f"{what} has {count(len(given), 'entry', 'entries')} for "
            f"{count(len(avals), 'value')}: give one for each."
        )
    positions = []
    for i, (position, aval) in enumerate(zip(given, avals, strict=True)):
        ndim = len(aval.shape)
        if position is not unplaced and not (is_position(position) and 0 <= position <= ndim):
            raise AxisError(
                f"{what}[{i}] is {position!r}: give an int in [0, {ndim}] for a value that has "
                f"shape {aval.shape} per example, or {unplaced!r}."
            )
        positions.append(position if position is unplaced else int(position))
    return positions
