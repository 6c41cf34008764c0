"""Masked lanes: harm that their jaxprs could do, and safe values in place of their operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal as Number
from jax.extend.core import Var
from jax.extend.core.primitives import scan_p
from jax.interpreters import ad

from batchax import _compat
from batchax.analysis.inner import integers_in, programs_in
from batchax.cache import cached_on
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import control_flow, programs_inside, with_inside
from batchax.jaxprs.primitive_facts import Facts, facts_of
from batchax.jaxprs.types import Eqn, Jaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, RuleOutputs, axis_to_front, move_axis
from batchax.kernel.own_primitive import own_primitive

_FEW_STEPS = 16  # of a loop, that masked lanes may take rather than be given other operands

# Linear where one operand is a number written in the program: which operand may vary.
_LINEAR_IN = {"mul": (0, 1), "div": (0,)}


@dataclass(frozen=True)
class Hazards:
    """Lists what may go wrong in masked lanes."""

    # A derivative depends on values, so NaN or inf may reach gradients.
    nonlinear: bool
    # An operation may make infinity, or NaN, from numbers of moderate size.
    immoderate: bool
    # A loop that ends on values, or a callback: it must not see operands of lanes that do not run
    # it.
    endless: bool
    # A loop, a callback or a decomposition: worth skipping if no lane runs it.
    costly: bool
    # Lanes see each other. As in ``jax.vmap`` a collective counts all lanes of its axis, also those
    # that drop the result. Their operands stay, and the program runs even if no lane needs it.
    collective: bool


@cached_on("what may go wrong in masked lanes of programs")
def hazards(jaxpr: Jaxpr) -> Hazards:
    """Returns the hazards of `jaxpr`, including jaxprs inside it."""
    eqns = list(_equations(jaxpr))
    facts = list(map(_facts, eqns))
    return Hazards(
        nonlinear=not all(map(_is_linear, eqns)),
        immoderate=not all(f.moderate for f in facts),
        endless=any(f.endless for f in facts),
        costly=any(f.costly or f.library for f in facts),
        collective=any(map(_is_collective, eqns)),
    )


def is_endless(eqn: Eqn) -> bool:
    """Returns whether an equation must not see operands of lanes that do not run it."""
    # Loops that a counter ends after a few steps, such as the stages of a Runge-Kutta method, may:
    # running them costs less than replacing operands.
    programs = () if _facts(eqn).guarded else programs_inside(eqn)
    endless = _facts(eqn).endless or any(hazards(program).endless for program in programs)
    return endless and _waits(eqn, {})


def _waits(eqn: Eqn, integers: Mapping[Any, int]) -> bool:
    """Returns whether an equation may run for more than a few steps."""
    inner = programs_in(eqn, integers)
    if _facts(eqn).endless:
        tested = control_flow(eqn.primitive).test
        most = [p.most for p in inner if p.role == "body"] if tested else [None]
        if any(n is None or n > _FEW_STEPS for n in most):
            return True
    inside = [integers_in(p.jaxpr, p.integers) for p in inner]
    return any(_waits(e, n) for p, n in zip(inner, inside, strict=True) for e in p.jaxpr.eqns)


def find_collective(jaxpr: Jaxpr) -> Eqn | None:
    """Finds an equation of `jaxpr`, or inside it, in which lanes synchronize."""
    if not hazards(jaxpr).collective:
        return None
    return next(filter(_is_collective, _equations(jaxpr)))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields all equations, except for those in jaxprs that run in active lanes only."""
    return with_inside(jaxpr.eqns, lambda eqn: not _facts(eqn).guarded)


def _facts(eqn: Eqn) -> Facts:
    """Returns the facts of its primitive. A bounded loop with a known count is like a scan."""
    counted = eqn.primitive.name == "bounded_loop" and eqn.params["test"] is None
    return facts_of(scan_p if counted else eqn.primitive)


def _is_linear(eqn: Eqn) -> bool:
    if _facts(eqn).linear:
        return True
    varying = [i for i, v in enumerate(eqn.invars) if not _is_number(v)]
    # A function of integers only has no derivative, and a result without one needs none.
    if not any(_is_inexact(eqn.invars[i]) for i in varying):
        return True
    if not any(map(_is_inexact, eqn.outvars)):
        return True
    return len(varying) == 1 and varying[0] in _LINEAR_IN.get(eqn.primitive.name, ())


def _is_number(v: Var | Number) -> bool:
    return isinstance(v, Number) and bool(np.all(np.isfinite(v.val)))


def _is_inexact(v: Var | Number) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_collective(eqn: Eqn) -> bool:
    facts = facts_of(eqn.primitive)
    if facts.names:
        return not facts.cast
    index = eqn.primitive.name == "axis_index"
    return not (index or programs_inside(eqn)) and bool(_compat.named_axes(eqn.effects))


@dataclass(frozen=True)
class MaskPlan:
    """Says what masked lanes need while a program runs; by default nothing."""

    takes_mask: bool = False  # the program is rewritten to take the mask (`in_place`)
    harmed: bool = False  # it would do harm with the operands of masked lanes
    # operands whose masked lanes are replaced before it runs
    replaced: frozenset[int] = frozenset()
    fill: Literal["donor", "keep"] = "keep"  # as for `safe_lanes`; "keep" cuts derivatives only
    skippable: bool = False  # worth testing whether any lane is active

    @property
    def runs_as_it_is(self) -> bool:
        """Returns whether the program may run for all lanes unchanged."""
        return not (self.takes_mask or self.harmed)


def plan_masking(
    program: Jaxpr,
    positions: Positions,
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
      updated: operands whose masked lanes stay as they were: never replaced.
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


def safe_lanes(active: Value, x: Value, depth: int, fill: str = "donor") -> Value:
    """Replaces the masked lanes of `x` by the first active one, or by lane 0 if none is.

    The first `depth` axes of `x` are those of `active`; it is shared along the others. With `depth`
    0 its value stays, and derivatives reach it only if some lane is active. "keep" leaves values,
    and cuts derivatives only.
    """
    x = _compat.varying_as(x, jax.typeof(active))
    return safe_lanes_p.bind(active, x, depth=depth, fill=fill)


@functools.partial(jax.jit, static_argnames=("depth", "fill"))
def _values(active: Value, x: Value, *, depth: int, fill: str) -> jax.Array:
    """Computes `safe_lanes_p`; masked lanes get the `fill` "donor" or "zero"."""
    no_lanes = any(isinstance(n, int) and n == 0 for n in active.shape)
    if fill == "keep" or (fill == "donor" and depth == 0) or no_lanes:
        return x
    # An operand shared along inner lanes is active if any of those is.
    if depth < active.ndim:
        active = lax.reduce_or(active, tuple(range(depth, active.ndim)))
    if fill == "zero":
        other = lax.full_like(x, 0)
    else:
        # All lanes in one row: an index into it is cheaper than one into each axis.
        lanes = math.prod(active.shape)
        first = lax.argmax(lax.reshape(active, (lanes,)), 0, np.int32)
        row = x if depth == 1 else lax.reshape(x, (lanes, *x.shape[depth:]))
        donor = _lane(row, first)
        other = expand_like(donor, depth, x)
    mask = expand_like(active, 0, x) if depth else active
    return _compat.unconsumed(lax.select(mask, *map(_compat.unconsumed, (x, other))))


def _lane(row: Value, index: Value) -> jax.Array:
    sharding: Any = jax.typeof(row).sharding
    if sharding.spec[:1] in ((), (None,)) or jnp.issubdtype(row.dtype, jax.dtypes.extended):
        return lax.dynamic_index_in_dim(row, index, 0, False, allow_negative_indices=False)
    # JAX cannot slice an axis that types say is sharded (of type Explicit). So all entries are
    # summed, of which the others are zero.
    places = lax.broadcasted_iota(
        np.int32, row.shape[:1], 0, out_sharding=sharding.update(spec=sharding.spec[:1])
    )
    mine = lax.select(expand_like(places == index, 0, row), row, lax.full_like(row, 0))
    return mine.any(0) if row.dtype == np.bool_ else mine.sum(0, dtype=row.dtype)


def _jvp(primals: Values, tangents: Values, *, depth: int, fill: str) -> tuple[Any, Any]:
    active, x = primals
    out = safe_lanes_p.bind(active, x, depth=depth, fill=fill)
    return out, _cut(tangents[1], active, depth)


def _transpose(cotangent: Value, active: Value, x: Value, *, depth: int, fill: str) -> list[Any]:
    return [None, _cut(cotangent, active, depth)]


def _cut(tangent: Value, active: Value, depth: int) -> Value:
    if type(tangent) is ad.Zero:
        return tangent
    return safe_lanes_p.bind(active, tangent, depth=depth, fill="zero")


def _batched(axis: Axis, args: Values, axes: Any, /, *, depth: int, fill: str) -> RuleOutputs:
    (active, x), (live_at, x_at) = args, axes
    if live_at is None:  # the lanes are as they were; each holds one more axis
        if x_at < depth:
            x = move_axis(x, x_at, depth)
        return safe_lanes_p.bind(active, x, depth=depth, fill=fill), max(x_at, depth)
    # The lanes of both axes form one set: a row of masked lanes borrows from another row.
    active = move_axis(active, live_at, 0)
    if x_at is None and depth == 0:
        return safe_lanes_p.bind(active, x, depth=0, fill=fill), None
    x = axis_to_front(axis, x, x_at)
    return safe_lanes_p.bind(active, x, depth=depth + 1, fill=fill), 0


safe_lanes_p = own_primitive(
    "safe_lanes",
    called="operands of masked lanes",
    operations=_values,
    types=lambda active, x, **how: x,
    facts="linear",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)


def run_masked(
    active: Value,
    run: Callable[[list[Any], list[Position]], tuple[list[Any], list[Position]]],
    operands: Values,
    positions: Positions,
    plan: MaskPlan,
    written: Collection[int],
) -> tuple[list[Any], list[Position]]:
    """Runs a program for all lanes so that masked lanes do no harm.

    `run` maps operands and positions to results and positions. `written` are operands that are
    references it writes to: their masked lanes are restored. Raises UnsupportedError if it writes
    to a reference that lanes share.
    """
    operands, positions, saved = list(operands), list(positions), []
    replaced, fill = plan.replaced, plan.fill
    for i, (x, position) in enumerate(zip(operands, positions, strict=True)):
        if _compat.is_reference(x):
            if position is None and i in written:
                raise UnsupportedError(
                    "a reference (jax.new_ref) that all lanes share is written to where lanes "
                    "diverge: in a branch that not every lane takes, or in a loop that ends at a "
                    "different step in each lane. Create the reference inside the function, or "
                    "pass it with a batch axis, so that each lane has its own."
                )
            if position is not None and (i in written or i in replaced):
                # Reading copies the values from before the run.
                saved.append((x, position, x[...]))
            if position is not None and i in replaced:
                safe = safe_lanes(active, move_axis(x[...], position, 0), 1)
                x[...] = move_axis(safe, 0, position)
        elif i in replaced and position is not None:
            if fill == "donor" or is_inexact(x):
                operands[i] = safe_lanes(active, move_axis(x, position, 0), 1, fill)
                positions[i] = 0
        elif i in replaced and isinstance(x, jax.Array) and is_inexact(x):
            operands[i] = safe_lanes(active, x, 0, fill)
    results = run(operands, positions)
    for reference, position, before in saved:
        reference[...] = select_lanes(active, position, reference[...], before)
    return results


def select_lanes(active: Value, position: int, new: Value, old: Value) -> Value:
    """Selects `new` in active lanes and `old` in others; both have lanes at `position`."""
    if new is old:
        return old
    mask = expand_like(active, position, new)
    # Of keys, those that lanes keep are read by no step.
    return _compat.unconsumed(lax.select(mask, new, _compat.unconsumed(old)))


_AT_ONCE = 32  # entries of a dimension that XLA for CPU reduces in one kernel, not in two


def packed(active: Value) -> jax.Array:
    """Returns a mask with four lanes in each number; their number is a multiple of four.

    A reduction of it takes a CPU one kernel to compile where one of the mask takes two or three.
    """
    lanes = lax.convert_element_type(active, np.uint8)
    count = lanes.size // 4
    shape = (count,) if count % _AT_ONCE else (count // _AT_ONCE, _AT_ONCE)
    return lax.bitcast_convert_type(lax.reshape(lanes, (*shape, 4)), np.uint32)


def is_best_packed(active: Value) -> bool:
    """Returns whether a reduction of so many lanes is faster to compile if the mask is `packed`."""
    count, on_mesh = active.shape[0], not jax.typeof(active).sharding.mesh.empty
    if jax.default_backend() != "cpu" or not isinstance(count, int) or on_mesh:
        return False
    return count % 4 == 0 and _AT_ONCE < count <= 4 * _AT_ONCE**2


def expand_like(x: Value, position: int, like: Value) -> Value:
    """Broadcasts `x`, whose axes are those of `like` from `position` on, to its shape."""
    if np.ndim(x) == np.ndim(like):
        return x
    dims = tuple(range(position, position + x.ndim))
    return lax.broadcast_in_dim(x, like.shape, dims, out_sharding=jax.typeof(like).sharding)


def is_inexact(x: Value) -> bool:
    """Returns whether a value or type may have derivatives: floats and complex numbers do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
