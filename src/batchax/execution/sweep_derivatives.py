"""Derivatives of the sweep back over a bounded loop, which are made of loops and sweeps.

In forward mode that is a sweep of values and tangents. Its transpose goes the other way: forth,
with the transpose of going back over a step, and back again. So the program of each order of
derivative is about twice that of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import ad

from batchax.execution.bounded_derivatives import (
    flat,
    moves,
    moving,
    moving_inputs,
    no_tangent,
    parts,
    places,
    refuse_shared,
    take,
    with_tangents,
    zeros_like,
)
from batchax.execution.bounded_forms import SweepForm
from batchax.execution.bounded_loop import Values, bounded_loop
from batchax.execution.reverse_sweep import reverse_sweep, reverse_sweep_p
from batchax.execution.watched import Steps
from batchax.kernel.derivatives import with_values
from batchax.user_rules.linear import linear_with_transpose


def jvp(
    primals: Values, tangents: Values, *, forth: Any, back: Any, guarded: Any, form: SweepForm
) -> tuple[list[Any], list[Any]]:
    outs = reverse_sweep_p.bind(*primals, forth=forth, back=back, guarded=guarded, form=form)
    count, _, consts, carry, _, returning, xs = form.split(primals)
    dots = form.split(tangents)
    groups = dots.consts, dots.carry, dots.xs
    of_consts, of_carry, of_xs, _ = moving(guarded[0].jaxpr, form.n_carry, *groups)
    which = of_consts, of_carry, of_xs, places(list(map(moves, dots.returning)))
    derivative = _Derivative(guarded[0], guarded[1], form, *which)
    given = map(take, (*groups, dots.returning), which)
    operands = [ad.instantiate_zeros(t) for group in given for t in group]
    if not operands:
        return outs, list(map(no_tangent, outs))
    refuse_shared(count, [*take(consts, derivative.consts), *take(xs, derivative.xs)])
    residuals = [count, *consts, *carry, *returning, *xs]
    return outs, linear_with_transpose(derivative.forward, derivative.back, residuals, operands)


@dataclass(frozen=True)
class _Derivative:
    """The derivative of a sweep, as a linear function and its transpose.

    Attributes:
      ahead, behind, form: what the sweep does forth and back, and what its operands are.
      consts, carry, xs, returning: which of each have tangents. All results have them.
    """

    ahead: Any
    behind: Any
    form: SweepForm
    consts: Sequence[int]
    carry: Sequence[int]
    xs: Sequence[int]
    returning: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        """Which inputs of `ahead` have tangents."""
        return moving_inputs(self.form, self.consts, self.carry, self.xs)

    def _split(self, residuals: Values) -> tuple[Any, ...]:
        """The count, constants, first carry, what returns, and the xs."""
        form = self.form
        return (residuals[0], *parts(residuals[1:], form.n_consts, form.n_carry, form.n_back))

    def forward(self, residuals: Values, tangents: Values) -> list[Any]:
        """The tangents of the results."""
        form, n = self.form, self.form.n_back
        count, consts, carry, returning, xs = self._split(residuals)
        sizes = len(self.consts), len(self.carry), len(self.xs)
        dconsts, dcarry, dxs, given = parts(tangents, *sizes)
        dreturning = with_values(list(map(zeros_like, returning)), self.returning, given)
        shift = lambda i: i if i < form.n_consts else i + n  # what returns comes after constants
        inputs = [*map(shift, self.inputs), *range(form.n_consts, form.n_consts + n)]
        ahead = with_tangents(self.ahead, (len(consts), len(carry), len(xs)), self.inputs)
        groups = len(consts), n, len(carry), len(xs)
        behind = with_tangents(self.behind, groups, sorted(inputs))

        def forth(*groups: Values) -> tuple[Values, Values]:
            outs, dots = ahead(*groups)
            return [*outs, *take(dots, self.carry)], []

        def back(consts: Values, returning: Values, x: Values) -> tuple[Values, Values]:
            outs, dots = behind(consts, returning, *parts(x, len(carry) + len(dcarry)))
            return [*outs[:n], *dots[:n]], dots[n:]

        returned, ys = reverse_sweep(
            forth,
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

    def back(self, residuals: Values, cotangents: Values) -> list[Any]:
        """The cotangents of constants, first carry, xs and what returns."""
        form, n, n_moving = self.form, self.form.n_back, len(self.carry)
        count, consts, carry, returning, xs = self._split(residuals)
        ct_back, ct_ys = parts(cotangents, n)
        # A sum has one cotangent for all steps, other ys have one for each.
        sums = [i for i, a in enumerate(form.y_axes) if a is None]
        rest = [i for i, a in enumerate(form.y_axes) if a is not None]

        def cts_of_step(cts: Values, of_sums: Values, of_rest: Values) -> list[Any]:
            return [*cts, *with_values(with_values(ct_ys, sums, of_sums), rest, of_rest)]

        def forth(consts: Values, state: Values, x: Values) -> tuple[Values, Values]:
            (consts, of_sums), (x, of_rest) = parts(consts, form.n_consts), parts(x, len(xs))
            carry, cts = parts(state, form.n_carry)
            behind = lambda *returning: flat(self.behind)(*consts, *returning, *carry, *x)
            _, pull = jax.vjp(behind, *map(zeros_like, cts))  # the same wherever it is taken
            cts = pull(cts_of_step(cts, of_sums, of_rest))
            return [*flat(self.ahead)(*consts, *carry, *x), *cts], []

        def back(consts: Values, returning: Values, x: Values) -> tuple[Values, Values]:
            consts, of_sums = parts(consts, form.n_consts)
            returning, ct_carry = parts(returning, n)
            carry, cts, x, of_rest = parts(x, form.n_carry, n, len(xs))
            primals = [*consts, *carry, *x]

            def both(*values: Any) -> list[Any]:
                consts, others = parts(with_values(primals, self.inputs, values), form.n_consts)
                ahead = flat(self.ahead)(*consts, *others)
                return [*take(ahead, self.carry), *flat(self.behind)(*consts, *returning, *others)]

            outs, pull = jax.vjp(both, *take(primals, self.inputs))
            pulled = pull([*ct_carry, *cts_of_step(cts, of_sums, of_rest)])
            ct_consts, ct_carry, ct_xs = parts(pulled, len(self.consts), n_moving)
            return [*outs[n_moving : n_moving + n], *ct_carry], [*ct_consts, *ct_xs]

        shared = [*consts, *take(ct_ys, sums)], [*carry, *ct_back]
        entries = [*xs, *take(ct_ys, rest)]
        x_axes = *form.x_axes, *take(form.y_axes, rest)
        steps = {"count": count, "steps": Steps(form.steps.most), "x_axes": x_axes}
        every = range(len(carry) + n)
        results = bounded_loop(forth, *shared, entries, kept=every, **steps)
        ct_carry = [zeros_like(x) for x in take(carry, self.carry)]
        returned, ys = reverse_sweep(
            forth,
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
