"""Scans over rows in which each row takes its own steps.

A scan over a padded row takes as many steps as the longest row has, and the others are dropped. As
a ``while`` of one example it takes as many as the row has, and lanes may leave it one by one
(`divergence`). Which of the two runs is decided where rows are batched: one primitive holds both.
The scan is what it stands for, and has the derivative, as a ``while`` has none in reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.analysis.one_function import fits_lowered_kernel, lower_for_kernel
from batchax.cache import cached_on
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Values
from batchax.kernel.axis import AnyLoop, Axis, Positions
from batchax.kernel.inner import batch_inner, inline_jaxpr
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.rows.sizes import has_symbols
from batchax.rules.masking import hazards

Flat = Callable[..., list[Any]]


@cached_on("whether rows may take their own steps of a scan")
def may_take_own_steps(body: ClosedJaxpr) -> bool:
    """Whether a step is so cheap that lanes may run as a single kernel; see `policy.Tiles`."""
    danger = hazards(body.jaxpr)
    if danger.collective or danger.endless or body.effects:
        return False
    if any(has_symbols(getattr(aval, "shape", ())) for aval in (*body.in_avals, *body.out_avals)):
        return False
    return fits_lowered_kernel(lower_for_kernel(body).jaxpr)


def run_own_steps(scan: Flat, loop: Flat, values: Values) -> list[Any]:
    """What both functions return of these arrays; `loop` may run in place of `scan`."""
    types = list(map(jax.typeof, values))
    programs, consts = _compat.hoist_constants(*(_compat.stage(f, types) for f in (scan, loop)))
    operands = _compat.varying_alike([*consts, *values])
    return own_steps_p.bind(*operands, scan=programs[0], loop=programs[1])


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, scan: ClosedJaxpr, loop: ClosedJaxpr
) -> tuple[list[Any], Positions]:
    masked, out_axes = batch_inner(axis, scan, axes)
    leaving = _leaving(axis, loop, args, axes, out_axes)
    if leaving is None:
        return inline_jaxpr(masked, args), out_axes
    return own_steps_p.bind(*args, scan=masked, loop=leaving), out_axes


def _leaving(
    axis: Axis, loop: ClosedJaxpr, args: Values, axes: Positions, out_axes: Positions
) -> ClosedJaxpr | None:
    """The batched loop, if lanes leave it one by one, in a single kernel."""
    loops = [AnyLoop(while_p, e.params, args, axes) for e in _find(loop, while_p.name)]
    if axis.divergence is None or any(axis.divergence.why_lockstep(axis, x) for x in loops):
        return None
    batched, _ = batch_inner(axis, loop, axes, out_axes)
    parts = [eqn.params["loop"] for eqn in _find(batched, "divergent_loop")]
    return batched if parts and all(own.in_kernel for own in parts) else None


def _find(program: ClosedJaxpr, primitive: str) -> list[Eqn]:
    return [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == primitive]


own_steps_p = own_primitive(
    "own_steps",
    called="a scan over a row",
    operations=lambda *operands, scan, **_: inline_jaxpr(scan, operands),
    on_cpu=lambda *operands, loop, **_: inline_jaxpr(loop, operands),
    types=lambda *avals, scan, **_: list(scan.out_avals),
    programs=("scan", "loop"),
    facts="costly control",
    rule=_batched,
    jvp=OF_OPERATIONS,
    transpose=OF_OPERATIONS,
)
