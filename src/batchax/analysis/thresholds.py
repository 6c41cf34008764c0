"""From where on lanes run apart: one table, a row for each kind of device, and one for "compact".

Results do not depend on these numbers; the time that programs take does. Work is in nanoseconds of
the work of lanes on a core of a CPU. It is given in multiples of what `make calibrate` measures
(`calibrated.py`): what it takes to begin an operation, and to compile one. A GPU begins an
operation in a few microseconds, and computes a few hundred times as fast, so there a launch is
much work.

Each threshold names the rows of the benchmarks whose decision it makes: by half or twice of it they
would run otherwise (`tests/divergence/decisions.txt`).

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

from batchax.analysis.calibrated import CALIBRATED
from batchax.analysis.cost import GPU_LAUNCH, GPU_SPEED, LAUNCH, Lanes, Nanoseconds

_FEW_CORES = 2
_CORES = os.cpu_count() or 1  # to ask takes as long as a few operations to trace


class Thresholds(NamedTuple):
    """Holds the thresholds of a kind of device, and what the device is.

    Defaults are those of a CPU.
    """

    max_move_steps: float = 1.5
    """Steps of a lane that moving it in and out of a window, or to a tile, may cost.

    divergence: adaptive ODE solver, 64x64 products; search: 32 sines, 32x32 of state."""
    max_move_steps_nested: float = 0.12
    """The same for each step of a nested loop, or all lanes run first.

    `nests`: NUTS 512 chains, beam search."""
    min_work: Nanoseconds = Nanoseconds(55 * LAUNCH)
    """Time of a step of all lanes next to which counting, leaving, and entering cost little.

    `nests`: rejection sampling, elliptical slice, scan of whiles; search: a convolution,
    Sinkhorn."""
    min_branch_work: Nanoseconds = Nanoseconds(55 * LAUNCH)
    """The same of a branch, next to finding which lanes take it.

    On a GPU: divergence: 20 products; `nests`: an expensive branch in 1% of the steps."""
    min_core_work: Nanoseconds = Nanoseconds(84 * LAUNCH)
    """Time of a step of a window that keeps a core as busy as all lanes do.

    divergence: 64x64 products, bounded loop 4,096 lanes; search: 32x32 of state, a sort of 64."""
    min_work_per_launch: float = 16
    """How many times as long as beginning its operations a step of such a window takes.

    divergence: 64x64 products; search: a lookup, Sinkhorn, down a tree."""
    min_gain_per_operation: Nanoseconds = Nanoseconds(CALIBRATED["cpu"].compile)
    """Time that a branch gains in 100 calls for each operation that is compiled for it.

    divergence: 20 products of 24, 1,024 lanes; search: eigenvalues, a pseudoinverse, a sort."""
    window_shares: tuple[int, ...] = (16, 8)
    """How many windows all lanes fill: as many as leave one that is wide enough.

    divergence: 64x64 products, bounded Runge-Kutta; search: down a tree, a lookup."""
    min_tail_gain: float = 4.0
    """How many times as long as a step of the last lanes alone one of all lanes takes.

    divergence: bounded Runge-Kutta; on a GPU products of 65,536 lanes."""
    min_operations: int = 40
    """Different operations of a step that may be compiled twice: what moves lanes is little then.

    divergence: adaptive ODE solver; on a GPU a step is compiled twice however short it is."""
    min_gain: float = 3.0
    """How many times as much as moving its lanes a branch costs that runs for some of them.

    divergence: 20 products of 24; search: one of six augmentations."""
    min_unfused_share: float = 0.5
    """Which share of a branch is not fused with what selects its result.

    divergence: 20 products, eight of 20 products."""
    max_share_gathered: float = 0.5
    """The share of the lanes from which on all run, masked, on a few cores.

    divergence: 20 products, 10% to 100% of the lanes."""
    min_serial_gain: float = 1.5
    """How many times as long as lanes that run one after another all lanes take, masked.

    `nests`: NUTS 512 chains; search: crop and flip."""
    min_copy_cost: float = 2.0
    """How many times as long as in blocks a branch takes with copies of what all lanes read.

    divergence: loop of 20."""

    # What the row is for.
    cores: int = 8
    """cores that all lanes keep busy: a narrow window runs on one"""
    kernel_lanes: Lanes = Lanes(128)
    """lanes of a tile that is a single kernel, which computes twice as many numbers; 0: no tiles"""
    max_devices: int = 1
    """devices that lanes may be spread over"""
    windows: int = 1
    """windows of a loop besides the run of all lanes: each is compiled"""
    explicit: bool = False
    """whether the user passed "compact", which raises where lanes cannot run apart"""

    @property
    def few_cores(self) -> bool:
        """Returns whether one core does about as much as all of them."""
        return self.cores <= _FEW_CORES

    @property
    def min_window_work(self) -> Nanoseconds:
        """Returns the time of a window's step that keeps a device as busy as all lanes do."""
        return Nanoseconds(self.min_core_work * self.cores)

    @property
    def serial_slowdown(self) -> float:
        """Returns how many times as long one core takes as all of them."""
        return max(1.0, self.cores / _FEW_CORES)

    @property
    def min_work_counted(self) -> Nanoseconds:
        """As `min_work`, to count lanes alone: those that are left run one after another.

        search: product 16."""
        return Nanoseconds(self.min_work / 4)

    @property
    def min_work_inside(self) -> Nanoseconds:
        """As `min_work`, of loops inside another, which lanes enter and leave at any time.

        search: GMRES."""
        return Nanoseconds(self.min_work * (2.5 if self.kernel_lanes else 1))

    @property
    def max_work_on_a_core(self) -> Nanoseconds:
        """Time of a step of all lanes, at most, that runs on one core.

        divergence: Mandelbrot, bounded Runge-Kutta; search: binary."""
        return Nanoseconds(self.min_core_work * (8 if self.few_cores else 2))

    @property
    def min_gain_of_all(self) -> float:
        """As `min_gain`, of a branch that runs in blocks even if all lanes take it."""
        return 3 * self.min_gain

    @property
    def min_gain_as_fast(self) -> float:
        """As `min_gain`, of a branch that blocks of all lanes take no longer for.

        divergence: 20 products; search: a sort, of all."""
        return 10 * self.min_gain

    @property
    def min_copy_cost_once(self) -> float:
        """As `min_copy_cost`, of a short branch that is compiled once."""
        return 3 * self.min_copy_cost


# On a GPU a step of a loop takes as long for few lanes as for thousands, and the host checks at
# each whether there is another, which takes as long as seven operations. So all lanes run first,
# and the last in a window if they save much; and lanes that are done with a nested loop do not wait
# for others. Nothing is a single kernel, no window is narrower than the device.
TABLE = {
    "cpu-small": Thresholds(cores=_FEW_CORES),
    "cpu": Thresholds(),
    "cpu-large": Thresholds(cores=32),
    "gpu": Thresholds(
        max_move_steps=8.0,
        max_move_steps_nested=math.inf,
        min_work=Nanoseconds(2.5 * GPU_LAUNCH),
        min_branch_work=Nanoseconds(150 * GPU_LAUNCH),
        min_core_work=Nanoseconds(math.inf),
        min_gain_per_operation=Nanoseconds(GPU_SPEED * CALIBRATED["gpu"].compile),
        min_tail_gain=3.0,
        min_operations=1,
        cores=1,
        kernel_lanes=Lanes(0),
    ),
    # What the user asks for need not be as fast in the worst case: it saves much in the usual one.
    "compact": Thresholds(
        max_move_steps=math.inf,
        min_work=Nanoseconds(33 * LAUNCH),
        min_branch_work=Nanoseconds(167 * LAUNCH),
        min_core_work=Nanoseconds(math.inf),
        min_operations=sys.maxsize,
        min_gain=4.0,
        min_unfused_share=0.0,
        cores=_FEW_CORES,
        kernel_lanes=Lanes(0),
        windows=2,
        explicit=True,
    ),
}
ANY_MACHINE = "cpu"
"""The row that a job uses which may resume on another machine."""


def device_kind() -> str:
    kind = jax.default_backend()
    if kind != "cpu":
        return kind
    return "cpu-small" if _CORES <= _FEW_CORES else "cpu" if _CORES <= 16 else "cpu-large"


def thresholds_here() -> Thresholds | None:
    """Returns the thresholds of the default device; None where nothing was measured."""
    return TABLE.get(device_kind())
