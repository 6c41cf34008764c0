"""References that a program creates, turned into values: it can be cut into parts then.

JAX does that, and opens the operations inside of loops and branches that it lowers early, such as
functions with derivatives of their own: these would be lost, silently. So an equation that has
nothing to do with references is held, meanwhile, as one that JAX knows nothing of.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value
from batchax.kernel.inner import remembered
from batchax.kernel.own_primitive import placeholder
from batchax.programs.rewritten import Inside, rewritten

_held_p = placeholder(
    "held", lambda *_, held: ([v.aval for v in held.eqn.outvars], held.eqn.effects)
)


@dataclass(frozen=True, eq=False)
class _Held:
    """An equation, known by identity."""

    eqn: Eqn


def without_references(program: ClosedJaxpr, name: Hashable | None, size: Value) -> ClosedJaxpr:
    """`program`, which may use the axis `name`, without the references that it creates."""
    if not _compat.makes_references(program.effects):
        return program

    def with_values() -> ClosedJaxpr:
        held = rewritten(program, _hold)
        return rewritten(_compat.without_references(held, name, size), _release)

    return remembered(program, ("without references", name, size), with_values)


def _hold(eqn: Eqn, inside: Inside) -> Any:
    if _compat.touches_references(eqn):
        return eqn.replace(params=inside())
    return eqn.replace(primitive=_held_p, params={"held": _Held(eqn)})


def _release(eqn: Eqn, inside: Inside) -> Any:
    if eqn.primitive is not _held_p:
        return eqn.replace(params=inside())
    was = eqn.params["held"].eqn
    return eqn.replace(primitive=was.primitive, params=was.params, effects=was.effects)
