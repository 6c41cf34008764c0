"""How far a scan of JAX's is gone back over, where it is differentiated in reverse.

JAX makes that loop of the one that goes forth. So each step of this one passes its carry through
a function that does nothing, whose derivative does nothing either, but says when it is transposed
that a step has been gone back over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.interpreters import ad

from batchax.execution.loop_progress import derivative_of, end_step
from batchax.execution.loop_runs import LoopProgress
from batchax.kernel.axis import Axis
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.rules.masking import is_inexact


def through_step(
    progress: LoopProgress | None, carry: Sequence[Any], done: Any, total: Any, *sizes: int
) -> list[Any]:
    """The carry of a scan at the start of a step; `sizes` as for `end_step`."""
    moving = [i for i, x in enumerate(carry) if is_inexact(x)]
    if progress is None or not moving:
        return list(carry)
    values = _through_p.bind(
        *(carry[i] for i in moving), done, progress=progress, total=total, sizes=sizes
    )
    found = dict(zip(moving, values, strict=True))
    return [found.get(i, x) for i, x in enumerate(carry)]


def _same(*operands: Any, **_: Any) -> list[Any]:
    return list(operands[:-1])


def _jvp_through(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    outs, dots = _through_p.bind(*primals, **how), list(tangents[:-1])
    # One of them speaks for all.
    first = next((i for i, t in enumerate(dots) if type(t) is not ad.Zero), None)
    if first is not None:
        dots[first] = _back_p.bind(dots[first], primals[-1], **how)
    return outs, dots


def _jvp_back(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    return _back_p.bind(*primals, **how), tangents[0]


def _transpose_back(
    cotangent: Any, x: Any, done: Any, *, progress: LoopProgress, total: int, sizes: Any
) -> list[Any]:
    if type(cotangent) is not ad.Zero:
        back = derivative_of(progress, "cotangents")
        end_step(back, np.int32(total) - done, total, [cotangent], *sizes)
    return [cotangent, None]


def _batched_through(axis: Axis, args: Any, axes: Any, /, **how: Any) -> Any:
    return _through_p.bind(*args, **how), list(axes[:-1])


def _batched_back(axis: Axis, args: Any, axes: Any, /, **how: Any) -> Any:
    return _back_p.bind(*args, **how), axes[0]


_through_p = own_primitive(
    "progress_through",
    called="progress",
    operations=_same,
    types=_same,
    programs=(),
    facts="",
    rule=_batched_through,
    jvp=_jvp_through,
    transpose=OF_OPERATIONS,
)

_back_p = own_primitive(
    "progress_back",
    called="progress",
    operations=lambda x, done, **how: x,
    types=lambda x, done, **how: x,
    programs=(),
    facts="",
    rule=_batched_back,
    jvp=_jvp_back,
    transpose=_transpose_back,
    several=False,
)
