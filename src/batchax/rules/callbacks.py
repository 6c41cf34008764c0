"""Host callbacks, foreign functions, and checks: called once for each lane that counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify as checkify  # registers its primitive with JAX
from jax.extend.core.primitives import cond_p
from jax.interpreters import ad

from batchax import _compat
from batchax.cache import cached
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import bind_with, bodies_of, calls_host, is_rebuilt
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    axis_to_front,
    move_axis,
)
from batchax.kernel.inner import batched_aval, remembered, stage_function
from batchax.kernel.interpreter import (
    by_rule_of_jax,
    lane_after_lane,
    lanes_spread,
    lanes_together,
)
from batchax.kernel.own_primitive import declare, own_primitive, tangents_of
from batchax.kernel.registry import register_rule
from batchax.rules.calls import CALLS
from batchax.rules.in_place import live_type
from batchax.rules.masking import hazards, safe_lanes

lane_calls_p = declare("lane_calls")


def with_active(axis: Axis, program: ClosedJaxpr) -> ClosedJaxpr:
    """Adds a first operand `active` to `program`, whose callbacks and checks then depend on it."""

    def run(active: Value, *xs: Value) -> list[Any]:
        return _evaluate(axis, program, xs, active)

    def build() -> ClosedJaxpr:
        return stage_function(axis, run, [live_type(), *program.in_avals])

    return remembered(program, ("with active", axis), build)


def _evaluate(axis: Axis, program: ClosedJaxpr, operands: Values, active: Value) -> list[Any]:
    run_equation = lambda eqn, xs: bind_if(axis, eqn, xs, active)
    return evaluate(program.jaxpr, program.consts, operands, run_equation)


def bind_if(axis: Axis, eqn: Eqn, xs: Values, active: Value) -> Sequence[Any]:
    """Evaluates an equation of one example, whose callbacks and checks require `active`."""
    calls, name = calls_host(eqn), eqn.primitive.name
    if not (calls or _compat.checks(eqn.effects)):
        return bind_equation(eqn, xs)
    if name == "check":
        count = failures(**eqn.params)
        return bind_equation(eqn, [*(lax.bitwise_and(x, active) for x in xs[:count]), *xs[count:]])
    if name == "jit":
        return _evaluate(axis, eqn.params["jaxpr"], xs, active)
    if is_rebuilt(eqn.primitive) or name in CALLS:
        programs = [with_active(axis, _compat.close(b.program)) for b in bodies_of(eqn)]
        return bind_with(eqn, xs, programs, [active])
    if eqn.primitive is lane_calls_p:
        # The lanes that call are those active in both masks.
        also = lax.bitwise_and(xs[0], lax.broadcast(active, np.shape(xs[0])))
        return bind_equation(eqn, [also, *xs[1:]])
    return call_if(eqn, xs, active) if calls else bind_equation(eqn, xs)


def failures(err_tree: Any, **_: Any) -> int:
    """Returns how many operands of a runtime check are flags that it failed: the first ones."""
    return err_tree.children()[0].num_leaves  # of an error: then come codes and payloads


def call_if(eqn: Eqn, operands: Values, active: Value, lane: Value | None = None) -> Sequence[Any]:
    """Evaluates an equation with a host callback if the lane is active; zeros otherwise.

    `lane` is the index among all lanes, negative for one that does not count: calls that all lanes
    share are then made once, for the first one. Raises UnsupportedError if the equation also holds
    a collective.
    """
    program = _compat.stage(lambda *xs: bind_equation(eqn, xs), [v.aval for v in eqn.invars])
    if hazards(program.jaxpr).collective:
        raise UnsupportedError(
            f"{_compat.user_line(eqn.source_info)}: `{eqn.primitive.name}` holds both a "
            "callback with effects and a collective over a named axis, where not every lane "
            "counts: lanes would have to run both sequentially and together. Move one of the "
            "two out of it."
        )
    places = [] if lane is None else [lane]
    shared = (True,) * len(operands)
    return lane_calls_p.bind(
        active, *places, *operands, program=program, shared=shared, placed=lane is not None
    )


def _run(
    active: Value, *operands: Value, program: ClosedJaxpr, shared: Sequence[bool], placed: bool
) -> list[Any]:
    """Makes the calls of the active lanes, one after another."""
    if placed:
        active = lax.bitwise_and(active, lax.ge(operands[0], np.int32(0)))
    xs, shape = operands[placed:], np.shape(active)
    nothing = returning_zeros(tuple(program.in_avals), tuple(program.out_avals))
    *xs, active = _compat.varying_alike([*xs, active])

    # A `cond` rather than a mask, as a call cannot be undone.
    def one_lane(active: Value, xs: Values) -> list[Any]:
        index = lax.convert_element_type(active, np.int32)
        return cond_p.bind(index, *xs, branches=(nothing, program))

    if not shape:
        return one_lane(active, xs)

    def step(_: None, row: tuple[Any, list[Any]]) -> tuple[None, list[Any]]:
        active, own = row[0], iter(row[1])
        mine = [x if s else next(own) for x, s in zip(xs, shared, strict=True)]
        return None, one_lane(active, mine)

    # Several batch axes are collapsed into one scan, which keeps calls in order.
    depth = len(shape)
    in_a_row = lambda x: lax.collapse(lanes_together(x), 0, depth)
    rows = [in_a_row(x) for x, s in zip(xs, shared, strict=True) if not s]
    _, outs = lax.scan(step, None, (in_a_row(active), rows), length=math.prod(shape))
    outs = [lax.reshape(x, (*shape, *x.shape[1:])) for x in outs]
    return [safe_lanes(lanes_together(active), x, depth) for x in outs]


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    program: ClosedJaxpr,
    shared: Sequence[bool],
    placed: bool,
) -> RuleOutputs:
    recording.note(service="lanes")
    count = 1 + placed  # operands that say whether a lane is active
    active, active_at, xs, xs_at = args[0], axes[0], args[count:], axes[count:]
    how = {"program": program, "shared": tuple(shared), "placed": placed}
    if placed and active_at is None and not any(a is not None for a in xs_at):
        return _for_the_first(axis, args, axes[1], how)
    lanes = active.shape if active_at is None else np.delete(active.shape, active_at)
    masks = [axis_to_front(axis, x, a) for x, a in zip(args[:count], axes[:count], strict=True)]
    operands, alone = [], []
    for x, a, s in zip(xs, xs_at, shared, strict=True):
        alone.append(s and a is None)
        if not alone[-1]:
            x = axis_to_front(axis, x, a)
            if s:  # the lanes that there were have it in common
                dims = (0, *range(1 + len(lanes), np.ndim(x) + len(lanes)))
                x = lax.broadcast_in_dim(x, (axis.size, *lanes, *x.shape[1:]), dims)
        operands.append(x)
    outs = lane_calls_p.bind(*masks, *operands, **{**how, "shared": tuple(alone)})
    return [lanes_spread(axis, x) for x in outs], [0] * len(outs)


def _for_the_first(
    axis: Axis, args: Values, lane_at: Position, how: dict[str, Any]
) -> tuple[list[Any], Positions]:
    """Makes a call that all lanes share, in what may be one chunk of the lanes."""
    program: ClosedJaxpr = how["program"]
    if program.out_avals:
        eqn = program.jaxpr.eqns[-1]
        raise UnsupportedError(
            f"{_compat.user_line(eqn.source_info)}: a callback with effects returns an "
            "unbatched value inside a loop or branch. With batch_size or mesh, each part of "
            "the batch would call it. Pass it a batched value, or call it before and pass the "
            "result with None in in_axes."
        )
    active, lane, *xs = args
    first = lax.eq(axis_to_front(axis, lane, lane_at), np.int32(0))
    # Only the chunk with lane 0 makes the call.
    here = lax.bitwise_and(active, lax.reduce_or(first, (0,)))
    return lane_calls_p.bind(here, *xs, **{**how, "placed": False}), []


def _types(active: Value, *operands: Value, program: ClosedJaxpr, **how: Any) -> list[Any]:
    def of_lanes(aval: Aval) -> Aval:
        for size in reversed(active.shape):
            aval = batched_aval(Axis(size), aval, 0)
        return aval

    return list(map(of_lanes, program.out_avals))


def _jvp(
    primals: Values, tangents: Values, *, program: ClosedJaxpr, **how: Any
) -> tuple[list[Any], list[Any]]:
    if not program.out_avals:
        return lane_calls_p.bind(*primals, program=program, **how), []
    run = functools.partial(_run, program=program, **how)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    every = range(len(program.out_avals))
    outs, dots = tangents_of(run, primals, moving, [tangents[i] for i in moving], every)
    zero = jax.dtypes.float0
    return outs, [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if jax.typeof(t).dtype == zero else t
        for x, t in zip(outs, dots, strict=True)
    ]


def _compiled(*operands: Value, program: ClosedJaxpr, **how: Any) -> list[Any]:
    def compile_() -> Callable[..., list[Any]]:
        # What is remembered under `program` as a weak key must not hold it alive.
        jaxpr, consts = program.jaxpr, program.consts
        return jax.jit(lambda *xs: _run(*xs, program=_compat.close(jaxpr, consts), **how))

    return remembered(program, ("compiled", *how.values()), compile_)(*operands)


own_primitive(
    lane_calls_p,
    called="a callback",
    operations=_run,
    compute=_compiled,
    types=_types,
    programs=("program",),
    facts="linear costly guarded",
    rule=_batched,
    jvp=_jvp,
)


@cached("programs that return zeros", most=1024)
def returning_zeros(
    in_avals: tuple[Aval, ...], out_avals: tuple[Aval, ...], kept: tuple[tuple[int, int], ...] = ()
) -> ClosedJaxpr:
    """Traces a program of these types that returns zeros, or an operand for results in `kept`."""
    handed_on = dict(kept)

    def zero(aval: Aval) -> jax.Array:
        x = _compat.varying_as(_compat.filled(aval, 0), aval)
        return _compat.weakly(x) if aval.weak_type else x

    def zeros(*operands: Value) -> list[Any]:
        return [
            operands[handed_on[k]] if k in handed_on else zero(aval)
            for k, aval in enumerate(out_avals)
        ]

    return _compat.stage(zeros, in_avals)


enter(
    """
    endless costly on_host: io_callback pure_callback
    on_host shows: debug_callback debug_print
    library: ffi_call
    : check inspect_sharding
    """
)

_SEQUENTIAL = ("sequential", "sequential_unrolled")
_AT_ONCE = ("expand_dims", "broadcast_all", "legacy_vectorized")


def _by_method(primitive: _compat.Primitive) -> None:
    """Registers `primitive`, which takes a ``vmap_method``."""

    @register_rule(primitive)
    def rule(
        axis: Axis, args: Values, axes: Positions, /, *, vmap_method: str | None, **params: Any
    ) -> RuleOutputs:
        if vmap_method in _SEQUENTIAL:
            params, unroll = {"vmap_method": vmap_method, **params}, vmap_method != _SEQUENTIAL[0]
            return lane_after_lane(axis, primitive, args, axes, params, unroll)
        if vmap_method not in _AT_ONCE:
            raise UnsupportedError(
                f"{_callee(params)} was called on batched values through {primitive}, without "
                "vmap_method. Pass vmap_method='sequential' to call it once for each lane, or "
                "'broadcast_all' or 'expand_dims' if it accepts arrays with a leading batch axis."
            )
        params = {"vmap_method": vmap_method, **params}
        return by_rule_of_jax(axis, primitive, args, axes, params)


def _callee(params: dict[str, Any]) -> str:
    if "target_name" in params:
        return f"the foreign function {params['target_name']!r}"
    callback = getattr(params["callback"], "callback_func", params["callback"])
    return f"the callback {name_of(callback)!r}"


def _lane_by_lane(primitive: _compat.Primitive) -> None:
    """Registers `primitive`, which has effects, to run once for each lane in order."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
        return lane_after_lane(axis, primitive, args, axes, params)


for _name in ("pure_callback", "ffi_call"):
    if (_primitive := _compat.find_primitive(_name)) is not None:
        _by_method(_primitive)
for _name in ("io_callback", "debug_callback", "debug_print"):
    if (_primitive := _compat.find_primitive(_name)) is not None:
        _lane_by_lane(_primitive)


_inspect_sharding_p: Any = _compat.find_primitive("inspect_sharding")
_check_p: Any = _compat.find_primitive("check")


@register_rule(_inspect_sharding_p)
def _inspect_sharding(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    _inspect_sharding_p.bind(*args, **params)  # of the whole batch; it has no results
    return [], []


@register_rule(_check_p)
def _check(
    axis: Axis, args: Values, axes: Positions, /, *, err_tree: Any, **params: Any
) -> RuleOutputs:
    """Reports the first lane that fails."""
    # Without lanes, no check can fail.
    if axis.size == 0:
        return [], []
    args = [x if a is None else move_axis(x, a, 0) for x, a in zip(args, axes, strict=True)]
    count = failures(err_tree)
    failed = functools.reduce(jnp.logical_or, args[:count])
    first = jnp.argmax(failed) if jnp.ndim(failed) else 0
    args = [
        x if a is None else lax.dynamic_index_in_dim(x, first, 0, keepdims=False)
        for x, a in zip(args, axes, strict=True)
    ]
    _check_p.bind(*args, err_tree=err_tree, **params)
    return [], []
