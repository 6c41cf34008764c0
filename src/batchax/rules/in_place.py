"""Jaxprs that a masked lane may run: it writes to no array, waits in no loop, calls nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from batchax import _compat
from batchax.cache import cached_on
from batchax.jaxprs.bodies import Body, bind_with, bodies_of, is_rebuilt
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value, Values
from batchax.kernel.axis import Axis, RuleOutputs, move_axis
from batchax.kernel.inner import remembered, stage_function
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.rules.calls import CALLS
from batchax.rules.masking import expand_like, is_endless, is_inexact, safe_lanes

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
    """Describes a result that is an operand, except for updates in place."""

    operand: int
    result: int
    updated: bool


class Origin(NamedTuple):
    """Names the input that a variable is, except for updates in place."""

    input: int
    updated: bool


@cached_on("variables of programs that are an input except for updates")
def origins(jaxpr: Jaxpr) -> dict[Any, Origin]:
    """Finds the variables of `jaxpr` that are an input except for updates."""
    by_variable = {v: Origin(i, False) for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for alias in aliases_of(eqn):
            source = origin_of(by_variable, eqn.invars[alias.operand])
            if source is not None:
                updated = source.updated or alias.updated
                by_variable[eqn.outvars[alias.result]] = Origin(source.input, updated)
    return by_variable


def origin_of(by_variable: dict[Any, Origin], v: Var | Literal) -> Origin | None:
    """Looks up the origin of a variable; literals have none."""
    return None if isinstance(v, Literal) else by_variable.get(v)


def kept_outputs(jaxpr: Jaxpr) -> dict[int, Origin]:
    """Finds the outputs of `jaxpr` that are an input of the same shape except for updates."""
    kept = {}
    for k, v in enumerate(jaxpr.outvars):
        source = origin_of(origins(jaxpr), v)
        if source is not None:
            before, after = jaxpr.invars[source.input].aval, v.aval
            if getattr(before, "shape", None) == getattr(after, "shape", None):
                kept[k] = source
    return kept


def kept_carries(body: ClosedJaxpr, n_consts: int) -> dict[int, Origin]:
    """Finds the carries that the body of a loop passes on except for updates."""
    kept = kept_outputs(body.jaxpr).items()
    return {k: source for k, source in kept if source.input == n_consts + k}


def carried_inputs(jaxpr: Jaxpr, n_consts: int, inputs: set[int]) -> set[int]:
    """Finds the inputs of a loop body that hold one of `inputs` at some step."""
    # A carry may move to another position from step to step, so this runs to a fixed point.
    by_variable = origins(jaxpr)
    carries = enumerate(jaxpr.outvars[: len(jaxpr.invars) - n_consts], n_consts)
    moves = [(k, origin_of(by_variable, v)) for k, v in carries]
    size = -1
    while size < len(inputs):
        size = len(inputs)
        inputs = inputs | {k for k, s in moves if s is not None and s.input in inputs}
    return inputs


def aliases_of(eqn: Eqn) -> list[Alias]:
    """Finds the results of an equation that are an operand except for updates worth dropping."""
    name = eqn.primitive.name
    facts = facts_of(eqn.primitive)
    if facts.alias:
        same_type = eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
        in_order = eqn.params.get("dimensions") is None
        return [Alias(0, 0, False)] if same_type and in_order and not facts.cast else []
    if name in SCATTERS or eqn.primitive is lax.dynamic_update_slice_p:
        return [Alias(0, 0, True)] if _is_small_update(eqn) else []
    return _through_bodies(bodies_of(eqn)) if facts.body or is_rebuilt(eqn.primitive) else []


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
    """Finds the results that are one operand in each body, and for a loop the same carry."""
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


def live_type() -> ShapedArray:
    """Returns the type of the predicate of one lane, on the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return ShapedArray((), np.dtype(bool), sharding=sharding)


def masked_in_place(
    axis: Axis, body: ClosedJaxpr, n_consts: int
) -> tuple[ClosedJaxpr, frozenset[int]]:
    """Masks the body of a loop for lanes that may have finished.

    Returns it with a first operand `active`, and the carries that it returns unchanged if `active`
    is false. Other carries are then to be dropped.
    """
    return masked(axis, body), frozenset(kept_carries(body, n_consts))


def updates_in_place(body: ClosedJaxpr, n_consts: int) -> bool:
    """Returns whether a loop with this body updates some carry in place."""
    return any(source.updated for source in kept_carries(body, n_consts).values())


def updated_operands(branches: Sequence[ClosedJaxpr]) -> dict[int, int]:
    """Maps results that are one operand in every branch, updated in some, to that operand.

    No operand is listed twice.
    """
    first, *others = (kept_outputs(branch.jaxpr) for branch in branches)
    operands: dict[int, int] = {}
    for k, (operand, updated) in first.items():
        in_others = [kept[k] for kept in others if k in kept and kept[k].input == operand]
        updated = updated or any(source.updated for source in in_others)
        if len(in_others) == len(others) and updated and operand not in operands.values():
            operands[k] = operand
    return operands


def masked(
    axis: Axis, program: ClosedJaxpr, own: Collection[int] = (), fill: str | None = None
) -> ClosedJaxpr:
    """Adds a first operand `active` to `program`, false in a lane that drops its results.

    `own` are operands that were not replaced in masked lanes, while others were. `fill` says how
    values read from them are made safe, as for `safe_lanes`; None: not at all.
    """
    own = frozenset(own) if fill else frozenset()

    def run(active: Value, *operands: Value) -> list[Any]:
        return _run(_Lane(axis, active, fill), program, operands, own)

    def build() -> ClosedJaxpr:
        return stage_function(axis, run, [live_type(), *program.in_avals])

    return remembered(program, ("masked", axis, own, fill), build)


@dataclass(frozen=True)
class _Lane:
    """Describes a lane that may be masked."""

    axis: Axis
    active: Any  # a boolean scalar
    fill: str | None  # see `masked`

    def safe(self, x: Value, fill: str | None = None) -> Value:
        """Replaces `x` by a safe value if the lane is masked."""
        fill = fill or self.fill
        aval = jax.typeof(x)
        if fill is None or _compat.is_reference(x) or not (fill == "donor" or is_inexact(aval)):
            return x
        return safe_lanes(self.active, x, 0, fill)

    def inner(self, program: ClosedJaxpr, own: Iterable[int]) -> ClosedJaxpr:
        return masked(self.axis, _compat.close(program), frozenset(own), self.fill)


def _run(lane: _Lane, program: ClosedJaxpr, operands: Values, own: Collection[int]) -> list[Any]:
    jaxpr = program.jaxpr
    arrays = {v for v, source in origins(jaxpr).items() if source.input in own}

    def run_equation(eqn: Eqn, xs: list[Value]) -> Sequence[Any]:
        mine = {i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in arrays}
        return _run_equation(lane, eqn, xs, mine)

    return evaluate(jaxpr, program.consts, operands, run_equation)


def _run_equation(lane: _Lane, eqn: Eqn, xs: list[Value], mine: set[int]) -> Sequence[Any]:
    """Evaluates one equation; `mine` are operands that were not replaced (see `masked`)."""
    name, aliases = eqn.primitive.name, aliases_of(eqn)
    endless = is_endless(eqn)
    holds_programs = is_rebuilt(eqn.primitive) or name in CALLS or name == "jit"
    if holds_programs and (endless or mine or any(alias.updated for alias in aliases)):
        outs = (_jit if name == "jit" else _inside)(lane, eqn, xs, mine)
        aliased = {alias.result for alias in aliases}
        return [x if k in aliased or not mine else lane.safe(x) for k, x in enumerate(outs)]
    # A loop without a bound ends in a masked lane if it gets the operands of an active one.
    if endless:
        return bind_equation(eqn, [lane.safe(x, "donor") for x in xs])
    # The array keeps its value, as only updates are dropped. Other operands are made safe.
    if aliases:
        xs = [lane.safe(x) if i in mine and i > 0 else x for i, x in enumerate(xs)]
        return _UPDATES.get(name, _as_it_is)(lane.active, eqn, xs)
    # What is read from an array is replaced, not the array.
    if name in _READS:
        return [lane.safe(x) if mine else x for x in bind_equation(eqn, xs)]
    return bind_equation(eqn, [lane.safe(x) if i in mine else x for i, x in enumerate(xs)])


def _as_it_is(active: Value, eqn: Eqn, xs: Values) -> Sequence[Any]:
    return bind_equation(eqn, xs)


# Updates: in a masked lane they go to an index out of bounds, and are dropped.


def _scatter(active: Value, eqn: Eqn, xs: Values) -> Sequence[Any]:
    operand, indices, updates = xs
    dnums, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    shape = np.shape(operand)
    indexed = dnums.scatter_dims_to_operand_dims
    indices = jnp.asarray(indices)
    if indices.dtype.itemsize < 4:
        indices = lax.convert_element_type(indices, np.int32)  # an index out of bounds must fit in
    if mode == lax.GatherScatterMode.CLIP:  # clamped here, as the scatter below drops instead
        last = np.subtract(shape, _window(dnums, shape, np.shape(updates)))
        last = np.asarray([last[d] for d in indexed], indices.dtype)
        last = lax.broadcast_in_dim(last, indices.shape, (indices.ndim - 1,))
        indices = lax.clamp(np.zeros((), indices.dtype), indices, last)
    if jnp.issubdtype(indices.dtype, np.unsignedinteger):  # out of bounds will be negative
        indices = lax.convert_element_type(indices, f"int{8 * indices.dtype.itemsize}")
    # Every index of a masked lane is out of bounds, and the scatter drops it.
    indices = _moved_out(active, indices, max(shape[d] for d in indexed))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return bind_equation(eqn, [operand, indices, updates], mode=mode)


def _window(
    dnums: lax.ScatterDimensionNumbers, shape: Sequence[int], update: Sequence[int]
) -> list[int]:
    single = {*dnums.inserted_window_dims, *dnums.operand_batching_dims}
    sizes = iter(update[d] for d in dnums.update_window_dims)
    return [1 if d in single else next(sizes) for d in range(len(shape))]


def _moved_out(active: Value, indices: Value, size: int) -> jax.Array:
    """Moves the indices of a masked lane out of bounds."""

    def number(n: int) -> np.ndarray:
        return np.asarray(n, indices.dtype)

    # The scatter may declare unique and sorted indices, so all move by the same amount, below zero.
    within = lax.clamp(number(-1), indices, number(size - 1))
    return lax.select(active, indices, lax.sub(within, lax.full_like(within, size)))


def _dynamic_update_slice(active: Value, eqn: Eqn, xs: Values) -> Sequence[Any]:
    operand, update, *starts = xs
    shape, sizes = np.shape(operand), np.shape(update)
    moving = [d for d in range(len(shape)) if shape[d] != sizes[d]]
    # An update in place of one slice becomes a scatter of one window, which can be dropped. Starts
    # are clamped here so that the slice fits in, as `dynamic_update_slice` does by itself.
    starts = [
        lax.clamp(np.zeros((), s.dtype), s, np.asarray(min(n, np.iinfo(s.dtype).max), s.dtype))
        for s, n in ((jnp.asarray(starts[d]), shape[d] - sizes[d]) for d in moving)
    ]
    dtype = np.int32 if max(shape) <= np.iinfo(np.int32).max else np.int64
    starts = [lax.convert_element_type(s, dtype) for s in starts]
    indices = _moved_out(active, jnp.stack(starts), max(shape[d] for d in moving))
    result = eqn.outvars[0].aval
    if jax.typeof(operand).weak_type and not result.weak_type:
        # The result of a scatter is weakly typed where its operand is.
        operand = lax.convert_element_type(operand, operand.dtype)
    return [
        lax.scatter_p.bind(
            operand,
            indices,
            update,
            dimension_numbers=lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(len(sizes))),
                inserted_window_dims=(),
                scatter_dims_to_operand_dims=tuple(moving),
            ),
            update_jaxpr=None,
            update_consts=(),
            unique_indices=True,
            indices_are_sorted=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )
    ]


# Programs inside: each is given `active`.


def _inside(lane: _Lane, eqn: Eqn, xs: list[Value], mine: set[int]) -> Sequence[Any]:
    bodies = bodies_of(eqn)
    sliced = {i for body in bodies for i in body.sliced_operands if body.is_repeated}
    xs = [lane.safe(x) if i in mine and i in sliced else x for i, x in enumerate(xs)]
    programs = [_for_lane(lane, body, mine) for body in bodies]
    return bind_with(eqn, xs, programs, [lane.active])


def _for_lane(lane: _Lane, body: Body, mine: set[int]) -> ClosedJaxpr:
    program = _compat.close(body.program)
    if body.role == "condition":
        key = ("goes on", lane.axis)
        return remembered(program, key, lambda: _goes_on_if_active(lane.axis, program))
    most = body.same + body.carried  # behind these are parts of sliced arrays, harmless by now
    own = {k for k, i in enumerate(body.operands[:most]) if i in mine}
    if body.is_repeated:
        own = carried_inputs(body.jaxpr, body.same, own)
    return lane.inner(program, own)


def _goes_on_if_active(axis: Axis, test: ClosedJaxpr) -> ClosedJaxpr:
    # Inputs of a predicate need no filling: it has no derivative, and its value in a masked lane
    # does not matter.
    program = masked(axis, test)

    def goes_on(active: Value, *operands: Value) -> list[Any]:
        (more,) = eval_jaxpr(program.jaxpr, program.consts, active, *operands)
        return [some_active_p.bind(active, more)]

    return stage_function(axis, goes_on, [live_type(), *test.in_avals])


def _jit(lane: _Lane, eqn: Eqn, xs: Values, mine: set[int]) -> Sequence[Any]:
    # Not a call again: shardings and donated arguments have no effect inside a loop or branch.
    return _run(lane, eqn.params["jaxpr"], xs, mine)


_UPDATES: dict[str, Callable[..., Sequence[Any]]] = {
    **dict.fromkeys(SCATTERS, _scatter),
    lax.dynamic_update_slice_p.name: _dynamic_update_slice,
}
# Of these the result is what was read, and has no more derivative than that: to make it harmless
# is enough, and leaves the whole operand alone.
_READS = frozenset("dynamic_slice gather slice".split())

# Whether a loop in a program goes on.


def _goes_on(active: Value, more: Value) -> jax.Array:
    """Computes ``active & more``. If lanes share `more`, they continue while one is active."""
    return lax.bitwise_and(more, lax.broadcast(active, np.shape(more)))


def _batched(axis: Axis, args: Values, axes: Any, /) -> RuleOutputs:
    (active, more), (live_at, more_at) = args, axes
    if more_at is None:
        # One predicate for all lanes: the loop stays one that they run together.
        return some_active_p.bind(lax.reduce_or(active, (live_at,)), more), None
    if live_at is None:
        return some_active_p.bind(active, more), more_at
    more = move_axis(more, more_at, 0)
    return lax.bitwise_and(more, expand_like(active, 0, more)), 0


_NO_NUMBERS = NoDerivative("whether a loop continues has no derivative.")

some_active_p = own_primitive(
    "some_active",
    called="predicate of a loop",
    operations=_goes_on,
    compute=jax.jit(_goes_on),
    types=lambda active, more: more,
    rule=_batched,
    jvp=_NO_NUMBERS,
    transpose=_NO_NUMBERS,
    several=False,
)
