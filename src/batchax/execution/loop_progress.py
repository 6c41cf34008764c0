"""How far a loop is that runs inside a compiled program: where such a program calls the host.

That is at the start of a step, about fifty times in a loop, and once more after the last step.
Nothing that is passed to the host depends on a batch, so a loop that is batched is still one loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import AxisType

from batchax import _compat
from batchax.execution.loop_runs import LoopProgress, Told
from batchax.kernel.axis import Axis
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.kernel.varying import mesh_around
from batchax.progress import How, check_progress

_CALLS = 50  # in a loop: each takes 0.1 to 0.2 milliseconds


def find_progress(how: How, fun: Any, unit: str) -> LoopProgress | None:
    """What the option `progress` asks for, of a loop over steps of `fun`; None for nothing.

    Raises:
      ArgumentTypeError: it is neither a bool nor callable.
    """
    check_progress(how, unit)
    name = getattr(fun, "__name__", type(fun).__name__)
    return None if how is False else LoopProgress(how, name, unit)


def derivative_of(progress: LoopProgress | None, name: str) -> LoopProgress | None:
    """The same for a loop that computes a derivative, if anybody is told."""
    return None if progress is None else progress.derivative(name)


def begin_step(
    progress: LoopProgress | None,
    done: Any,
    total: Any,
    most: Any = None,
    *,
    width: int = 1,
    together: int = 1,
) -> None:
    """In a loop, at the start of a step: so many are done.

    Args:
      progress: who is told; None for nobody.
      done: how many steps are done.
      total: how many there are.
      most: how many there are at most; needed where `total` is traced.
      width: how many steps this is the start of.
      together: how many such starts have no order, and are next to each other.
    """
    most = total if most is None else most
    if progress is not None and most > 1:  # of the only step it is enough to tell that it is done
        done = lax.convert_element_type(done, np.int32)  # indices of JAX's may have 64 bits
        _tell(progress, False, done, total, (), _due(done, most, width, together))


def end_step(
    progress: LoopProgress | None,
    done: Any,
    total: int,
    results: Sequence[Any],
    width: int = 1,
    together: int = 1,
) -> None:
    """As `begin_step`, at the end of a step, which may be the last one, with what it computed."""
    if progress is not None:
        due, last = _due(done, total, width, together), lax.eq(done, np.int32(total))
        due = None if due is None else lax.bitwise_or(due, last)
        _tell(progress, None, done, total, results, due)


def _due(done: Any, most: int, width: int, together: int) -> Any:
    """Whether the host is to be called after so many steps; None: after any."""
    every = max(-(-most // _CALLS), width * together)
    if every == 1:
        return None
    due = lax.lt(lax.rem(done, np.int32(every)), np.int32(width))
    if together == 1:
        return due
    # What is left over runs after the loop, where calls have no order.
    return lax.bitwise_and(due, lax.lt(done, np.int32(most - most % together)))


def end_loop(
    progress: LoopProgress | None, done: Any, total: Any, results: Sequence[Any] = ()
) -> None:
    """After a loop: so many steps are done, and these are the results."""
    if progress is not None:
        _tell(progress, True, done, total, results, None)


def _tell(
    progress: LoopProgress,
    ended: bool | None,
    done: Any,
    total: Any,
    after: Sequence[Any],
    due: Any,
) -> None:
    """Calls the host if it is `due`, from one device of those that run the same program."""
    known = isinstance(total, int)
    operands = [done, *([] if known else [total]), *after]
    told = Told(progress, ended, total if known else None)
    mesh = mesh_around()
    if mesh.manual_axes:
        first = _is_first_device([(name, mesh.shape[name]) for name in mesh.manual_axes])
        # A branch whose predicate is the same at each step JAX drops where it differentiates.
        due = lax.ge(done, np.int32(0)) if due is None else due
        due = lax.bitwise_and(*_compat.varying_alike([due, first]))
    if due is None:
        tell_progress_p.bind(*operands, told=told)
    else:
        lax.cond(due, lambda: tell_progress_p.bind(*operands, told=told), lambda: [])


def _is_first_device(axes: Sequence[tuple[Hashable, Any]]) -> Any:
    names = tuple(name for name, _ in axes)
    # Staged, with names that are not in scope where a program is lowered.
    program = _compat.stage(lambda: [lax.eq(lax.axis_index(names), np.int32(0))], [], axes)
    return eval_jaxpr(program.jaxpr, program.consts)[0]


def _call(*operands: Any, told: Told) -> list[Any]:
    """Calls the host, once what follows the numbers among the operands is computed."""
    numbers, after = operands[: told.numbers], operands[told.numbers :]
    jax.debug.callback(told, *numbers, *_entry(after))
    return []


def _entry(values: Sequence[Any]) -> Sequence[Any]:
    """The last entry of one of the values, if one has any: it is there when the value is."""
    for x in values:
        aval = jax.typeof(x)
        extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
        if not (extended or explicit or 0 in aval.shape):
            return [lax.squeeze(lax.slice(x, [n - 1 for n in x.shape], x.shape), range(x.ndim))]
    return []


def _call_when_computed(*operands: Any, told: Told) -> list[Any]:
    return _call(*jax.block_until_ready(operands), told=told)


def _batched(axis: Axis, args: Any, axes: Any, /, *, told: Told) -> tuple[list[Any], list[Any]]:
    # Lanes that left a loop at steps of their own: it goes on to the last of these.
    numbers = list(zip(args, axes, strict=True))[: told.numbers]
    told_of = [x if a is None else lax.reduce_max(x, (a,)) for x, a in numbers]
    return tell_progress_p.bind(*told_of, *args[told.numbers :], told=told), []


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, told: Told) -> Any:
    return tell_progress_p.bind(*primals, told=told), []


# A primitive, as a batch axis of what a call waits for must not multiply the call.
tell_progress_p = own_primitive(
    "tell_progress",
    called="progress",
    operations=_call,
    compute=_call_when_computed,
    types=lambda *avals, told: [],
    programs=(),
    effects=lambda told: [_compat.debug_effect],
    facts="once",
    rule=_batched,
    jvp=_jvp,
    transpose=OF_OPERATIONS,
)
