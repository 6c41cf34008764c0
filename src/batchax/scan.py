"""`scan`: a function of one step becomes a loop over any axis of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.progress import Steps, find_progress
from batchax.execution.steps import ScanProgram, run_scan, run_until
from batchax.frontend.advice import advise
from batchax.frontend.arguments import (
    Mapped,
    MappedRows,
    check_axis_size,
    find_axis_size,
    flatten_arguments,
    with_lane_indices,
)
from batchax.frontend.batched import Batched
from batchax.frontend.containers import AxisSpec, is_container_spec
from batchax.frontend.in_axes import (
    STEPS,
    argument_names,
    as_a_call,
    check_in_axes,
    is_position,
)
from batchax.frontend.options import check_callable, check_flags, translate_argument_names, wraps
from batchax.frontend.outputs import (
    FlatOutputs,
    as_array,
    carry_keys,
    check_predicate,
    check_structure,
    check_types,
    flatten_arrays,
    flatten_carry,
    flatten_outputs,
    settle,
)
from batchax.jaxprs.error_format import brief, listed, name_of, show
from batchax.jaxprs.evaluate import bind_equation, evaluate, variables_in, variables_read
from batchax.jaxprs.types import AxesTree, ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import example_aval, stage_described, stage_function
from batchax.kernel.registry import describe_returned

P = ParamSpec("P")
Carry = TypeVar("Carry")


@_compat.api_boundary
@translate_argument_names
def scan(
    fun: Callable[Concatenate[Any, P], tuple[Carry, Any]],
    in_axes: AxesTree = 0,
    out_axes: AxesTree = 0,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    until: Callable[[Any], Any] | None = None,
    progress: bool | Callable[[int, int], Any] = False,
) -> Batched[Concatenate[Any, P], tuple[Carry, Any], tuple[Carry, Any]]:
    """Loops `fun`, a function of one step, over an axis of its arguments.

    Example:
      >>> def step(carry, x, w):
      ...     carry = jnp.tanh(w @ carry + x)
      ...     return carry, carry
      >>> init, xs, w = jnp.zeros(3), jnp.ones((3, 50)), jnp.eye(3)
      >>> last, ys = bx.scan(step, in_axes=(1, None), out_axes=1)(init, xs, w)
      >>> last.shape, ys.shape
      ((3,), (3, 50))

    A ``lax.scan`` with the interface of `vmap`, and with early exit. Use it where:

    - the axis of the steps is not the first: arrays are read and written in place, without a
      transposed copy;
    - all steps share arguments;
    - a loop ends early.

    Derivatives, loops with `progress` or effects, and loops in a function that `vmap` batches take
    the time and memory of ``lax.scan`` between transposes.

    Args:
      fun: The function of one step: ``(carry, *xs) -> (carry, ys)``. The carry is a pytree of
        arrays, whose structure, shapes, and dtypes do not change. `ys` is a pytree of arrays, or
        None.
      in_axes: The axis of the steps in each argument after the carry, as for `vmap`: an int, None
        for a shared argument (any Python object), a tuple, a dict by parameter name, or a callable
        ``leaf -> int | None``. Keyword arguments have 0. ``batchax.tiles(size=64)`` passes each
        step a block, and ``batchax.split_key`` its own random key.
      out_axes: The axis of the steps in each of the `ys`: an int; None for an output that is the
        same at each step; or a prefix pytree of these.
      length: The number of steps. Needed only if no argument is mapped.
      reverse: Whether the steps run from the last entry to the first.
      unroll: The number of steps in each iteration of the compiled loop, or whether to unroll all;
        as for ``lax.scan``.
      until: A function of the carry, evaluated before each step. If it is true, no further step is
        taken: the carry stays, and the other `ys` are zeros. The time depends on the steps taken.
        Reverse mode saves about ``2 * sqrt(length)`` carries, and recomputes the other steps. Under
        `vmap`, finished lanes leave the loop or are masked.
      progress: Whether to show the number of steps, the rate, and the time left; or a function of
        the finished and the total number of steps. About fifty calls at most, inside of `jit`, too.

    Returns:
      A function ``(init, *xs, **kwargs) -> (carry, ys)`` of the first carry and the whole arrays.
      It returns the last carry and the stacked `ys`. An `x` of shape ``(*before, length, *after)``
      mapped over axis ``len(before)`` reaches `fun` with shape ``(*before, *after)``.

    Raises:
      AxisError: (a ValueError) Sizes disagree, an axis is out of range, a specification does not
        fit its argument or output, a parameter name is unknown, no argument is mapped and `length`
        is missing, or an output with axis None may differ between steps.
      ArgumentTypeError: (a TypeError) `fun` is not callable or does not return a pair, the carry
        changes its structure, shapes, or dtypes, a mapped argument or an output is not an array, or
        an option has the wrong type.
      UnsupportedError: (a NotImplementedError) A reference (``jax.new_ref``) is mapped over another
        axis than its first, or used with `until`; `until` is used with `unroll`; or, with `until`,
        steps with input or output are differentiated.

    References:
      Saved carries with `until`: as for `bounded_while`.
    """
    check_callable("scan", "a function of one step", fun)
    check_in_axes(_after_carry(fun, None), in_axes, "scan")
    _check_out_axes(fun, out_axes)
    check_axis_size(length, terms=STEPS)
    check_flags(reverse=reverse)
    _check_unroll(unroll)
    _check_until(until, unroll)
    callback = find_progress(progress, fun, "steps")

    @wraps(fun)
    @_compat.api_boundary
    def scanned(init: Tree, /, *args: Tree, **kwargs: Tree) -> tuple[Any, Any]:
        flat = flatten_arguments(_after_carry(fun, init), in_axes, args, kwargs, STEPS)
        _check_arrays(flat.mapped)
        steps = find_axis_size(flat.mapped, length, STEPS)
        if callback is not None and not isinstance(steps, int):
            raise UnsupportedError(
                f"progress does not support a symbolic size: the number of steps is {steps}. "
                "Export the function for a known size, or remove progress."
            )
        axis, watched = Axis(steps), Steps(steps, callback)
        flat = replace(flat, mapped=with_lane_indices(flat.mapped, axis))
        xs, x_axes = [m.value for m in flat.mapped], tuple(m.axis for m in flat.mapped)
        (of_carry,) = argument_names(fun, 1)
        carry, structure = flatten_carry(
            init, of_carry, "scan", "pass other objects as arguments with None in in_axes"
        )
        keys = carry_keys(init)
        n_carry = len(carry)

        @wraps(fun)  # JAX's messages name the user's function
        def one_step(*values: Value) -> tuple[list[Value], FlatOutputs]:
            example_args, example_kwargs = flat.rebuild(values[n_carry:])
            old = jax.tree.unflatten(structure, values[:n_carry])
            new, ys = _pair(fun, fun(old, *example_args, **example_kwargs))
            check_structure(fun, old, new)
            flatten_arrays(ys, containers=True, name="ys")
            arrays, outputs = flatten_outputs(ys, out_axes, steps, STEPS)
            return [*jax.tree.leaves(new), *arrays], outputs

        def go_on(*values: Value) -> list[Value]:
            assert until is not None
            stop = until(jax.tree.unflatten(structure, values))
            return [jnp.logical_not(check_predicate(until, stop))]

        def stage(
            carry: Values,
        ) -> tuple[ClosedJaxpr | None, ClosedJaxpr, FlatOutputs]:
            avals, tested, over = list(map(jax.typeof, carry)), None, frozenset()
            if until is not None:
                names = [f"carry{path}" for path in keys]
                tested = stage_function(axis, go_on, avals, names, "scan")
                # In `shard_map` devices may stop at different steps: what they read differs, too.
                over = _compat.varying_axes(tested.out_avals[0])
            for x, a in zip(xs, x_axes, strict=True):
                avals.append(_compat.type_varying_over(example_aval(axis, jax.typeof(x), a), over))
            names = [*(f"{of_carry}{path}" for path in keys), *(m.path for m in flat.mapped)]
            return tested, *stage_described(axis, one_step, avals, names, "scan")

        for m in flat.mapped:
            if m.axis != 0 and _compat.is_reference(m.value):
                raise UnsupportedError(
                    f"{m.path} is a reference (jax.new_ref) that is mapped over axis {m.axis}, but "
                    "scan reads references along axis 0. Pass None in in_axes for it, and index "
                    "it in the step."
                )
        try:
            with _compat.name_stack_extended("scan"):
                tested, staged, outputs, carry = settle(stage, carry)
                check_types(fun, keys, carry, staged.out_avals)
                staged, places, once = _parted(staged, outputs, carry, xs, x_axes)
                if tested is None:
                    (body,), consts = _compat.hoist_constants(staged)
                    how = watched, bool(reverse), _written_out(unroll, steps)
                    program = ScanProgram(body, n_carry, x_axes, places, *how)
                    outs = run_scan(program, consts, carry, xs)
                else:
                    how = watched, bool(reverse)
                    outs = run_until(tested, staged, carry, xs, x_axes, places, *how)
        except Exception as error:
            advise(error, fun, flat.mapped, flat.shared, STEPS.each)
            raise
        ys = iter(outs[n_carry:])
        each = [next(ys) if k not in once else once[k] for k in range(len(outputs.described))]
        return jax.tree.unflatten(structure, outs[:n_carry]), outputs.rebuild(each)

    return cast(Any, scanned)


def _check_arrays(mapped: Sequence[Mapped]) -> None:
    """Raises an error for a `Ragged` that is scanned over.

    Raises:
      ArgumentTypeError: an argument is one.
    """
    for m in mapped:
        if isinstance(m, MappedRows):
            raise ArgumentTypeError(
                f"{m.path} is a {type(m.value).__name__}, whose rows differ in length; the steps "
                "of a scan have one shape. To scan over each row use lax.scan in the function of a "
                "row, under batchax.vmap; to scan over the rows, pass to_padded()."
            )


def _after_carry(fun: Callable[..., Any], init: Tree) -> Callable[..., Any]:
    """`fun` as a function of what `in_axes` covers."""
    rest = functools.partial(fun, init)
    rest.__name__ = getattr(fun, "__name__", "the function")  # pyright: ignore
    return rest


def _pair(fun: Callable[..., Any], out: object) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise ArgumentTypeError(
        f"{name_of(fun)!r} must return a pair (carry, ys), but it returned "
        f"{describe_returned(out)}. Return None for ys if there is nothing to stack."
    )


def _check_out_axes(fun: Callable[..., Any], out_axes: AxesTree) -> None:
    for keys, leaf in jax.tree_util.tree_flatten_with_path(out_axes)[0]:
        if not (is_position(leaf) or isinstance(leaf, AxisSpec) or is_container_spec(leaf)):
            raise ArgumentTypeError(
                f"out_axes{jax.tree_util.keystr(keys)} must be an int or None, got {brief(leaf)}: "
                "scan stacks what each step returns as ys along an axis. Put a value of which only "
                "the last, or a sum over the steps, is wanted into the carry."
                + as_a_call("scan", fun, leaf)
            )


def _parted(
    staged: ClosedJaxpr,
    outputs: FlatOutputs,
    carry: Values,
    xs: Values,
    x_axes: Positions,
) -> tuple[ClosedJaxpr, tuple[int, ...], dict[int, Any]]:
    """A step without the ys for which `out_axes` says None: these are computed once, outside it.

    Returns:
      The step; where the axis of the steps goes in each of its ys; and the others, by number.

    Raises:
      AxisError: one of those may differ between steps.
    """
    n_carry, jaxpr, described = len(carry), staged.jaxpr, outputs.described
    new, ys = jaxpr.outvars[:n_carry], jaxpr.outvars[n_carry:]
    alone = [k for k, output in enumerate(described) if output.spec is None]
    stacked = [k for k in range(len(ys)) if k not in alone]
    places = tuple(int(described[k].spec) % (len(ys[k].aval.shape) + 1) for k in stacked)
    if not alone:
        return staged, places, {}
    invars = jaxpr.invars
    varying = {v for v, v_new in zip(invars[:n_carry], new, strict=True) if v is not v_new}
    varying |= {v for v, a in zip(invars[n_carry:], x_axes, strict=True) if a is not None}
    for eqn in jaxpr.eqns:  # an effect may be to read what another step has written
        if eqn.effects or not varying.isdisjoint(variables_read(eqn)):
            varying.update(eqn.outvars)
    wrong = [described[k].path for k in alone if not varying.isdisjoint(variables_in([ys[k]]))]
    if wrong:
        one = len(wrong) == 1
        raise AxisError(
            f"{listed(wrong)} may differ between steps, but out_axes says None for "
            f"{'it' if one else 'them'}. Pass an int, the position of the axis of the steps. Put a "
            "value of which only the last, or a sum over the steps, is wanted into the carry."
        )
    of_one = jaxpr.replace(outvars=[ys[k] for k in alone])
    once = evaluate(of_one, staged.consts, [*carry, *xs], bind_equation, keeps=lambda _: False)
    rest = _compat.close(jaxpr.replace(outvars=[*new, *(ys[k] for k in stacked)]), staged.consts)
    return _compat.without_dead(rest), places, dict(zip(alone, map(as_array, once), strict=True))


def _check_unroll(unroll: object) -> None:
    if not isinstance(unroll, bool) and not (is_position(unroll) and unroll >= 0):
        raise ArgumentTypeError(
            f"unroll must be a bool or a non-negative int, got {brief(unroll)}."
        )


def _written_out(unroll: int | bool, steps: Any) -> int:
    """How many steps an iteration of the loop has: all of them for True, and for 0, as in JAX."""
    if isinstance(unroll, bool):  # True would equal 1
        unroll = 0 if unroll else 1
    return unroll or (max(steps, 1) if isinstance(steps, int) else 0)


def _check_until(until: object, unroll: object) -> None:
    if until is None:
        return
    if not callable(until):
        raise ArgumentTypeError(f"until must be a function of the carry, got {show(until)}.")
    if unroll is not False and unroll != 1:
        raise UnsupportedError(
            f"unroll is {brief(unroll)}, but a scan that may end early (until) runs its steps "
            "one by one. Remove unroll."
        )
