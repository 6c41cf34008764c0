"""How the `impl` of a library's primitive is batched, and differentiated as that primitive."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Positions, RuleOutputs
from batchax.kernel.impl_programs import impl_program_p
from batchax.kernel.inner import batch_inner
from batchax.kernel.own_primitive import Of, own_primitive


def _run(*xs: Value, program: ClosedJaxpr, of: ClosedJaxpr) -> list[Any]:
    return eval_jaxpr(program.jaxpr, program.consts, *xs)


def _run_library(*xs: Value, program: ClosedJaxpr, of: ClosedJaxpr) -> list[Any]:
    return eval_jaxpr(of.jaxpr, of.consts, *xs)


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, program: ClosedJaxpr, of: ClosedJaxpr
) -> RuleOutputs:
    if all(a is None for a in axes):
        outs = impl_program_p.bind(*args, program=program, of=of)
        return outs, [None] * len(outs)
    front = (0,) * len(program.out_avals)
    batched, _ = batch_inner(axis, program, axes, front)
    run = jax.vmap(lambda *xs: eval_jaxpr(of.jaxpr, of.consts, *xs), axes, 0, axis_size=axis.size)
    of = _compat.stage(run, list(map(jax.typeof, args)))
    (batched, of), consts = _compat.hoist_constants(batched, of)
    return impl_program_p.bind(*consts, *args, program=batched, of=of), front


own_primitive(
    impl_program_p,
    called="`impl` of a primitive of a library",
    operations=_run,
    types=lambda *avals, program, of: list(program.out_avals),
    programs=("program",),
    facts="moderate",
    rule=_batched,
    jvp=Of(_run_library),
    transpose=Of(_run_library),
)
