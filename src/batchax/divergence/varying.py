"""Programs whose values all vary over a mesh, inside ``shard_map``.

A loop counter that starts from zero is the same on all devices, and typed so. Once lanes leave
the loop one by one it is not, and nothing else in the loop may be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from batchax import _compat
from batchax.engine.divergence import Loop
from batchax.engine.evaluate import evaluate
from batchax.engine.fallback import bind_equation
from batchax.engine.inner import remembered
from batchax.rules.collectives import CASTS


def with_varying_values(loop: Loop) -> Loop:
    """`loop` with a carry, and programs of values, that vary as any of its operands does."""
    given = (*loop.test_consts, *loop.body_consts, *loop.carry)
    model = jax.typeof(_compat.varying_alike([np.int32(0)], like=given)[0])
    if not _compat.varying_axes(model):
        return loop
    return replace(
        loop,
        test=_varying(loop.test, model),
        body=_varying(loop.body, model),
        test_consts=_compat.varying_alike(loop.test_consts, like=given),
        body_consts=_compat.varying_alike(loop.body_consts, like=given),
        carry=_compat.varying_alike(loop.carry, like=given),
    )


def _varying(program: _compat.ClosedJaxpr, model: Any) -> _compat.ClosedJaxpr:
    """`program` of values that vary as those of type `model`."""

    jaxpr, consts = program.jaxpr, program.consts

    def run_equation(eqn: Any, operands: list[Any]) -> Any:
        if eqn.primitive.name in CASTS.split():
            return operands
        if not any(True for _ in jaxprs_in_params(eqn.params)):
            operands = _compat.varying_alike(operands)
        return bind_equation(eqn, operands)

    def run(*args: Any) -> list[Any]:
        outs = evaluate(jaxpr, consts, args, run_equation)
        return _compat.varying_alike([*outs, args[0]])[:-1]

    def build() -> Any:
        cast = lambda like, *xs: _compat.varying_alike(xs, like=[like])
        types = _compat.stage(cast, [model, *program.in_avals]).out_avals
        return _compat.stage(run, list(types))

    return remembered(program, ("varying", model), build)
