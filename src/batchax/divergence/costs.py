"""What loops and branches cost, in nanoseconds of the work of lanes: what the policy decides by.

`Step` is a step of a loop, `Price` a program that some lanes run, and `BranchCost` a branch.
`price_at_most` is computed before anything is batched. It is never below what these estimate later,
or lanes would stay together unnoticed.

The last part is about where lanes cannot diverge: what cannot be moved, or must see all lanes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.analysis.cost import (
    ALONE,
    GPU_LAUNCH,
    GPU_SPEED,
    LAUNCH,
    MASKED,
    STEPS,
    VECTORIZED,
    Bytes,
    Cost,
    Lanes,
    Nanoseconds,
    bytes_of,
    cost_of_program,
    costs_of_program,
    size_of,
)
from batchax.cache import cached_on
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import Anywhere, programs_inside, with_inside
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.primitive_facts import facts_of, is_own
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Values
from batchax.kernel.axis import AnyLoop, Axis
from batchax.kernel.differing import LOOPS, has_other_rule
from batchax.linalg.pays import runs
from batchax.rules.in_place import kept_carries
from batchax.rules.masking import find_collective

# Steps that moving a lane costs at most, measured: arithmetic that is fused costs nothing here, and
# is not free.
_MOST_TO_MOVE = 16.0

_STEP_ALONE = 3.0  # nanoseconds that a step of one lane by itself takes besides what it computes

_LEAST = Nanoseconds(0.1)  # the time taken for a program that does nothing: it is divided by


class _Device(NamedTuple):
    """What the width of a window is weighed by."""

    begin: Nanoseconds
    """what it takes to begin an operation"""
    memory: Bytes
    """what a window may take: what lies in a cache is worked on several times as fast"""
    speed: float
    """how many times as fast as a core it does the work of many lanes"""


_DEVICES = {"cpu": _Device(LAUNCH, Bytes(400_000), 1.0)}
_OTHER_DEVICES = _Device(GPU_LAUNCH, Bytes(1_000_000_000), GPU_SPEED)


def _device() -> _Device:
    return _DEVICES.get(jax.default_backend(), _OTHER_DEVICES)


def launch_time(count: float) -> Nanoseconds:
    """How long it takes to begin so many operations, on the default device."""
    return Nanoseconds(count * _device().begin)


def lanes_in_cache(held: Bytes) -> float:
    """How many lanes that hold so many bytes a device works on fast."""
    return _device().memory / (held + 1)


def microseconds(time: Nanoseconds) -> str:
    """So much work of lanes as the time it takes, for people."""
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
    """A step of a loop, as far as the widths of its windows depend on it."""

    length: int  # operations in its programs, to be compiled
    work: Nanoseconds  # nanoseconds that a lane takes, of many that run at once, with its predicate
    begun: Nanoseconds  # the part of it that is not one loop with what selects what lanes keep
    overhead: float  # how many lanes have as much work as it takes to begin its operations
    moving: float  # how many steps of a lane cost as much as moving it in and out of a window
    held: Bytes  # bytes of what a lane carries
    masked: Nanoseconds  # nanoseconds that a lane takes among all lanes, masked, next to `alone`
    beginning: Nanoseconds  # nanoseconds that all lanes take besides, masked
    alone: Nanoseconds  # nanoseconds that it takes by itself, in a single kernel

    @classmethod
    def of(cls, test: ClosedJaxpr | None, body: ClosedJaxpr, differs: Sequence[bool]) -> Step:
        """From its programs, and which operands of the body each lane has its own of."""
        tests = [test.jaxpr] if test is not None else []
        of_tests = (cost_of_program(t, differs=(True,) * len(t.invars), steps=STEPS) for t in tests)
        cost = sum(of_tests, cost_of_program(body.jaxpr, differs=differs, steps=STEPS))
        held, consts = bytes_of(body.out_avals), body.in_avals[: -len(body.out_avals)]
        # What is carried is read and written, except for arrays that stay in place, updated or not.
        kept = kept_carries(body, len(consts))
        written = bytes_of(a for k, a in enumerate(body.out_avals) if k not in kept)
        changed = max(1, len(body.out_avals) - len(kept))
        # What a lane by itself reads is copied once, before its steps. These may be few, in a loop
        # inside another. Search: walk down a tree.
        copied = Cost(bytes=2 * bytes_of(itertools.compress(consts, differs)))
        stepped = cost + Cost(bytes=2 * written)
        work = max(VECTORIZED.time(stepped), _LEAST)
        moving = time_to_move(itertools.compress(body.in_avals, differs))
        return cls(
            length=sum(map(length, [*tests, body.jaxpr])),
            work=work,
            begun=time_begun(body.jaxpr, differs),
            # What is fused is one operation more, in each of the programs.
            overhead=_device().begin * (cost.launches + 1 + len(tests)) / work,
            moving=min(moving / work, _MOST_TO_MOVE),
            held=held,
            masked=MASKED.time(stepped),
            # XLA for CPUs makes a function of each array that a step changes.
            beginning=launch_time(cost.launches + changed + len(tests)),
            alone=Nanoseconds(ALONE.time(cost) + ALONE.time(copied) / STEPS_INSIDE + _STEP_ALONE),
        )

    def masked_by(self, lanes: int) -> Nanoseconds:
        """What so many lanes take together, masked."""
        return Nanoseconds(self.masked * lanes + self.beginning)


def time_to_move(arrays: Iterable[Any]) -> Nanoseconds:
    """What it costs to move arrays of a lane to the lanes it runs with, and back."""
    each_way = (Cost(places=3, bytes=2 * bytes_of([a])) for a in arrays)  # read there, written here
    return VECTORIZED.time(2 * sum(each_way, Cost()))


def time_begun(jaxpr: Jaxpr, differs: Sequence[bool]) -> Nanoseconds:
    """How long a lane takes in operations which are not fused with others."""
    return VECTORIZED.time(costs_of_program(jaxpr, differs=differs, steps=STEPS)[1])


def power_of_two(lanes: float) -> int:
    """The nearest one."""
    return 1 << round(math.log2(max(1.0, lanes)))


_KEPT = 0.01  # nanoseconds for a byte: lanes come again soon, to what is in a cache
_MOVED = 0.03
_ROW = 2.0  # for an entry, whatever its size
STEPS_INSIDE = 4  # of a loop whose number of steps is unknown: few, or it would have been cut


class Price(NamedTuple):
    """The price of a program: roughly."""

    begin: Nanoseconds
    """however many lanes there are"""
    lane: Nanoseconds
    """for each lane"""

    def of(self, lanes: float) -> Nanoseconds:
        """For so many lanes."""
        return Nanoseconds(self.begin + lanes * self.lane)

    @classmethod
    def made(cls, begin: float, lane: float) -> Price:
        """Of nanoseconds that were computed."""
        return cls(Nanoseconds(begin), Nanoseconds(lane))


def price_of(program: ClosedJaxpr, differs: Sequence[bool]) -> Price:
    """Returns the price of a program, some of whose operands are batched."""
    cost = cost_of_program(program.jaxpr, differs=tuple(differs), steps=STEPS_INSIDE)
    return price_of_cost(cost + Cost(launches=1))


def price_of_cost(cost: Cost) -> Price:
    return Price(launch_time(cost.launches), VECTORIZED.time(cost))


def price_of_keeping(avals: Sequence[Any]) -> Price:
    """The price of keeping what lanes hold that are elsewhere, where others compute."""
    return Price.made(0.0, _KEPT * bytes_of(avals))


def price_of_copying(avals: Sequence[Any]) -> Price:
    """The price of keeping what is updated in place elsewhere: two are read, one is written."""
    return Price.made(0.0, VECTORIZED.time(Cost(bytes=3 * bytes_of(avals))))


def price_of_moving(read: Sequence[Any], written: Sequence[Any]) -> Price:
    """The price of moving what some lanes read and write to where they run, and back."""
    rows = len(read) + 2 * len(written)
    moved = bytes_of(read) + bytes_of(written)
    return Price.made(launch_time(rows), _ROW * rows + _MOVED * moved)


def total(prices: Sequence[Price]) -> Price:
    return Price.made(sum(p.begin for p in prices), sum(p.lane for p in prices))


NOTHING = "computes nothing"


class BranchCost(NamedTuple):
    """What a branch costs, times for each lane."""

    work: Nanoseconds  # to run it
    # to run it where each lane has a copy of unbatched operands, as under ``jax.vmap``
    copied: Nanoseconds
    alone: Nanoseconds  # to run it for one lane, in a loop that is one function
    beginning: Nanoseconds  # to begin its operations, not divided among lanes
    # The part of it that is not one loop with what selects the results. Whatever is in that loop a
    # CPU computes for the lanes that take the branch, and for no others.
    begun: Nanoseconds
    moving: Nanoseconds  # to move what it reads and returns
    starting: Nanoseconds  # to begin its operations, however many lanes run at a time
    chunk: Lanes  # how many lanes run at a time
    lanes: Lanes  # how many there are
    others: Nanoseconds  # what the other branches take that is begun likewise
    operations: int  # how many it has, to be compiled
    alike: Lanes  # how many lanes at least run each of them in the way that all do
    cannot: str = ""  # why it cannot run for some lanes only; empty if it can
    may_be_serial: bool = False  # whether it may run sequentially, as a single kernel
    is_unknown: bool = False  # whether it holds a loop of unknown length, or has a host callback
    steps: int = 0  # in how many steps of loops it runs, about; 0 outside of loops
    share: float = 0.5  # of the lanes, which take it if each branch is taken equally often

    @property
    def gain(self) -> Nanoseconds:
        """How much longer ``jax.vmap`` takes in all calls, if this share of the lanes takes it."""
        each = self.copied - self.work * self.share
        return Nanoseconds(runs(self.steps) * self.lanes * each)

    @property
    def every(self) -> Nanoseconds:
        """To run it for all lanes."""
        return Nanoseconds(self.work * self.lanes)

    @property
    def apart(self) -> Nanoseconds:
        """To move what it reads and returns, and run it in a chunk that is full."""
        return Nanoseconds(self.work + self.moving + self.starting / self.chunk)


WITH_DERIVATIVE = 4
"""How many times as long a step takes together with the step back over it, at least."""

_BEGUN = 4  # operations more in a loop: in its predicate, in its step, in the segment before it


def price_at_most(loop: AnyLoop) -> Price:
    """What a step of a loop costs at most, before anything is batched, all inside it included.

    A step of a loop inside costs no more than twice that, as `nest_of` may cut it; nor does a step
    of which derivatives are taken cost more than `WITH_DERIVATIVE` times that.
    """
    return total([_at_most(p.jaxpr) for p in loop.params.values() if isinstance(p, ClosedJaxpr)])


@cached_on("what programs cost at most")
def _at_most(jaxpr: Jaxpr) -> Price:
    loops = [jaxpr, *(e for e in with_inside(jaxpr.eqns) if programs_inside(e))]
    held = [[v.aval for v in loop.outvars] for loop in loops]
    # Lanes that are done keep what they have, and entries are taken and put.
    kept = (Cost(bytes=6 * bytes_of(h), places=3 * len(h), launches=_BEGUN + len(h)) for h in held)
    return price_of_cost(sum(kept, cost_of_program(jaxpr, steps=STEPS)))


may_wait = Anywhere(lambda eqn: eqn.primitive is while_p or eqn.primitive.name in LOOPS)
"""Whether a program holds a loop that lanes may leave one by one."""


def can_move(axis: Axis, values: Values) -> bool:
    """Whether some lanes can be taken out of these values, and put back.

    Not where the number of lanes is symbolic, where a value is a reference, nor where the lanes
    are spread over the axis of a mesh.
    """
    if not isinstance(axis.size, int) or axis.size == 0:
        return False
    if axis.mesh_axis is not None or axis.spmd_name is not None:
        return False
    return not any(map(_compat.is_reference, values))


def calls_back(programs: Iterable[ClosedJaxpr]) -> bool:
    """Whether programs call the host: in a window, places without a lane would call it, too."""
    return any(_compat.calls_back(program.effects) for program in programs)


def why_together(programs: Sequence[ClosedJaxpr]) -> str:
    """Why lanes that run these must stay together; empty if they need not."""
    if any(find_collective(program.jaxpr) is not None for program in programs):
        return "lanes meet in a collective"
    if any(map(rule_of_user.in_program, programs)):
        return "a batching rule is given all lanes"
    return HOST if calls_back(programs) else ""


CANNOT_MOVE = "lanes cannot be moved: they are spread over devices, or hold references"
HOST = "the host is called, and would be for lanes that stand in for missing ones"
NAME = "a step uses the name of an axis"
VARYING = "lanes are spread over devices"


def _may_part(eqn: Eqn) -> bool:
    primitive, facts = eqn.primitive, facts_of(eqn.primitive)
    if primitive is scan_p or not eqn.invars:  # the body of a scan is looked at, too
        return False
    expensive = facts.control or facts.costly or facts.endless
    # A rule that is not known here may run loops, as may the forward rule of a derivative.
    others = is_own(primitive) or has_other_rule.is_true(eqn) or "fwd_jaxpr_thunk" in eqn.params
    return expensive or others


may_part = Anywhere(_may_part)
"""Whether lanes may diverge in a program: it errs on the side of True."""

rule_of_user = Anywhere(lambda eqn: eqn.primitive.name in _WITH_RULE)
"""Whether a program calls a function with a batching rule, which may look at all lanes."""

_WITH_RULE = "custom_vmap_call", "custom_batched_call"


def reject_collectives(programs: Iterable[ClosedJaxpr], where: str) -> None:
    """Rejects programs in which lanes, or devices, synchronize.

    Raises:
      UnsupportedError: there is a collective; the message says where.
    """
    for program in programs:
        eqn = find_collective(program.jaxpr)
        if eqn is not None:
            raise UnsupportedError(
                f"{line_of(eqn)}: {spoken(eqn)} over a named axis is inside {where}, and "
                'divergence="compact" runs lanes at different times there: a collective would '
                'reach only some of them. Move the collective out, or use divergence="predicate".'
            )
