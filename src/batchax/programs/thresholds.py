"""From where on lanes run apart: one table, a row for each kind of device.

Results do not depend on these numbers; the benchmarks `divergence`, `nests` and `bounded` do. A CPU
begins an operation in a third of a microsecond, and a window of some lanes takes as long for each
of them as all lanes do. A GPU begins one in a few microseconds, and does as many lanes at a time
as a batch has, so what counts there is how many operations are begun. Both are measured in
nanoseconds of the work of lanes, which a GPU does a few hundred times as fast.

What a program becomes depends on the kind of device alone, and of a CPU on its cores in three
steps: so another machine of the kind computes the same bits, and finds the program in its
compilation cache.
"""

from __future__ import annotations

import math
import os
import sys
from typing import NamedTuple

import jax

from batchax.programs.cost import GPU_LAUNCH


class Thresholds(NamedTuple):
    """The row of a kind of device. Times are nanoseconds of the work of lanes."""

    max_move_steps: float = 1.2
    """steps of a lane that it may cost to move it in and out of a window"""
    max_move_steps_bounded: float = 4.0
    """the same in a bounded loop, of which all lanes run first"""
    min_work_per_launch: int = 16
    """how many times as long as beginning its operations a step of a window takes"""
    min_core_work: float = 25_000.0
    """time of a step of a window for each core"""
    min_gain: float = 8.0
    """how many times as much as moving its lanes a branch costs that is run in blocks"""
    min_gain_of_all: float = 32.0
    """the same of a branch that blocks of all lanes take no longer for"""
    min_gain_decided: float = 3.0
    """the same of a branch for which it is decided at run time whether all lanes run it"""
    min_decided_work: float = 30_000.0
    """time of such a branch for all lanes"""
    min_work_per_operation: float = 1_000.0
    """time of such a branch for all lanes and each operation, which is compiled twice"""
    max_share_gathered: float = 0.5
    """the share of the lanes from which on all run, masked, on a few cores"""
    min_unfused_share: float = 0.5
    """which share of a branch is not fused with what selects its result"""
    min_serial_work: float = 8_000.0
    """time of a branch for all lanes that runs for few lanes sequentially"""
    min_serial_gain: float = 1.5
    """how many times as long as these all lanes take, masked"""
    serial_share: int = 32
    """one of so many lanes are few, at least"""
    min_copy_cost: float = 2.0
    """how many times as long as in blocks a branch takes with copies of what all lanes read"""
    min_copy_cost_once: float = 6.0
    """the same of a short branch that is compiled once"""
    min_residual_bytes: int = 32_000_000
    """bytes that a derivative saves of all lanes, at least: fewer are read from a cache"""
    max_tile_copy: float = 1.5
    """steps of a lane that it may cost to copy it with its tile and back, where a lane has arrays
    or a tile is not a single kernel"""
    kernel_lanes: int = 128
    """lanes of a tile that is a single kernel, which computes twice as many numbers"""
    min_leave_work: float = 20_000.0
    """time of a step of all lanes, at least, where a tile leaves its last lanes behind"""
    max_kernel_work: float = 50_000.0
    """time of a step of all lanes, at most, that then runs on one core"""
    min_tail_gain: float = 4.0
    """how many times as long as a step of the last lanes alone one of all lanes takes"""
    min_operations: int = 40
    """different operations of a step that may be compiled twice"""
    max_tail_arrays: int = 4
    """arrays that a bounded loop carries, each to be moved, if its step has fewer operations"""
    tail_work_per_launch: int = 4
    """how many times as long as beginning its operations a step of the last lanes takes"""
    min_counted_work: float = 80_000.0
    """time of a step of all lanes beside which counting those that are left is nothing"""
    count_interval: int = 8
    """steps of all lanes before those that are left are counted"""
    min_nested_work: float = 15_000.0
    """time of a step of a loop inside another for all lanes"""
    min_entered_work: float = 40_000.0
    """the same of loops inside that are not a single kernel: to enter one begins many operations"""
    max_move_steps_nested: float = 0.12
    """steps of a lane that it may cost to move it, for each step of the loop around them, or all
    lanes run first"""
    max_move_steps_tail: float = 0.4
    """the same, or all of them stay to the end"""
    window_shares: tuple[int, ...] = (16, 8)
    """how many windows all lanes fill: as many as leave one that is wide enough"""
    min_block_fill: float = 0.75
    """of what it takes to begin its operations, as much work as a block of the last lanes has"""
    min_wait_work: float = 0.0
    """time of an expensive branch in a loop for all lanes, where they wait before it"""
    narrow_share: int = 0
    """how many windows of fused steps all lanes fill, where one core is kept busy by less; 0: as
    many as others"""
    cores: int = 8
    """cores that all lanes keep busy: a narrow window runs on one"""
    max_devices: int = 1
    """devices that lanes may be spread over"""
    windows: int = 1
    """windows of a loop besides the run of all lanes: each is compiled"""
    asked: bool = False
    """whether the user asks for lanes to run apart, and what cannot is refused"""

    @property
    def min_window_work(self) -> float:
        """Time of a step of a window that keeps a device as busy as all lanes do."""
        return self.min_core_work * self.cores

    @property
    def serial_slowdown(self) -> float:
        """How many times as long as all cores one of them takes for what it runs alone."""
        return max(1.0, self.cores / _FEW_CORES)

    @property
    def max_work_on_a_core(self) -> float:
        """Time of a step of all lanes, at most, that runs on one core."""
        return self.max_kernel_work * (4 if self.cores <= _FEW_CORES else 1)


_FEW_CORES = 2


def _on_a_gpu(operations: float) -> float:
    """Nanoseconds that it takes to begin so many operations there."""
    return operations * GPU_LAUNCH


# On a GPU a step of a loop takes as long for few lanes as for thousands, and the host is asked at
# each whether there is another, which takes as long as seven operations. So all lanes run first,
# and the last in a window if they save much; and lanes that are done with a nested loop do not wait
# for others. Nothing is a single kernel, no window is narrower than the device.
TABLE = {
    "cpu-small": Thresholds(cores=2, narrow_share=32),
    "cpu": Thresholds(),
    "cpu-large": Thresholds(cores=32),
    "gpu": Thresholds(
        max_move_steps=8.0,
        max_move_steps_bounded=8.0,
        min_core_work=math.inf,
        min_decided_work=_on_a_gpu(130),
        min_work_per_operation=_on_a_gpu(1 / 3),
        max_share_gathered=0.35,
        min_serial_work=math.inf,
        min_copy_cost_once=math.inf,
        max_tile_copy=-1.0,
        kernel_lanes=sys.maxsize,
        max_kernel_work=-1.0,
        min_tail_gain=3.0,
        min_operations=1,
        min_counted_work=_on_a_gpu(10),
        min_nested_work=_on_a_gpu(2.5),
        min_entered_work=_on_a_gpu(2.5),
        max_move_steps_nested=math.inf,
        window_shares=(16, 8, 4),
        min_block_fill=0.7,
        min_wait_work=_on_a_gpu(200),
        cores=1,
    ),
    # What the user asks for need not be as fast in the worst case: it saves much in the usual one.
    "compact": Thresholds(
        max_move_steps=math.inf,
        max_move_steps_bounded=math.inf,
        min_core_work=math.inf,
        min_gain_decided=4.0,
        min_decided_work=50_000.0,
        min_unfused_share=0.0,
        max_tile_copy=-1.0,
        kernel_lanes=sys.maxsize,
        max_kernel_work=-1.0,
        min_operations=sys.maxsize,
        count_interval=1,
        min_nested_work=10_000.0,
        min_entered_work=0.0,
        max_move_steps_nested=math.inf,
        cores=_FEW_CORES,
        windows=2,
        asked=True,
    ),
}
ANY_MACHINE = "cpu"
"""The row that a job uses which may resume on another machine."""


def device_kind() -> str:
    """The kind of the device that programs run on by default: a CPU has three, by its cores."""
    kind = jax.default_backend()
    if kind != "cpu":
        return kind
    cores = os.cpu_count() or 1
    return "cpu-small" if cores <= _FEW_CORES else "cpu" if cores <= 16 else "cpu-large"


def thresholds_here() -> Thresholds | None:
    """Those of the default device; None where nothing was measured."""
    return TABLE.get(device_kind())
