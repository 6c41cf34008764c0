"""Where lanes cannot diverge: what cannot be moved, and what must see all lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.extend.core.primitives import scan_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.own_primitives import is_own
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Values
from batchax.kernel.axis import Axis
from batchax.kernel.differing import has_other_rule
from batchax.rules.masking import find_collective


def can_move(axis: Axis, values: Values) -> bool:
    """Whether some lanes can be taken out of these values, and put back.

    Not where the number of lanes is symbolic, where a value is a reference, nor where the lanes
    are spread over the axis of a mesh.
    """
    if not isinstance(axis.size, int) or axis.size == 0:
        return False
    if axis.mesh_axis is not None or axis.spmd_name is not None:
        return False
    return not any(map(_compat.is_reference, values))


def calls_back(programs: Iterable[ClosedJaxpr]) -> bool:
    """Whether programs call the host: in a window, places without a lane would call it, too."""
    return any(_compat.calls_back(program.effects) for program in programs)


def why_together(programs: Sequence[ClosedJaxpr]) -> str:
    """Why lanes that run these must stay together; empty if they need not."""
    if any(find_collective(program.jaxpr) is not None for program in programs):
        return "lanes meet in a collective"
    if any(map(rule_of_user.in_program, programs)):
        return "a batching rule is given all lanes"
    return HOST if calls_back(programs) else ""


CANNOT_MOVE = "lanes cannot be moved: they are spread over devices, or hold references"
HOST = "the host is called, and would be for lanes that stand in for missing ones"
NAME = "a step uses the name of an axis"
VARYING = "lanes are spread over devices"


def _may_part(eqn: Eqn) -> bool:
    primitive, facts = eqn.primitive, facts_of(eqn.primitive)
    if primitive is scan_p or not eqn.invars:  # the body of a scan is looked at, too
        return False
    expensive = facts.control or facts.costly or facts.endless
    # A rule that is not known here may run loops, as may the forward rule of a derivative.
    others = is_own(primitive) or has_other_rule.is_true(eqn) or "fwd_jaxpr_thunk" in eqn.params
    return expensive or others


may_part = Anywhere(_may_part)
"""Whether lanes may diverge in a program: it errs on the side of True."""

rule_of_user = Anywhere(lambda eqn: eqn.primitive.name in _WITH_RULE)
"""Whether a program calls a function with a batching rule, which may look at all lanes."""

_WITH_RULE = "custom_vmap_call", "custom_batched_call"


def reject_collectives(programs: Iterable[ClosedJaxpr], where: str) -> None:
    """Rejects programs in which lanes, or devices, synchronize.

    Raises:
      UnsupportedError: there is a collective; the message says where.
    """
    for program in programs:
        eqn = find_collective(program.jaxpr)
        if eqn is not None:
            raise UnsupportedError(
                f"{line_of(eqn)}: {spoken(eqn)} over a named axis is inside {where}, and "
                'divergence="compact" runs lanes at different times there: a collective would '
                'reach only some of them. Move the collective out, or use divergence="predicate".'
            )
