"""Batching the jaxprs inside equations: of calls, loops and branches.

A call or loop holds its body as a closed jaxpr. The batched body is built once for each distinct
body, axis and pattern of batched inputs, and cached, so that a function called many times is
batched (and compiled) once.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import mapped_aval, unmapped_aval
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.types import Aval, ClosedJaxpr, Params, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    is_in_types,
    lanes_vary_over,
    match_axis,
    names_in,
    sharding_on_mesh,
)
from batchax.kernel.captured import may_be_differentiated, reject_lost
from batchax.kernel.interpreter import checks_nans_here, interpret
from batchax.kernel.named_axes import (
    Varying,
    any_uses_axis,
    as_without_mesh,
    types_varying,
    vary_over,
    without_mesh,
)
from batchax.kernel.registry import registrations

T = TypeVar("T")
State = TypeVar("State")


class _Placement(enum.Enum):
    """Names where an output may have its batch axis, other than at a given position."""

    ANYWHERE = "where it is, or none"
    ZERO_IF_MAPPED = "first if it depends on the batch, or none"

    def __repr__(self) -> str:
        return f"batchax.{self.name}"


ANYWHERE: Any = _Placement.ANYWHERE
ZERO_IF_MAPPED: Any = _Placement.ZERO_IF_MAPPED
ZERO_IF_MAPPED.__doc__ = """\
Gives an output in `out_axes` of `batch_jaxpr` batch axis 0 if it has one, and none otherwise.

Example:
  >>> program = jax.make_jaxpr(lambda w, x: (2 * w, x.sum()))(1.0, jnp.ones(3))
  >>> _, out_axes = bx.batch_jaxpr(program, 8, (None, 1), out_axes=bx.ZERO_IF_MAPPED)
  >>> out_axes
  (None, 0)
"""

# Arrays that a body holds are freed with it, but where its batched form refers back to it.
_built = Cache("programs inside programs, batched", most=4096)


def batch_inner(
    axis: Axis,
    body: ClosedJaxpr,
    in_axes: Positions,
    out_axes: Sequence[Any] | Any = ANYWHERE,
    varying: Varying = (),
    read: Sequence[bool] | None = None,
) -> tuple[ClosedJaxpr, tuple[Position, ...]]:
    """Batches the closed jaxpr `body`, and returns it with the batch axes of its outputs.

    Entries of `out_axes` are positions, `ANYWHERE`, or `ZERO_IF_MAPPED`. `varying` holds the mesh
    axes over which inputs vary inside ``shard_map``, which may be more than for one example. `read`
    is as for `interpret`.
    """
    in_axes = tuple(in_axes)
    anywhere = (ANYWHERE,) * len(body.out_avals)
    out_axes = anywhere if out_axes is ANYWHERE else tuple(out_axes)
    key = (axis, in_axes, varying, lanes_vary_over(axis), read)
    built, context = _memory()
    # A program that was built for any placement may already have the requested axes.
    fits = built.find(((key, anywhere), context), owner=body)
    if fits is not None and all(w in (ANYWHERE, a) for w, a in zip(out_axes, fits[1], strict=True)):
        return fits
    build = lambda: _batch_inner(axis, body, in_axes, out_axes, varying, read)
    return remembered(body, (key, out_axes), build)


def remembered(owner: object, key: Hashable, build: Callable[[], T]) -> T:
    """Caches what `build` returns for each `key` while `owner`, such as a jaxpr, lives."""
    built, context = _memory()
    return built.get((key, context), build, owner)


def inline_jaxpr(program: ClosedJaxpr, operands: Values) -> list[Any]:
    """Runs `program`. While another is traced, its equations are inlined."""
    if _compat.staging() and not _compat.checked_axes():
        return _compat.inlined(program, operands)
    return eval_jaxpr(program.jaxpr, program.consts, *operands)


def emitted(
    axis: Axis,
    body: ClosedJaxpr,
    operands: Values,
    axes: Positions,
    emit: Callable[..., tuple[list[Any], Positions]],
    more: Hashable = None,
) -> tuple[list[Any], Positions]:
    """Returns `emit(*operands)`, traced once and inlined if the same `body` occurs again.

    `emit` must not depend on values of the function being batched; `more` names what else it
    depends on.
    """
    if not _compat.staging() or recording.is_on() or _compat.checked_axes() or body.effects:
        return emit(*operands)
    types = tuple(map(jax.typeof, operands))
    key = "emitted", axis, types, tuple(axes), more
    # JAX caches the jaxprs of functions such as `jnp.where`, so one body occurs in many jaxprs.
    # Bodies that occur once are not worth tracing separately.
    met: list[bool] = remembered(body, key, list)
    if not met:
        met.append(True)
        return emit(*operands)
    program, out_axes = remembered(
        body, (key, "again"), lambda: _compat.stage_described(emit, types)
    )
    return _compat.inlined(program, operands), out_axes


def _memory() -> tuple[Cache, Hashable]:
    """Returns the cache of batched programs, and the context that they depend on."""
    # Rules of derivatives are called only where something may be differentiated, and while notes
    # are taken each record has its own marks.
    built, place = recording.memory() or (_built, None)
    return built, (place, _compat.trace_context(), registrations(), may_be_differentiated())


def _batch_inner(
    axis: Axis,
    body: ClosedJaxpr,
    in_axes: tuple[Position, ...],
    out_axes: tuple[Any, ...],
    varying: Varying,
    read: Sequence[bool] | None,
) -> tuple[ClosedJaxpr, tuple[Position, ...]]:
    def run(*args: Value) -> tuple[list[Any], tuple[Position, ...]]:
        outs, axes = run_inner(axis, body, args, in_axes, read)
        places = [_place(a, w) for a, w in zip(axes, out_axes, strict=True)]
        placed = [
            x if to is None else match_axis(axis, x, a, to)
            for x, a, to in zip(outs, axes, places, strict=True)
        ]
        return placed, tuple(places)

    avals = [batched_aval(axis, aval, a) for aval, a in zip(body.in_avals, in_axes, strict=True)]
    if varying:
        avals = list(map(_compat.type_varying_over, avals, varying))
    return _compat.stage_described(run, avals)


def _place(position: Position, out_axis: Any) -> Position:
    if out_axis is ZERO_IF_MAPPED:
        return None if position is None else 0
    return position if out_axis is ANYWHERE else out_axis


def returning(program: ClosedJaxpr, varying: Varying) -> ClosedJaxpr:
    """Casts results of `program` to vary over these mesh axes too."""
    own = types_varying(program.out_avals)
    if all(want <= have for have, want in zip(own, varying, strict=True)):
        return program

    def run(*args: Value) -> list[Any]:
        return vary_over(eval_jaxpr(program.jaxpr, program.consts, *args), varying)

    return remembered(program, ("returning", varying), lambda: _compat.stage(run, program.in_avals))


def returning_alike(programs: Sequence[ClosedJaxpr]) -> list[ClosedJaxpr]:
    """Casts results so that each varies over the same mesh axes in all `programs`."""
    if not _compat.checked_axes():
        return list(programs)
    by_program = [types_varying(program.out_avals) for program in programs]
    varying = tuple(frozenset().union(*each) for each in zip(*by_program, strict=True))
    return [returning(program, varying) for program in programs]


def batched_aval(axis: Axis, aval: Aval, position: Position) -> Aval:
    """Returns the type for all lanes, with the batch axis at `position`."""
    if position is None:
        return aval
    entry = axis.mesh_axis
    # Abstract values of other kinds, such as references, have no sharding to update.
    if entry is not None and type(aval) is ShapedArray:
        aval = aval.update(sharding=sharding_on_mesh(axis, aval.sharding))
        entry = entry if is_in_types(aval.sharding, entry) else None
    aval = unmapped_aval(axis.size, position, aval, entry)
    over = lanes_vary_over(axis)
    return _compat.type_varying_over(aval, over) if over else aval


def example_aval(axis: Axis, aval: Aval, position: Position) -> Aval:
    """Returns the type of one example of a value whose batch axis is at `position`."""
    if position is None:
        return aval
    over = lanes_vary_over(axis) if axis.spmd_name is not None else ()
    if over:
        aval = _compat.with_varying_axes(aval, _compat.varying_axes(aval) - over)
    # `mapped_aval` updates the sharding, too, which takes three times as long.
    if type(aval) is ShapedArray and aval.sharding.mesh.empty:
        shape = aval.shape[:position] + aval.shape[position + 1 :]
        return ShapedArray(shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)
    return mapped_aval(aval.shape[position], position, aval)  # with lanes that repeat others


_staging_lanes: ContextVar[bool] = ContextVar("batchax_staging_lanes", default=False)


def staging_lanes() -> bool:
    """Returns whether a function of one example is being traced for batchax."""
    return _staging_lanes.get()


def stage_function(
    axis: Axis,
    fun: Callable[..., Any],
    avals: Sequence[Aval],
    arg_names: Sequence[str] | None = None,
    transformation: str = "vmap",
) -> ClosedJaxpr:
    """Traces a flat function of one example with the name of `axis` in scope.

    `arg_names` are for messages, and `transformation` is what the function is traced for.
    """
    named = [] if axis.name is None else [(axis.name, axis.size)]
    types = as_without_mesh(avals)

    # Keep nested `jit` calls as equations, for which JAX checks results only.
    def stage(f: Callable[..., Any], selecting: bool = False) -> ClosedJaxpr:
        if checks_nans_here():
            f = _compat.keeping_calls(f)
        taken = _compat.mesh_axis_taken(axis.mesh_axis)
        token = _staging_lanes.set(transformation != "scan" or _staging_lanes.get())
        try:
            with recording.paused(axis), taken, without_mesh():
                f = _compat.noting_trace(f, traces := [])
                program = _compat.stage(f, types, named, arg_names, transformation, selecting)
        finally:
            _staging_lanes.reset(token)
        return reject_lost(program, traces[-1])  # constants of this trace are not lost

    try:
        return stage(fun)
    except NEEDS_VALUES as error:
        # Python branched on a traced value. If the value derives from unbatched arguments only, it
        # can be computed while tracing.
        try:
            return stage(_compat.known_at_once(fun, functools.partial(_stays, axis)))
        except Exception:
            # The first error names the value the function needed: a batched one,
            # or one computed from the index or size of the axis.
            raise error from None
    except (TypeError, ValueError) as error:
        if not _compat.checked_axes():
            raise
        # Mesh axes that branches vary over may disagree, unless each lane selects its own branch:
        # types are then computed as if lanes did.
        try:
            return stage(fun, selecting=True)
        except Exception:
            raise error from None


def _stays(axis: Axis, primitive: _compat.Primitive, params: Params) -> bool:
    """Returns whether an operation must stay in the program even if its operands are known."""
    if primitive.name in _EFFECTFUL or (axis.name is not None and axis.name in names_in(params)):
        return True
    # Parameters may be jaxprs, whose effects keep them in the program.
    return any(getattr(x, "effects", None) for x in params.values())


_EFFECTFUL = frozenset(
    {"addupdate", "debug_callback", "debug_print", "get", "io_callback", "new_ref", "swap"}
)


def stage_described(
    axis: Axis,
    fun: Callable[..., tuple[list[Any], Any]],
    avals: Sequence[Aval],
    arg_names: Sequence[str] | None = None,
    transformation: str = "vmap",
) -> tuple[ClosedJaxpr, Any]:
    """Traces as `stage_function` a function that returns arrays and their description."""

    def stage(arrays: Callable[..., Any]) -> ClosedJaxpr:
        return stage_function(axis, arrays, avals, arg_names, transformation)

    return _compat.described(fun, stage)


NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where Python branches on, or converts, a value that is being traced."""


def batch_function(
    axis: Axis,
    fun: Callable[..., Any],
    args: Values,
    axes: Positions,
) -> tuple[list[Any], list[Position]]:
    """Applies a flat function of one example to batched values, from inside a rule."""
    avals = [example_aval(axis, jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    staged = stage_function(axis, fun, avals)
    return run_inner(axis, staged, args, axes)


def run_inner(
    axis: Axis,
    program: ClosedJaxpr,
    args: Values,
    axes: Positions,
    read: Sequence[bool] | None = None,
) -> tuple[list[Any], list[Position]]:
    """Runs a jaxpr of an equation for all lanes, by `axis.bodies` if the axis has that."""
    if axis.bodies is not None and any_uses_axis(axis, program):
        return axis.bodies.run(program, args, axes)
    return interpret(axis, program.jaxpr, program.consts, args, axes, read)


_programs = Cache("what moves lanes in windows, and counts them", most=512)


def staged_once(key: Hashable, fun: Callable[..., Sequence[Any]], *operands: Value) -> list[Any]:
    """Runs `fun`, traced once for each `key`, operand types, platform, and context."""
    types = tuple(map(jax.typeof, operands))
    whole = key, types, jax.default_backend(), _compat.trace_context()
    program = _programs.get(whole, lambda: _compat.stage(lambda *xs: list(fun(*xs)), types))
    return inline_jaxpr(program, operands)


def while_loop(
    goes_on: Callable[[State], Value], once: Callable[[State], State], state: State
) -> State:
    """Runs as ``lax.while_loop``, with a strongly typed carry, as a step may return one.

    JAX checks that a step returns what it is given, for messages to users. These checks are more
    than half of the time of tracing a loop, so this binds the primitive. Benchmark `vmap`: "while
    inside scan", tracing.
    """
    leaves, structure = jax.tree.flatten(state)
    first = list(map(_strong, leaves))
    types = list(map(jax.typeof, first))

    def test(*leaves: Value) -> list[Value]:
        return [goes_on(structure.unflatten(leaves))]

    def step(*leaves: Value) -> list[Value]:
        return list(map(_strong, jax.tree.leaves(once(structure.unflatten(leaves)))))

    (test_jaxpr,), test_consts = _compat.hoist_constants(_compat.stage(test, types))
    (step_jaxpr,), step_consts = _compat.hoist_constants(_compat.stage(step, types))
    # The type of an array from outside a `shard_map` lacks the mesh, which JAX adds to the carry.
    if step_jaxpr.out_avals != types:
        once_strong = lambda state: jax.tree.map(_strong, once(state))
        return lax.while_loop(goes_on, once_strong, structure.unflatten(first))
    last = while_p.bind(
        *test_consts,
        *step_consts,
        *first,
        cond_nconsts=len(test_consts),
        cond_jaxpr=test_jaxpr,
        body_nconsts=len(step_consts),
        body_jaxpr=step_jaxpr,
    )
    return structure.unflatten(last)


def _strong(x: Value) -> Value:
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x
