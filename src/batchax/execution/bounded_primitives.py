"""The primitives of a bounded loop and of the sweep back over its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from batchax.execution import bounded_derivatives, bounded_loop, reverse_sweep, sweep_derivatives
from batchax.execution.bounded_batching import batch_loop, batch_sweep
from batchax.execution.eager import jitted, whatever_jit
from batchax.jaxprs.program_key import value_key
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive


def _compiled(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`run` compiled; it makes no use of the parameter `guarded`."""

    @whatever_jit
    def compute(*operands: Any, **params: Any) -> list[Any]:
        values = {name: value for name, value in params.items() if name != "guarded"}
        keys = map(value_key, values.values())
        return jitted((run, *keys), functools.partial(run, **params))(*operands)

    return compute


own_primitive(
    bounded_loop.bounded_loop_p,
    called="bounded loop",
    operations=bounded_loop.run,
    compute=_compiled(bounded_loop.run),
    types=lambda count, *avals, test, body, guarded, form: bounded_loop.result_types(
        test, body, form, count
    ),
    programs=("test", "body", "guarded"),
    facts="endless costly nests",  # while its steps are not counted
    rule=batch_loop,
    jvp=bounded_derivatives.jvp,
    transpose=bounded_derivatives.transpose,
)

own_primitive(
    reverse_sweep.reverse_sweep_p,
    called="derivative of a bounded loop",
    operations=reverse_sweep.run,
    compute=_compiled(reverse_sweep.run),
    types=lambda *avals, forth, back, guarded, form: reverse_sweep.result_types(back, form),
    programs=("forth", "back", "guarded"),
    facts="linear costly nests",
    rule=batch_sweep,
    jvp=sweep_derivatives.jvp,
    transpose=OF_OPERATIONS,
)
