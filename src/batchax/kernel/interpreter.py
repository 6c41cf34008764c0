"""The interpreter: walks a traced jaxpr and batches it equation by equation.

Each value carries the position of its batch axis, or None while it does not depend on the batch. An
equation whose operands are all unbatched, and which does not use the name of the axis, is emitted
once as it is; any other goes to the rule of its primitive. Rules emit ordinary JAX operations into
the trace that surrounds the call, so every JAX transformation composes from outside.

A primitive without a rule gets that of JAX, through ``jax.vmap`` of the one equation. If JAX has
none either, or it raises NotImplementedError, lanes run sequentially, with a warning.

A callback that is called in order (``ordered=True``) makes all calls of one example before those of
the next. So lanes run sequentially from the first such callback to the last. As few equations as
possible do: what a later callback does not need of an earlier one is computed before or after, for
all lanes at once. Calls with unbatched operands are made once, between the lanes before and after.
The same holds for collectives.

With ``jax.debug_nans`` and ``jax.debug_infs``, JAX looks at the results of each operation that it
computes eagerly, and at those of each compiled program. A batched function computes more than its
examples do: for lanes that are masked, in padding, in blank buffers, of neutral values. A NaN there
is not the user's. So such operations run with the options off, and then their results, which are
the user's, are checked. If they are differentiated they are one compiled program besides, because
the reverse pass would check each operation that was computed eagerly.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Literal
from jax.extend.core.primitives import copy_p, jit_p
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import SequentialFallbackWarning, UnsupportedError
from batchax.jaxprs.bodies import bodies_of, control_flow, program_called
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.evaluate import Step, bind_equation, plan, values_of, variables_in, walk
from batchax.jaxprs.primitive_facts import facts_of, is_own, shown
from batchax.jaxprs.types import Atom, Eqn, Jaxpr, Tree, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, Positions, move_axis, sharding_on_mesh
from batchax.kernel.differing import OPENED, differing_in, differing_through, differs_of
from batchax.kernel.named_axes import (
    as_lanes,
    check_lanes_apart,
    create_batched,
    has_rules,
    holds_programs,
    may_use_name,
    references_to_batch,
    uses_axis,
    varies_as_staged,
    vary_alike,
)
from batchax.kernel.registry import find, run_rule

# Where the warning was given: by default once for each line of the user.
_warned: dict[Any, Any] = {}


def run_without_rule(
    axis: Axis, eqn: Eqn, operands: list[Value], operand_axes: list[Position]
) -> tuple[Sequence[Any], Positions]:
    """Batches an equation without a rule here: by JAX's rule, or lane by lane."""
    primitive = eqn.primitive
    if _compat.jax_has_rule(primitive):
        try:
            outs, positions = by_rule_of_jax(axis, primitive, operands, operand_axes, eqn.params)
            return (outs, positions) if primitive.multiple_results else ([outs], [positions])
        except UnsupportedError:  # of batchax, which is called inside JAX's rule
            raise
        except NotImplementedError:
            # Some rules do not take every operand, such as initial values of a reduction.
            if uses_axis(axis, eqn):
                raise

    if not recording.is_watched():  # if one is, `explain` has a finding for it
        _warn(axis, eqn)
    # No rule exists, so the lanes run in a `scan`.
    outs = one_after_another(axis, lambda *xs: list(bind_equation(eqn, xs)), operands, operand_axes)
    return outs, [0] * len(outs)


def by_rule_of_jax(
    axis: Axis,
    primitive: _compat.Primitive,
    args: Values,
    axes: Positions,
    params: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Binds a primitive for all lanes by JAX's rule, as a rule of it."""
    several = primitive.multiple_results

    # The results leave `jax.vmap` as a description, next to its outputs: as one of those, each
    # would have to be placed at an axis, be it batched or not.
    def look(*xs: Value) -> tuple[list[Any], list[tuple[Any, Position]]]:
        out = primitive.bind(*xs, **primitive.get_bind_params(dict(params)))
        return [], list(map(_compat.batched_by_jax, out if several else [out]))

    def batch(fun: Callable[..., Any]) -> object:
        return jax.vmap(
            fun,
            in_axes=tuple(map(_number, axes)),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )(*args)

    _, placed = _compat.described(look, batch)
    outs, positions = [x for x, _ in placed], [position for _, position in placed]
    return (outs, positions) if several else (outs[0], positions[0])


def _warn(axis: Axis, eqn: Eqn) -> None:
    warnings.warn_explicit(
        f"the primitive {spoken(eqn)} at {line_of(eqn)} has no batching rule: it runs for the "
        f"{axis.size} lanes one after another. Register a rule with @batchax.register_rule to run "
        "them together.",
        SequentialFallbackWarning,
        *_compat.user_file_and_line(eqn.source_info),
        registry=_warned,
    )


def one_after_another(
    axis: Axis,
    one_lane: Callable[..., Any],
    operands: Values,
    operand_axes: Positions,
    unroll: bool = False,
) -> list[Any]:
    """Applies `one_lane` to each lane in a `scan`; outputs have the lanes first.

    Lanes run in order of their index, which keeps ordered effects in order.
    """
    recording.note(service="lanes")
    batched = [
        lanes_together(move_axis(x, a, 0))
        for x, a in zip(operands, operand_axes, strict=True)
        if a is not None
    ]

    # Unbatched operands are closed over, and batched ones are sliced by the scan.
    def step(carry: None, lane: list[Any]) -> tuple[None, list[Any]]:
        mine = iter(lane)
        xs = [x if a is None else next(mine) for x, a in zip(operands, operand_axes, strict=True)]
        return carry, one_lane(*xs)

    _, outs = lax.scan(step, None, batched, length=axis.size, unroll=unroll)
    return [lanes_spread(axis, x) for x in outs]


def lane_after_lane(
    axis: Axis,
    primitive: _compat.Primitive,
    args: Values,
    axes: Positions,
    params: dict[str, Any],
    unroll: bool = False,
) -> tuple[Any, Any]:
    """Binds a primitive for each lane, as a rule of it that runs lanes sequentially."""
    several = primitive.multiple_results

    def one_lane(*xs: Value) -> list[Any]:
        out = primitive.bind(*xs, **params)
        return list(out) if several else [out]

    outs = one_after_another(axis, one_lane, args, axes, unroll)
    return (outs, [0] * len(outs)) if several else (outs[0], 0)


def lanes_together(x: Value) -> Value:
    sharding: Any = jax.typeof(x).sharding
    if sharding.mesh.empty or sharding.spec[:1] in ((), (None,)):
        return x
    # A scan slices axis 0, so types must not carry a sharding of it.
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(None, *sharding.spec[1:])))


def lanes_spread(axis: Axis, x: Value) -> Value:
    if axis.mesh_axis is None:
        return x
    sharding = sharding_on_mesh(axis, jax.typeof(x).sharding)
    spec = PartitionSpec(axis.mesh_axis, *sharding.spec[1:])
    return jax.sharding.reshard(x, sharding.update(spec=spec))


Placed = tuple[Any, Position]
"""A value, and where it carries the batch axis."""


def in_order(jaxpr: Jaxpr) -> bool:
    return any(eqn.effects and _compat.in_order(eqn.effects) for eqn in jaxpr.eqns)


def _not_batched(literal: Literal) -> Placed:
    return literal.val, None


def walk_in_order(
    axis: Axis,
    jaxpr: Jaxpr,
    steps: Iterable[Step],
    env: dict[Any, Placed],
    run_step: Callable[[Step, list[Placed]], Iterable[Placed]],
) -> None:
    """Runs the `steps` of `jaxpr` as `walk` does, with ordered effects in lane order."""
    steps = [step._replace(dead=()) for step in steps]
    waiting: list[Step] = []
    # Steps are deferred while they make ordered calls that differ between lanes, or depend on such
    # steps. All deferred calls then run in one scan over the lanes, so that the calls of lane 0
    # come before those of lane 1.
    made: set[Any] = set()

    def read(atoms: Iterable[Atom]) -> list[Placed]:
        return values_of(atoms, env, _not_batched)

    def run(steps: Iterable[Step]) -> None:
        walk(steps, env, _not_batched, run_step)

    def run_waiting() -> None:
        calls, others = _needed(waiting)
        if len(calls) > 1 or any(_repeats(step.eqn, *read(step.inputs[:1])) for step in calls):
            # Inputs of other steps and of the program must be left in `env`.
            inside = set(map(id, calls))
            reads = [jaxpr.outvars, *(s.inputs for s in steps if id(s) not in inside)]
            _run_lanes(axis, calls, env, read, set().union(*map(variables_in, reads)))
        else:
            run(calls)
        run(others)
        waiting.clear()
        made.clear()

    for step in steps:
        waits = not made.isdisjoint(variables_in(step.inputs))
        if not (waits or _compat.in_order(step.eqn.effects)):
            run([step])
        elif waits or _calls_differ(step.eqn, [a is not None for _, a in read(step.inputs)]):
            if _needs_all(axis, step.eqn):
                run_waiting()
                run([step])
            else:
                waiting.append(step)
                made.update(step.outputs)
        else:  # one host callback, as no operand is batched
            run_waiting()
            run([step])
    run_waiting()


def _calls_differ(eqn: Eqn, operands: Sequence[bool]) -> bool:
    """Returns whether lanes make different ordered calls in an equation.

    `operands` says which operands differ. Lanes do not if all arguments of the calls are shared.
    """
    if not any(operands):
        return False
    flow = control_flow(eqn.primitive)
    looked_into = flow.test or flow.branches or eqn.primitive.name in OPENED
    if not looked_into or has_rules(eqn):
        return True
    results = differing_in(eqn, tuple(operands)).results
    if flow.branches and operands[0]:
        return True
    if flow.test and all(results):  # as where lanes leave it one by one
        return True
    # At the fixed point of a loop, part of its carry may differ in addition.
    for body in bodies_of(eqn):
        first, last = body.same, body.same + body.carried
        given = [operands[k] for k in body.operands]
        given[first:last] = results[: body.carried]
        env = dict(zip(body.jaxpr.invars, given, strict=True))
        for inside, _ in differing_through(body.jaxpr, env):
            called = _compat.in_order(inside.effects)
            if called and _calls_differ(inside, differs_of(env, inside.invars)):
                return True
    return False


def _needs_all(axis: Axis, eqn: Eqn) -> bool:
    """Returns whether an equation must run for all lanes at the same time."""
    # Lanes synchronize in a collective, and a reference is shared by all.
    return uses_axis(axis, eqn) or any(hasattr(v.aval, "inner_aval") for v in eqn.invars)


def _repeats(eqn: Eqn, first: Placed) -> bool:
    """Returns whether an equation may run a jaxpr another number of times than once a lane."""
    together = control_flow(eqn.primitive).branches and first[1] is None
    return facts_of(eqn.primitive).control and not together


def _needed(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Splits steps into those that ordered effects need, and the others."""
    eqns = [step.eqn for step in steps]
    needed = plan(eqns, (), keeps=lambda eqn: _compat.in_order(eqn.effects))
    inside = {id(step.eqn) for step in needed}
    calls = [step for step in steps if id(step.eqn) in inside]
    return calls, [step for step in steps if id(step.eqn) not in inside]


def _run_lanes(
    axis: Axis,
    steps: Sequence[Step],
    env: dict[Any, Placed],
    read: Callable[[Iterable[Any]], list[Placed]],
    needed: set[Any],
) -> None:
    """Runs steps for one lane after the other, and stores `needed` outputs in `env`."""
    # JAX's reverse mode drops calls in a scan whose results are unused.
    calls = {v for step in steps if _compat.in_order(step.eqn.effects) for v in step.outputs}
    made = {v for step in steps for v in step.outputs}
    read_here = dict.fromkeys(v for step in steps for v in variables_in(step.inputs))
    inputs = [v for v in read_here if v not in made]
    needed = needed | calls
    outputs = [v for step in steps for v in step.outputs if v in needed]

    def one_lane(*xs: Value) -> list[Any]:
        own = dict(zip(inputs, xs, strict=True))
        number = lambda literal: literal.val
        walk(steps, own, number, lambda step, xs: bind_equation(step.eqn, xs))
        return [own[v] for v in outputs]

    placed = read(inputs)
    values, positions = [x for x, _ in placed], [a for _, a in placed]
    if recording.is_on():
        at = dict(zip(inputs, positions, strict=True))
        for step in steps[1:]:
            with _recorded(axis, step, at):
                recording.note(service="lanes")
        with _recorded(axis, steps[0], at):
            outs = one_after_another(axis, one_lane, values, positions)
    else:
        outs = one_after_another(axis, one_lane, values, positions)
    env.update(zip(outputs, [(x, 0) for x in outs], strict=True))


def _recorded(
    axis: Axis, step: Step, at: dict[Any, Position]
) -> AbstractContextManager[recording.Record]:
    """Records an equation whose operands have the batch axis `at` these positions."""
    positions = [None if isinstance(v, Literal) else at.get(v, 0) for v in step.inputs]
    return recording.equation(axis, step.eqn, positions, False)


@dataclass(eq=False)
class ProgramRun:
    """Describes a run through a jaxpr, for rules that look ahead in it."""

    jaxpr: Jaxpr
    read: Sequence[bool] | None = None  # which results the caller reads; None for all
    # facts that rules derived from the jaxpr, by rule
    found: dict[Any, Any] = field(default_factory=dict)

    def reads(self, eqn: Eqn) -> tuple[bool, ...]:
        if "read" not in self.found:
            outvars = self.jaxpr.outvars
            outs = variables_in(outvars if self.read is None else compress(outvars, self.read))
            # `plan` drops equations whose results do not reach an output.
            inputs = [step.inputs for step in plan(self.jaxpr.eqns, outs)]
            self.found["read"] = {*outs, *variables_in(chain.from_iterable(inputs))}
        return tuple(v in self.found["read"] for v in eqn.outvars)


Place = tuple[ProgramRun, Eqn]
"""Where a rule that looks ahead is: the run through a program, and the equation."""


def interpret(
    axis: Axis,
    jaxpr: Jaxpr,
    consts: Values,
    args: Values,
    axes: Positions,
    read: Sequence[bool] | None = None,
) -> tuple[list[Any], list[Position]]:
    """Runs the per-example `jaxpr` for all lanes of `axis`.

    Entries of `axes` are the position of the batch axis in each operand, or None; so for the
    results. `read` says which outputs the caller reads, for rules that depend on it; None for all.
    """
    effectful = [eqn for eqn in jaxpr.eqns if eqn.effects]  # most programs have none
    # A reference must have a part for each lane before something batched is written to it.
    one_for_each_lane = references_to_batch(axis, jaxpr, axes) if effectful else frozenset()
    whole = ProgramRun(jaxpr, read)
    run = _batch  # without what most equations do not need
    if checks_nans_here():
        run = batch_looked_at
    elif recording.is_on() or axis.spmd_name is not None or _compat.checked_axes():
        run = batch_equation

    def run_step(step: Step, operands: list[Placed]) -> Iterable[Placed]:
        eqn = step.eqn
        values, positions = map(list, zip(*operands, strict=True)) if operands else ([], [])
        for_each_lane = bool(one_for_each_lane) and not one_for_each_lane.isdisjoint(eqn.outvars)
        return zip(*run(axis, eqn, values, positions, for_each_lane, whole), strict=True)

    env: dict[Any, Placed] = {v: (x, None) for v, x in zip(jaxpr.constvars, consts, strict=True)}
    env.update(zip(jaxpr.invars, zip(args, axes, strict=True), strict=True))
    steps = plan(jaxpr.eqns, jaxpr.outvars)

    def run_all() -> None:
        if effectful and in_order(jaxpr):
            walk_in_order(axis, jaxpr, steps, env, run_step)
        else:
            walk(steps, env, _not_batched, run_step)

    if recording.is_watched():
        with recording.run(jaxpr):
            run_all()
    else:
        run_all()
    outputs = values_of(jaxpr.outvars, env, _not_batched)
    return [value for value, _ in outputs], [position for _, position in outputs]


def batch_equation(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    creates_batched: bool = False,
    whole: ProgramRun | None = None,
) -> tuple[Sequence[Any], Positions]:
    """Returns outputs and batch axes of one equation, always as sequences.

    `creates_batched` is set for a reference that has a part for each lane, and `whole` is the run
    through the program if rules may look ahead in it.
    """
    shared = _is_shared(axis, eqn, operand_axes, creates_batched)
    if axis.spmd_name is not None and not shared:
        check_lanes_apart(axis, eqn)
    # Inside ``shard_map`` with checked types, operands must vary over the same mesh axes.
    checked = _compat.checked_axes()
    if checked:
        operands = vary_alike(eqn, operands)
        shared = shared and _fits(eqn, operands)
    how = creates_batched, whole, shared
    if recording.is_on():
        with recording.equation(axis, eqn, operand_axes, shared) as record:
            outs, out_axes = _batch(axis, eqn, operands, operand_axes, *how)
            record.out_axes = tuple(out_axes)
    else:
        outs, out_axes = _batch(axis, eqn, operands, operand_axes, *how)
    return (as_lanes(axis, outs, out_axes) if checked else outs), out_axes


def _is_shared(axis: Axis, eqn: Eqn, axes: Sequence[Position], creates_batched: bool) -> bool:
    """Returns whether an equation is emitted once, for all lanes."""
    return axes.count(None) == len(axes) and not (
        creates_batched or (axis.name is not None and may_use_name(eqn, axis.name))
    )


def batch_looked_at(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    creates_batched: bool = False,
    whole: ProgramRun | None = None,
) -> tuple[Sequence[Any], Positions]:
    """Batches an equation as `batch_equation` under ``jax.debug_nans``.

    Raises FloatingPointError, with the user's line, for NaN in results that one example would have.
    Values of masked lanes are not reported.
    """
    primitive, facts = eqn.primitive, facts_of(eqn.primitive)
    run = functools.partial(batch_equation, axis, eqn, creates_batched=creates_batched)
    if creates_batched or any(map(_compat.is_reference, operands)):
        return run(operands, operand_axes, whole=whole)
    hidden = lambda: hide_from_debug_nans(
        lambda *xs: run(list(xs), operand_axes), operands, shown(primitive)
    )
    calls_back = _compat.observed(eqn.effects)
    body = program_called(eqn) if facts.body else None
    try:
        # Loops and primitives of batchax compute masked values inside, which must stay hidden.
        if facts.control or is_own(primitive):
            return hidden()
        # Inside `jit`, JAX checks the results of the compiled program.
        if in_jit():
            return run(operands, operand_axes, whole=whole)
        if body is not None and primitive is not jit_p:
            if calls_back:
                return hidden()
            # JAX computes it operation by operation.
            outs = interpret(axis, body.jaxpr, body.consts, operands, operand_axes)
            return hidden() if any(isinstance(x, Tracer) for x in operands) else outs
        try:
            return run(operands, operand_axes, whole=whole)
        except (FloatingPointError, _compat.FoundNaN):
            if has_rules(eqn) or calls_back:
                raise  # it was in what the function does; or may not be done twice
        # The NaN may be in intermediate values of the rule, so the equation runs again with those
        # hidden.
        try:
            return hidden()
        except FloatingPointError:
            if body is not None:  # JAX would say which operation in it, and so it is looked for
                interpret(axis, body.jaxpr, body.consts, operands, operand_axes)
            raise
    except (FloatingPointError, _compat.FoundNaN) as error:
        if isinstance(error, _compat.FoundNaN):
            error = found(error, shown(primitive))
        if not hasattr(error, "__notes__"):
            error.add_note(f"in {_compat.user_line(eqn.source_info, running=True)}")
        raise error from None


def _fits(eqn: Eqn, operands: Values) -> bool:
    """Returns whether the equation is valid for the operand types inside ``shard_map``."""
    casts = eqn.primitive.name == "pvary"  # JAX raises for a cast of a value that varies already
    return not (casts or holds_programs(eqn)) or varies_as_staged(eqn, operands)


def _batch(
    axis: Axis,
    eqn: Eqn,
    operands: list[Value],
    operand_axes: list[Position],
    creates_batched: bool,
    whole: ProgramRun | None,
    shared: bool | None = None,
) -> tuple[Sequence[Any], Positions]:
    primitive = eqn.primitive
    if shared is None:  # most equations have a batched operand
        shared = operand_axes.count(None) == len(operand_axes) and _is_shared(
            axis, eqn, operand_axes, creates_batched
        )
    if shared:
        return bind_equation(eqn, operands), [None] * len(eqn.outvars)
    if creates_batched:
        return create_batched(axis, eqn, operands, operand_axes)
    registered = find(primitive)
    if registered is None:
        return run_without_rule(axis, eqn, operands, operand_axes)
    if registered.is_users:
        types = [v.aval for v in eqn.outvars]
        return run_rule(axis, primitive, registered.rule, operands, operand_axes, eqn.params, types)
    more = {"place": (whole, eqn)} if registered.looks_ahead and whole is not None else {}
    out, out_axes = registered.rule(axis, operands, operand_axes, **eqn.params, **more)
    # Rules compute positions from parameters, where users may have passed NumPy integers.
    if primitive.multiple_results:
        return out, list(map(_number, out_axes))
    return [out], [out_axes if type(out_axes) is int else _number(out_axes)]


def _number(position: Position) -> Position:
    """Converts a position to Python's int, which JAX expects."""
    return position if position is None else int(position)


T = TypeVar("T")

WHOLE = "batchax.vmap"
"""What made the results of a call that is not looked at operation by operation."""


_inside = ContextVar("batchax_unseen", default=False)


def checks_nans_here() -> bool:
    """Returns whether JAX would check each operation here, where it must see only user values."""
    config: Any = jax.config
    looks = config.jax_debug_nans or config.jax_debug_infs
    return looks and not (_inside.get() or recording.is_on())


def in_jit() -> bool:
    """Returns whether operations are traced into a program instead of being computed now."""
    if _compat.staging():
        return True  # no need to stage an operation to see it
    # An operation on constants shows whether the trace in scope makes tracers of them.
    return _compat.tracing() and isinstance(jnp.zeros(()), Tracer)


def hide_from_debug_nans(run: Callable[..., T], args: Tree, name: str) -> T:
    """Runs `run(*args)` so that JAX checks only its final arrays for NaN.

    Raises FloatingPointError, which names `name`, if there is one in the results.
    """
    if not checks_nans_here():
        return run(*args)
    staged = in_jit()
    # Traced operands are checked later, by JAX or a transform. One compiled program hides the
    # intermediate values from that check.
    if staged or any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        token = _inside.set(True)
        try:
            run = _as_one_program(run, args)
        finally:
            _inside.reset(token)
    with jax.debug_nans(False), jax.debug_infs(False):
        outs = run(*args)
    return outs if staged else seen(outs, name)


def seen(outs: T, name: str) -> T:
    """Copies `outs`, so that JAX checks them, values behind tracers, and later cotangents."""
    try:
        return jax.tree.map(lambda x: copy_p.bind(x) if _is_inexact(x) else x, outs)
    except FloatingPointError as error:
        raise found(error, name) from None


def found(error: Exception, name: str) -> FloatingPointError:
    infinite = "(inf)" in str(error) or getattr(error, "ty", "") == "inf"
    return FloatingPointError(
        f"invalid value ({'inf' if infinite else 'nan'}) encountered in {name}"
    )


def _as_one_program(run: Callable[..., T], args: Tree) -> Callable[..., T]:
    """Wraps `run` in a call of one compiled program of the traced leaves of `args`."""

    def of_traced(*xs: Value) -> tuple[list[Any], Any]:
        given = iter(xs)
        own = [next(given) if isinstance(x, Tracer) else x for x in leaves]
        outs, out_tree = jax.tree.flatten(run(*jax.tree.unflatten(tree, own)))
        # Results that are not traced are returned with their values, outside of the program.
        made = [x for x in outs if isinstance(x, Tracer)]
        return made, (out_tree, [None if isinstance(x, Tracer) else (x,) for x in outs])

    leaves, tree = jax.tree.flatten(args)
    types = [jax.typeof(x) for x in leaves if isinstance(x, Tracer)]
    program, (out_tree, at_hand) = _compat.stage_described(of_traced, types)
    evaluate = functools.partial(eval_jaxpr, program.jaxpr, program.consts)
    if in_jit() and not _compat.observed(program.effects):
        # What reverse mode keeps is looked at where a `jit` around ends: so it keeps arguments.
        evaluate = jax.checkpoint(evaluate)
    # `jax.disable_jit` is meant for the programs of the user.
    with jax.disable_jit(False):
        whole = _compat.stage(jax.jit(evaluate), types)

    def call(*args: Tree) -> T:
        xs = [x for x in jax.tree.leaves(args) if isinstance(x, Tracer)]
        made = iter(eval_jaxpr(whole.jaxpr, whole.consts, *xs))
        outs = [next(made) if x is None else x[0] for x in at_hand]
        return jax.tree.unflatten(out_tree, outs)

    return call


def _is_inexact(x: Value) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
