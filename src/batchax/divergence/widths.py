"""How many lanes run together, chosen by what the operations of a step cost.

In a narrow window operations are mostly overhead; in a wide one many lanes that are done wait
for others. The figures are those of the device on which programs run by default. Results do not
depend on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from batchax.jaxprs.inside import programs_inside, with_inside
from batchax.jaxprs.words import ClosedJaxpr, Jaxpr
from batchax.programs.cost import STEPS, Cost, cost_of_program
from batchax.programs.dear_branches import time_begun, time_to_move
from batchax.programs.shapes import bytes_of, size_of
from batchax.programs.weights import LAUNCH, TOGETHER
from batchax.rules.aliases import kept_carries

# The benchmark `divergence` times loops with windows of these widths.
_NARROWING = 4  # the second window is this many times narrower than the first
_FEW = 8  # the share of all lanes that a window holds at most: in a wide one few leave for long
_FEWEST = 4  # the same where windows narrower than that would be mostly overhead
_ROOMY = 16  # how many times as long as its overhead a step of the first window takes
_LONE = 4  # the same of a window alone: with it the slowest lanes run until the end
_LONGEST = 700  # operations in the programs of all windows together, about: each is compiled
_MOST_WINDOWS = 2  # each is a program of its own to compile
# A loop inside a loop has windows only if moving a lane costs no more than so many of its steps:
# it is entered often, and mostly for few steps.
_MOST_STEPS_INSIDE = 8
# Steps that moving a lane costs at most, measured: arithmetic that is fused costs nothing here, and
# is not free.
_MOST_TO_MOVE = 16.0

_SHARED = 0.75  # the cost of a step of all lanes, as a share of that of as many lanes in windows

_LEAST = 0.1  # the time taken for a program that does nothing: it is divided by


class _Device(NamedTuple):
    """What the width of a window is weighed by."""

    begin: float
    """what it takes to begin an operation, in nanoseconds of the work of lanes"""
    memory: float
    """bytes that a window may take: what lies in a cache is worked on several times as fast"""
    speed: float
    """how many times as fast as a core it does the work of many lanes"""


_DEVICES = {"cpu": _Device(LAUNCH, 4e5, 1.0)}
# An H100 begins an operation in 3 us, and does in 0.5 ns what a core does in 0.1 us.
_OTHER_DEVICES = _Device(2_000 * LAUNCH, 1e9, 200.0)


def _device(kind: str | None = None) -> _Device:
    return _DEVICES.get(kind or jax.default_backend(), _OTHER_DEVICES)


def launch_time(count: float, device: str | None = None) -> float:
    """Nanoseconds that it takes to begin so many operations, on the default device or another."""
    return count * _device(device).begin


def microseconds(time: float) -> str:
    """So many nanoseconds of the work of lanes, for people."""
    return f"{float(f'{time / _device().speed / 1000:.2g}'):g} us"


def length(jaxpr: Jaxpr) -> int:
    """How many operations a program has, to be compiled: each counts once, in loops too."""
    return sum(1 for _ in with_inside(jaxpr.eqns))


def different(jaxpr: Jaxpr) -> int:
    """How many operations a program has that differ: a compiler makes one of those that do not."""
    types = lambda variables: tuple((v.aval.shape, v.aval.dtype) for v in variables)
    alone = (e for e in with_inside(jaxpr.eqns) if not programs_inside(e))
    return len({(e.primitive, types(e.invars), types(e.outvars)) for e in alone})


def largest(programs: Sequence[ClosedJaxpr]) -> int:
    """How many numbers the largest array has that programs compute; one at least."""
    eqns = itertools.chain(*(with_inside(p.jaxpr.eqns) for p in programs))
    return max((size_of(v.aval) for e in eqns for v in e.outvars), default=0) or 1


@dataclass(frozen=True)
class Step:
    """A step of a loop, as far as the widths of its windows depend on it.

    Attributes:
      length: operations in its programs, to be compiled.
      work: nanoseconds that a lane takes, of many that run at once, with its predicate.
      begun: the part of it that is not one loop with what selects what lanes keep.
      overhead: how many lanes have as much work as it takes to begin its operations.
      moving: how many steps of a lane cost as much as moving it in and out of a window.
      held: bytes of what a lane carries.
      staying: how many steps of a lane cost as much as copying it together with its neighbours.
    """

    length: int
    work: float
    begun: float
    overhead: float
    moving: float
    held: int
    staying: float

    @classmethod
    def of(cls, test: Any, body: ClosedJaxpr, differs: Sequence[bool]) -> Step:
        """From its programs, and which operands of the body each lane has its own of."""
        tests = [test.jaxpr] if test is not None else []
        asked = (cost_of_program(t, differs=(True,) * len(t.invars), steps=STEPS) for t in tests)
        cost = sum(asked, cost_of_program(body.jaxpr, differs=differs, steps=STEPS))
        held = bytes_of(body.out_avals)
        # What is carried is read and written, but for arrays that stay in place, updated or not.
        kept = kept_carries(body, len(body.in_avals) - len(body.out_avals))
        written = bytes_of(a for k, a in enumerate(body.out_avals) if k not in kept)
        work = max(TOGETHER.time(cost + Cost(bytes=2 * written)), _LEAST)
        moving = time_to_move(itertools.compress(body.in_avals, differs))
        n_consts = len(body.in_avals) - len(body.out_avals)
        own = itertools.compress(body.in_avals[:n_consts], differs)
        copied = Cost(bytes=2 * bytes_of(own) + 4 * held)  # both are read, and back go carries
        return cls(
            length=sum(map(length, [*tests, body.jaxpr])),
            work=work,
            begun=time_begun(body.jaxpr, differs),
            # What is fused is one operation more, in each of the programs.
            overhead=_device().begin * (cost.launches + 1 + len(tests)) / work,
            moving=min(moving / work, _MOST_TO_MOVE),
            held=held,
            staying=TOGETHER.time(copied) / work,
        )


def choose_widths(
    size: int, most: int, step: Step, nesting: int, width: int | None
) -> tuple[tuple[int, ...], str]:
    """The widths of the windows of a loop, from the widest down; why, if there is but one.

    The first is that of all lanes, if they may run at once.

    Args:
      size: number of lanes.
      most: how many may run at once.
      step: a step of the loop.
      nesting: inside how many loops or branches it is that lanes part ways in.
      width: the width of the first window after that of all lanes; None to choose.
    """
    # Each window is one more copy of the program of a step to compile.
    windows = min(_MOST_WINDOWS, max(1, _LONGEST // max(1, step.length)))
    if nesting:
        windows = 1
        if nesting > 1 or 4 * step.length > _LONGEST:
            return (most,), "inside another, a step is too long to be compiled again"
        if step.moving > _MOST_STEPS_INSIDE and width is None:
            return (most,), "inside another, to move a lane costs more than the steps saved"
    narrow = power_of_two(step.overhead)
    if width is None:
        memory = power_of_two(_device().memory / (step.held + 1))
        wide = min((_ROOMY if windows > 1 else _LONE) * narrow, max(narrow, memory))
        wide = min(wide, max(size // _FEW, min(narrow, size // _FEWEST)))
    else:
        wide, narrow = width, min(width, narrow)
    wide = min(wide, most)
    every = (wide // _NARROWING**k for k in range(wide.bit_length()))
    widths = [w for w in every if narrow <= w < size][:windows]
    if not widths:
        return (most,), f"a step of fewer than {narrow:,} lanes would be mostly overhead"
    return ((size, *widths) if most == size else tuple(widths)), ""


def most_left(widths: Sequence[int], overhead: float) -> int:
    """How many lanes may be left when they leave the run of all lanes for the first window.

    A step of all lanes costs ``_SHARED * (size + overhead)``, however few are active (several
    cores may share it), and a lane in a full window ``(width + overhead) / width``. Lanes leave
    when that is cheaper.
    """
    if len(widths) == 1:
        return 0
    size, width = widths[:2]
    share = _SHARED * (1 + overhead / size) / (1 + overhead / width)
    return max(min(size - 1, round(share * size)), width)


def power_of_two(lanes: float) -> int:
    """The nearest one."""
    return 1 << round(math.log2(max(1.0, lanes)))
