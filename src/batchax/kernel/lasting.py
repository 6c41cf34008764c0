"""Calls outside of tracing, and how their programs are known again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.program_key import program_key
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.kernel.looking import looks_here
from batchax.kernel.registry import registrations
from batchax.memo import Memo


def call_key(axis: Axis, program: _compat.ClosedJaxpr, *rest: Hashable) -> Hashable:
    """Equal for calls of programs that do the same, in the same surroundings, outside of tracing.

    A call outside of `jit` stages its function anew each time. What it takes longer to make of the
    program is remembered under this.

    Args:
      axis: the axis being mapped.
      program: the program of one example.
      rest: what else the call depends on: the types of its arguments, say.
    """
    return axis, program_key(program), registrations(), _compat.trace_context(), *rest


def evaluated(
    run: Callable[..., tuple[list[Any], Any]],
    args: Sequence[Any],
    traced: bool,
    check: Callable[[Any], None] = lambda described: None,
    kept: tuple[Memo, Callable[[], Hashable]] | None = None,
) -> tuple[list[Any], Any]:
    """The arrays that `run` returns for `args`, and what describes them.

    Where nothing is traced, operations would be computed as they are met. So the whole is staged
    first: what is wrong with it is found before anything is computed, and it may be kept. What
    notes are taken of is not, and nothing that is kept is used for it.

    Args:
      run: returns arrays, and what describes them.
      args: its arguments.
      traced: whether running it traces operations, rather than computing them.
      check: raises if what describes the arrays is wrong.
      kept: where the staged program is kept, and what makes its key; None for nowhere.
    """
    if traced:
        outs, described = run(*args)
        check(described)
        return outs, described

    def stage() -> tuple[_compat.ClosedJaxpr, Any]:
        return _compat.stage_described(run, list(map(jax.typeof, args)))

    if kept is None or recording.is_on():
        whole, described = stage()
    else:
        memo, key = kept
        whole, described = memo.get(key(), stage)
    check(described)
    if looks_here():  # at the results of the user's operations, which are those of `run`
        return run(*args)
    return eval_jaxpr(whole.jaxpr, whole.consts, *args), described
