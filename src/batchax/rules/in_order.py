"""Lanes one after another, where a program has effects that must come in the order of lanes."""

from __future__ import annotations

from typing import Any

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.fallback import one_after_another
from batchax.rules.hazards import hazards


def run_in_order(
    axis: Axis, primitive: _compat.Primitive, args: Any, axes: Any, params: dict[str, Any]
) -> tuple[list[Any], list[AxisPosition]]:
    """A branch or loop with its own predicate in each lane, for the lanes in order.

    Raises:
      UnsupportedError: lanes depend on each other, or on a reference.
    """
    programs = [p for v in params.values() for p in (v if isinstance(v, tuple) else [v])]
    programs = [p.jaxpr for p in programs if isinstance(p, _compat.ClosedJaxpr)]
    where = "a branch that not every lane takes, or a loop that ends at its own step in each lane,"
    if any(hazards(p).collective for p in programs):
        raise UnsupportedError(
            f"{where} holds both a callback with effects and a collective over a named axis: its "
            "lanes would have to run one after another, to keep the effects in order, and "
            "together, for the collective. Move one of the two out of it."
        )
    if any(_compat.is_reference(x) and a is not None for x, a in zip(args, axes, strict=True)):
        raise UnsupportedError(
            f"{where} holds both a callback with effects and a reference (jax.new_ref) with a "
            "batch axis: its lanes run one after another, and a reference cannot be taken apart "
            "into lanes. Read the reference before and write it after."
        )

    def one_lane(*xs: Any) -> list[Any]:
        return primitive.bind(*xs, **params)

    outs = one_after_another(axis, one_lane, args, axes)
    return list(outs), [0] * len(outs)
