"""A scan over any axes as one primitive, whose derivative is made of scans over the same axes.

JAX differentiates its own loop well if all arrays are scanned along axis 0. Along another axis its
residuals would be copies of the slices that steps read. Here a step is split into a part that
computes its results and residuals, and a linear part. The first runs as a scan that stacks the
residuals. The second runs as a scan of tangents or, in reverse mode, of cotangents. Of the
residuals

- entries of the xs are read again where they are;
- entries of the ys are read where they were written;
- values that are the same in each step are computed once, outside of the loop;
- values that take a few sums and products of these are recomputed, which takes less time than
  writing and reading them;
- the rest is stacked.

In reverse mode, cotangents of the xs are written along the same axes as the xs. All these scans are
such primitives again, and so are derivatives of any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal, mapped_aval, unmapped_aval
from jax.interpreters import ad

from batchax import _compat
from batchax.execution.bounded_derivatives import moving, no_tangent, parts, take
from batchax.execution.eager import jitted
from batchax.execution.steps import ScanProgram, entry_axis, run_steps, steps_axes, whole_axis
from batchax.jaxprs.evaluate import plan, variables_in, variables_read
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.rewriter import Rewriter
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.inner import batch_function, remembered, staging_lanes
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import (
    Linearized,
    own_primitive,
    pullback_of,
    transposed,
    with_values,
)
from batchax.programs.cost import cost_of_equation
from batchax.rules.custom_derivatives import reached
from batchax.rules.loops import settle
from batchax.rules.masking import hazards
from batchax.user_rules.own_derivatives import linear_with_transpose

_FEW = 8
"""Operations that take less than to write an element and to read it again."""


class CheapRemat:
    """What of a program is recomputed, from values that are kept anyway.

    Args:
      program: the program.
      places: of the values that are kept, where; more may be added.
    """

    def __init__(self, program: ClosedJaxpr, places: Mapping[Any, Any]) -> None:
        self._program, self._places = program, places
        self._made_by = {v: eqn for eqn in program.jaxpr.eqns for v in eqn.outvars}

    def makes(self, v: Any) -> bool:
        """Whether that takes so little that a value need not be kept, or it is kept already."""
        return self._left(v, _FEW) >= 0

    def _left(self, v: Any, left: float) -> float:
        """Of so many operations for each element those left once it is made; negative: too few.

        What is read twice counts twice, as nobody may look on for longer than there are some left.
        """
        if isinstance(v, Literal) or v in self._places:
            return left
        eqn = self._made_by.get(v)
        if eqn is None or not facts_of(eqn.primitive).elementwise:
            return -inf
        if cost_of_equation(eqn).transcendentals:
            return -inf
        left -= 1
        for x in eqn.invars:
            left = self._left(x, left) if left >= 0 else left
        return left

    def program(self, outvars: Sequence[Any]) -> ClosedJaxpr:
        """From what is kept to all that is needed."""
        made = [v for v in variables_in(outvars) if v not in self._places]
        steps = plan(self._program.jaxpr.eqns, made, lambda _: False, self._not_kept)
        eqns = [step.eqn for step in steps]
        read = variables_in([*outvars, *(v for eqn in eqns for v in eqn.invars)])
        invars = [v for v in dict.fromkeys(read) if v in self._places]
        return Rewriter(self._program, eqns).program(invars, outvars)

    def _not_kept(self, eqn: Eqn) -> list[Any]:
        return [v for v in variables_read(eqn) if v not in self._places]


Values = Sequence[Any]


def run_scan(program: ScanProgram, consts: Values, carry: Values, xs: Values) -> list[Any]:
    """The last carry and the stacked ys."""
    if not _has_own_derivative(program, [*consts, *carry, *xs]):
        return program.run(consts, carry, xs)
    return _bind(program, [*consts, *carry, *xs])


def _has_own_derivative(program: ScanProgram, operands: Values) -> bool:
    """Whether a scan is this primitive, rather than JAX's.

    Where all is along axis 0, JAX's is as good. In a function of one example of a batch whoever
    reads its program knows JAX's loop. Nobody transposes a loop that ends on values, or the user's
    derivative in reverse; and JAX orders effects.
    """
    axes = [*(a for a in program.in_axes if a is not None), *program.out_axes]
    return (
        any(axes)
        and isinstance(program.steps.most, int)
        and program.steps.most > 0
        and program.steps.callback is None
        and not program.body.effects
        and not staging_lanes()
        and not any(map(_compat.is_reference, operands))
        and not any(_compat.varying_axes(jax.typeof(x)) for x in operands)
        and not hazards(program.body.jaxpr).endless
        and not _with_rules_in_reverse.in_program(program.body.jaxpr)
    )


_with_rules_in_reverse = Anywhere(lambda eqn: eqn.primitive.name.startswith("custom_vjp"))


@dataclass(frozen=True)
class _Split:
    """A step of a scan, split into values and a linear part.

    Attributes:
      program: the scan that computes values, and stacks what is kept, after the ys.
      held: what its program has as constants, besides those of the scan.
      once: a program, of what is the same at each step, of what is kept of that alone.
      kept: what the linear part is made of: what kind of array it is in, and which of those.
      linear: the linear part: from what it needs, and from tangents of those constants, carries and
        xs that have some, to those of carries and ys that have some.
    """

    program: ScanProgram
    held: list[Any]
    once: ClosedJaxpr
    kept: list[tuple[str, int]]
    linear: Callable[..., list[Any]]


def _split(program: ScanProgram, inputs: Sequence[int], outputs: Sequence[int]) -> _Split:
    """Splits a step; of which some inputs, and some outputs, have tangents."""
    split = Linearized.of(program.body, inputs, outputs)
    staged, linear = split.values, split.tangents
    jaxpr, n_outs = staged.jaxpr, len(program.body.out_avals)
    same = _same_at_each_step(program)
    changes = reached(jaxpr, [not s for s in same])
    first_x = len(same) - len(program.in_axes)
    places: dict[Any, tuple[str, int]] = {}
    for i, v in enumerate(jaxpr.invars):
        if same[i] or i >= first_x:
            places[v] = "operand", i
    for k, v in enumerate(jaxpr.outvars[program.n_carry : n_outs]):
        if not isinstance(v, Literal):
            places.setdefault(v, ("y", k))
    once, stacked = [], []
    needed = [*take(jaxpr.invars, split.reads), *jaxpr.outvars[n_outs:]]
    again = CheapRemat(staged, places)
    change = [*(not same[i] for i in split.reads), *changes[n_outs:]]
    for v, changing in zip(needed, change, strict=True):
        if isinstance(v, Literal) or again.makes(v):
            continue
        if changing:
            places[v] = "y", n_outs - program.n_carry + len(stacked)
            stacked.append(v)
        else:
            places[v] = "once", len(once)
            once.append(v)
    late = again.program(needed)
    kept = [places[v] for v in late.jaxpr.invars]

    def part(outvars: Sequence[Any]) -> ClosedJaxpr:
        whole = _compat.close(jaxpr.replace(outvars=list(outvars)), staged.consts)
        return _compat.without_dead(whole)

    beside = part(once)
    invars = [v for v, s in zip(beside.jaxpr.invars, same, strict=True) if s]
    beside = _compat.close(beside.jaxpr.replace(invars=invars), beside.consts)
    (body,), held = _compat.hoist_constants(part([*jaxpr.outvars[:n_outs], *stacked]))
    out_axes = (*program.out_axes, *[0] * len(stacked))
    program = replace(program, body=body, out_axes=out_axes)
    n_kept = len(kept)
    needed_of = lambda kept: eval_jaxpr(late.jaxpr, late.consts, *kept)
    run = lambda *xs: eval_jaxpr(linear.jaxpr, linear.consts, *needed_of(xs[:n_kept]), *xs[n_kept:])
    return _Split(program, held, beside, kept, run)


def _same_at_each_step(program: ScanProgram) -> list[bool]:
    """Which inputs of a step are."""
    n_consts = len(program.body.in_avals) - program.n_carry - len(program.in_axes)
    return [*[True] * n_consts, *[False] * program.n_carry, *(a is None for a in program.in_axes)]


def _jvp(
    primals: Values, tangents: Values, *, program: ScanProgram, body: ClosedJaxpr
) -> tuple[list[Any], list[Any]]:
    program = replace(program, body=body)
    n_consts, n_carry = len(primals) - program.n_carry - len(program.in_axes), program.n_carry
    consts, carry, xs, ys = moving(body.jaxpr, n_carry, *parts(tangents, n_consts, n_carry))
    if not (carry or ys):
        outs = _bind(program, primals)
        return outs, list(map(no_tangent, outs))
    inputs = [*consts, *(n_consts + i for i in carry), *(n_consts + n_carry + i for i in xs)]
    outputs = [*carry, *(n_carry + k for k in ys)]
    key = "split", tuple(inputs), tuple(outputs), replace(program, body=None)
    split = remembered(body, key, lambda: _split(program, inputs, outputs))

    outs = _bind(split.program, [*split.held, *primals])
    n_outs = len(body.out_avals)
    fixed = [x for x, s in zip(primals, _same_at_each_step(program), strict=True) if s]
    once = eval_jaxpr(split.once.jaxpr, split.once.consts, *fixed)
    axes: dict[Any, Any] = {("operand", i): None for i in range(n_consts)}
    axes |= {("operand", n_consts + n_carry + i): a for i, a in enumerate(program.in_axes)}
    axes |= {("y", k): a for k, a in enumerate(split.program.out_axes)}
    arrays = {"operand": primals, "y": outs[n_carry:], "once": once}
    different = list(dict.fromkeys(split.kept))
    places = [different.index(place) for place in split.kept]
    linear = _Linear(
        replace(program, after=len(different) + len(ys) - 1 if ys else None),
        lambda *xs: split.linear(*take(xs, places), *xs[len(different) :]),
        [axes.get(place) for place in different],
        len(consts),
        carry,
        xs,
        ys,
        [body.in_avals[i].to_tangent_aval() for i in inputs],
    )
    dots = linear_with_transpose(
        linear.forward,
        linear.back,
        [arrays[kind][i] for kind, i in different],
        [ad.instantiate_zeros(tangents[i]) for i in inputs],
    )
    outs = outs[:n_outs]
    return outs, with_values(list(map(no_tangent, outs)), outputs, dots)


@dataclass(frozen=True)
class _Linear:
    """The derivative of a scan, as a linear function and its transpose.

    Attributes:
      program: the scan.
      step: the linear part of a step, from what is kept and tangents.
      kept_axes: where what is kept has the axis of the steps.
      n_consts: number of constants that have tangents.
      carry, xs, ys: which carries, xs and ys have them.
      types: those of the tangents of constants, carries and xs, in a step.
    """

    program: ScanProgram
    step: Callable[..., list[Any]]
    kept_axes: list[Any]
    n_consts: int
    carry: Sequence[int]
    xs: Sequence[int]
    ys: Sequence[int]
    types: list[Any]

    def _split(self, xs: Values, n: int) -> list[list[Any]]:
        return parts(xs, len(self.kept_axes), n)

    def forward(self, kept: Values, tangents: Values) -> list[Any]:
        """From tangents of constants, carries and xs to those of carries and ys."""
        dconsts, dcarry, dxs = parts(tangents, self.n_consts, len(self.carry))

        def step(carry: Values, entries: Values) -> list[Any]:
            kept, dconsts, dxs = self._split(entries, self.n_consts)
            return self.step(*kept, *dconsts, *carry, *dxs)

        in_axes = [*self.kept_axes, *[None] * self.n_consts, *take(self.program.in_axes, self.xs)]
        out_axes = take(self.program.out_axes, self.ys)
        return self._run(step, dcarry, [*kept, *dconsts, *dxs], in_axes, out_axes, False)

    def back(self, kept: Values, cotangents: Values) -> list[Any]:
        """From cotangents of carries and ys to those of constants, carries and xs."""
        ct_carry, ct_ys = parts(cotangents, len(self.carry))
        axes = take(self.program.in_axes, self.xs)
        types = self.types
        n = self.n_consts
        shared = [*range(n), *(n + len(ct_carry) + i for i, a in enumerate(axes) if a is None)]
        sliced = [n + len(ct_carry) + i for i, a in enumerate(axes) if a is not None]

        def step(carry: Values, entries: Values) -> list[Any]:
            sums, cts = parts(carry, len(shared))
            kept, ct_ys = parts(entries, len(self.kept_axes))
            linear = range(len(kept), len(kept) + len(types))
            of = range(len(cts) + len(ct_ys))
            cts = transposed(self.step, kept, linear, types, of)([*cts, *ct_ys])
            sums = [a + cts[i] for a, i in zip(sums, shared, strict=True)]
            return [*sums, *cts[n : n + len(self.carry)], *take(cts, sliced)]

        in_axes = [*self.kept_axes, *take(self.program.out_axes, self.ys)]
        sums = [_compat.filled(types[i], 0) for i in shared]
        outs = self._run(
            step,
            [*sums, *ct_carry],
            [*kept, *ct_ys],
            in_axes,
            [a for a in axes if a is not None],
            True,
        )
        sums, ct_carry, ct_xs = parts(outs, len(shared), len(self.carry))
        cts = with_values([None] * len(types), shared, sums)
        cts = with_values(cts, range(n, n + len(ct_carry)), ct_carry)
        return with_values(cts, sliced, ct_xs)

    def _run(
        self,
        step: Callable[[Values, Values], list[Any]],
        carry: Values,
        xs: Values,
        in_axes: Sequence[Any],
        out_axes: Sequence[int],
        turned: bool,
    ) -> list[Any]:
        n = len(carry)
        entries = [
            jax.typeof(x) if a is None else mapped_aval(x.shape[a], a, jax.typeof(x))
            for x, a in zip(xs, in_axes, strict=True)
        ]
        types = list(map(jax.typeof, carry))
        body = _compat.stage(lambda *ops: step(ops[:n], ops[n:]), [*types, *entries])
        (body,), held = _compat.hoist_constants(body)
        program = replace(
            self.program,
            body=body,
            n_carry=n,
            in_axes=tuple(in_axes),
            out_axes=tuple(out_axes),
            after=self.program.after if turned else None,
            reverse=self.program.reverse != turned,
        )
        return _bind(program, [*held, *carry, *xs])


def _bind(program: ScanProgram, operands: Values) -> list[Any]:
    return scan_steps_p.bind(*operands, program=program, body=program.body)


def _transpose(
    cotangents: Values, *operands: Any, program: ScanProgram, body: ClosedJaxpr
) -> list[Any]:
    """That of a scan which is linear in some operands: of its derivative, anywhere."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    points = [_compat.filled(x.aval, 0) if ad.is_undefined_primal(x) else x for x in operands]
    run = functools.partial(scan_steps_p.bind, program=program, body=body)
    _, pull = pullback_of(run, points, linear, range(len(cotangents)))
    cts = pull(list(map(ad.instantiate_zeros, cotangents)))
    return with_values([None] * len(operands), linear, cts)


def _operations(
    *operands: Any, program: ScanProgram, body: ClosedJaxpr, differentiable: bool = False
) -> list[Any]:
    n_consts = len(operands) - program.n_carry - len(program.in_axes)
    consts, carry, xs = parts(operands, n_consts, program.n_carry)
    return run_steps(replace(program, body=body), consts, carry, xs, differentiable)


def _compute(*operands: Any, program: ScanProgram, body: ClosedJaxpr) -> list[Any]:
    run = functools.partial(_operations, program=program, body=body)
    return jitted((program, "in place"), run)(*operands)


def _types(*avals: Any, program: ScanProgram, body: ClosedJaxpr) -> list[Any]:
    carry, ys = parts(body.out_avals, program.n_carry)
    axes = zip(ys, program.out_axes, strict=True)
    return [*carry, *(unmapped_aval(program.steps.most, a, y) for y, a in axes)]


def _batched(
    axis: Axis, args: Any, axes: Any, /, *, program: ScanProgram, body: ClosedJaxpr
) -> tuple[list[Any], Sequence[Position]]:
    varies = any(_compat.varying_axes(jax.typeof(x)) for x in args)
    if varies or any_uses_axis(axis, body):  # in the way that the axis has for JAX's loop
        run = functools.partial(_operations, program=program, body=body, differentiable=True)
        return batch_function(axis, run, args, axes)
    n_consts = len(args) - program.n_carry - len(program.in_axes)
    consts_at, carry_at, xs_at = parts(axes, n_consts, program.n_carry)
    entries = [
        a if s is None else entry_axis(a, s) for a, s in zip(xs_at, program.in_axes, strict=True)
    ]
    batched, carry_at, ys_at = settle(axis, body, consts_at, carry_at, entries)
    targets = [*consts_at, *carry_at, *xs_at]
    placed = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(args, axes, targets, strict=True)
    ]
    program = replace(
        program,
        body=batched,
        in_axes=steps_axes(xs_at, program.in_axes),
        out_axes=(y_axes := steps_axes(ys_at, program.out_axes)),
    )
    return _bind(program, placed), [*carry_at, *map(whole_axis, ys_at, y_axes)]


scan_steps_p = own_primitive(
    "scan_steps",
    called="scan",
    operations=_operations,
    types=_types,
    programs=("body",),
    facts="costly nests",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    compute=_compute,
)
