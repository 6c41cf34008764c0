"""`cond` and `switch`.

Where all lanes take the same branch, one branch runs. Where they may differ every
branch runs for all lanes and each lane selects its own result; the lanes that did
not take a branch are kept harmless in it (see `masking`). An array that branches
update in place goes through one after another, and each updates its own lanes (see
`in_place`).
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.jaxprs.bodies import is_seen
from batchax.jaxprs.primitive_facts import enter, facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Branches, PlacedOutputs, Position, Positions, match_axis
from batchax.kernel.inner import ANYWHERE, batch_inner, returning_alike
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import varying_of
from batchax.kernel.registry import register_rule
from batchax.rules.callbacks import returning_zeros, with_active
from batchax.rules.calls import calls_library, in_turn
from batchax.rules.in_place import masked, updated_operands
from batchax.rules.loops import run_divergent
from batchax.rules.masking import (
    expand_like,
    hazards,
    is_best_packed,
    is_inexact,
    packed,
    plan_masking,
    run_masked,
)

enter("linear control: cond")  # facts of its branches are read separately


@register_rule(cond_p)
def _cond(
    axis: Axis, args: Values, axes: Positions, /, *, branches: Sequence[ClosedJaxpr], **params: Any
) -> PlacedOutputs:
    (index, *operands), (index_axis, *positions) = args, axes
    if index_axis is not None and params.get("branches_platforms"):
        # `platform_dependent` has the same index in every lane, even where it comes
        # out of a branch that not every lane took (as a residual of a gradient does).
        index, index_axis = _compat.platform_index(params["branches_platforms"]), None
    if index_axis is None:
        return _common_branch(axis, index, operands, positions, branches, params)
    params = {"branches": branches, **params}
    divergent = Branches(branches, index, operands, positions)
    return run_divergent(axis, cond_p, args, axes, params, divergent, _every_branch)


def _every_branch(axis: Axis, divergent: Branches) -> PlacedOutputs:
    """Runs every branch for all lanes, which then select their results."""
    branches, index = divergent.programs, divergent.index
    # A branch may take the mask of its lanes, unless lanes synchronize in it.
    apart = not any(hazards(branch.jaxpr).collective for branch in branches)
    updated = updated_operands(branches) if apart else {}
    operands, positions, results = list(divergent.operands), list(divergent.positions), []
    if updated:
        # An index read from an array that is updated below must be read before: otherwise XLA reads
        # it later, from a copy of the array.
        index = lax.optimization_barrier(index)
    for i, branch in enumerate(branches):
        operands = after_branches(branches[:i], results, branch, operands)
        with recording.part(f"branch {i}"):
            placed = one_branch(axis, index, i, branch, operands, positions, updated)
        results.append(placed)
        for k, operand in updated.items():
            operands[operand], positions[operand] = placed[0][k], placed[1][k]
    return select_results(axis, index, branches, results, updated)


def after_branches(
    branches: Sequence[Any], results: list[PlacedOutputs], branch: ClosedJaxpr, operands: Values
) -> list[Any]:
    """Orders one more branch after those before it, if both call libraries.

    Returns its operands. `results` are replaced by the same values, through which reverse mode
    keeps the order.
    """
    # Threads of two library calls at once may wait for each other (see `in_turn`).
    last = next((i for i in range(len(branches) - 1, -1, -1) if calls_library(branches[i])), None)
    if last is None or not calls_library(branch):
        return list(operands)
    outs, after = in_turn(results[last][0], operands)
    results[last] = outs, results[last][1]
    return after


def _common_branch(
    axis: Axis,
    index: Value,
    operands: Values,
    positions: Positions,
    branches: Sequence[ClosedJaxpr],
    params: dict[str, Any],
) -> PlacedOutputs:
    """Batches a `cond` whose index all lanes share: a `cond` of batched branches."""
    recording.note(divergence="together")

    def batch(i: int, places: Positions = ANYWHERE) -> tuple[ClosedJaxpr, Positions]:
        with recording.part(f"branch {i}"):
            return batch_inner(axis, branches[i], positions, places, varying_of(operands))

    batched = [batch(i) for i in range(len(branches))]
    # All branches must return an output alike: with its batch axis where the first branch that has
    # one puts it. The others are batched again.
    out_axes = [
        next((a for a in axes if a is not None), None)
        for axes in zip(*(axes for _, axes in batched), strict=True)
    ]
    places = [ANYWHERE if a is None else a for a in out_axes]
    programs = [
        program if list(axes) == out_axes else batch(i, places)[0]
        for i, (program, axes) in enumerate(batched)
    ]
    # Inside ``shard_map`` results must vary over the same mesh axes, too.
    programs = tuple(returning_alike(programs))
    return cond_p.bind(index, *operands, branches=programs, **params), out_axes


def one_branch(
    axis: Axis,
    index: Value,
    i: int,
    branch: ClosedJaxpr,
    operands: Values,
    positions: Positions,
    updated: Mapping[int, int] = types.MappingProxyType({}),
    surely: bool = False,
) -> PlacedOutputs:
    """Runs branch `i` for all lanes.

    Lanes that did not take it get arbitrary results, except for the results `updated`, which keep
    the operand named there. `surely`: some lane takes it, so the branch is not skipped.
    """
    taken = lambda: lax.eq(index, np.asarray(i, index.dtype))
    active, mine = None, frozenset[int]()
    # A branch with callbacks or checks takes the mask as its first operand.
    if is_seen(branch):
        branch, active, mine = with_active(axis, branch), taken(), frozenset({0})
        operands, positions = [active, *operands], [0, *positions]
        updated = {k: operand + 1 for k, operand in updated.items()}
    jaxpr = branch.jaxpr
    written = _compat.written_inputs(jaxpr)
    differentiable = {
        k for k, x in enumerate(operands) if isinstance(x, jax.Array) and is_inexact(x)
    }
    # Arrays updated in place stay those of their lane; what is read from them is replaced.
    own = frozenset(updated.values())
    plan = plan_masking(jaxpr, positions, differentiable, own | mine, updates=bool(updated))
    skippable = plan.skippable and not surely
    # Masked lanes do no harm in this branch, and it is cheap enough not to be skipped.
    if plan.runs_as_it_is and not (skippable or written):
        return interpret(axis, jaxpr, branch.consts, operands, positions)

    active = taken() if active is None else active
    program = branch
    if plan.takes_mask:
        program = masked(axis, branch, own, plan.fill if plan.harmed else None)

    def run(operands: list[Value], positions: list[Position]) -> PlacedOutputs:
        if plan.takes_mask:
            operands, positions = [active, *operands], [0, *positions]
        if skippable:
            kept = {k: operand + 1 for k, operand in updated.items()}
            return _if_any(axis, active, program, operands, positions, kept)
        return interpret(axis, program.jaxpr, program.consts, operands, positions)

    outs, out_axes = run_masked(active, run, operands, positions, plan, written)
    # An operand that a branch returns unchanged need not be protected or computed.
    inputs = dict(zip(jaxpr.invars, zip(operands, positions, strict=True), strict=True))
    placed = [
        inputs.get(v, placed) if not isinstance(v, Literal) else placed
        for v, placed in zip(jaxpr.outvars, zip(outs, out_axes, strict=True), strict=True)
    ]
    return [x for x, _ in placed], [a for _, a in placed]


def _if_any(
    axis: Axis,
    active: Value,
    branch: ClosedJaxpr,
    operands: list[Value],
    positions: list[Position],
    kept: Mapping[int, int],
) -> PlacedOutputs:
    """Runs the branch if some lane takes it.

    Otherwise results are zeros, or the operands in `kept`.
    """
    operands, positions = list(operands), list(positions)
    for operand in kept.values():
        x, position = operands[operand], positions[operand]
        operands[operand], positions[operand] = match_axis(axis, x, position, 0), 0
    places = [0 if k in kept else ANYWHERE for k in range(len(branch.out_avals))]
    program, out_axes = batch_inner(axis, branch, positions, places, varying_of(operands))
    nothing = returning_zeros(
        tuple(program.in_avals), tuple(program.out_avals), tuple(kept.items())
    )
    packs = is_best_packed(active)
    lanes = packed(active) if packs else active
    some = lax.reduce_or(lanes, tuple(range(lanes.ndim)))
    taken = lax.convert_element_type(lax.ne(some, np.uint32(0)) if packs else some, np.int32)
    return cond_p.bind(taken, *operands, branches=(nothing, program)), list(out_axes)


def select_results(
    axis: Axis,
    index: Value,
    branches: Sequence[Any],
    results: Sequence[PlacedOutputs],
    updated: Collection[int] = (),
) -> PlacedOutputs:
    """Selects for each lane the results of its branch. The last branch holds those `updated`."""
    indices: dict[Any, Any] = {}  # the index, repeated to a shape
    # Memory that a branch leaves unwritten (residuals of other branches) is never read, so nothing
    # is selected there, and shared weights stay shared. For fused elementwise results zeros are
    # selected instead: XLA then computes them only for the lanes that took the branch.
    blank = list(map(_unwritten, branches))
    fused = frozenset().union(*map(_number_by_number, branches)) if any(blank) else frozenset()

    def select(k: int, cases: Sequence[tuple[Any, Position]]) -> tuple[Any, Position]:
        written = [case for case, none in zip(cases, blank, strict=True) if k not in none]
        some = (written or cases)[0]
        spared = len(written) < len(cases) and some[1] is not None and k in fused
        if not spared and all(_same(x, some[0]) for x, _ in written):
            return some
        other = (lax.full_like(some[0], 0), some[1]) if spared else some
        cases = [other if k in none else case for case, none in zip(cases, blank, strict=True)]
        position = next((a for _, a in cases if a is not None), 0)
        values = [match_axis(axis, x, a, position) for x, a in cases]
        key = (values[0].shape, position)
        if key not in indices:
            indices[key] = expand_like(index, position, values[0])
        return lax.select_n(indices[key], *values), position

    outputs = zip(*(zip(*placed, strict=True) for placed in results), strict=True)
    selected = [cases[-1] if k in updated else select(k, cases) for k, cases in enumerate(outputs)]
    return [x for x, _ in selected], [a for _, a in selected]


def _number_by_number(branch: ClosedJaxpr) -> frozenset[int]:
    """Returns which results of a branch XLA fuses with the selection."""

    def fused(eqn: Eqn) -> bool:
        facts = facts_of(eqn.primitive)
        return facts.elementwise or facts.is_plain_call

    made = {v for eqn in branch.jaxpr.eqns if fused(eqn) for v in eqn.outvars}
    outs = enumerate(branch.jaxpr.outvars)
    return frozenset(k for k, v in outs if not isinstance(v, Literal) and v in made)


def _unwritten(branch: ClosedJaxpr) -> frozenset[int]:
    """Returns which results of a branch are uninitialized memory."""
    made = {v: eqn for eqn in branch.jaxpr.eqns for v in eqn.outvars}

    def unwritten(v: Var | Literal) -> bool:
        eqn = None if isinstance(v, Literal) else made.get(v)
        # The broadcast of such memory to all lanes is uninitialized, too.
        if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
            return unwritten(eqn.invars[0])
        return eqn is not None and eqn.primitive.name in _UNWRITTEN

    return frozenset(k for k, v in enumerate(branch.jaxpr.outvars) if unwritten(v))


_UNWRITTEN = "empty", "empty2"


def _same(x: Value, y: Value) -> bool:
    """Returns whether two branches return the same operand, or the same number."""
    if x is y:
        return True
    if not all(isinstance(v, (bool, int, float, complex, np.generic)) for v in (x, y)):
        return False
    # By bytes, as -0.0 equals 0.0, and NaN does not equal itself.
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
