"""Which equations use the name of the axis being mapped.

An equation whose operands are all unbatched runs once, unless it is a
collective over our axis, or a call, loop or branch with one inside.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax

from batchax import _compat
from batchax.jaxprs.inside import Anywhere, programs_inside, with_inside
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn, Jaxpr
from batchax.kernel.axis import Axis, names_in
from batchax.kernel.registry import is_foreign, registrations
from batchax.memo import kept_with

# In the place of names, for a call whose batching rule, of a user, is told the name of the axis:
# whichever that is, the rule may use it.
ANY_NAME = object()


def as_names(axis_name: Any) -> tuple[Hashable, ...]:
    """The names a collective was given, which may be one or several."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def uses_name(eqn: Eqn, name: Hashable) -> bool:
    """Whether `eqn`, or an equation inside it, is a collective over `name`."""
    if eqn.effects and name in _compat.named_axes(eqn.effects):
        return True
    unmarked = _unmarked(eqn)
    return name in unmarked or ANY_NAME in unmarked


def uses_axis(axis: Axis, eqn: Eqn) -> bool:
    """Whether `eqn` uses the name of `axis`, if that has one."""
    return axis.name is not None and uses_name(eqn, axis.name)


def any_uses_axis(axis: Axis, *programs: Any) -> bool:
    """Whether an equation of these programs uses the name of `axis`."""
    return any(uses_axis(axis, eqn) for program in programs for eqn in program.jaxpr.eqns)


def may_use_name(eqn: Eqn, name: Hashable) -> bool:
    """Whether `eqn` uses `name`, or has derivative rules inside, which may once they are traced.

    Rules that JAX traces when they are needed leave no mark in a program, and once the axis is
    mapped nothing tells them of it but the rule that batches their call.
    """
    return uses_name(eqn, name) or _rules.in_equation(eqn)


def gives_index(eqn: Eqn, name: Hashable) -> bool:
    """Whether `eqn`, or an equation inside it, asks for the index of the lane over `name`."""
    return any(
        e.primitive.name == "axis_index" and name in as_names(e.params["axis_name"])
        for e in with_inside([eqn])
    )


def has_rules(eqn: Eqn) -> bool:
    """Whether `eqn` calls a function with a derivative rule."""
    operation = eqn.params.get("_prim")  # of a `call_hi_primitive`, with parameters of its own
    inside = not _HIGH_RULES.isdisjoint(getattr(operation, "params", ()))
    return inside or not _RULES.isdisjoint(eqn.params)


# The parameters that hold the derivative rules of ``custom_jvp`` and ``custom_vjp``.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk"})

# Those of JAX's operations that hold rules, or a program that may call functions with rules.
_HIGH_RULES = frozenset({"jvp", "fwd", "jaxpr"})

_rules = Anywhere(has_rules)


def _unmarked(eqn: Eqn) -> frozenset[Hashable]:
    """Names that `eqn` uses without an effect that says so; `ANY_NAME` if it may use any."""
    holder = facts_of(eqn.primitive).names
    if holder:
        return frozenset(as_names(eqn.params[holder]))
    if eqn.primitive.name == "call_hi_primitive":  # an object, which may hold what it traced
        traced = [x for x in vars(eqn.params["_prim"]).values() if isinstance(x, jax.stages.Traced)]
        programs = [x.jaxpr.jaxpr for x in traced]
        used = frozenset(name for jaxpr in programs for name in _compat.named_axes(jaxpr.effects))
        return used.union(*(_unmarked_inside(jaxpr, registrations()) for jaxpr in programs))
    if getattr(eqn.params.get("rule"), "told_name", False):
        return frozenset([ANY_NAME])
    # Which names count depends on whose rule a primitive has.
    inner = frozenset().union(
        *(_unmarked_inside(program, registrations()) for program in programs_inside(eqn))
    )
    if inner and "mesh" in eqn.params:  # shard_map binds the names of its mesh itself
        inner -= frozenset(eqn.params["mesh"].axis_names)
    # The primitive of a third party may be a collective: any parameter may hold the name.
    return inner | names_in(eqn.params) if is_foreign(eqn.primitive) else inner


@kept_with("names of axes that programs use")
def _unmarked_inside(jaxpr: Jaxpr, _: int) -> frozenset[Hashable]:
    return frozenset[Hashable]().union(*map(_unmarked, jaxpr.eqns))
