"""Traces functions of one example, runs the jaxprs, and batches those inside equations.

A call or loop holds its body as a closed jaxpr. The batched body is built once for each distinct
body, axis and pattern of batched inputs, and cached, so that a function called many times is
batched (and compiled) once.

The last part finds the values that a custom derivative rule closes over. JAX traces the derivative
rules of ``custom_jvp`` and ``custom_vjp`` when they are first needed, which may be long after the
per-example function was traced::

    def per_example(x, p):
        y = jnp.sin(p)

        @jax.custom_jvp
        def f(z): ...
        f.defjvp(lambda primals, tangents: ... y ...)     # y is of the traced jaxpr

What such a rule closes over is then a tracer of a jaxpr that has run by now. It knows the variable
that it stood for, so its value is found by running that part of the jaxpr again. That costs
something only for rules that close over such values; to keep every value would always cost.

JAX runs a derivative rule outside of the derivative. A value that is differentiated is a constant
there, and what the rule does with it has no derivative. JAX raises an error when such a value is
used, but not for operations without a used result: those that a rule replaces.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray, Trace, Tracer, eval_jaxpr
from jax.extend.core import Literal, mapped_aval, unmapped_aval
from jax.extend.core.primitives import cond_p, jit_p, scan_p, while_p
from jax.tree_util import PyTreeDef

from batchax import _compat
from batchax.cache import Cache, cached_on
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import (
    Anywhere,
    bodies_of,
    programs_held,
    programs_inside,
    with_inside,
)
from batchax.jaxprs.error_format import line_of
from batchax.jaxprs.evaluate import (
    Inside,
    Rewriter,
    plan,
    rewritten,
    variables_in,
    variables_used,
)
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Params, Program, Value, Values, Var
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
from batchax.kernel.impl_programs import impl_program_p, with_impl_programs
from batchax.kernel.interpreter import checks_nans_here, interpret
from batchax.kernel.named_axes import (
    Varying,
    any_uses_axis,
    as_without_mesh,
    types_varying,
    vary_over,
    varying_of,
    without_mesh,
)
from batchax.kernel.own_primitive import held, placeholder, released
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
Moves the batch axis of an output of `batch_jaxpr` to 0, if it has one.

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


def repeat(count: int | Value, step: Callable[[Value, State], State], state: State) -> State:
    """Runs ``step(i, state)`` for `i` from 0 to `count`, int32, as ``lax.fori_loop``.

    It is traced and lowered in half the time.
    """
    end = np.int32(count) if isinstance(count, int) else count
    goes_on = lambda state: lax.lt(state[0], end)
    once = lambda state: (lax.add(state[0], np.int32(1)), step(*state))
    return while_loop(goes_on, once, (np.int32(0), state))[1]


def while_loop(
    goes_on: Callable[[State], Value], once: Callable[[State], State], state: State
) -> State:
    """Runs as ``lax.while_loop``, with a strongly typed carry, as a step may return one.

    JAX checks that a step returns what it is given, for messages to users. These checks are more
    than half of tracing a loop, so this binds the primitive. Benchmark `vmap`: "while
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


def reject_lost(program: ClosedJaxpr, trace: Trace) -> ClosedJaxpr:
    """Checks that a traced jaxpr does not close over a value of a trace around it.

    A constant that belongs to `trace` itself is allowed. Raises UnsupportedError for a value of a
    derivative around it, and UnexpectedTracerError for one of a function that JAX has traced.
    """
    if program.consts or any(map(programs_held, program.jaxpr.eqns)):
        _reject_lost(program, trace, _compat.name_and_place(program.jaxpr))
    return program


def _reject_lost(program: Program, trace: Trace, called_at: str) -> None:
    jaxpr, consts = _compat.jaxpr_of(program), getattr(program, "consts", ())
    if _compat.any_inside(consts, trace):
        for x, v in zip(consts, jaxpr.constvars, strict=False):
            if isinstance(x, Tracer) and _compat.is_inside(x, trace):
                reader = _reader(jaxpr, v)
                place = called_at if reader is None else line_of(reader)
                if _compat.staged_variable(x) is not None:
                    _compat.reject_escaped(x)  # JAX says where it was made
                raise UnsupportedError(of_what_is_around(place, jax.typeof(x).str_short()))
    for eqn in filter(programs_held, jaxpr.eqns):
        for inner in _run_by(eqn):
            if _holds_tracers(inner):
                _reject_lost(inner, trace, line_of(eqn))


def of_what_is_around(place: str, type_of: str) -> str:
    """Words the error for a tracer that `place` uses outside of its trace."""
    return (
        f"{place} uses a traced value ({type_of}) of what is differentiated or "
        "staged around it, and runs outside of that. If it is a rule of jax.custom_jvp or "
        "jax.custom_vjp, it closes over the value, whose part of the derivative would be lost. "
        "Pass the value to the function as an argument: its rules are then given it, too."
    )


@cached_on("whether programs hold traced values as constants")
def _holds_tracers(program: Program) -> bool:
    """Returns whether a program, or one that it runs, holds traced values as constants."""
    if any(isinstance(x, Tracer) for x in getattr(program, "consts", ())):
        return True
    eqns = filter(programs_held, _compat.jaxpr_of(program).eqns)
    return any(_holds_tracers(inner) for eqn in eqns for inner in _run_by(eqn))


def _run_by(eqn: Eqn) -> list[Any]:
    """Returns the jaxprs that an equation with programs runs on its operands.

    Third parties hold other jaxprs in parameters (Lineax: the jaxpr that made an operator).
    """
    bodies = bodies_of(eqn)
    # A jaxpr that the equation does not run has inputs that are not operands.
    return [body.program for body in bodies if len(body.operands) == len(body.jaxpr.invars)]


def _reader(jaxpr: Jaxpr, variable: Var) -> Eqn | None:
    """Finds the first equation that reads `variable`, also inside calls, loops, and branches."""
    for eqn in jaxpr.eqns:
        if not any(v is variable for v in eqn.invars):
            continue
        for body in bodies_of(eqn):
            for v, operand in zip(body.jaxpr.invars, body.operands, strict=False):
                if eqn.invars[operand] is variable:
                    # A body may pass the value on without reading it: then the call itself is the
                    # reader.
                    return _reader(body.jaxpr, v) or eqn
        return eqn
    return None


@dataclass(frozen=True, eq=False)
class MappedProgram:
    """Holds a traced jaxpr, the operands that it runs on, and their batch axes."""

    axis: Axis
    staged: Any  # a closed jaxpr, or a part of one that looks like it
    args: Values
    axes: Positions
    computes: bool = False  # whether what is staged of it will be computed at once

    @property
    def traced(self) -> bool:
        """Returns whether running it traces operations instead of computing them at once."""
        values = (*self.args, *self.staged.consts)
        return not self.computes and any(isinstance(x, Tracer) for x in values)

    def run(self) -> tuple[list[Any], list[Position]]:
        """Runs it; meanwhile rules find what they close over."""
        jaxpr = of_what_is_read(self.staged)
        if self.axis.divergence is not None and isinstance(self.staged, ClosedJaxpr):
            values = *self.staged.consts, *self.args
            # What is differentiated already is not computed for its values alone.
            staged = all(_compat.staged_variable(x) for x in values if isinstance(x, Tracer))
            if staged and not any(varying_of(values)):
                jaxpr = _rules_apart(jaxpr) or jaxpr
        return self.run_as(jaxpr)

    def run_as(self, jaxpr: Jaxpr) -> tuple[list[Any], list[Position]]:
        """Runs `jaxpr`, of the same operands, instead."""
        token = _running.set(self)
        try:
            return interpret(self.axis, jaxpr, self.staged.consts, self.args, self.axes)
        finally:
            _running.reset(token)

    def resolve(self, values: Values) -> tuple[list[Any], list[Position]]:
        """Replaces placeholders of this program in `values` where possible; with their axes."""
        variables = [_compat.staged_variable(x) for x in values]
        jaxpr = self.staged.jaxpr
        # Placeholders are variables of this program that a rule closed over while it was traced.
        needed = [v for v in variables if v is not None and v in self._variables]
        if not needed:
            return list(values), [None] * len(values)
        # Only the equations that the needed variables depend on run again.
        eqns = [step.eqn for step in plan(jaxpr.eqns, needed, keeps=lambda _: False)]
        jaxpr = jaxpr.replace(eqns=eqns, outvars=needed)
        # Rules run outside of the derivative whose values the program may have been run on. What
        # does not depend on these is found inside of it: a mask, or what has no derivative.
        read = {*needed, *(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))}
        inputs = zip(jaxpr.constvars, self.staged.consts, strict=False)
        inputs = *inputs, *zip(jaxpr.invars, self.args, strict=True)
        left = [x for v, x in inputs if v in read and isinstance(x, Tracer) and _compat.is_left(x)]
        if any(map(_compat.is_over, left)):
            return list(values), [None] * len(values)
        with _compat.within_trace_of(left):
            outs, axes = interpret(self.axis, jaxpr, self.staged.consts, self.args, self.axes)
        computed: dict[Any, tuple[Value, Position]] = dict(
            zip(needed, zip(outs, axes, strict=True), strict=True)
        )
        pairs = [computed.get(v, (x, None)) for v, x in zip(variables, values, strict=True)]
        return [x for x, _ in pairs], [a for _, a in pairs]

    def resolves(self, x: Tracer) -> bool:
        variable = _compat.staged_variable(x)
        return variable is not None and variable in self._variables

    @functools.cached_property
    def _variables(self) -> set[Any]:
        jaxpr = self.staged.jaxpr
        return {*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)}


def of_what_is_read(program: Any) -> Jaxpr:
    """Returns the jaxpr of a program, in which loops carry only what something reads."""
    if not isinstance(program, ClosedJaxpr):
        return program.jaxpr
    jaxpr = with_impl_programs(program)
    if not _leaves_unread(jaxpr):
        return jaxpr
    # JAX's dead code elimination keeps all that a ``while`` carries: XLA removes it later, if no
    # lane is moved. So a placeholder stands for the loop.
    live = _compat.without_dead(_compat.close(_held(jaxpr), program.consts))
    return _released(live.jaxpr)


@cached_on("whether loops in programs have results that nothing reads")
def _leaves_unread(jaxpr: Jaxpr) -> bool:
    used = variables_used(jaxpr)
    for eqn in filter(_has_loop.in_equation, jaxpr.eqns):
        unread = [v not in used for v in eqn.outvars]
        if eqn.primitive is while_p:  # its predicate reads most of these: a counter, a bound
            test = eqn.params["cond_jaxpr"].jaxpr
            tested, carry = variables_used(test), test.invars[eqn.params["cond_nconsts"] :]
            unread = [u and v not in tested for u, v in zip(unread, carry, strict=True)]
        if any(unread) or any(map(_leaves_unread, programs_inside(eqn))):
            return True
    return False


_has_loop = Anywhere(lambda eqn: eqn.primitive is while_p)
_loop_p = placeholder("while")
_ENTERED = jit_p, while_p, scan_p, cond_p, _compat.find_primitive("custom_jvp_call")


@cached_on("programs whose loops are placeholders")
def _held(program: Any) -> Any:
    return rewritten(program, _hold, _held)


def _hold(eqn: Eqn, inside: Inside) -> Eqn:
    if not programs_held(eqn):
        return eqn
    # Rules that close over values must be found by what they are.
    if eqn.primitive in _ENTERED and _has_loop.in_equation(eqn) and not closed_over(eqn):
        loop = eqn.primitive is while_p
        return eqn.replace(primitive=_loop_p if loop else eqn.primitive, params=inside())
    return held(eqn)


@cached_on("programs whose loops carry what is read")
def _released(program: Any) -> Any:
    return rewritten(program, _release, _released)


def _release(eqn: Eqn, inside: Inside) -> Eqn:
    if not programs_held(eqn):
        return released(eqn) or eqn
    loop = eqn.primitive is _loop_p
    return eqn.replace(primitive=while_p if loop else eqn.primitive, params=inside())


def _carrying(results: Sequence[bool], params: Params) -> _compat.Reduced:
    test, body, operands, live = _compat.reduced_while(
        params["cond_jaxpr"], params["body_jaxpr"], results
    )
    n_test = sum(operands[: params["cond_nconsts"]])
    counts = {"cond_nconsts": n_test, "body_nconsts": sum(operands) - n_test - sum(live)}
    return _compat.Reduced(operands, live, {"cond_jaxpr": test, "body_jaxpr": body, **counts})


_compat.register_unread_results(_loop_p, _carrying)


@cached_on("programs that are computed without derivative rules")
def _rules_apart(jaxpr: Jaxpr) -> Jaxpr | None:
    """Returns `jaxpr` as an equation without derivative rules; None if its loops carry as much.

    A function with such a rule reads all its operands, as its derivative may need them: Equinox and
    diffrax pass all that a loop carries through one. The derivatives are those of `jaxpr`.
    `programs`: Lotka-Volterra, decay to a level.
    """
    if not (_has_loop.in_program(jaxpr) and _has_rule.in_program(jaxpr)):
        return None
    given = [*jaxpr.constvars, *jaxpr.invars]
    made = [v for v in dict.fromkeys(variables_in(jaxpr.outvars)) if v not in given]
    whole = _compat.close(jaxpr.replace(constvars=[], invars=given, outvars=made))
    # Rules must find what they close over, and effects happen once.
    if whole.effects or _holds_tracers(jaxpr) or any(map(closed_over, jaxpr.eqns)):
        return None
    values = _compat.close(of_what_is_read(_without_rules(whole)))
    if _carried(values.jaxpr) >= _carried(jaxpr):
        return None
    params = {"program": values, "of": whole}
    how = {"primitive": impl_program_p, "params": params, "effects": whole.effects}
    eqn = jaxpr.eqns[-1].replace(invars=given, outvars=made, **how)
    return jaxpr.replace(eqns=[eqn])


def _carried(jaxpr: Jaxpr) -> int:
    """Returns how many values the loops in `jaxpr` carry."""
    eqns = with_inside(jaxpr.eqns, _has_loop.in_equation)
    return sum(len(eqn.outvars) for eqn in eqns if eqn.primitive is while_p)


_has_rule = Anywhere(lambda eqn: eqn.primitive.name in _WITH_RULES)
_WITH_RULES = "custom_jvp_call", "custom_vjp_call"


@cached_on("programs without derivative rules")
def _without_rules(program: Program) -> Any:
    """Replaces calls of functions with derivative rules by what they call."""
    made = Rewriter(_compat.close(rewritten(program, _within, _without_rules)))
    for eqn in made.read.jaxpr.eqns:
        if eqn.primitive.name in _WITH_RULES:
            made.replace(eqn, _without_rules(eqn.params["call_jaxpr"]))
        else:
            made.eqns.append(made.own(eqn))
    return made.program()


def _within(eqn: Eqn, inside: Inside) -> Eqn:
    entered = eqn.primitive in _ENTERED and _has_rule.in_equation(eqn)
    return eqn.replace(params=inside()) if entered else eqn


_running: ContextVar[MappedProgram | None] = ContextVar("batchax_running", default=None)


def may_be_differentiated() -> bool:
    """Returns whether the operations that run now may be differentiated later."""
    program = _running.get()
    # A program that computes with values is not seen by transformations around it.
    return program is None or program.traced


def program_behind(*rules: object) -> MappedProgram | None:
    """Returns the running program if `rules` close over its placeholders, else None."""
    program = _running.get()
    # A rule that needs no program must not hold one: caches keep rules for long.
    return program if program is not None and closes_over_tracers(rules) else None


def closes_over_tracers(rule: object) -> bool:
    """Returns whether a function closes over a placeholder of a program, or may do so."""
    return any(True for _ in _tracers([rule]))


def captured_tracers(rule: Callable[..., Any] | None) -> list[Tracer]:
    """Lists the tracers in a function's closure and defaults, and in containers there.

    Attributes of other objects are not searched.
    """
    tracers = _tracers([rule], lambda x: ())
    # Keyed by `id`, as `==` of tracers is a traced operation.
    return list({id(t): t for t in tracers if t is not None}.values())


# The parameters of equations that hold functions which are traced later: derivative rules of JAX
# calls, and rules of calls of batchax.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule", "_prim")


def rules_of(eqn: Eqn) -> list[Any]:
    return [rule for name, rule in eqn.params.items() if name in _RULES]


def closed_over(eqn: Eqn) -> list[Any]:
    """Lists the variables that rules in `eqn`, and in jaxprs inside it, close over."""
    rules = rules_of(eqn)
    variables = list(map(_compat.staged_variable, _tracers(rules))) if rules else []
    for inner in programs_inside(eqn):
        variables += _closed_over_inside(inner)
    return [v for v in dict.fromkeys(variables) if v is not None]


@cached_on("variables that derivative rules in programs close over")
def _closed_over_inside(jaxpr: Jaxpr) -> list[Any]:
    return [v for eqn in jaxpr.eqns for v in closed_over(eqn)]


class Captured:
    """Holds the values, for all lanes, of what rules of the function `name` close over."""

    def __init__(self, name: str, program: MappedProgram | None) -> None:
        # the program of the placeholders, if rules close over any
        self.name, self.program = name, program
        self._values: dict[int, tuple[Value, Position]] = {}

    def find(self, rule: object) -> None:
        """Resolves now what `rule` closes over, as the rule runs after the derivative is over."""
        tracers = [] if self.program is None else [t for t in _tracers([rule]) if t is not None]
        if self.program is not None and tracers:
            pairs = zip(*self.program.resolve(tracers), strict=True)
            self._values = dict(zip(map(id, tracers), pairs, strict=True))

    def values(self, constants: Values) -> tuple[list[Any], list[Position]]:
        """Resolves constants of a rule to values and their batch axes.

        Raises UnsupportedError for a value of what is differentiated or traced around the rule.
        """
        if self.program is None:
            return list(constants), [None] * len(constants)
        # What was found in a step of a loop that has been staged since is of no use any more.
        usable = lambda x: not isinstance(x, Tracer) or _compat.is_live(x)
        here = {i: pair for i, pair in self._values.items() if usable(pair[0])}
        new = [x for x in constants if id(x) not in here]
        computed = zip(*self.program.resolve(new), strict=True)
        pairs = [here.get(id(x)) or next(computed) for x in constants]
        for x, _ in pairs:
            if isinstance(x, Tracer) and (_compat.is_left(x) or self.program.resolves(x)):
                type_of = jax.typeof(x).str_short()
                raise UnsupportedError(of_what_is_around(f"a rule of {self.name}", type_of))
        return [x for x, _ in pairs], [a for _, a in pairs]


_MOST_OBJECTS = 10_000  # a rule bound to something larger is taken to hold a tracer


def _tracers(
    unseen: list[Any], of_object: Callable[[Any], Iterable[Any]] | None = None
) -> Iterator[Any]:
    """Yields the tracers reachable from functions, their closures, and containers.

    Yields None last where the search exceeds `_MOST_OBJECTS`.
    """
    seen: set[int] = set()
    # A depth-first search with a stack: closures may refer to themselves, hence `seen`.
    while unseen:
        x = unseen.pop()
        number = id(x)
        if number in seen:
            continue
        seen.add(number)
        find_parts = _PARTS.get(type(x))
        if find_parts is None:
            if isinstance(x, Tracer):
                yield x
                continue
            find_parts = of_object or _parts_of_object
        # The search is cut off here, and the caller assumes a tracer.
        if len(seen) > _MOST_OBJECTS:
            yield None
            return
        unseen += [part for part in find_parts(x) if type(part) not in _LEAVES]


def _parts_of_function(f: types.FunctionType) -> list[Any]:
    parts = [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
    for cell in f.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # one that is not filled yet
            continue
    return parts


def _parts_of_object(x: Value) -> Iterable[Any]:
    if isinstance(x, (tuple, list)):
        return x
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, (type, types.ModuleType, jax.Array)):
        return ()
    # Objects with `__slots__` or C wrappers show no `__dict__`; `wrapped_parts` knows those of JAX.
    return (*getattr(x, "__dict__", {}).values(), *_compat.wrapped_parts(x))


_LEAVES = frozenset(
    {str, bytes, bool, int, float, complex, type(None), object, ShapedArray, PyTreeDef}
)


def _own_parts(call: object) -> list[Any]:
    # `functools.wraps` copies attributes such as `__wrapped__` to the call, and these are skipped.
    return [part for name, part in vars(call).items() if not name.startswith("_")]


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    jax.custom_jvp: _own_parts,
    jax.custom_vjp: _own_parts,
    types.FunctionType: _parts_of_function,
    types.MethodType: lambda m: (m.__self__, m.__func__),
    functools.partial: lambda p: (p.func, *p.args, *p.keywords.values()),
    type(jax.jit(int)): lambda f: (f.__wrapped__,),
    dict: dict.values,
    list: iter,
    tuple: iter,
    set: iter,
    frozenset: iter,
}
