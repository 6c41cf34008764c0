"""The option `progress`: steps of loops, the callbacks that report them, and the bars they show.

A compiled program reports at the start of a step, about fifty times in a loop, and once more after
the last step. Arguments of the callback do not depend on a batch, so a loop that is batched is
still one loop. It reports how many steps are done, and how many there are. It has no state, for it
may run again, and in several threads at a time; so a callback does not know which run it is from. A
bar belongs to the loop, not to a run: it shows the run that is furthest.

Loops of batchax are equations, and their derivatives are made of what describes them. So the
description of a loop has its `Steps`. JAX makes the loop that goes back over a scan. There the
carry passes through an identity, which reports in its transpose that a step has been gone back
over.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.interpreters import ad
from jax.sharding import AxisType

from batchax import _compat
from batchax.frontend.options import check_progress
from batchax.jaxprs.error_format import brief, name_of
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.named_axes import mesh_around
from batchax.kernel.own_primitive import own_primitive
from batchax.progress import How, Progress
from batchax.rules.masking import is_inexact


@dataclass(frozen=True)
class LoopProgress:
    """Reports the progress of a loop. Instances that report the same are equal."""

    how: How = field(compare=False)  # True, or a function of the user, by identity
    name: str  # what the loop does
    unit: str  # what its steps are, in the plural
    _identity: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A method is another object each time that it is looked up.
        owner = getattr(self.how, "__self__", self.how)
        object.__setattr__(self, "_identity", (id(owner), getattr(self.how, "__name__", None)))

    def derivative(self, name: str) -> LoopProgress:
        return replace(self, name=f"{name} of {self.name.removeprefix('tangents of ')}")

    def tell(self, done: int, total: int, over: bool) -> None:
        """Reports that so many steps are done.

        Errors are shown as a warning, and the program continues.
        """
        # A loop may end before all steps are done.
        over = over or done == total
        shown = _shown(self, total, done, over)
        if shown.failed:
            return
        try:
            if not callable(self.how):
                shown.advance(done)
            elif done or over:  # of the start there is nothing to tell
                self.how(done, total)
        except Exception as error:
            shown.failed = True
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"progress={brief(self.how)} raised {brief(error)} at "
                f"{place.filename}:{place.lineno}. The loop continues without progress.",
                RuntimeWarning,
                stacklevel=2,
            )
        if over:
            shown.close()


@dataclass(frozen=True)
class ProgressCallback:
    """Is called by a program with the steps done and, if it is not known, their number."""

    progress: LoopProgress
    total: int | None
    over: bool

    @property
    def numbers(self) -> int:
        """Returns how many numbers it is called with, before other values."""
        return 1 if self.total is not None else 2

    # Values may follow, which only order the call. A known total is not passed, as each number
    # takes time.
    def __call__(self, done: Value, *more: Value) -> None:
        total = int(more[0]) if self.total is None else self.total
        self.progress.tell(int(done), total, self.over)


def find_progress(how: How, fun: Callable[..., Any], unit: str) -> LoopProgress | None:
    """Validates the option `progress`; None for no reports. Raises ArgumentTypeError."""
    check_progress(how, unit)
    name = name_of(fun)
    return None if how is False else LoopProgress(how, name, unit)


class _Shown:
    def __init__(self, of: LoopProgress, total: int) -> None:
        self.failed, self._done = False, 0
        self._heard, self._longest = time.monotonic(), 0.0
        self._bar = None
        if not callable(of.how):
            self._bar = Progress(of.how, of.name, total, 0, of.unit, attended=True)

    def hear(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._heard)
        self._heard = now

    def advance(self, done: int) -> None:
        with _lock:
            more = done - self._done
            if self._bar is not None and more > 0:
                self._done = done
                self._bar.advance(more)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()

    def seems_left(self) -> bool:
        """Returns whether the last call is so long ago that the program must have failed."""
        silence = time.monotonic() - self._heard
        # More than ten times the longest pause so far.
        return silence > 5.0 and silence > 10 * self._longest


_running: dict[tuple[LoopProgress, int], _Shown] = {}
_lock = threading.RLock()


def _shown(of: LoopProgress, total: int, done: int, over: bool) -> _Shown:
    """Returns the display of a loop, restarted when no step is done."""
    loop = of, total
    with _lock:
        if not done:  # what is there is of a run that failed, if not of another thread's
            _forget(loop)
        if loop not in _running:
            # Loops that failed never report their end.
            for other in [other for other, shown in _running.items() if shown.seems_left()]:
                _forget(other)
            _running[loop] = _Shown(*loop)
        shown = _running[loop]
        shown.hear()
        if over:
            del _running[loop]
    return shown


def _forget(loop: tuple[LoopProgress, int]) -> None:
    left = _running.pop(loop, None)
    if left is not None:
        left.close()


_CALLS = 50  # in a loop: each takes 0.1 to 0.2 milliseconds


@dataclass(frozen=True)
class Steps:
    """Describes the steps of a loop. Instances that report the same are equal."""

    most: Any  # the largest number of steps; a symbolic one is not reported
    callback: LoopProgress | None = None  # gets the number of steps done
    together: int = 1  # how many beginnings of steps are unordered, next to each other

    def derivative(self, name: str) -> Steps:
        callback = None if self.callback is None else self.callback.derivative(name)
        return replace(self, callback=callback)

    def begin(self, done: Value, total: Value | None = None) -> None:
        """Reports at the start of a step that `done` steps of `total`, or `most`, are done."""
        if self.callback is not None and self.most > 1:  # that the only step is done is enough
            done = lax.convert_element_type(done, np.int32)  # indices of JAX's may have 64 bits
            self._tell(done, total, self._due(done))

    def end(self, done: Value, total: Value | None = None, results: Values = ()) -> None:
        """Reports after the loop; `results` make the call wait for them."""
        if self.callback is not None:
            done = np.int32(done) if isinstance(done, int) else done
            self._tell(done, total, None, results, over=True)

    def through(self, carry: Values, done: Value) -> list[Value]:
        """Passes the carry of a scan through an operation whose transpose reports reverse steps."""
        moving = [i for i, x in enumerate(carry) if is_inexact(x)]
        if self.callback is None or not moving:
            return list(carry)
        values = progress_back_p.bind(*(carry[i] for i in moving), done, steps=self, linear=False)
        passed = dict(zip(moving, values, strict=True))
        return [passed.get(i, x) for i, x in enumerate(carry)]

    def went_back(self, done: Value, cotangent: Value) -> None:
        """Reports in the reverse loop, at the end of a step, that so many are left."""
        back, most = self.derivative("cotangents"), np.int32(self.most)
        due = back._due(most - done)
        due = None if due is None else lax.bitwise_or(due, lax.eq(done, np.int32(0)))
        back._tell(most - done, None, due, [cotangent])

    def _due(self, done: Value) -> Value | None:
        """Returns whether a step reports; None: every step does."""
        # At most about `_CALLS` calls a loop.
        every = max(-(-self.most // _CALLS), self.together)
        if every == 1:
            return None
        due = lax.eq(lax.rem(done, np.int32(every)), np.int32(0))
        if self.together == 1:
            return due
        # What is left over runs after the loop, where calls have no order.
        return lax.bitwise_and(due, lax.lt(done, np.int32(self.most - self.most % self.together)))

    def _tell(
        self,
        done: Value,
        total: Value | None,
        due: Value | None,
        after: Sequence[Any] = (),
        over: bool = False,
    ) -> None:
        """Reports to the host if `due`, from one device of those that run the same program."""
        assert self.callback is not None
        callback = ProgressCallback(self.callback, self.most if total is None else None, over)
        operands = [done, *([] if total is None else [total]), *after]
        mesh = mesh_around()
        if mesh.manual_axes:
            first = _is_first_device([(name, mesh.shape[name]) for name in mesh.manual_axes])
            # A branch whose predicate is the same at each step JAX drops where it differentiates.
            due = lax.ge(done, np.int32(0)) if due is None else due
            due = lax.bitwise_and(*_compat.varying_alike([due, first]))

        def tell() -> list[Value]:
            return tell_progress_p.bind(*operands, callback=callback)

        if due is None:
            tell()
        else:
            lax.cond(due, tell, lambda: [])


def _is_first_device(axes: Sequence[tuple[Hashable, Any]]) -> Value:
    names = tuple(name for name, _ in axes)
    # Staged, with names that are not in scope where a program is lowered.
    program = _compat.stage(lambda: [lax.eq(lax.axis_index(names), np.int32(0))], [], axes)
    return eval_jaxpr(program.jaxpr, program.consts)[0]


def _call(*operands: Value, callback: ProgressCallback) -> list[Value]:
    """Reports to the host once the operands after the numbers are computed."""
    numbers, after = operands[: callback.numbers], operands[callback.numbers :]
    # The callback waits for one entry, so that arrays are not copied to the host.
    jax.debug.callback(callback, *numbers, *_entry(after))
    return []


def _entry(values: Values) -> Sequence[Any]:
    """Returns the last entry of one of the values, which is available when the value is."""
    for x in values:
        aval = jax.typeof(x)
        extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        # Types with Explicit mesh axes, empty arrays, and random keys cannot be sliced to a number.
        explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
        if not (extended or explicit or 0 in aval.shape):
            return [lax.squeeze(lax.slice(x, [n - 1 for n in x.shape], x.shape), range(x.ndim))]
    return []


def _call_when_computed(*operands: Value, callback: ProgressCallback) -> list[Value]:
    return _call(*jax.block_until_ready(operands), callback=callback)


def _batched_call(
    axis: Axis, args: Values, axes: Positions, /, *, callback: ProgressCallback
) -> tuple[list[Value], list[Value]]:
    # Lanes leave the loop at different steps: it runs until the last of these.
    numbers = zip(args[: callback.numbers], axes, strict=False)
    furthest = [x if a is None else lax.reduce_max(x, (a,)) for x, a in numbers]
    return tell_progress_p.bind(*furthest, *args[callback.numbers :], callback=callback), []


# A primitive, as a batch axis of what a call waits for must not multiply the call.
tell_progress_p = own_primitive(
    "tell_progress",
    called="progress",
    operations=_call,
    compute=_call_when_computed,
    types=lambda *avals, callback: [],
    effects=lambda callback: [_compat.debug_effect],
    facts="once",
    rule=_batched_call,
    jvp=lambda primals, tangents, callback: (tell_progress_p.bind(*primals, callback=callback), []),
)


def _same(*operands: Value, **_: Any) -> list[Value]:
    return list(operands[:-1])


def _batched_back(
    axis: Axis, args: Values, axes: Positions, /, **how: Any
) -> tuple[list[Value], list[Position]]:
    return progress_back_p.bind(*args, **how), list(axes[:-1])


def _jvp_back(
    primals: Values, tangents: Values, *, steps: Steps, linear: bool
) -> tuple[list[Value], list[Value]]:
    outs = progress_back_p.bind(*primals, steps=steps, linear=linear)
    dots = list(tangents[:-1])
    # One of them speaks for all.
    first = next((i for i, t in enumerate(dots) if type(t) is not ad.Zero), None)
    if first is not None and not linear:
        (dots[first],) = progress_back_p.bind(dots[first], primals[-1], steps=steps, linear=True)
    return outs, dots


def _transpose_back(
    cotangents: Values, *operands: Value, steps: Steps, linear: bool
) -> list[Value]:
    if linear and type(cotangents[0]) is not ad.Zero:
        steps.went_back(operands[-1], cotangents[0])
    return [*cotangents, None]


# What goes through is the same. It is `linear` where it is a tangent: then its transpose tells.
progress_back_p = own_primitive(
    "progress_back",
    called="progress",
    operations=_same,
    types=_same,
    rule=_batched_back,
    jvp=_jvp_back,
    transpose=_transpose_back,
)
