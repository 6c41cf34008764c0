"""Which operations act on each element of a row alone, or reduce it: those that can be packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core.primitives import custom_jvp_call_p

from batchax import _compat
from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn
from batchax.kernel.registry import is_replaced_in_jax, reduced_dims
from batchax.rows.merged import has_several, merge, names_of
from batchax.rows.padded_rules.custom_derivatives import staged_jvp_rule
from batchax.rows.row_rules import size_of_rule
from batchax.rows.segments import REDUCTIONS
from batchax.rows.sizes import depends_on_sizes, has_symbols, is_symbolic, ragged_axis
from batchax.rows.steps import Constant, flatten

# How segments are reduced for each reduction over a row.
REDUCED = {
    **{name: name for name in REDUCTIONS},
    "reduce_and": "reduce_min",
    "reduce_or": "reduce_max",
}


def _apart(*names: str) -> Callable[[Any, int], bool]:
    """A check that axes in these parameters are not the ragged one."""

    def check(eqn: Eqn, at: int) -> bool:
        for name in names:
            axes = eqn.params[name]
            if at in (axes if isinstance(axes, (tuple, list)) else (axes,)):
                return False
        return True

    return check


def _not_reduced(eqn: Eqn, at: int) -> bool:
    dims = reduced_dims(eqn.primitive, eqn.params["axes"], len(eqn.invars[0].aval.shape))
    return at not in dims


def _always(eqn: Eqn, at: int) -> bool:
    return True


def _whole_slice(eqn: Eqn, at: int) -> bool:
    dim = eqn.invars[0].aval.shape[at]
    params = eqn.params
    stride = 1 if params["strides"] is None else params["strides"][at]
    limit = params["limit_indices"][at]
    return bool(params["start_indices"][at] == 0 and limit == dim and stride == 1)


def _plain_reshape(eqn: Eqn, at: int) -> bool:
    """Whether a reshape leaves the ragged axis alone, and only changes the axes of its elements."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    to = ragged_axis(after)
    if to is None or before[at] != after[to] or eqn.params["dimensions"] is not None:
        return False
    elements = lambda shape, i: (math.prod(shape[:i]), math.prod(shape[i + 1 :]))
    return elements(before, at) == elements(after, to)


def _free_in_dot(eqn: Eqn, at: int) -> bool:
    """Whether the result of a product keeps the ragged axis, of one operand or paired of both.

    If the ragged axis is contracted, elements of a row are added up.
    """
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    places = [ragged_axis(v.aval.shape) for v in eqn.invars]
    if places[0] in left or places[1] in right:
        return False
    if None not in places:
        return places[0] in left_batch and places[1] in right_batch
    return True


def _looked_up(eqn: Eqn, at: int) -> bool:
    """Whether a gather takes, for each element, something from what all rows share."""
    table, indices = (v.aval.shape for v in eqn.invars)
    if has_symbols(table):
        dnums, where = eqn.params["dimension_numbers"], ragged_axis(table)
        touched = (*dnums.start_index_map, *dnums.collapsed_slice_dims)
        return not has_symbols(indices) and where not in (*touched, *dnums.operand_batching_dims)
    return ragged_axis(indices) != len(indices) - 1


def _unpadded(eqn: Eqn, at: int) -> bool:
    return tuple(eqn.params["padding_config"][at]) == (0, 0, 0)


_Rules = tuple[str, ...]
"""The derivative rules, as text, that are being looked into. One that turns up inside itself needs
no second look."""

# The rule of `jnp.sinc` calls a function with a rule that calls another, and so on for ever.
_MOST_RULES = 8


def _acts_inside(body: Any, seen: _Rules) -> bool:
    """Whether a program does nothing but act on each element."""
    body = _compat.close(body)
    return all(_acts_on_elements(eqn, seen) for eqn in body.jaxpr.eqns)


def _acts_on_elements(eqn: Eqn, seen: _Rules) -> bool:
    if not depends_on_sizes(eqn):
        return True
    name, params = eqn.primitive.name, eqn.params
    facts = facts_of(eqn.primitive)
    if facts.is_plain_call or facts.again:
        return _acts_inside(program_called(eqn), seen)
    if name == "dim_as_value":
        return False
    if name == "iota":
        return not is_symbolic(params["shape"][params["dimension"]])
    places = [ragged_axis(v.aval.shape) for v in eqn.invars]
    if name in REDUCED and places[0] in params["axes"]:
        return False
    return _can_pack(eqn, [False] * len(eqn.invars), seen)


def _custom_jvp(eqn: Eqn, seen: _Rules) -> bool:
    # The rule may do what the function does not: divide by the norm of the row, for instance. And
    # it may call the function again, whose rule then reads as this one does.
    try:
        rule = staged_jvp_rule(eqn)
    except Exception:  # the user's, who is told where the derivative is taken, if it is
        return False
    text = str(rule)
    if text in seen:
        return True
    if len(seen) == _MOST_RULES:
        return False
    seen = (*seen, text)
    return _acts_inside(eqn.params["call_jaxpr"], seen) and _acts_inside(rule, seen)


_ACTS_ON_ELEMENTS: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze", "iota"), _always),
    **dict.fromkeys((*REDUCED, "reduce_xor", "argmax", "argmin"), _apart("axes")),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _apart("axis")
    ),
    "concatenate": _apart("dimension"),
    "dot_general": _free_in_dot,
    "gather": _looked_up,
    "pad": _unpadded,
    "reshape": _plain_reshape,
    "rev": _apart("dimensions"),
    "slice": _whole_slice,
    "sort": _apart("dimension"),
}


def _how_it_acts(primitive: _compat.Primitive) -> tuple[Callable[[Any, int], bool] | None, bool]:
    """How to check that a primitive acts on each element, or None if it does not.

    Also whether operands that have no ragged axis may differ between rows.
    """
    facts = facts_of(primitive)
    if is_replaced_in_jax(primitive):  # by a rule for arrays, which padded rows are
        return None, False
    if facts.elementwise:
        return _always, True
    if facts.reduces:
        return _not_reduced, False
    if _compat.is_namesake(primitive):
        return None, False
    return _ACTS_ON_ELEMENTS.get(primitive.name), primitive.name == "broadcast_in_dim"


def can_pack(eqn: Eqn, batched: Sequence[bool]) -> bool:
    """Whether `run_packed` computes an equation.

    Args:
      eqn: an equation of a program of one row.
      batched: which of its operands without a ragged size differ between rows.
    """
    return _can_pack(eqn, batched, ())


def _can_pack(eqn: Eqn, batched: Sequence[bool], seen: _Rules) -> bool:
    if not depends_on_sizes(eqn):
        return True
    name = eqn.primitive.name
    if name == "dim_as_value":
        return True
    if size_of_rule(eqn) is not None:
        return not eqn.params["steps"] and not _closes_over_rows(eqn, batched)
    if has_several(eqn):
        if facts_of(eqn.primitive).again:
            return _can_pack_inside(eqn, batched, seen)
        merged = merge(eqn)
        return merged is not None and _can_pack(merged, batched, seen)
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    ragged = {str(d) for shape in shapes for d in shape if is_symbolic(d)}
    if len(ragged) != 1 or None in map(names_of, shapes):
        return False
    if eqn.primitive is custom_jvp_call_p:
        return not any(batched) and _custom_jvp(eqn, seen)
    if facts_of(eqn.primitive).again:
        return _can_pack_inside(eqn, batched, seen)
    check, may_differ = _how_it_acts(eqn.primitive)
    if check is None or (any(batched) and not may_differ):
        return False
    places = [at for v in eqn.invars if (at := ragged_axis(v.aval.shape)) is not None]
    if name in REDUCED and places[0] in eqn.params["axes"]:
        return eqn.invars[0].aval.dtype == jnp.bool_ or name in REDUCTIONS
    return all(check(eqn, at) for at in places or [0])


def _closes_over_rows(eqn: Eqn, batched: Sequence[bool]) -> bool:
    """Whether what a function with a rule closes over differs between rows."""
    closed = len(eqn.params["rule"].closed)
    return any(batched[:closed]) or any(has_symbols(v.aval.shape) for v in eqn.invars[:closed])


def _can_pack_inside(eqn: Eqn, batched: Sequence[bool], seen: _Rules) -> bool:
    """Whether `run_packed` computes each equation of the program that a call holds."""
    program = flatten(program_called(eqn))
    differs = dict.fromkeys(program.shapes, False)
    differs.update(enumerate(batched))
    for step in program.steps:
        of_sizes = depends_on_sizes(step.eqn)
        dense = [
            not isinstance(i, Constant) and not has_symbols(program.shapes[i]) and differs[i]
            for i in step.inputs
        ]
        if of_sizes and not _can_pack(step.eqn, dense, seen):
            return False
        own = of_sizes or any(differs[i] for i in step.used)
        differs.update(dict.fromkeys(step.outputs, own))
    return True
