"""Derivatives of the bounded loop, which are bounded loops.

Forward, values and tangents go through the steps that were taken. In reverse, a loop over the
segments, from the last to the first, computes the steps of each again, from the carry that was
kept at its start, and goes back over them. Nothing is computed for steps not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import Form, Values, bounded_loop, bounded_loop_p
from batchax.kernel.derivatives import tangents_of, with_values
from batchax.rules.batched_transpose import reached
from batchax.rules.hazards import hazards
from batchax.user_rules.linear import linear_with_transpose


def _jvp(
    primals: Values, tangents: Values, *, test: Any, body: Any, guarded: Any, form: Form
) -> tuple[list[Any], list[Any]]:
    _, _, *groups = form.split(primals)
    _, _, *dots = form.split(tangents)
    derivative = _Derivative(body, guarded, form, *_moving(guarded.jaxpr, form, *dots))
    programs = {"test": test, "body": body, "guarded": guarded}
    if not (derivative.carry or derivative.ys):
        outs = bounded_loop_p.bind(*primals, **programs, form=form)
        return outs, list(map(_no_tangent, outs))
    if _compat.ordered_by_lane(body.effects | (test.effects if test else frozenset())):
        raise UnsupportedError(
            "a bounded loop that does input or output (io_callback, ordered debug callbacks) is "
            "differentiated: computing its steps again in the derivative would do it twice."
        )
    form = replace(form, record=True)
    results = form.results(bounded_loop_p.bind(*primals, **programs, form=form))
    consts, carry, xs = groups
    given = list(map(_take, dots, (derivative.consts, derivative.carry, derivative.xs)))
    _refuse_shared(results.steps, [*_take(consts, derivative.consts), *_take(xs, derivative.xs)])
    residuals = [results.steps, *consts, *carry, *results.checkpoints, *xs]
    moving = [ad.instantiate_zeros(t) for group in given for t in group]
    try:
        found = linear_with_transpose(derivative.forward, derivative.back, residuals, moving)
    except ValueError:
        if not hazards(body.jaxpr).endless:
            raise
        # A loop without a bound inside the body has a derivative in forward mode only, so the
        # transpose could not be staged. Without it, reverse mode is refused later (`_transpose`).
        found = derivative.forward(residuals, moving)
    if not derivative.form.record:
        results = results._replace(checkpoints=[])
    outs = [*results.carry, *results.ys, *results.checkpoints, results.steps]
    return outs, with_values(list(map(_no_tangent, outs)), derivative.places, found)


@dataclass(frozen=True)
class _Derivative:
    """The derivative of a bounded loop, as a linear function and its transpose.

    Attributes:
      body, guarded, form: those of the loop.
      consts, carry, xs, ys: which of each have tangents.
    """

    body: Any
    guarded: Any
    form: Form
    consts: Sequence[int]
    carry: Sequence[int]
    xs: Sequence[int]
    ys: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        """Which inputs of a step have tangents."""
        first_x = self.form.n_consts + self.form.n_carry
        carry = (self.form.n_consts + i for i in self.carry)
        return [*self.consts, *carry, *(first_x + i for i in self.xs)]

    @property
    def outputs(self) -> list[int]:
        """Which results of a step have them."""
        return [*self.carry, *(self.form.n_carry + i for i in self.ys)]

    @property
    def places(self) -> list[int]:
        """Which results of the loop have them."""
        first = self.form.n_carry + len(self.form.y_axes)
        return [*self.outputs, *(first + i for i in self.carry if self.form.record)]

    def _split(self, residuals: Values) -> tuple[Any, ...]:
        """The steps taken, constants, first carry, checkpoints and xs."""
        a, n = self.form.n_consts, self.form.n_carry
        return (residuals[0], *_parts(residuals[1:], a, n, n))

    def forward(self, residuals: Values, tangents: Values) -> list[Any]:
        """The tangents of the results."""
        form = self.form
        steps, consts, carry, _, xs = self._split(residuals)
        dconsts, dcarry, dxs = _parts(tangents, len(self.consts), len(self.carry))

        def step(*groups: Values) -> tuple[Values, Values]:
            sizes = len(consts), len(carry), len(xs)
            primals = [x for group, n in zip(groups, sizes, strict=True) for x in group[:n]]
            dots = [x for group, n in zip(groups, sizes, strict=True) for x in group[n:]]
            every = range(len(self.guarded.out_avals))
            outs, dots = tangents_of(_flat(self.guarded), primals, self.inputs, dots, every)
            dots = _take(dots, self.outputs)
            return [*outs[: form.n_carry], *dots[: len(dcarry)]], dots[len(dcarry) :]

        found = bounded_loop(
            step,
            [*consts, *dconsts],
            [*carry, *dcarry],
            [*xs, *dxs],
            count=steps,
            length=form.length,
            x_axes=(*form.x_axes, *_take(form.x_axes, self.xs)),
            y_axes=_take(form.y_axes, self.ys),
            reverse=form.reverse,
            record=form.record,
        )
        return [*found.carry[len(carry) :], *found.ys, *found.checkpoints[len(carry) :]]

    def back(self, residuals: Values, cotangents: Values) -> list[Any]:
        """The cotangents of constants, first carry and xs."""
        form = self.form
        steps, consts, _, checkpoints, xs = self._split(residuals)
        ct_carry, ct_ys, ct_kept = _parts(cotangents, len(self.carry), len(self.ys))
        size, count = np.int32(form.segment), form.n_segments
        y_axes = _take(form.y_axes, self.ys)

        def segment(shared: Values, carry: Values, x: Values) -> tuple[Values, Values]:
            (steps, *consts), (j, *x) = shared, x
            start, xs, ct_ys, ct_kept = _parts(x, form.n_carry, len(form.x_axes), len(self.ys))
            taken = lax.clamp(np.int32(0), steps - j * size, size)
            cts, ct_xs = self._back_over_steps(taken, consts, start, xs, carry, ct_ys)
            n = len(ct_kept)  # a checkpoint is the carry at this place: their cotangents add up
            return [*map(lax.add, cts[:n], ct_kept), *cts[n:]], ct_xs

        found = bounded_loop(
            segment,
            [steps, *consts],
            [*ct_carry, *map(_zeros_like, _take(consts, self.consts))],
            [
                lax.iota(np.int32, count),
                *checkpoints,
                *(_in_segments(x, a, form) for x, a in zip(xs, form.x_axes, strict=True)),
                *(_in_segments(ct, a, form) for ct, a in zip(ct_ys, y_axes, strict=True)),
                *ct_kept,
            ],
            count=lax.div(steps + (size - np.int32(1)), size),
            length=count,
            x_axes=(0, *[0] * len(checkpoints), *form.x_axes, *y_axes, *[0] * len(ct_kept)),
            y_axes=_take(form.x_axes, self.xs),
            reverse=not form.reverse,
        )
        ct_carry, ct_consts, _ = _parts(found.carry, len(self.carry), len(self.consts))
        axes = _take(form.x_axes, self.xs)
        ct_xs = [_in_a_row(x, a, form) for x, a in zip(found.ys, axes, strict=True)]
        return [*ct_consts, *ct_carry, *ct_xs]

    def _back_over_steps(
        self, taken: Any, consts: Values, start: Values, xs: Values, cts: Values, ct_ys: Values
    ) -> tuple[list[Any], list[Any]]:
        """Goes back over the steps `taken` of a segment that begins with the carry `start`.

        Args:
          cts: the cotangents of the carry after it, and what is known of those of constants.
          ct_ys: those of its ys.

        Returns:
          The same as `cts` at its start, and the cotangents of its xs.
        """
        form, n = self.form, len(self.carry)
        size, y_axes = form.segment, _take(form.y_axes, self.ys)

        def again(program: Any) -> Any:
            def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
                return _flat(program)(*consts, *carry, *x)[: form.n_carry], carry

            return step

        seen = bounded_loop(
            again(self.body),
            consts,
            start,
            xs,
            guarded=None if self.guarded is self.body else again(self.guarded),
            count=taken,
            length=size,
            x_axes=form.x_axes,
            y_axes=[0] * len(start),
            reverse=form.reverse,
        ).ys

        def step(consts: Values, cts: Values, x: Values) -> tuple[Values, Values]:
            carry, x, ct_ys = _parts(x, len(start), len(xs))
            primals = [*consts, *carry, *x]

            def of_moving(*values: Any) -> list[Any]:
                outs = _flat(self.guarded)(*with_values(primals, self.inputs, values))
                return _take(outs, self.outputs)

            _, pull = jax.vjp(of_moving, *_take(primals, self.inputs))
            found = pull([*cts[:n], *ct_ys])
            ct_consts, ct_carry, ct_xs = _parts(found, len(self.consts), n)
            return [*ct_carry, *map(lax.add, cts[n:], ct_consts)], ct_xs

        found = bounded_loop(
            step,
            consts,
            cts,
            [*seen, *xs, *ct_ys],
            count=taken,
            length=size,
            x_axes=(*[0] * len(seen), *form.x_axes, *y_axes),
            y_axes=_take(form.x_axes, self.xs),
            reverse=not form.reverse,
        )
        return found.carry, found.ys


def _moving(
    jaxpr: Any, form: Form, consts: Values, carry: Values, xs: Values
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Which constants, carries, xs and ys have tangents.

    A carry has one if it starts with one, or if some step gives it one.
    """
    n = form.n_carry
    known, entries = list(map(_moves, consts)), list(map(_moves, xs))
    smooth = [v.aval.to_tangent_aval().dtype != jax.dtypes.float0 for v in jaxpr.outvars]
    found = [m and s for m, s in zip(map(_moves, carry), smooth, strict=False)]
    while True:
        hits = reached(jaxpr, [*known, *found, *entries])
        hits = [hit and s for hit, s in zip(hits, smooth, strict=True)]
        more = [old or hit for old, hit in zip(found, hits, strict=False)]
        if more == found:
            break
        found = more
    return _places(known), _places(found), _places(entries), _places(hits[n:])


def _moves(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero and jax.typeof(tangent).dtype != jax.dtypes.float0


def _no_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _refuse_shared(steps: Any, moving: Values) -> None:
    """Refuses a sum over devices in a loop that each device leaves at another step."""
    axes = _compat.varying_axes(jax.typeof(steps))
    if any(axes - _compat.varying_axes(jax.typeof(x)) for x in moving):
        raise UnsupportedError(
            "a bounded loop inside shard_map ends at a different step on each device, and is "
            "differentiated with respect to a value that is the same on all of them. Pass that "
            f"value through jax.lax.pcast(x, {tuple(axes)}, to='varying') before the loop."
        )


def _in_segments(x: Any, axis: int, form: Form) -> Any:
    """`x` with the axis of the steps as two: of the segments, and of the steps of each."""
    shape, missing = list(x.shape), form.n_segments * form.segment - form.length
    if missing:
        shape[axis] = missing
        x = lax.concatenate([x, lax.full_like(x, 0, shape=tuple(shape))], axis)
    shape[axis : axis + 1] = [form.n_segments, form.segment]
    return lax.reshape(x, shape)


def _in_a_row(x: Any, axis: int, form: Form) -> Any:
    """The inverse of `_in_segments`."""
    shape = list(x.shape)
    shape[axis : axis + 2] = [form.n_segments * form.segment]
    return lax.slice_in_dim(lax.reshape(x, shape), 0, form.length, axis=axis)


def _zeros_like(x: Any) -> Any:
    return ad.instantiate_zeros(_no_tangent(x))


def _flat(program: Any) -> Any:
    return lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)


def _take(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [items[i] for i in places]


def _places(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


def _parts(items: Sequence[Any], *sizes: int) -> list[list[Any]]:
    """`items` in lists of these sizes, and the rest."""
    items, parts = list(items), []
    for n in sizes:
        parts.append(items[:n])
        items = items[n:]
    return [*parts, items]


def _transpose(*_: Any, **params: Any) -> Any:
    raise UnsupportedError(
        "a bounded loop (batchax.bounded_while, or a scan with until) is differentiated in reverse "
        "mode, and the steps of it contain a loop that has no derivative in reverse, such as "
        "lax.while_loop. Use batchax.bounded_while there, too."
    )


ad.primitive_jvps[bounded_loop_p] = _jvp
ad.primitive_transposes[bounded_loop_p] = _transpose
