"""`cond` and `switch`.

Where all lanes take the same branch, one branch runs. Where they may differ every
branch runs for all lanes and each lane selects its own result; the lanes that did
not take a branch are kept harmless in it (see `masking`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.engine.axis import Axis, AxisPosition, match_axis
from batchax.engine.divergence import Branches, Placed
from batchax.engine.inner import ANYWHERE, batch_inner
from batchax.engine.interpreter import interpret
from batchax.engine.registry import register_rule
from batchax.rules.hazards import hazards
from batchax.rules.in_order import run_in_order
from batchax.rules.masking import is_inexact, run_masked, spread


@register_rule(cond_p)
def _cond(axis: Axis, args: Any, axes: Any, /, *, branches: Any, **params: Any) -> Placed:
    (index, *operands), (index_axis, *positions) = args, axes
    if index_axis is not None and params.get("branches_platforms"):
        # `platform_dependent` has the same index in every lane, even where it comes
        # out of a branch that not every lane took (as a residual of a gradient does).
        index, index_axis = _compat.platform_index(params["branches_platforms"]), None
    if index_axis is None:
        return _common_branch(axis, index, operands, positions, branches, params)
    if any(_compat.ordered_by_lane(branch.effects) for branch in branches):
        return run_in_order(axis, cond_p, args, axes, {"branches": branches, **params})
    if axis.divergence is not None:
        parted = Branches(branches, index, operands, positions)
        placed = axis.divergence.run_branches(axis, parted)
        if placed is not None:
            return placed

    results = [
        _one_branch(axis, index, i, branch, operands, positions)
        for i, branch in enumerate(branches)
    ]
    return _select(axis, index, results)


def _common_branch(
    axis: Axis, index: Any, operands: Any, positions: Any, branches: Any, params: Any
) -> Placed:
    """All lanes take the same branch: a `cond` of batched branches."""
    batched = [batch_inner(axis, branch, positions) for branch in branches]
    out_axes = [
        next((a for a in found if a is not None), None)
        for found in zip(*(found for _, found in batched), strict=True)
    ]
    wanted = [ANYWHERE if a is None else a for a in out_axes]
    programs = [
        program if list(found) == out_axes else batch_inner(axis, branch, positions, wanted)[0]
        for branch, (program, found) in zip(branches, batched, strict=True)
    ]
    outs = cond_p.bind(index, *operands, branches=tuple(programs), **params)
    return outs, out_axes


def _one_branch(
    axis: Axis, index: Any, i: int, branch: Any, operands: Any, positions: Any
) -> Placed:
    """What branch `i` returns, for all lanes; those that did not take it may hold anything."""
    jaxpr = branch.jaxpr
    hazard = hazards(jaxpr)
    written = _compat.written_inputs(jaxpr)
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used = {k for k, v in enumerate(jaxpr.invars) if v in used}
    inexact = [
        positions[k] for k in used if isinstance(operands[k], jax.Array) and is_inexact(operands[k])
    ]
    differentiable = bool(inexact)
    protected = not hazard.collective and (hazard.endless or (hazard.nonlinear and differentiable))
    skippable = hazard.costly and not hazard.collective

    def run(operands: list[Any], positions: list[AxisPosition]) -> Placed:
        if skippable:
            return _if_any(axis, live, branch, operands, positions)
        return interpret(axis, jaxpr, branch.consts, operands, positions)

    if not (protected or skippable or written):
        return run(operands, positions)
    live = lax.eq(index, np.asarray(i, index.dtype))
    if hazard.cast:
        mesh_axes = _compat.varying_axes(jax.typeof(live))
        used = {k for k in used if mesh_axes <= _compat.varying_axes(jax.typeof(operands[k]))}
    # Lanes meet in the gradient of an operand they share. Without one, what a masked
    # lane computes stays in that lane, and does no harm where it is sure to be a number.
    fill = "donor" if hazard.endless or hazard.partial or None in inexact else "keep"
    replaced = used if protected else ()
    outs, out_axes = run_masked(live, run, operands, positions, replaced, written, fill)
    # An operand that a branch hands on as it is need be neither protected nor computed.
    inputs = dict(zip(jaxpr.invars, zip(operands, positions, strict=True), strict=True))
    placed = [
        inputs.get(v, placed) if not isinstance(v, Literal) else placed
        for v, placed in zip(jaxpr.outvars, zip(outs, out_axes, strict=True), strict=True)
    ]
    return [x for x, _ in placed], [a for _, a in placed]


def _if_any(axis: Axis, live: Any, branch: Any, operands: Any, positions: Any) -> Placed:
    """The branch if some lane takes it; zeros, which no lane will select, if none does."""
    program, out_axes = batch_inner(axis, branch, positions)
    nothing = _zeros(tuple(program.in_avals), tuple(program.out_avals))
    taken = lax.convert_element_type(lax.reduce_or(live, (0,)), np.int32)
    return cond_p.bind(taken, *operands, branches=(nothing, program)), list(out_axes)


@functools.lru_cache(maxsize=1024)
def _zeros(in_avals: tuple[Any, ...], out_avals: tuple[Any, ...]) -> _compat.ClosedJaxpr:
    """A program of these types that returns zeros."""

    def zero(aval: Any) -> Any:
        sharding = None if aval.sharding.mesh.empty else aval.sharding
        return _compat.varying_as(lax.full(aval.shape, 0, aval.dtype, sharding=sharding), aval)

    def zeros(*_: Any) -> list[Any]:
        return [zero(aval) for aval in out_avals]

    return _compat.stage(zeros, in_avals)


def _select(axis: Axis, index: Any, results: Sequence[Placed]) -> Placed:
    """For each lane the results of its own branch."""
    indices: dict[Any, Any] = {}  # the index, repeated to a shape

    def select(cases: Sequence[tuple[Any, AxisPosition]]) -> tuple[Any, AxisPosition]:
        if all(_same(x, cases[0][0]) for x, _ in cases):
            return cases[0]
        position = next((a for _, a in cases if a is not None), 0)
        values = [match_axis(axis, x, a, position) for x, a in cases]
        key = (values[0].shape, position)
        if key not in indices:
            indices[key] = spread(index, position, values[0])
        return lax.select_n(indices[key], *values), position

    outputs = zip(*(zip(*placed, strict=True) for placed in results), strict=True)
    selected = [select(cases) for cases in outputs]
    return [x for x, _ in selected], [a for _, a in selected]


def _same(x: Any, y: Any) -> bool:
    """Whether two branches return the same operand, or the same number."""
    if x is y:
        return True
    if not all(isinstance(v, (bool, int, float, complex, np.generic)) for v in (x, y)):
        return False
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()
