"""From where on it pays that lanes part ways without being asked, on each kind of device.

What a step costs is told in nanoseconds of the work of lanes on a core of a processor. On a GPU, to
begin an operation takes as long as `widths` says; the work of lanes is done a few hundred times as
fast there, so that nanoseconds are a few hundred times as many.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import jax

from batchax.divergence.widths import launch_time


class Limits(NamedTuple):
    """From where on it pays. Results do not depend on these; the benchmark `divergence` does."""

    moving: float = 1.2
    """how many steps of a lane it may cost to move it in and out of a window"""
    later: float = 4.0
    """the same of lanes of a bounded loop, of which all run first"""
    begun: int = 16
    """how many times as long as beginning its operations a step of a window takes"""
    busy: float = 25_000.0
    """nanoseconds of work in a step of a window for each core of a processor"""
    gain: float = 8.0
    """how many times as much as moving its lanes a branch costs"""
    surely: float = 32.0
    """the same of one that blocks of all lanes take no longer for"""
    perhaps: float = 3.0
    """the same of one of which it is decided while the program runs for whom it does"""
    counting: float = 30_000.0
    """nanoseconds that such a branch takes for all lanes"""
    compiling: float = 1_000.0
    """nanoseconds that it takes for each of its operations, which are compiled twice"""
    most: float = 0.5
    """the share of the lanes from which on all run, masked, on a few cores"""
    launched: float = 0.5
    """which share of a branch is not one loop with what selects its result"""
    beginning: float = 8_000.0
    """nanoseconds that a branch takes for all lanes which runs for few one after another"""
    singly: float = 1.5
    """how many times as long as these all lanes take, masked"""
    share: int = 32
    """which share of all lanes are few, at least"""
    copying: float = 2.0
    """how many times as long as in chunks a branch takes with copies of what all lanes read"""
    copies: float = 6.0
    """the same of a short branch that is not compiled twice"""
    cached: int = 32_000_000
    """bytes that a derivative keeps of all lanes at least: fewer are read from a cache"""
    staying: float = 1.5
    """how many steps of a lane it may cost to copy it with its neighbours, and back: where a lane
    has arrays, or neighbours are no one function, in which copies of numbers are slices"""
    together: int = 128
    """how many neighbours take steps in one function, which computes twice as many numbers"""
    leaving: float = 20_000.0
    """nanoseconds that a step of all lanes takes at least where neighbours leave their last ones"""
    one_core: float = 50_000.0
    """nanoseconds that a step of all lanes takes at most which then runs on one core"""
    saved: float = 4.0
    """how many times as long as a step of the last lanes alone one of all lanes takes"""
    long: int = 40
    """how many different operations a step has that may be compiled twice"""
    rows: int = 4
    """how many arrays a bounded loop carries at most, each to be moved, if its step has fewer"""
    roomy: int = 4
    """how many times as long as its overhead a step of the last lanes takes"""
    last: float = 80_000.0
    """nanoseconds that a step of all lanes takes beside which it is nothing to ask who is left"""
    asking: int = 8
    """how many steps all lanes take before they are asked"""
    nest: float = 15_000.0
    """nanoseconds that a step of a loop inside another takes for all lanes"""
    places: float = 40_000.0
    """the same of loops inside that are not one function: to enter one begins many operations"""
    carried: float = 0.12
    """how many steps of a lane it may cost to move it, for each step of the loop around them, or
    all lanes run first"""
    staying_on: float = 0.4
    """the same, or all of them stay to the end"""
    around: int = 8
    """how many steps that loop has, if nobody knows"""
    windows: tuple[int, ...] = (16, 8)
    """how many windows all lanes would fill: as many as leave one that is wide enough"""
    narrower: int = 32
    """how many they fill on so few cores that one is kept busy by less, and masks are not free"""
    few: int = 2
    """how many cores those are"""
    devices: int = 1
    """how many there may be, if lanes may be spread over them"""
    cores: int = os.cpu_count() or 1
    """that all lanes would keep busy: a narrow window runs on one"""
    whole: bool = False
    """whether narrow windows, too, run on all of a device"""
    part: float = 0.75
    """of what it takes to begin its operations, as much work as a block of the last ones has"""
    waiting: float = 0.0
    """nanoseconds that a dear branch in a loop takes for all lanes, where they wait before it"""

    @property
    def slower(self) -> float:
        """How many times as long as all cores one of them takes at least for what it runs alone."""
        return 1.0 if self.whole else max(1.0, self.cores / self.few)


def _on_a_gpu(operations: float) -> float:
    """Nanoseconds that it takes to begin so many operations there."""
    return launch_time(operations, "gpu")


# There a step of a loop takes as long for few lanes as for thousands, and the host is asked at each
# whether there is another, which takes as long as seven operations. So all lanes run first, and the
# last in a window if they save much; and whoever is done with a loop inside another waits for
# nobody. Nothing is one function, no window is narrower than the device.
LIMITS = {
    "cpu": Limits(),
    "gpu": Limits(
        moving=8.0,
        later=8.0,
        busy=float("inf"),
        counting=_on_a_gpu(130),
        compiling=_on_a_gpu(1 / 3),
        most=0.35,
        beginning=float("inf"),
        staying=-1.0,
        together=sys.maxsize,
        one_core=-1.0,
        saved=3.0,
        long=1,
        last=_on_a_gpu(10),
        nest=_on_a_gpu(2.5),
        places=_on_a_gpu(2.5),
        carried=float("inf"),
        windows=(16, 8, 4),
        copies=float("inf"),
        whole=True,
        part=0.7,
        waiting=_on_a_gpu(200),
    ),
}


def limits_here() -> Limits | None:
    """Those of the device on which programs run by default; None where nothing was measured."""
    return LIMITS.get(jax.default_backend())
