"""The ways to run a loop, or branches, whose predicate differs between lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import (
    AnyLoop,
    Axis,
    BoundedLoop,
    Branches,
    PlacedOutputs,
    Position,
    WhileLoop,
)
from batchax.rules.hazards import hazards

Parting = TypeVar("Parting", WhileLoop, BoundedLoop, Branches)


def axis_for(axis: Axis, loop: AnyLoop) -> Axis:
    """`axis`; without a way of its own where that has no use in a loop, nor inside it.

    With one, programs are batched once to find out what differs between lanes, and then again.
    """
    # A listing says of each loop why lanes are masked in it, and so each is looked at.
    if axis.divergence is None or recording.is_on() or axis.divergence.may_diverge(axis, loop):
        return axis
    return replace(axis, divergence=None)


def run_parting(
    axis: Axis,
    primitive: _compat.Primitive,
    args: Sequence[Value],
    axes: Sequence[Position],
    params: dict[str, Any],
    parting: Parting,
    masked: Callable[[Axis, Parting], PlacedOutputs],
) -> PlacedOutputs:
    """The results of an equation in which lanes part ways.

    Args:
      axis: the axis being mapped.
      primitive, args, axes, params: the equation.
      parting: the same, as an axis with a way of its own is given it.
      masked: runs it for all lanes, each of which drops what is not its own. So it is run unless
        the axis has another way.

    Raises:
      UnsupportedError: effects must come in order, and lanes depend on each other, or on a
        reference.
    """
    programs = [p for v in params.values() for p in (v if isinstance(v, tuple) else [v])]
    programs = [p.jaxpr for p in programs if isinstance(p, ClosedJaxpr)]
    if any(_compat.in_order(program.effects) for program in programs):
        _refuse_order(programs)
    if axis.divergence is None:
        recording.note(why=_NONE_LEAVES)
    placed = None if axis.divergence is None else axis.divergence.run(axis, parting)
    if placed is None:
        recording.note(divergence="masked")
        placed = masked(axis, parting)
    return placed


_NONE_LEAVES = (
    'nothing may part them here: divergence="predicate", several devices, or what is around it'
)


def _refuse_order(programs: Sequence[Any]) -> None:
    """Refuses an equation whose lanes were to run one after another, and cannot.

    Where they can they do, before any rule is asked (`kernel/interpreter.py`).
    """
    where = "a branch that not every lane takes, or a loop that ends at its own step in each lane,"
    if any(hazards(program).collective for program in programs):
        raise UnsupportedError(
            f"{where} holds both a callback in order (ordered=True) and a collective over a named "
            "axis: its lanes would have to run one after another, for the order, and together, for "
            "the collective. Move one of the two out of it."
        )
    raise UnsupportedError(
        f"{where} holds both a callback in order (ordered=True) and a reference (jax.new_ref): its "
        "lanes run one after another, and a reference cannot be taken apart into lanes. Read the "
        "reference before and write it after."
    )
