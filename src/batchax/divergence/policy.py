"""How lanes run that diverge: a pure function of what the control flow costs and of thresholds.

`decide` looks at no device and runs nothing. What it is given is a `Loop`, a `NestedLoop`, a
`BoundedTail` or a `BranchCost`; what it returns holds what its runner needs. The architecture page
lists the decisions, and where each is run.

How many steps lanes take is not known before a loop runs. So what is chosen by default must cost
next to nothing where all take as many, in time and in compiling:

- Where a lane by itself, in a single kernel, takes no longer than its share of a step that all
  take, masked, each runs by itself. Where that is so of some only, all run first, and then those
  that are left, one after another; not in bounded loops, where windows were faster.
- Where a step is expensive, lanes are in a window from the first step on: the body is compiled
  once, and a window is as wide as keeps a device as busy as all lanes do.
- Where a step is many operations, which take as long for a window as for many lanes, or is much
  work, all lanes run first, and those that are left in a window. The body is compiled twice, next
  to which moving lanes is cheap.
- Where a step is too cheap to move lanes, and a compiler can make it a single kernel, narrow tiles
  of adjacent lanes run: no lane is moved but the last of a tile, which are left behind.
- All other loops are masked.

On a GPU a step takes as long for a few lanes as for thousands. So the second is what there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from batchax.analysis.cost import Nanoseconds
from batchax.analysis.one_function import fits_lowered_kernel, fits_serial_kernel
from batchax.analysis.thresholds import Thresholds
from batchax.divergence.compact import Compact
from batchax.divergence.costs import (
    NOTHING,
    WITH_DERIVATIVE,
    BranchCost,
    Step,
    different,
    lanes_in_cache,
    largest,
    microseconds,
    power_of_two,
    price_of_moving,
    time_to_move,
    why_together,
)
from batchax.divergence.nest import Nest, price_inside
from batchax.jaxprs.types import ClosedJaxpr
from batchax.linalg.pays import runs
from batchax.rules.linalg import least_lanes


@dataclass(frozen=True)
class Masked:
    """All lanes take each step that some lane takes."""

    reason: str  # why nothing else is done, for people


@dataclass(frozen=True)
class Window:
    """Lanes in windows of fixed width."""

    # The widths, from the widest down. If the first is that of all lanes, it is the run of all
    # lanes before the windows, and not refilled.
    widths: tuple[int, ...]
    patience: float  # how many steps of a lane cost as much as moving it in and out of a window
    leave_at: int = 0  # how many lanes may be left when they leave the run of all lanes
    # how many steps of all lanes are taken at least before those that are left are counted
    pause: int = 1
    # The share of the lanes of a window that must be done before it is refilled; None to leave
    # that to `patience`
    share: float | None = None
    counts: bool = False  # whether lane-steps are counted


@dataclass(frozen=True)
class Tiles:
    """Adjacent lanes, until the last of them is done; then the next ones: no lane is moved.

    All is a single kernel, on one core.
    """

    width: int  # how many lanes make a tile
    patience: float  # as of a `Window`
    leave_at: int  # how many of a tile may be left when it ends, to run with others that are left

    @property
    def widths(self) -> tuple[int, ...]:
        """The width, as of a `Window`."""
        return (self.width,)


@dataclass(frozen=True)
class Flattened:
    """Lanes of a nested loop, which advance independently."""

    window: Window  # the lanes that run at a time: all, a window, or all first and then a window

    @property
    def widths(self) -> tuple[int, ...]:
        """Those of its window."""
        return self.window.widths


@dataclass(frozen=True)
class Alone:
    """Lanes one after another, in a single kernel: each takes all its steps as one example."""

    widths: ClassVar = (1,)


@dataclass(frozen=True)
class FewAlone:
    """All lanes, masked, until few are left; those as `Alone`."""

    # as of a `Window`
    leave_at: int
    pause: int
    widths: ClassVar = (1,)


@dataclass(frozen=True)
class Probed:
    """All lanes of a nested loop, masked, until `Alone` takes less; see `probed`."""

    slowdown: float  # how long that takes over all lanes, masked, if the counts of steps are equal
    widths: ClassVar = (1,)


@dataclass(frozen=True)
class Gathered:
    """A branch that runs in blocks, for the lanes that take it."""

    # The share of the lanes from which on all run, masked, as is decided while the program runs;
    # None: blocks run whatever their number
    all_from: float | None = None
    all_from_back: float | None = None  # that share for derivatives; None: all lanes run, masked


@dataclass(frozen=True)
class Serial:
    """A branch that runs for few lanes sequentially, each by itself; for more all run, masked."""

    most: int  # how many are few


LoopDecision = Window | Tiles | Alone | FewAlone | Masked
NestDecision = Flattened | Alone | Probed | Masked
Decision = LoopDecision | NestDecision | Gathered | Serial
SHOWN = {
    Window: "compact",
    Tiles: "tiles",
    Flattened: "flat",
    Alone: "alone",
    FewAlone: "few alone",
    Probed: "probed",
}
"""How a listing names the strategy of a loop."""


NOTHING_ASKED = Compact()


@dataclass(frozen=True)
class Request:
    """What the user, or the loop around, asks of how lanes run."""

    option: Compact = NOTHING_ASKED  # what the user asks for; what is not set is chosen
    nesting: int = 0  # inside how many loops or branches that lanes diverge in it is
    max_width: int | None = None  # how many lanes may run at a time; None: any number
    recompiled: bool = False  # whether it is inside a branch that is compiled twice
    default: Thresholds | None = None  # with "compact", the row that decides by default

    @property
    def counts(self) -> bool:
        """Whether lane-steps are counted."""
        return self.option.steps is not None

    def most(self, lanes: int) -> int:
        """How many of these may run at a time."""
        return lanes if self.max_width is None else min(lanes, self.max_width)


@dataclass(frozen=True)
class Loop:
    """A loop whose lanes end at different steps."""

    lanes: int  # how many there are
    # the programs of a step; `test` may be None
    test: ClosedJaxpr | None
    body: ClosedJaxpr
    differs: tuple[bool, ...]  # which operands of the body each lane has its own of
    bounded: bool = False  # whether it is a bounded loop as a ``while``

    @property
    def jaxprs(self) -> list[ClosedJaxpr]:
        return [self.body] if self.test is None else [self.test, self.body]

    @property
    def step(self) -> Step:
        """What a step costs."""
        return Step.of(self.test, self.body, self.differs)


@dataclass(frozen=True)
class NestedLoop:
    """A loop that holds loops which lanes leave one by one."""

    whole: Loop  # it, as one loop
    nest: Nest  # the same loop, cut at those
    length: int | None  # how many steps it has, if that is known


@dataclass(frozen=True)
class BoundedTail:
    """The lanes that others leave behind in a bounded loop that is differentiated."""

    lanes: int  # how many there are in all
    step: Step  # what a step costs, without its derivative
    programs: Sequence[ClosedJaxpr]  # those of a step; of a sweep, and that of going back over one
    most: int  # how many steps it takes at most
    steps: int = 0  # in how many steps of loops around it it runs, about; 0 outside of loops

    @property
    def gain(self) -> Nanoseconds:
        """How much longer ``jax.vmap`` takes in all calls, if half idle for half of the steps."""
        idle = (self.lanes / 2) * (self.most / 2)
        return Nanoseconds(runs(self.steps) * idle * WITH_DERIVATIVE * self.step.work)


ControlFlow = Loop | NestedLoop | BoundedTail | BranchCost


def decide(control_flow: ControlFlow, thresholds: Thresholds, request: Request) -> Decision:
    """How the lanes of a loop, a nested loop, or a branch run."""
    if request.default and not request.nesting and isinstance(control_flow, Loop | NestedLoop):
        loop = control_flow if isinstance(control_flow, Loop) else control_flow.whole
        chosen = decide(control_flow, request.default, replace(request, default=None))
        # By the model windows compute no faster than this.
        if isinstance(chosen, Alone | Probed) and not why_together(loop.jaxprs):
            return chosen
    match control_flow:
        case Loop():
            return _loop(control_flow, thresholds, request)
        case NestedLoop():
            return _nest(control_flow, thresholds, request)
        case BoundedTail():
            return _tail_of_bounded(control_flow, thresholds, request)
        case BranchCost():
            return _branch(control_flow, thresholds, request)


def _flattened(width: int, nest: Nest, request: Request) -> Flattened:
    moving = price_of_moving(nest.slots, nest.slots).lane / max(price_inside(nest).lane, 1.0)
    return Flattened(
        Window((width,), moving, share=request.option.threshold, counts=request.counts)
    )


def _loop(loop: Loop, t: Thresholds, request: Request) -> LoopDecision:
    step, size, alike = loop.step, loop.lanes, least_lanes(loop.lanes, loop.jaxprs)
    few = _few_serial(t, loop, step)
    if few >= size:
        return Alone()
    few_left = few and not loop.bounded and _is_much(t, loop, step)
    tiled = _fits_tiles(t, size, loop.jaxprs)  # in tiles lanes wait for few others
    # Tiles would leave other cores idle. Search: walk
    if few_left and (_divided(t, size, step) if tiled else few >= size // _FEW):
        return FewAlone(few, _PAUSE)
    if step.moving <= t.max_move_steps:
        width = _from_the_start(t, size, step, alike)
        if width < size and loop.bounded:
            widths = (size, width)
            return Window(widths, step.moving, _most_left(widths, step.overhead))
        if width < size:
            return Window((width,), step.moving)
        widths, why = _of_the_last(t, loop, step, request)
        if widths != (size,) or request.counts:
            left = _most_left(widths, step.overhead) if t.serial_slowdown == 1 else widths[-1]
            pause = 1 if t.explicit else _PAUSE
            rest = pause, request.option.threshold, request.counts
            return Window(widths, step.moving, left, *rest)
    else:
        why = f"to move a lane costs as much as {step.moving:.2g} of its steps"
    width = _of_a_kernel(t, loop, step)
    if width < size:
        return Tiles(width, step.moving, leave_at=width // _LEFT)
    by_library = alike > size // min(t.window_shares) and not t.explicit
    return Masked(_LIBRARY if by_library else why)


def _from_the_start(t: Thresholds, size: int, step: Step, alike: int) -> int:
    """The width of a window that keeps a device as busy as all lanes do; all for none.

    It has `alike` lanes, of which fewer would run some operation otherwise.
    """
    begun = max(t.min_work_per_launch * step.overhead, alike)
    width = _fitting(t, size, max(begun, t.min_window_work / step.work))
    if width < size and t.few_cores and step.begun >= step.work / 2:
        # One core takes no longer for these than two take for all lanes, which are masked.
        width = min(width, max(1, size // max(t.window_shares), math.ceil(begun)))
    return width


def _of_the_last(
    t: Thresholds, loop: Loop, step: Step, request: Request
) -> tuple[tuple[int, ...], str]:
    """The widths of the windows for the lanes that others have left behind; why, if of all lanes.

    By default these must save much alone, and their step be most of what is compiled then, or take
    long.
    """
    size, body = loop.lanes, loop.body
    long = different(body.jaxpr) >= t.min_operations
    widths, why = _widths(t, size, step, request, 1 if long else _ROOM)
    if t.explicit:
        return widths, why
    much = step.work * size >= t.min_work  # search: matching pursuit
    saves = size + step.overhead >= t.min_tail_gain * (widths[-1] + step.overhead)
    pays = saves and (much or long) and widths[-1] < size
    copied = not (much and loop.bounded)  # what ends such a loop has no other copy
    if pays and copied and t.kernel_lanes and 2 * step.length > _LONGEST:  # on a CPU
        return (size,), _LONG
    return (widths, why) if pays else ((size,), CHEAP)


def _widths(
    t: Thresholds, size: int, step: Step, request: Request, room: float
) -> tuple[tuple[int, ...], str]:
    """The widths of the windows of a loop, from the widest down; why, if there is but one.

    The first is that of all lanes, if they may run at once. A step of a window alone takes `room`
    times as long as its overhead.
    """
    most, width = request.most(size), request.option.width
    # Each window is one more copy of the program of a step to compile.
    windows = min(t.windows, max(1, _LONGEST // max(1, step.length) - 1))
    if request.nesting:
        windows = 1
        if request.nesting > 1 or 4 * step.length > _LONGEST:
            return (most,), f"inside another, {_LONG}"
    narrow = power_of_two(step.overhead)
    least = narrow if t.explicit else 1  # by default less must be saved than this makes sure of
    if width is None:
        cached = power_of_two(lanes_in_cache(step.held))
        wide = int(min((_ROOMY if windows > 1 else room) * narrow, max(narrow, cached)))
        wide = min(wide, max(size // _FEW, min(narrow, size // _FEWEST)))
    else:
        wide, least = width, min(width, least)
    wide = min(wide, most)
    every = (wide // _NARROWING**k for k in range(wide.bit_length()))
    widths = [w for w in every if least <= w < size][:windows]
    if not widths:
        return (most,), f"a step of fewer than {narrow:,} lanes would be mostly overhead"
    return ((size, *widths) if most == size else tuple(widths)), ""


def _most_left(widths: Sequence[int], overhead: float) -> int:
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


def _few_serial(t: Thresholds, loop: Loop, step: Step) -> int:
    """Of how many lanes each by itself, in a single kernel, takes less than all do, masked."""
    share = _SERIAL_OF_CORES if _divided(t, loop.lanes, step) else 1
    return int(share * _alone_as_fast(t, loop, step))


def _divided(t: Thresholds, lanes: int, step: Step) -> bool:
    """Whether several cores divide a step of all lanes."""
    return step.work * lanes > t.max_work_on_a_core


def _is_much(t: Thresholds, loop: Loop, step: Step) -> bool:
    """Whether a step of all lanes is much work, next to counting them and to a second kernel."""
    many = different(loop.body.jaxpr) >= t.min_operations
    return many or step.masked_by(loop.lanes) >= t.min_work_counted


def _alone_as_fast(t: Thresholds, loop: Loop, step: Step) -> float:
    """How many lanes, each by itself in a single kernel, take as long as a step of all, masked."""
    if not t.kernel_lanes or not all(fits_serial_kernel(p.jaxpr) for p in loop.jaxprs):
        return 0
    return step.masked_by(loop.lanes) / (t.serial_slowdown * step.alone)


def _of_a_kernel(t: Thresholds, loop: Loop, step: Step) -> int:
    """How many adjacent lanes run as a single kernel, on one core; all if none do."""
    size, numbers = loop.lanes, largest(loop.jaxprs)
    if not _fits_tiles(t, size, loop.jaxprs) or _divided(t, size, step):
        return size
    if numbers * _VECTOR > 2 * t.kernel_lanes:  # one lane fills a core, and was too slow alone
        return size
    return min(_that_fill_a_core(t, numbers), max(1, size // 2))


def _fits_tiles(t: Thresholds, lanes: int, programs: Sequence[ClosedJaxpr]) -> bool:
    """Whether lanes are enough for tiles, and a step of some a part of a single kernel."""
    return lanes >= t.kernel_lanes > 0 and all(fits_lowered_kernel(p.jaxpr) for p in programs)


def _that_fill_a_core(t: Thresholds, numbers: int) -> int:
    """How many lanes fill what a core computes at once in a kernel."""
    fill = min(t.kernel_lanes, 2 * t.kernel_lanes // numbers)
    return max(fill // _VECTOR * _VECTOR, _VECTOR)


def _fitting(t: Thresholds, size: int, enough: float) -> int:
    every = (max(1, size // n) for n in t.window_shares)
    return next((width for width in every if enough <= width < size), size)


def _tail_of_bounded(tail: BoundedTail, t: Thresholds, request: Request) -> Window | Masked:
    size, own = tail.lanes, tail.step
    work, begun = WITH_DERIVATIVE * own.work, WITH_DERIVATIVE * own.begun
    step = replace(own, work=work, begun=begun, moving=own.moving / WITH_DERIVATIVE)
    if t.explicit:
        widths, why = _widths(t, size, own, request, _ROOM)
        width = widths[-1]
    elif tail.gain < t.min_gain_per_operation * (_TO_TAKE_APART + WITH_DERIVATIVE * own.length):
        return Masked(CHEAP)
    else:
        alike, why = least_lanes(size, tail.programs), CHEAP
        width = _from_the_start(t, size, step, alike)
        if width == size and work * size >= t.min_work:
            begun = own.overhead * t.serial_slowdown
            width = _fitting(t, size, max(_FILL * begun, alike))
            saves = size + begun >= t.min_tail_gain * (width + begun)
            width = width if saves else size
    return Window((size, width), step.moving) if width < size else Masked(why)


def _nest(nested: NestedLoop, t: Thresholds, request: Request) -> NestDecision:
    size, nest, length = nested.whole.lanes, nested.nest, nested.length
    step = nested.whole.step
    alone = _alone_as_fast(t, nested.whole, step)
    if _few_serial(t, nested.whole, step) >= size:
        return Alone()
    price, long = price_inside(nest), length is not None and length > _MANY
    width = request.option.width or _width_of_nest(t, size, nest)
    flat = _flattened(min(width, request.most(size)), nest, request)
    width = flat.window.widths[0]
    cheap = price.of(size) < t.min_work_inside
    # In tiles of the loops inside, lanes wait for few others.
    tiled = length is not None and cheap and _fits_tiles(t, size, nest.inside)
    many = length is None or length > 2 * PROBED
    if many and alone * (1 if tiled else _MAX_SLOWDOWN) >= size:
        return Probed(size / alone)
    if cheap:
        return Masked(_CHEAP_INSIDE)
    limit = t.max_move_steps_nested * price.lane * (length or _FEW_STEPS)
    moving = time_to_move([*nest.own, *nest.slots])
    if width == size or moving <= limit or request.option.width:
        return flat
    if long or moving > _TAIL * limit:
        return Flattened(replace(flat.window, widths=(size,)))
    if not t.explicit:
        # All lanes run first, and the step is compiled once more for the last of them.
        last = max(width, size // _LEFT)
        return Flattened(replace(flat.window, widths=(size, last), leave_at=last))
    return flat


def _width_of_nest(t: Thresholds, size: int, nest: Nest) -> int:
    """In a window only the slowest lanes in sum have no others in their places at the end."""
    width, price = _LEAST_OF_NESTS, price_inside(nest)
    least = _WORTH * price.begin
    if math.isfinite(t.min_window_work) and all(fits_lowered_kernel(p.jaxpr) for p in nest.inside):
        # The compiler divides them among cores, which would wait for each other if they were few.
        least = max(least, t.min_window_work)
    while width * price.lane < least and width < size:
        width *= 2
    return width if width * _WINDOWS_OF_NESTS <= size else size


def _branch(cost: BranchCost, t: Thresholds, request: Request) -> Gathered | Serial | Masked:
    if cost.cannot:
        return Masked(cost.cannot)
    if not cost.work and not (t.explicit and cost.is_unknown):
        return Masked(NOTHING)
    if t.explicit:
        # A loop of unknown length may cost anything. A callback is made for lanes that take the
        # branch only.
        why = "" if cost.is_unknown else _why_not(cost, t, bool(request.option.width))
        return Masked(why) if why else Gathered()
    if _decides(cost, t, request.recompiled):
        share = t.max_share_gathered / t.serial_slowdown
        # In blocks and decided, derivatives compute the branch once more, which takes no longer
        # than the copies of what all share that `jax.vmap` makes.
        copies = cost.copied >= t.min_copy_cost * cost.work
        return Gathered(share, share * cost.work / cost.apart if copies else None)
    if _in_blocks(cost, t):
        return Gathered()
    few = _few(cost, t) if cost.may_be_serial else 0
    serial = few and _gains_back(cost, t, cost.operations + _TO_MOVE)
    return Serial(few) if serial else Masked(_why_masked(cost, t, request.recompiled))


def _in_blocks(cost: BranchCost, t: Thresholds) -> bool:
    """Whether a branch is to run for the lanes that take it, even if all of them do."""
    return _as_fast_in_blocks(cost, t) and _gains_back(cost, t, _TO_MOVE)


def _as_fast_in_blocks(cost: BranchCost, t: Thresholds) -> bool:
    if cost.others >= cost.begun and not _why_not(cost, t):
        return True  # all lanes that take it save the others
    if cost.work < t.min_gain_of_all * cost.moving or cost.begun < t.min_unfused_share * cost.work:
        return False
    return cost.work * cost.chunk >= t.min_window_work


def _decides(cost: BranchCost, t: Thresholds, recompiled: bool) -> bool:
    """Whether it is decided while the program runs for which lanes a branch does."""
    if recompiled or cost.others >= cost.begun or _why_not(cost, t):
        return False
    of_all = cost.work >= t.min_gain_as_fast * cost.moving
    # A short branch that mostly copies what lanes share, which blocks do not: where all lanes take
    # it, blocks may take longer than masked lanes, but not than copies. To compile it twice would
    # be most of what it compiles for.
    short = cost.operations < t.min_operations
    copies = cost.copied >= t.min_copy_cost_once * cost.apart * t.serial_slowdown
    once = cost.alike <= cost.chunk and (of_all or (short and copies))
    if once and _in_blocks(cost, t):
        return False  # as fast in blocks, and compiled once
    return _gains_back(cost, t, cost.operations + _TO_MOVE)


def _gains_back(cost: BranchCost, t: Thresholds, operations: int) -> bool:
    """Whether a branch gains in some calls what so many operations more take to compile."""
    return cost.gain >= t.min_gain_per_operation * operations


def _why_not(cost: BranchCost, t: Thresholds, however_short: bool = False) -> str:
    """Why a branch does not run for the lanes that take it, if they are few; empty if it does."""
    if cost.work < t.min_gain * cost.moving:
        return f"costs {cost.work / cost.moving:.2g} of moving a lane, limit {t.min_gain:.2g}"
    if cost.begun < t.min_unfused_share * cost.work:
        return "what selects results is one loop with most of it, for no lane but its own"
    short = cost.every < t.min_branch_work and not however_short
    limit = f"limit {microseconds(t.min_branch_work)}"
    return f"{microseconds(cost.every)} for all lanes, {limit}" if short else ""


def _few(cost: BranchCost, t: Thresholds) -> int:
    """Of how many lanes that take a branch each runs by itself; of more all run, masked."""
    masked = cost.beginning + cost.lanes * cost.work
    if not t.kernel_lanes or masked < t.min_work or cost.begun < t.min_unfused_share * cost.work:
        return 0
    return min(int(masked / (t.min_serial_gain * cost.alone)), cost.lanes)


def _why_masked(cost: BranchCost, t: Thresholds, recompiled: bool) -> str:
    why = _why_not(cost, t)
    if why or recompiled:
        return why or "it is in a branch that is compiled twice"
    compiled = microseconds(Nanoseconds(t.min_gain_per_operation * (cost.operations + _TO_MOVE)))
    return f"it gains {microseconds(cost.gain)} in 100 calls, and compiles {compiled} longer"


CHEAP = "a step costs too little, or lanes are too few, for a window"
_LONG = "a step is too long to be compiled again"
_CHEAP_INSIDE = "a step of the loops inside costs less than to enter and leave them one by one"
_LIBRARY = "fewer lanes would run its operations one after another, by a library"
# The benchmark `divergence` times loops with windows of these widths.
_NARROWING = 4  # the second window is this many times narrower than the first
_FEW = 8  # the share of all lanes that a window holds at most: in a wide one few leave for long
# The same where windows narrower than that would be mostly overhead. Programs: CartPole, "compact".
_FEWEST = 4
_ROOM = 4  # how many times as long as its overhead a step of a window alone takes
_ROOMY = 16  # how many times as long as its overhead a step of the first of two windows takes
# Operations in the programs of all lanes and of each window together: each is compiled. A program
# that is little else compiles for more than twice as long as that of `jax.vmap` beyond. Rows:
# adaptive ODE solver; programs: Dogleg, adaptive tempering.
_LONGEST = 1000
# Steps of a nested loop that all lanes take, masked, before it is known how unequal their counts
# are; and how long lanes may take one after another if counts are equal, over a step of all. They
# do so only once that has been seen to take less, by this factor. Programs: NUTS.
PROBED, _MAX_SLOWDOWN, PROBED_GAIN = 4, 2.5, 0.8
# What lanes may take one after another by the model, over what all take, masked, where cores divide
# the step. Programs: van der Pol; search: 32 sines.
_SERIAL_OF_CORES = 0.5
_SHARED = 0.75  # the cost of a step of all lanes, as a share of that of as many lanes in windows
_FILL = 0.75  # of what it takes to begin its operations, as much work as a block of the last has
_PAUSE = 8  # steps of all lanes before those that are left are counted: each count ends a kernel
# A window of a nested loop to which moving a lane costs so many times too much saves half of what
# it should, and takes as long to compile: all lanes stay to the end.
_TAIL = 4
# Operations that take as long to compile as what moves lanes to a branch and back; as windows, and
# blocks with their derivatives.
_TO_MOVE, _TO_TAKE_APART = 100, 600
# Of so many lanes of a tile, or of a nested loop, one may be left. Search: van der Waals.
_LEFT = 8
_VECTOR = 8  # lanes that a core computes at once
# Steps of a loop, of one inside it in each of them, or of one around it, if their number is not
# known. Rows: elliptical slice, NUTS.
_FEW_STEPS = 16
_LEAST_OF_NESTS = 64  # lanes in a window of a nested loop
_WORTH = 4.0  # how many times as long as it takes to begin its operations such a window works
_WINDOWS_OF_NESTS = 4  # how many of them all lanes fill
_MANY = 32  # outer steps, over which what lanes need in all evens out
