"""Linear solves with implicit derivatives (`jax.lax.custom_linear_solve`)."""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, match_axis
from batchax.kernel.inner import ANYWHERE, batch_inner
from batchax.kernel.registry import register_rule

enter(": custom_linear_solve")


@register_rule(lax.linear_solve_p)
def _custom_linear_solve(
    axis: Axis, args: Any, axes: Any, /, *, const_lengths: Any, jaxprs: Any
) -> tuple[Any, Any]:
    # The operands are the constants of each program (matvec, vecmat, solve,
    # transpose_solve), one program after the other, and then `b`.
    ends = [sum(const_lengths[: i + 1]) for i in range(len(const_lengths))]
    const_axes = [axes[end - n : end] for end, n in zip(ends, const_lengths, strict=True)]
    start = ends[-1]
    b_axes, aux_axes = _solution_axes(
        axis, jaxprs, const_axes, axes[start:], len(jaxprs.solve.out_avals)
    )

    def for_all_lanes(program: Any, its_axes: Any) -> Any:
        if program is None:
            return None
        # Where no batch axis is wanted, none turns up. Two of the four have no auxiliary data.
        places = [ANYWHERE if a is None else a for a in (*b_axes, *aux_axes)]
        places = places[: len(program.out_avals)]
        return batch_inner(axis, program, [*its_axes, *b_axes], places)[0]

    b = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(args[start:], axes[start:], b_axes, strict=True)
    ]
    outs = lax.linear_solve_p.bind(
        *args[:start],
        *b,
        const_lengths=const_lengths,
        jaxprs=type(jaxprs)(*map(for_all_lanes, jaxprs, const_axes)),
    )
    return outs, [*b_axes, *aux_axes]


def _solution_axes(
    axis: Axis, programs: Any, const_axes: Any, given: Any, n_out: int
) -> tuple[list[int | None], list[int | None]]:
    """Which leaves of the solution, and which of the auxiliary data, carry the batch axis.

    The solution has the type of `b`, and so have the arguments and results of
    all programs, those of derivatives included: leaf by leaf all of these carry
    the batch axis, at the front, or none does. Found by adding what some
    program makes batched until nothing is added.
    """
    n = len(given)
    axes: list[int | None] = [None if a is None else 0 for a in given] + [None] * (n_out - n)
    while None in axes:
        grown = list(axes)
        for program, its_axes in zip(programs, const_axes, strict=True):
            if program is None:
                continue
            _, out_axes = batch_inner(axis, program, [*its_axes, *axes[:n]])
            for i, a in enumerate(out_axes):
                grown[i] = grown[i] if a is None else 0
        if grown == axes:
            break
        axes = grown
    return axes[:n], axes[n:]
