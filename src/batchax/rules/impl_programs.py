"""How the `impl` of a library's primitive is batched, and differentiated as that primitive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.types import ClosedJaxpr, Params, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Positions, RuleOutputs
from batchax.kernel.impl_programs import impl_program_p
from batchax.kernel.inner import (
    ZERO_IF_MAPPED,
    batch_inner,
    example_aval,
    inline_jaxpr,
    stage_function,
)
from batchax.kernel.own_primitive import Of, own_primitive
from batchax.rules.masking import is_inexact


def _run(*xs: Value, program: ClosedJaxpr, of: Any) -> list[Any]:
    return eval_jaxpr(program.jaxpr, program.consts, *xs)


def _differentiated(*xs: Value, program: ClosedJaxpr, of: Any) -> list[Any]:
    return eval_jaxpr(of.jaxpr, of.consts, *xs) if isinstance(of, ClosedJaxpr) else of(*xs)


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, program: ClosedJaxpr, of: Any
) -> RuleOutputs:
    if all(a is None for a in axes):
        outs = impl_program_p.bind(*args, program=program, of=of)
        return outs, [None] * len(outs)
    types = list(map(jax.typeof, args))

    def whole(places: Sequence[Any]) -> tuple[ClosedJaxpr, Positions]:
        """Batches what is differentiated, which takes as long again."""
        with recording.paused(axis):
            return batch_inner(axis, _staged(axis, types, axes, of), axes, places)

    front = [ZERO_IF_MAPPED] * len(program.out_avals)
    batched, at = batch_inner(axis, program, axes, front)
    shared = [a is None and is_inexact(t) for a, t in zip(at, program.out_avals, strict=True)]
    if any(shared):
        # Its derivative may depend on the batch although its value does not.
        also = zip(at, whole(front)[1], shared, strict=True)
        at = tuple(b if s else a for a, b, s in also)
        batched, _ = batch_inner(axis, program, axes, at)
    all_lanes = lambda *xs: inline_jaxpr(whole(at)[0], xs)
    return impl_program_p.bind(*args, program=batched, of=all_lanes), at


def _staged(axis: Axis, types: Sequence[Any], axes: Positions, of: Any) -> ClosedJaxpr:
    if isinstance(of, ClosedJaxpr):
        return of
    avals = [example_aval(axis, t, a) for t, a in zip(types, axes, strict=True)]
    return stage_function(axis, of, avals)


def _of_some(results: Sequence[bool], params: Params) -> _compat.Reduced:
    """Keeps these results."""
    operands = [True] * len(params["program"].in_avals)
    program, _ = _compat.reduced(params["program"], results, operands)
    some = lambda *xs: [*compress(_differentiated(*xs, **params), results)]
    return _compat.Reduced(operands, results, {"program": program, "of": some})


own_primitive(
    impl_program_p,
    called="`impl` of a primitive of a library",
    operations=_run,
    types=lambda *avals, program, of: list(program.out_avals),
    programs=("program",),
    facts="moderate",
    rule=_batched,
    jvp=Of(_differentiated),
    transpose=Of(_differentiated),
)
_compat.register_unread_results(impl_program_p, _of_some)
