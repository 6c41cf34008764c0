"""Derivatives of the bounded loop and of the sweep back over its steps.

In forward mode, values and tangents go through the steps that ran. In reverse mode, a sweep goes
back over these steps. Steps that did not run cost nothing.

The derivative of a sweep in forward mode is a sweep of values and tangents. Its transpose is a loop
forward, with the transpose of going back over a step, and a sweep back. So the jaxpr of each order
of derivative is about twice as long as that of the order before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.interpreters import ad

from batchax import _compat
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import (
    LoopSignature,
    LoopStep,
    SweepSignature,
    bounded_loop,
    bounded_loop_p,
    no_checkpoints,
    reverse_sweep,
    reverse_sweep_p,
)
from batchax.execution.progress import Steps
from batchax.jaxprs.bodies import Anywhere, with_inside
from batchax.jaxprs.types import ClosedJaxpr, Jaxpr, Value, Values
from batchax.kernel.inner import closes_over_tracers, inline_jaxpr, rules_of
from batchax.kernel.own_primitive import pullback_of, tangents_of, with_values
from batchax.kernel.reverse_rules import with_reverse_rules
from batchax.rules.custom_derivatives import reached
from batchax.rules.masking import hazards, is_inexact


def loop_jvp(
    primals: Values,
    tangents: Values,
    *,
    test: ClosedJaxpr | None,
    body: ClosedJaxpr,
    guarded: ClosedJaxpr,
    form: LoopSignature,
) -> tuple[list[Value], list[Value]]:
    guarded = with_reverse_rules(guarded)
    given, moved = form.split(primals), form.split(tangents)
    dots = moved.consts, moved.carry, moved.xs
    # Only these need derivatives. `guarded` is what is differentiated.
    derivative = _derivative(body, guarded, form, moving(guarded.jaxpr, form.n_carry, *dots))
    if not (derivative.carry or derivative.ys):
        programs = {"test": test, "body": body, "guarded": guarded}
        outs = bounded_loop_p.bind(*primals, **programs, form=form)
        return outs, list(map(no_tangent, outs))
    # Effects in order cannot be repeated, and the derivative recomputes steps from checkpoints.
    if _compat.ordered_by_lane(body.effects | (test.effects if test else frozenset())):
        raise UnsupportedError(
            "a bounded loop that does input or output (io_callback, ordered debug callbacks) is "
            "differentiated: computing its steps again in the derivative would do it twice."
        )
    try:
        needed = derivative.needed()
    except ValueError:
        if not hazards(body.jaxpr).endless:
            raise
        # A loop without a bound inside the body has a derivative in forward mode only, so no
        # transpose can be staged. Without it, reverse mode raises later (`_transpose`).
        needed = None
    programs = {"test": test, "body": derivative.body, "guarded": derivative.guarded}
    recorded = form
    # Record checkpoints of what the sweep needs, in addition to those that the loop records.
    if needed is not None:
        recorded = replace(form, kept=tuple(sorted({*needed, *(form.kept or ())})))
    derivative = replace(derivative, form=recorded)
    # With a known number of steps, the sweep can recompute everything from the first carry.
    again = form.again and test is None and form.kept is None and needed is not None
    bound = form if again else recorded
    results = bound.results(bounded_loop_p.bind(*primals, **programs, form=bound))
    steps, checkpoints = results.steps, results.checkpoints
    if again:  # of no result of the loop, which then is unused
        steps = lax.clamp(np.int32(0), given.count, np.int32(form.steps.most))
        checkpoints = no_checkpoints(body, recorded)
    which = derivative.consts, derivative.carry, derivative.xs
    reject_shared(steps, [*take(given.consts, which[0]), *take(given.xs, which[2])])
    residuals = [steps, *given.consts, *given.carry, *checkpoints, *given.xs]
    tangents = [ad.instantiate_zeros(t) for group in map(take, dots, which) for t in group]
    if needed is None:
        out_tangents = derivative.forward(residuals, tangents)
    else:
        out_tangents = linear_with_transpose(
            derivative.forward, derivative.back, residuals, tangents
        )
    kept = _chosen(results.checkpoints, bound, form)
    outs = [*results.carry, *results.ys, *kept, results.steps]
    # Checkpoints and the number of steps have no tangents: checkpoints are copies.
    return outs, with_values(list(map(no_tangent, outs)), derivative.outputs, out_tangents)


@dataclass(frozen=True)
class _Derivative:
    """Holds the derivative of a bounded loop as a linear function and its transpose."""

    # `body` and `guarded`: functions with a reverse rule compute what its forward part does.
    body: Any
    guarded: Any
    differentiated: Any  # `guarded`, with the functions of reverse rules themselves
    form: LoopSignature
    # Which of the constants, the carry, the xs, and the ys have tangents.
    consts: Sequence[int]
    carry: Sequence[int]
    xs: Sequence[int]
    ys: Sequence[int]
    # Reverse steps by operand types, with their hoisted constants. `needed` and `back` share one
    # trace of a step.
    staged: dict[Any, tuple[Any, list[Any]]] = field(default_factory=dict, compare=False)

    @property
    def inputs(self) -> list[int]:
        return moving_inputs(self.form, self.consts, self.carry, self.xs)

    @property
    def outputs(self) -> list[int]:
        return [*self.carry, *(self.form.n_carry + i for i in self.ys)]

    def _split(self, residuals: Values) -> tuple[Any, ...]:
        form = self.form
        n_kept = 0 if form.kept is None else 1 + len(form.kept)
        return (residuals[0], *parts(residuals[1:], form.n_consts, form.n_carry, n_kept))

    def forward(self, residuals: Values, tangents: Values) -> list[Value]:
        form = self.form
        steps, consts, carry, _, xs = self._split(residuals)
        dconsts, dcarry, dxs = parts(tangents, len(self.consts), len(self.carry))
        # Values are recomputed with the tangents, as a step needs both.
        run = with_tangents(self.differentiated, (len(consts), len(carry), len(xs)), self.inputs)

        def step(*groups: Values) -> tuple[Values, Values]:
            outs, dots = run(*groups)
            dots = take(dots, self.outputs)
            return [*outs[: form.n_carry], *dots[: len(dcarry)]], dots[len(dcarry) :]

        results = bounded_loop(
            step,
            [*consts, *dconsts],
            [*carry, *dcarry],
            [*xs, *dxs],
            count=steps,
            steps=form.steps.derivative("tangents"),
            x_axes=(*form.x_axes, *take(form.x_axes, self.xs)),
            y_axes=take(form.y_axes, self.ys),
        )
        return [*results.carry[len(carry) :], *results.ys]

    def back(self, residuals: Values, cotangents: Values) -> list[Value]:
        form, n, n_consts = self.form, len(self.carry), len(self.consts)
        steps, consts, carry, checkpoints, xs = self._split(residuals)
        ct_carry, ct_ys = parts(cotangents, n)

        def forward(program: ClosedJaxpr) -> LoopStep:
            # Forward steps of the sweep compute the carry only, and drop the ys.
            def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
                return flat(program)(*consts, *carry, *x[: len(xs)])[: form.n_carry], []

            return step

        ct_carry, cts = reverse_sweep(
            forward(self.body),
            self._step_back,
            consts,
            carry,
            checkpoints,
            ct_carry,
            [*xs, *ct_ys],
            kept=form.kept,
            guarded=(None if self.guarded is self.body else forward(self.guarded), None),
            count=steps,
            steps=form.steps.derivative("cotangents"),
            x_axes=(*form.x_axes, *take(form.y_axes, self.ys)),
            # Cotangents of constants are summed over the steps (None), those of xs are stacked.
            y_axes=(*[None] * n_consts, *take(form.x_axes, self.xs)),
        )
        return [*cts[:n_consts], *ct_carry, *cts[n_consts:]]

    def _step_back(self, consts: Values, cts: Values, x: Values) -> tuple[Values, Values]:
        """Maps cotangents after a step to those before it, and to those of constants and xs."""
        operands = [*consts, *cts, *x]
        types = tuple(jax.typeof(x).strip_weak_type() for x in operands)
        if types not in self.staged:
            (program,), held = _compat.hoist_constants(_compat.stage(self._pulled, types))
            self.staged[types] = program, held
        program, held = self.staged[types]
        pulled = inline_jaxpr(program, [*held, *operands])
        ct_consts, cts, ct_xs = parts(pulled, len(self.consts), len(self.carry))
        return cts, [*ct_consts, *ct_xs]

    def _pulled(self, *xs: Value) -> list[Value]:
        """Computes the cotangents of all perturbed inputs of a step, in order."""
        n_cts = len(self.carry)
        consts, cts, x = parts(xs, self.form.n_consts, n_cts)
        carry, x, ct_ys = parts(x, self.form.n_carry, len(self.form.x_axes))
        primals, step = [*consts, *carry, *x], flat(self.differentiated)
        _, pull = pullback_of(step, primals, self.inputs, self.outputs)
        return list(pull([*cts, *ct_ys]))

    def needed(self) -> list[int]:
        """Lists values of the carry that a sweep needs, for a reverse step or to recompute them.

        Counters and arrays that are only written to are not among them.
        """
        n, n_cts, n_carry = self.form.n_consts, len(self.carry), self.form.n_carry
        inputs = self.guarded.in_avals
        cts = [self.guarded.out_avals[i].to_tangent_aval() for i in self.outputs]

        def back(*xs: Value) -> list[Value]:
            cts, ys = self._step_back(xs[:n], xs[n : n + n_cts], xs[n + n_cts :])
            return [*cts, *ys]

        program = _compat.stage(back, [*inputs[:n], *cts[:n_cts], *inputs[n:], *cts[n_cts:]])
        _reject_closures(self.differentiated, program.consts)
        # First the values that a reverse step reads, then, up to a fixed point, those that a
        # forward step reads to compute them.
        used = _compat.used_inputs(program, [True] * len(program.out_avals))[n + n_cts :][:n_carry]
        while True:
            flags, needs = [*used, *[False] * len(self.form.y_axes)], used
            for program in (self.body, self.guarded):
                more = _compat.used_inputs(program, flags)[n : n + n_carry]
                needs = [old or new for old, new in zip(needs, more, strict=True)]
            if needs == used:
                return places(used)
            used = needs


def _derivative(
    body: ClosedJaxpr,
    guarded: ClosedJaxpr,
    form: LoopSignature,
    which: tuple[list[int], list[int], list[int], list[int]],
) -> _Derivative:
    derivative = _Derivative(body, guarded, guarded, form, *which)
    at = derivative.inputs, derivative.outputs
    ruled = _by_forward_rules(body, *at)
    same = guarded is body
    return replace(
        derivative, body=ruled, guarded=ruled if same else _by_forward_rules(guarded, *at)
    )


def _by_forward_rules(
    program: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]
) -> ClosedJaxpr:
    """Rewrites functions with a reverse rule to compute what its forward part does.

    As in JAX, that is differentiable again, in both modes, and the functions are not.
    """
    if not _has_reverse_rule.in_program(program):
        return program
    run = lambda *values: pullback_of(flat(program), values, inputs, outputs)[0]
    return _compat.stage(run, program.in_avals)


_has_reverse_rule = Anywhere(lambda eqn: eqn.primitive.name == "custom_vjp_call")


def _reject_closures(body: ClosedJaxpr, consts: Values) -> None:
    """Rejects derivative rules that close over values traced outside of the loop.

    They are traced with the derivative of a step, whose constants `consts` are.
    """
    # These values are not operands of the loop, so they are gone when the sweep runs.
    if not any(isinstance(x, Tracer) for x in consts):
        return
    for eqn in with_inside(body.jaxpr.eqns):
        kind = eqn.primitive.name.removesuffix("_call")
        ruled = kind in ("custom_jvp", "custom_vjp")
        if ruled and any(map(closes_over_tracers, rules_of(eqn))):
            function = _compat.name_and_place(eqn.params["call_jaxpr"].jaxpr)
            raise UnsupportedError(
                f"a rule of the {kind} function {function} closes over a value that is traced, and "
                "a step of a bounded loop (batchax.bounded_while, or a scan with until) calls the "
                "function. Pass it the value as an argument: its rules then receive it, and "
                "return its derivative (zeros if there is none)."
            )


def _chosen(checkpoints: Values, recorded: LoopSignature, form: LoopSignature) -> list[Value]:
    if form.kept is None:
        return []
    values = dict(zip(recorded.kept or (), checkpoints[1:], strict=True))
    return [checkpoints[0], *(values[i] for i in form.kept)]


def moving(
    jaxpr: Jaxpr, n: int, consts: Values, carry: Values, xs: Values
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns which constants, carries, xs, and ys of a loop with `n` carries have tangents.

    A carry does if it starts with one, or if a step gives it one.
    """
    entries, smooth = list(map(moves, xs)), [is_inexact(v.aval) for v in jaxpr.outvars]

    # A constant that only decides something has no tangent. Its cotangent would be zero times a
    # derivative that may be infinite, hence NaN.
    def matters(k: int) -> bool:
        alone = [i == k for i in range(len(jaxpr.invars))]
        return any(hit and s for hit, s in zip(reached(jaxpr, alone), smooth, strict=True))

    of_consts = [moves(t) and matters(k) for k, t in enumerate(consts)]
    of_carry = [m and s for m, s in zip(map(moves, carry), smooth, strict=False)]
    # Ends at the fixed point, as entries only change from False to True.
    while True:
        hits = reached(jaxpr, [*of_consts, *of_carry, *entries])
        hits = [hit and s for hit, s in zip(hits, smooth, strict=True)]
        more = [old or hit for old, hit in zip(of_carry, hits, strict=False)]
        if more == of_carry:
            break
        of_carry = more
    return places(of_consts), places(of_carry), places(entries), places(hits[n:])


def moves(tangent: Value) -> bool:
    return type(tangent) is not ad.Zero and jax.typeof(tangent).dtype != jax.dtypes.float0


def no_tangent(x: Value) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def zeros_like(x: Value) -> Value:
    return ad.instantiate_zeros(no_tangent(x))


def reject_shared(steps: Value, moving: Values) -> None:
    """Rejects a sum over devices in a loop that each device leaves at another step."""
    # A cotangent of a shared value needs a `psum` each step, where devices would wait forever.
    axes = _compat.varying_axes(jax.typeof(steps))
    if any(axes - _compat.varying_axes(jax.typeof(x)) for x in moving):
        raise UnsupportedError(
            "a bounded loop inside shard_map ends at a different step on each device, and is "
            "differentiated with respect to a value that is the same on all of them. Pass that "
            f"value through jax.lax.pcast(x, {tuple(axes)}, to='varying') before the loop."
        )


def moving_inputs(
    form: LoopSignature | SweepSignature,
    consts: Sequence[int],
    carry: Sequence[int],
    xs: Sequence[int],
) -> list[int]:
    first_x = form.n_consts + form.n_carry
    return [*consts, *(form.n_consts + i for i in carry), *(first_x + i for i in xs)]


def with_tangents(
    program: ClosedJaxpr, sizes: Sequence[int], moving: Sequence[int]
) -> Callable[..., tuple[list[Value], list[Value]]]:
    """Evaluates a program and its tangents, from groups of inputs.

    Each group holds primals, `sizes` of them, and then tangents of those that are `moving`.
    """

    def run(*groups: Values) -> tuple[list[Value], list[Value]]:
        primals = [x for group, n in zip(groups, sizes, strict=True) for x in group[:n]]
        dots = [x for group, n in zip(groups, sizes, strict=True) for x in group[n:]]
        return tangents_of(flat(program), primals, moving, dots, range(len(program.out_avals)))

    return run


def flat(program: ClosedJaxpr) -> Callable[..., list[Value]]:
    return lambda *xs: inline_jaxpr(program, xs)


def take(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [items[i] for i in places]


def places(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


def parts(items: Sequence[Any], *sizes: int) -> list[list[Any]]:
    items, groups = list(items), []
    for n in sizes:
        groups.append(items[:n])
        items = items[n:]
    return [*groups, items]


def loop_transpose(*_: Value, **params: Any) -> NoReturn:
    raise UnsupportedError(
        "a bounded loop (batchax.bounded_while, or a scan with until) is differentiated in reverse "
        "mode, and the steps of it contain a loop that has no derivative in reverse, such as "
        "lax.while_loop. Use batchax.bounded_while there, too."
    )


def sweep_jvp(
    primals: Values,
    tangents: Values,
    *,
    forward: ClosedJaxpr,
    back: ClosedJaxpr,
    guarded: Sequence[ClosedJaxpr],
    form: SweepSignature,
) -> tuple[list[Value], list[Value]]:
    outs = reverse_sweep_p.bind(*primals, forward=forward, back=back, guarded=guarded, form=form)
    count, _, consts, carry, _, returning, xs = form.split(primals)
    dots = form.split(tangents)
    groups = dots.consts, dots.carry, dots.xs
    of_consts, of_carry, of_xs, _ = moving(guarded[0].jaxpr, form.n_carry, *groups)
    which = of_consts, of_carry, of_xs, places(list(map(moves, dots.returning)))
    derivative = _SweepDerivative(guarded[0], guarded[1], form, *which)
    given = map(take, (*groups, dots.returning), which)
    operands = [ad.instantiate_zeros(t) for group in given for t in group]
    if not operands:
        return outs, list(map(no_tangent, outs))
    reject_shared(count, [*take(consts, derivative.consts), *take(xs, derivative.xs)])
    residuals = [count, *consts, *carry, *returning, *xs]
    return outs, linear_with_transpose(derivative.forward, derivative.back, residuals, operands)


@dataclass(frozen=True)
class _SweepDerivative:
    ahead: Any
    behind: Any
    form: SweepSignature
    # Which of each have tangents. All results do.
    consts: Sequence[int]
    carry: Sequence[int]
    xs: Sequence[int]
    returning: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        return moving_inputs(self.form, self.consts, self.carry, self.xs)

    def _split(self, residuals: Values) -> tuple[Any, ...]:
        form = self.form
        return (residuals[0], *parts(residuals[1:], form.n_consts, form.n_carry, form.n_back))

    def forward(self, residuals: Values, tangents: Values) -> list[Value]:
        form, n = self.form, self.form.n_back
        count, consts, carry, returning, xs = self._split(residuals)
        sizes = len(self.consts), len(self.carry), len(self.xs)
        dconsts, dcarry, dxs, given = parts(tangents, *sizes)
        dreturning = with_values(list(map(zeros_like, returning)), self.returning, given)
        shift = lambda i: i if i < form.n_consts else i + n  # what returns comes after constants
        # The reverse step takes constants, returning values, then carry and xs.
        inputs = [*map(shift, self.inputs), *range(form.n_consts, form.n_consts + n)]
        ahead = with_tangents(self.ahead, (len(consts), len(carry), len(xs)), self.inputs)
        groups = len(consts), n, len(carry), len(xs)
        behind = with_tangents(self.behind, groups, sorted(inputs))

        def forward(*groups: Values) -> tuple[Values, Values]:
            outs, dots = ahead(*groups)
            return [*outs, *take(dots, self.carry)], []

        def back(consts: Values, returning: Values, x: Values) -> tuple[Values, Values]:
            outs, dots = behind(consts, returning, *parts(x, len(carry) + len(dcarry)))
            return [*outs[:n], *dots[:n]], dots[n:]

        returned, ys = reverse_sweep(
            forward,
            back,
            [*consts, *dconsts],
            [*carry, *dcarry],
            None,
            [*returning, *dreturning],
            [*xs, *dxs],
            count=count,
            steps=Steps(form.steps.most),
            x_axes=(*form.x_axes, *take(form.x_axes, self.xs)),
            y_axes=form.y_axes,
        )
        return [*returned[n:], *ys]

    def back(self, residuals: Values, cotangents: Values) -> list[Value]:
        form, n, n_moving = self.form, self.form.n_back, len(self.carry)
        count, consts, carry, returning, xs = self._split(residuals)
        ct_back, ct_ys = parts(cotangents, n)
        # A sum has one cotangent for all steps, other ys have one for each.
        sums = [i for i, a in enumerate(form.y_axes) if a is None]
        rest = [i for i, a in enumerate(form.y_axes) if a is not None]

        # Transposing a sweep back over steps gives a loop forward: it carries the cotangents `cts`
        # of the returning values from the first step to the last. A second sweep then pulls
        # cotangents back through the forward steps.
        def cts_of_step(cts: Values, of_sums: Values, of_rest: Values) -> list[Value]:
            return [*cts, *with_values(with_values(ct_ys, sums, of_sums), rest, of_rest)]

        def forward(consts: Values, state: Values, x: Values) -> tuple[Values, Values]:
            (consts, of_sums), (x, of_rest) = parts(consts, form.n_consts), parts(x, len(xs))
            carry, cts = parts(state, form.n_carry)
            returned = list(map(zeros_like, cts))  # the transpose is the same wherever it is taken
            operands = [*consts, *returned, *carry, *x]
            places, of = range(len(consts), len(consts) + n), range(n + len(ct_ys))
            _, pull = pullback_of(flat(self.behind), operands, places, of)
            cts = pull(cts_of_step(cts, of_sums, of_rest))
            return [*flat(self.ahead)(*consts, *carry, *x), *cts], []

        def back(consts: Values, returning: Values, x: Values) -> tuple[Values, Values]:
            consts, of_sums = parts(consts, form.n_consts)
            returning, ct_carry = parts(returning, n)
            carry, cts, x, of_rest = parts(x, form.n_carry, n, len(xs))
            primals = [*consts, *carry, *x]

            def both(*values: Value) -> list[Value]:
                consts, others = parts(values, form.n_consts)
                ahead = flat(self.ahead)(*consts, *others)
                return [*take(ahead, self.carry), *flat(self.behind)(*consts, *returning, *others)]

            of = range(n_moving + n + len(ct_ys))
            outs, pull = pullback_of(both, primals, self.inputs, of)
            pulled = pull([*ct_carry, *cts_of_step(cts, of_sums, of_rest)])
            ct_consts, ct_carry, ct_xs = parts(pulled, len(self.consts), n_moving)
            return [*outs[n_moving : n_moving + n], *ct_carry], [*ct_consts, *ct_xs]

        shared = [*consts, *take(ct_ys, sums)], [*carry, *ct_back]
        entries = [*xs, *take(ct_ys, rest)]
        x_axes = *form.x_axes, *take(form.y_axes, rest)
        steps = {"count": count, "steps": Steps(form.steps.most), "x_axes": x_axes}
        # Record checkpoints of everything, since both the carry and the cotangents are needed.
        every = range(len(carry) + n)
        results = bounded_loop(forward, *shared, entries, kept=every, **steps)
        ct_carry = [zeros_like(x) for x in take(carry, self.carry)]
        returned, ys = reverse_sweep(
            forward,
            back,
            *shared,
            results.checkpoints,
            [*returning, *ct_carry],
            entries,
            y_axes=(*[None] * len(self.consts), *take(form.x_axes, self.xs)),
            **steps,
        )
        ct_returning = take(results.carry[form.n_carry :], self.returning)
        ct_consts, ct_xs = parts(ys, len(self.consts))
        return [*ct_consts, *returned[n:], *ct_xs, *ct_returning]
