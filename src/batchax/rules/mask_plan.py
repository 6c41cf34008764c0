"""What a program needs so that it does no harm in masked lanes, which drop what it computes.

That is decided here, for branches, loops and bounded loops alike. Nothing is emitted here:
`masking` has the operations, and the rules apply them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import Literal as Number

from batchax.kernel.axis import Position
from batchax.rules.hazards import hazards


@dataclass(frozen=True)
class MaskPlan:
    """What masked lanes need while a program runs; by default nothing.

    Attributes:
      takes_mask: the program is written again, with the active mask as an operand (`in_place`).
      harmed: it would do harm in masked lanes, if they were given their own operands.
      replaced: so these operands have their masked lanes replaced before it runs.
      fill: by what, as for `safe_lanes`: "donor", or "keep", which cuts derivatives only.
      skippable: it is worth asking whether any lane is active at all.
    """

    takes_mask: bool = False
    harmed: bool = False
    replaced: frozenset[int] = frozenset()
    fill: Literal["donor", "keep"] = "keep"
    skippable: bool = False

    @property
    def runs_as_it_is(self) -> bool:
        """Whether the program may run for all lanes as it is."""
        return not (self.takes_mask or self.harmed)


def plan_masking(
    program: Any,
    positions: Sequence[Position],
    differentiable: Collection[int],
    updated: Collection[int] = (),
    updates: bool = False,
    may_take_mask: bool = True,
) -> MaskPlan:
    """What masked lanes need while `program` runs for all lanes.

    ==========================  ============================  =================================
    the program                 masked lanes                  since
    ==========================  ============================  =================================
    has a collective            nothing                       lanes meet in it, and all of them
                                                              count, as in ``jax.vmap``
    updates arrays in place     it takes the mask             else each array would be copied
    waits for values, or calls  it takes the mask; where it   it might never end, or a callback
    back ("endless")            cannot, a donor's operands    see what it was not written for
    is not linear, and has      a donor's operands if lanes   zero times a NaN is a NaN, also in
    differentiable operands     share such an operand; else   the gradient of what lanes share;
                                their own, with derivatives   within a lane a cut of derivatives
                                cut                           is enough
    none of these               nothing                       what it computes is dropped
    ==========================  ============================  =================================

    Args:
      program: the program of one example, without its constants.
      positions: where its operands have the batch axis.
      differentiable: the operands that derivatives may be taken of.
      updated: operands that masked lanes have of their own, as they were: never replaced.
      updates: whether it updates arrays in place.
      may_take_mask: whether the program can be written so.
    """
    hazard = hazards(program)
    if hazard.collective:
        return MaskPlan()
    takes_mask = may_take_mask and (hazard.endless or updates)
    waits = hazard.endless and not takes_mask
    used = {v for eqn in program.eqns for v in eqn.invars if not isinstance(v, Number)}
    read = frozenset(i for i, v in enumerate(program.invars) if v in used)
    moving = [positions[i] for i in sorted(read) if i in differentiable]
    harmed = waits or (hazard.nonlinear and bool(moving))
    donor = waits or None in moving
    replaced = read - frozenset(updated) if harmed else frozenset()
    return MaskPlan(takes_mask, harmed, replaced, "donor" if donor else "keep", hazard.costly)
