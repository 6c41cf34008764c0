"""Which variables of a program are one of its inputs, but for updates in place.

Such is the array that a scatter returns, the carry of a loop whose body hands it on, and what
every branch makes of one operand. An *alias* is a result of an equation on the way, with the
operand that it is but for an update. That a variable is an input *but for updates* means:
if none of the updates on the way were made, it would hold what the input holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Literal

from batchax.jaxprs.bodies import LOOPS_AND_BRANCHES, Body, bodies_of
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.memo import kept_with

SCATTERS = frozenset(
    p.name
    for p in (
        lax.scatter_p,
        lax.scatter_add_p,
        lax.scatter_sub_p,
        lax.scatter_mul_p,
        lax.scatter_min_p,
        lax.scatter_max_p,
    )
)

# To copy an array costs no more than to have its updates dropped, if it has fewer elements than
# `_SMALLEST`, or if an update writes more than one of `_PARTS` parts of it.
_SMALLEST = 64
_PARTS = 4


class Alias(NamedTuple):
    """A result of an equation that is one of its operands, but for updates in place."""

    operand: int
    result: int
    updated: bool


class Origin(NamedTuple):
    """The input of a program that a variable is, but for updates in place."""

    input: int
    updated: bool


@kept_with("variables of programs that are an input but for updates")
def origins(jaxpr: Jaxpr) -> dict[Any, Origin]:
    """The variables of `jaxpr` that are an input but for updates."""
    by_variable = {v: Origin(i, False) for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for alias in aliases_of(eqn):
            source = origin_of(by_variable, eqn.invars[alias.operand])
            if source is not None:
                updated = source.updated or alias.updated
                by_variable[eqn.outvars[alias.result]] = Origin(source.input, updated)
    return by_variable


def origin_of(by_variable: dict[Any, Origin], v: Any) -> Origin | None:
    """What `by_variable` says of a variable; None for a number written in the program."""
    return None if isinstance(v, Literal) else by_variable.get(v)


def kept_outputs(jaxpr: Jaxpr) -> dict[int, Origin]:
    """The outputs of `jaxpr` that are an input but for updates, of the same shape."""
    kept = {}
    for k, v in enumerate(jaxpr.outvars):
        source = origin_of(origins(jaxpr), v)
        if source is not None:
            before, after = jaxpr.invars[source.input].aval, v.aval
            if getattr(before, "shape", None) == getattr(after, "shape", None):
                kept[k] = source
    return kept


def kept_carries(body: ClosedJaxpr, n_consts: int) -> dict[int, Origin]:
    """The carries that the body of a loop hands on but for updates."""
    kept = kept_outputs(body.jaxpr).items()
    return {k: source for k, source in kept if source.input == n_consts + k}


def kept_operands(branches: Sequence[ClosedJaxpr]) -> dict[int, Origin]:
    """The results that are, in every branch, the same operand but for updates."""
    first, *others = (kept_outputs(branch.jaxpr) for branch in branches)
    return {
        k: Origin(i, updated or any(kept[k].updated for kept in others))
        for k, (i, updated) in first.items()
        if all(k in kept and kept[k].input == i for kept in others)
    }


def carried_inputs(jaxpr: Jaxpr, n_consts: int, inputs: set[int]) -> set[int]:
    """The inputs of a loop's body that hold one of `inputs` at some step.

    A carry may hold what was another before.
    """
    by_variable = origins(jaxpr)
    carries = enumerate(jaxpr.outvars[: len(jaxpr.invars) - n_consts], n_consts)
    moves = [(k, origin_of(by_variable, v)) for k, v in carries]
    size = -1
    while size < len(inputs):
        size = len(inputs)
        inputs = inputs | {k for k, s in moves if s is not None and s.input in inputs}
    return inputs


def aliases_of(eqn: Eqn) -> list[Alias]:
    """The results of an equation that are an operand but for updates worth dropping."""
    name = eqn.primitive.name
    facts = facts_of(eqn.primitive)
    if facts.alias:
        same_type = eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
        in_order = eqn.params.get("dimensions") is None
        return [Alias(0, 0, False)] if same_type and in_order and not facts.cast else []
    if name in SCATTERS or eqn.primitive is lax.dynamic_update_slice_p:
        return [Alias(0, 0, True)] if _is_small_update(eqn) else []
    return _through_bodies(bodies_of(eqn)) if facts.body or name in LOOPS_AND_BRANCHES else []


def _is_small_update(eqn: Eqn) -> bool:
    if eqn.primitive is lax.dynamic_update_slice_p:
        operand, update = (v.aval for v in eqn.invars[:2])
    elif eqn.params["dimension_numbers"].scatter_dims_to_operand_dims:
        operand, _, update = (v.aval for v in eqn.invars)
    else:  # it has no index that could be moved out of bounds
        return False
    if not all(isinstance(n, int) for n in (*operand.shape, *update.shape)):
        return False
    size = math.prod(operand.shape)
    return size >= _SMALLEST and size >= _PARTS * math.prod(update.shape)


def _through_bodies(bodies: Sequence[Body]) -> list[Alias]:
    """The results that are one operand in each body; for a loop, as the same carry again."""
    of_bodies: list[dict[int, Alias]] = []
    for body in bodies:
        if body.role == "condition" or not body.operands:
            continue
        kept = kept_outputs(body.jaxpr).items()
        of_bodies.append(
            {
                body.results[k]: Alias(body.operands[source.input], body.results[k], source.updated)
                for k, source in kept
                if not body.is_repeated or (k < body.carried and source.input == body.same + k)
            }
        )
    first, *others = of_bodies or [{}]
    return [
        alias._replace(updated=any(each[k].updated for each in of_bodies))
        for k, alias in first.items()
        if all(k in each and each[k].operand == alias.operand for each in others)
    ]
