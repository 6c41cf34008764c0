"""The primitive of a loop that lanes leave one by one.

Batched once more, its lanes and those of the outer axis become one set of lanes, which share
one window. Were its operations batched instead, each by its rule, outer lanes would be masked,
and would wait for the slowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.divergence.loops import PartingLoop
from batchax.execution.bounded_derivatives import moves, no_tangent
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, match_axis, move_axis
from batchax.kernel.inner import batch_inner, remembered, written_into
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import OF_OPERATIONS, jvp_of, own_primitive
from batchax.programs.shapes import bytes_of

# To be one set, lanes of one axis that share an operand get copies of it. These may take so many
# times the bytes of what the lanes carry.
_MOST_REPEATED = 4


def bind(loop: PartingLoop, operands: Sequence[Value]) -> list[Any]:
    """Runs the loop; it may be batched, and differentiated in forward mode."""
    types = tuple(map(jax.typeof, operands))
    stage = lambda: _compat.stage(loop.run, types)
    program = remembered(loop.body, (loop.but_for_body, types), stage)
    return parting_loop_p.bind(*operands, loop=loop, program=program)


def _compiled(*operands: Any, loop: PartingLoop, program: Any) -> list[Any]:
    compiled = remembered(program, "compiled", lambda: jax.jit(_function(program)))
    return compiled(*operands)


def _function(program: Any) -> Any:
    # What is returned is remembered under `program` as a weak key, and must not hold it alive.
    jaxpr, consts = program.jaxpr, program.consts
    return lambda *operands: eval_jaxpr(jaxpr, consts, *operands)


def _run(*operands: Any, loop: PartingLoop, program: Any) -> list[Any]:
    return written_into(program, operands)


def _elsewhere(*, loop: PartingLoop, program: Any) -> Callable[..., list[Any]] | None:
    """What runs on a platform for which nobody decided: masked lanes, unless the user asked.

    ``jax.export`` lowers a program for platforms of which the machine that traces has none.
    """
    return None if loop.axis.divergence.explicit else loop.masked


def _masked(*operands: Any, loop: PartingLoop, program: Any) -> list[Any]:
    # What moves lanes reads and writes out of bounds on purpose, which is no error of the user's.
    return loop.masked(*operands)


def _differentiated(*operands: Any, loop: PartingLoop, program: Any) -> list[Any]:
    return loop.differentiated(program, operands)


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Any], *, loop: PartingLoop, program: Any
) -> tuple[list[Any], list[Any]]:
    which = [i for i, t in enumerate(tangents) if moves(t)]
    both = loop.tangents(primals, which, [tangents[i] for i in which])
    if both is None:
        of_operations = jvp_of(_differentiated, parting_loop_p)
        return of_operations(primals, tangents, loop=loop, program=program)
    outs, dots = both
    return outs, [no_tangent(x) if t is None else t for x, t in zip(outs, dots, strict=True)]


def _batched(
    axis: Axis, args: Any, axes: Any, /, *, loop: PartingLoop, program: Any
) -> tuple[list[Any], Sequence[Position]]:
    merged = _merged(axis, loop, args, axes)
    if merged is None:
        # In a window lanes of the outer axis would wait; and one function is made of its lanes.
        explicit, kernels = loop.axis.divergence.explicit, loop.without_kernels()
        run = kernels.run if explicit else loop.masked
        if not explicit or kernels is not loop:
            types = tuple(program.in_avals)
            key = (*loop.but_for_body, types, "batched", axis.name, axis.size)

            def stage() -> Any:
                with _compat.named_scope(axis.name, axis.size):
                    return _compat.stage(run, types)

            program = remembered(loop.body, key, stage)
        batched, out_axes = batch_inner(axis, program, axes)
        return written_into(batched, args), out_axes
    both = (axis.size, loop.axis.size)
    outs = bind(*merged)
    return [lax.reshape(x, (*both, *x.shape[1:])) for x in outs], [0] * len(outs)


def _merged(
    axis: Axis, loop: PartingLoop, args: Any, axes: Any
) -> tuple[PartingLoop, list[Any]] | None:
    """The loop of the lanes of both axes; None where it cannot be, or would copy too much."""
    together = isinstance(axis.size, int) and axis.mesh_axis is None and axis.spmd_name is None
    if not together or any_uses_axis(axis, loop.test, loop.body):
        return None
    count = len(loop.positions)
    lanes = axis.size * loop.axis.size

    def flat(x: Value, outer: Position, inner: Position) -> Any:
        """All lanes of `x` in a row, inner ones together."""
        if inner is not None:
            inner += outer is not None and outer <= inner
            outer = outer if outer is None else outer + (outer < inner)
            x = match_axis(axis, move_axis(x, inner, 0), outer, 0)
        else:
            x = match_axis(axis, x, outer, 0)
            x = match_axis(loop.axis, x, None, 1)
        return lax.reshape(x, (lanes, *x.shape[2:]))

    carry = [flat(x, a, 0) for x, a in zip(args[count:], axes[count:], strict=True)]
    consts = list(zip(args[:count], axes[:count], loop.positions, strict=True))
    repeated = sum(
        bytes_of([jax.typeof(x)]) * (loop.axis.size if inner is None else axis.size)
        for x, outer, inner in consts
        if (outer is None) != (inner is None)
    )
    if repeated > _MOST_REPEATED * bytes_of(map(jax.typeof, carry)):
        return None
    same = [outer is None and inner is None for _, outer, inner in consts]
    operands = [
        x if s else flat(x, outer, inner) for s, (x, outer, inner) in zip(same, consts, strict=True)
    ]
    plan = loop.replanned(lanes, loop.positions)
    wide = replace(loop.axis, size=lanes)
    positions = tuple(None if s else 0 for s in same)
    return replace(loop, axis=wide, positions=positions, plan=plan), [*operands, *carry]


parting_loop_p = own_primitive(
    "parting_loop",
    called="while",
    operations=_run,
    compute=_compiled,
    elsewhere=_elsewhere,
    checked=_masked,
    types=lambda *avals, loop, program: list(program.out_avals),
    programs=("program",),
    facts="nests",
    rule=_batched,
    jvp=_jvp,
    transpose=OF_OPERATIONS,
)
