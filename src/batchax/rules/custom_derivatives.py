"""Functions with derivative rules of their own: the rules are batched with them.

Both kinds of call (``custom_jvp``, ``custom_vjp``) are made again with batched functions
and rules, by the same primitive. Which of them JAX runs, and when, depends on what
surrounds the call: the function where it is not differentiated; the rule at once where
it is; the function at once and the rule much later where the call is staged and
differentiated after that. Whichever runs first decides where the outputs have their
batch axis (`rule_outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from batchax import _compat
from batchax.errors import ArgumentTypeError
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis
from batchax.kernel.captured import Captured, closes_over_tracers, program_behind
from batchax.kernel.inner import emitted
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import types_varying, without_mesh
from batchax.kernel.registry import register_rule
from batchax.memo import Memo, kept_with
from batchax.rules.batched_transpose import match_or_zeros
from batchax.rules.reverse_rule import Residuals, ReverseRule, known_number
from batchax.rules.rule_outputs import (
    Axes,
    CallOutputs,
    if_differentiable,
    if_later,
    inside_rule,
    union,
)

enter(": call_hi_primitive_linearized custom_jvp_call custom_lin custom_vjp_call")


@register_rule("custom_jvp_call")
def _custom_jvp(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[list[Any], Axes]:
    body, trace_rule = params["call_jaxpr"], params["jvp_jaxpr_fun"]
    bound = _custom_jvp_p.get_bind_params(params)
    fun, jvp = bound.pop("subfuns")
    skip, n_out = params["num_consts"], len(body.out_avals)
    types = [jax.typeof(x) for x in args[skip:]]  # rules that live on must not hold values
    outputs = CallOutputs("jvp", axis, body, axes)
    program = program_behind(trace_rule) if _closes_over_values(body, trace_rule) else None
    captured = Captured(_compat.name_and_place(body.jaxpr), program)

    def differentiate(zeros: Sequence[bool], primals: Any, tangents: Any) -> Any:
        """The rule on primals and those tangents that are not symbolic zeros."""
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts, out_zeros = trace_rule.call_wrapped(*zeros)
        consts, const_axes = captured.values(consts)
        own_axes = axes[skip:]
        tangent_axes = [a for a, zero in zip(own_axes, zeros, strict=True) if not zero]
        # JAX wants the results without the tangents. A branch or loop of both, run for some lanes,
        # is one equation, which gives all or nothing: lanes stay together.
        together = replace(axis, divergence=None)
        with outputs.in_rule():
            outs, out_axes = interpret(
                together,
                _compat.constants_as_inputs(jaxpr),
                (),
                [*consts, *primals, *tangents],
                [*const_axes, *own_axes, *tangent_axes],
            )
        given, given_axes = iter(outs[n_out:]), iter(out_axes[n_out:])
        tangents = [None if zero else next(given) for zero in out_zeros]
        tangent_axes = [None if zero else next(given_axes) for zero in out_zeros]
        return outs[:n_out], out_axes[:n_out], tangents, tangent_axes

    def axes_from_rule() -> Axes:
        def run(*xs: Any) -> tuple[list[Any], Axes]:
            n = len(types)
            _, out_axes, _, tangent_axes = differentiate([False] * n, xs[:n], xs[n:])
            return [], union(out_axes, tangent_axes)

        tangents = [a.to_tangent_aval() for a in types]
        return _compat.stage_described(run, [*types, *tangents])[1]

    def call(*xs: Any) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: if_later(axes_from_rule, n_out))
        return outputs.place(outs, out_axes)

    def rule(*xs: Any) -> list[Any]:
        n = len(xs) // 2
        primals, tangents = xs[skip:n], xs[n + skip :]
        zeros = [isinstance(t, SymbolicZero) for t in tangents]
        given = [t for t, zero in zip(tangents, zeros, strict=True) if not zero]
        outs, out_axes, out_tangents, tangent_axes = differentiate(zeros, primals, given)
        outputs.settle(out_axes, lambda: tangent_axes)
        outs = outputs.place(outs, out_axes)
        placed = [
            SymbolicZero(jax.typeof(x).to_tangent_aval())
            if t is None
            else match_or_zeros(axis, t, a, to)
            for x, t, a, to in zip(outs, out_tangents, tangent_axes, outputs.axes, strict=True)
        ]
        return [*outs, *placed]

    def emit(*xs: Any) -> tuple[list[Any], Axes]:
        subfuns = (_compat.rewrapped(call, fun), _compat.rewrapped(rule, jvp))
        return _custom_jvp_p.bind(*xs, subfuns=subfuns, **bound), outputs.axes

    depends = program is not None or inside_rule()
    return emit(*args) if depends else emitted(axis, body, args, axes, emit)


@kept_with("whether derivative rules close over values of a program that is being staged")
def _closes_over_values(body: Any, *rules: Any) -> bool:
    return any(map(closes_over_tracers, rules))


@register_rule("custom_vjp_call")
def _custom_vjp(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[list[Any], Axes]:
    body, trace_forward = params["call_jaxpr"], params["fwd_jaxpr_thunk"]
    skip, out_trees = params["num_consts"], params["out_trees"]
    bound = _custom_vjp_p.get_bind_params(params)
    fun, fwd, bwd = bound.pop("subfuns")
    n_out = len(body.out_avals)
    types = [jax.typeof(x) for x in args]
    outputs = CallOutputs("vjp", axis, body, axes)
    program = program_behind(trace_forward, params["bwd"])
    captured = Captured(_compat.name_and_place(body.jaxpr), program)
    reverse = ReverseRule(axis, bwd, captured, axes, types)
    # What the latest forward run said of its residuals. JAX calls `forward` and, later, `backward`,
    # and hands on arrays alone from the one to the other: what describes them has to wait here.
    kept = Residuals((), (), ())
    description = _compat.ResidualsDescription(out_trees)

    def run_forward(perturbed: Sequence[bool], primals: Any) -> tuple[list[Any], Axes, Residuals]:
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts = trace_forward.call_wrapped(*perturbed)
        # JAX may have traced the rule before, and for other arguments since.
        description.set(_descriptions.get(tuple(perturbed), description.get, owner=out_trees))
        consts, const_axes = captured.values(consts)
        jaxpr = _compat.constants_as_inputs(jaxpr)
        given, given_axes = [*consts, *primals], [*const_axes, *axes[skip:]]
        with outputs.in_rule():
            outs, out_axes = interpret(axis, jaxpr, (), given, given_axes)
        computed = zip(out_axes, jaxpr.outvars, strict=True)
        inputs = list(zip(axes, body.jaxpr.invars, strict=True))
        residuals = [next(computed) if f is None else inputs[f] for f in out_trees()[2]]
        types = [*(v.aval for _, v in residuals), *body.out_avals]
        at = [a for a, _ in residuals]
        numbers = [known_number(v) for _, v in residuals]
        return outs, out_axes, Residuals(at, types_varying(types), numbers)

    def call(*xs: Any) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: if_later(axes_from_rules, n_out))
        return outputs.place(outs, out_axes)

    def axes_from_rules() -> Axes:
        def run(*xs: Any) -> tuple[list[Any], Axes]:
            outs, out_axes, residuals = run_forward(inexact[skip:], xs[skip:])
            needed = need(xs, outs, out_axes, residuals)
            return [], union(out_axes[len(outs) - n_out :], needed)

        inexact = [jnp.issubdtype(t.dtype, jnp.inexact) for t in types]
        before = description.get()
        try:
            return _compat.stage_described(run, types)[1]
        finally:
            if before is not None:  # traces that JAX remembers have that one
                description.set(before)

    def need(xs: Any, outs: Any, out_axes: Axes, residuals: Residuals) -> Axes:
        """Which outputs the reverse rule needs for each lane, from what the forward one gave."""
        n = len(outs) - n_out
        computed = iter(outs[:n])
        values = [next(computed) if f is None else xs[f] for f in out_trees()[2]]
        return reverse.axes_needed(residuals, values, outs[n:], out_axes[n:])

    def forward(*xs: Any) -> list[Any]:
        nonlocal kept
        primals, perturbed = xs[::2], xs[1::2]
        if any(perturbed[:skip]):
            fwd.call_wrapped(*xs)  # says that what is closed over cannot be differentiated
        captured.find(params["bwd"])
        outs, out_axes, kept = run_forward(perturbed[skip:], primals[skip:])
        n = len(outs) - n_out
        needed = lambda: if_differentiable(lambda: need(primals, outs, out_axes, kept), n_out)
        outputs.settle(out_axes[n:], needed)
        return [*outs[:n], *outputs.place(outs[n:], out_axes[n:])]

    def backward(*xs: Any) -> Any:
        n = len(kept.axes)
        return reverse(kept, xs[:n], xs[n:], outputs.axes)

    subfuns = tuple(map(_compat.rewrapped, (call, forward, backward), (fun, fwd, bwd)))
    outs = _custom_vjp_p.bind(*args, subfuns=subfuns, **bound)
    return outs, outputs.axes


# Of the residuals of forward rules, by which arguments are differentiated.
_descriptions = Memo("descriptions of the residuals of custom_vjp functions", most=1024)

_IN_REVERSE = "custom_lin", "call_hi_primitive_linearized"

in_reverse_alone = Anywhere(lambda eqn: eqn.primitive.name in _IN_REVERSE)
"""Whether a program has tangents of a function whose rule gives cotangents only."""


@register_rule(_IN_REVERSE[0])
@register_rule(_IN_REVERSE[1])
def _custom_lin(axis: Axis, args: Any, axes: Any, /, **params: Any) -> Any:
    raise ArgumentTypeError(
        "can't apply forward-mode autodiff (jvp) to a custom_vjp function: its rule gives "
        "cotangents only. Use reverse mode (jax.grad, jax.vjp), or jax.custom_jvp for both."
    )


_custom_jvp_p: Any = _compat.find_primitive("custom_jvp_call")
_custom_vjp_p: Any = _compat.find_primitive("custom_vjp_call")
