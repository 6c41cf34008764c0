"""`batch_jaxpr`: batches a jaxpr directly, for authors of interpreters and rules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.arguments import check_axis_name, check_axis_size, mesh_axis_names
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import AUTO
from batchax.jaxprs.error_format import brief, count
from batchax.jaxprs.types import Aval, AxesTree, ClosedJaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.inner import ANYWHERE, ZERO_IF_MAPPED, batch_inner


@_compat.api_boundary
def batch_jaxpr(
    closed_jaxpr: ClosedJaxpr,
    axis_size: int | None,
    in_axes: Sequence[int | None] | int | None,
    out_axes: AxesTree = AUTO,
    axis_name: Hashable | None = None,
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> tuple[ClosedJaxpr, tuple[int | None, ...]]:
    """Batches a closed jaxpr.

    Example:
      >>> program = jax.make_jaxpr(lambda w, x: w @ x)(jnp.ones((2, 3)), jnp.ones(3))
      >>> batched, out_axes = bx.batch_jaxpr(program, axis_size=8, in_axes=(None, 0))
      >>> [x.shape for x in batched.in_avals], out_axes
      ([(2, 3), (8, 3)], (1,))

    Args:
      closed_jaxpr: A jaxpr over one example, from ``jax.make_jaxpr``.
      axis_size: The number of lanes. None: a symbolic dimension, as ``jax.export`` uses for
        arguments of any size.
      in_axes: The position of the batch axis of each input, or one for all. None for a shared
        input.
      out_axes: For each output, or one for all,

        - an int: the position of the batch axis.
        - ``batchax.AUTO`` (default): any position, or none if the output does not depend on the
          batch.
        - ``batchax.ZERO_IF_MAPPED``: 0, or none if the output does not depend on the batch.
        - None: the output must not depend on the batch.
      axis_name: The name that collectives in the jaxpr use for the axis.
      spmd_axis_name: The name or names of the mesh axis that the batch axis is sharded over. It is
        added to the sharding annotations inside the jaxpr.

    Returns:
      The batched jaxpr, and the position of the batch axis of each output, or None.

    Raises:
      ArgumentTypeError: The first argument is not a closed jaxpr, or `axis_size` is not a size.
      AxisError: `in_axes` or `out_axes` does not fit the jaxpr, or an output with axis None depends
        on the batch.
    """
    if not isinstance(closed_jaxpr, ClosedJaxpr):
        raise ArgumentTypeError(
            "batch_jaxpr expects a closed jaxpr, as jax.make_jaxpr(f)(*args) returns it, got "
            f"{type(closed_jaxpr).__name__}."
        )
    check_axis_size(axis_size)
    check_axis_name(axis_name)
    size = _any_size(closed_jaxpr) if axis_size is None else axis_size
    spmd_axis_name = mesh_axis_names(spmd_axis_name)
    in_axes = _positions("in_axes", in_axes, closed_jaxpr.in_avals, (None,))
    out_axes = _positions(
        "out_axes", out_axes, closed_jaxpr.out_avals, (AUTO, ZERO_IF_MAPPED, None)
    )
    places = [ANYWHERE if p is AUTO or p is None else p for p in out_axes]
    axis = Axis(size, axis_name, spmd_axis_name)
    batched, positions = batch_inner(axis, closed_jaxpr, in_axes, places)
    for i, (position, wanted_axis) in enumerate(zip(positions, out_axes, strict=True)):
        if wanted_axis is None and position is not None:
            raise AxisError(
                f"out_axes[{i}] is None, but output {i} of the program depends on the batch. Pass "
                "the position its batch axis should have, or batchax.AUTO."
            )
    return batched, positions


def _any_size(program: ClosedJaxpr) -> Any:
    """A symbolic number of lanes, of the scope of the symbols that `program` has."""
    dims = [d for aval in program.in_avals for d in getattr(aval, "shape", ())]
    symbolic = [d for d in dims if jax.export.is_symbolic_dim(d)]
    taken = frozenset().union(*map(_compat.symbols, symbolic))
    names = ("b", *(f"b{i}" for i in range(len(taken) + 1)))
    name = next(name for name in names if name not in taken)
    (size,) = jax.export.symbolic_shape(name, scope=symbolic[0].scope if symbolic else None)
    return size


def _positions(
    what: str, given: AxesTree, avals: Sequence[Aval], others: Sequence[Any]
) -> list[Any]:
    """A non-negative position, or one of `others`, for each value."""
    is_other = lambda x: any(x is other for other in others)
    shown = ", ".join(map(repr, others))
    if is_other(given) or is_position(given):
        given = [given] * len(avals)
    elif not isinstance(given, (tuple, list)):
        raise ArgumentTypeError(
            f"{what} must be an int, {shown}, or a tuple or list of those; got {brief(given)}."
        )
    if len(given) != len(avals):
        raise AxisError(
            f"{what} has {count(len(given), 'entry', 'entries')} for "
            f"{count(len(avals), 'value')}. Pass one for each."
        )
    positions = []
    for i, (position, aval) in enumerate(zip(given, avals, strict=True)):
        ndim = len(aval.shape) + 1
        if not (is_other(position) or (is_position(position) and -ndim <= position < ndim)):
            raise AxisError(
                f"{what}[{i}] is {brief(position)}. Pass an int in [{-ndim}, {ndim}) for a value "
                f"that has shape {aval.shape} per example, or {shown}."
            )
        positions.append(position if is_other(position) else int(position) % ndim)
    return positions
