"""Lanes that diverge wherever they can, however little a step costs: `divergence="auto"`."""

from math import inf

from batchax.analysis.thresholds import Thresholds
from batchax.divergence.runner import Runner

EVERYWHERE = Thresholds(
    max_move_steps=inf,
    min_work_per_launch=0,
    min_core_work=0,
    min_gain=0,
    min_gain_per_operation=0,
    min_unfused_share=0,
    min_work=0,
    min_branch_work=0,
    window_shares=(3,),
    cores=2,
    max_devices=1_000,
    kernel_lanes=0,
)
FORCED = Runner(thresholds=EVERYWHERE)

ALONE = Runner(thresholds=EVERYWHERE._replace(kernel_lanes=1 << 20))
"""One lane after another, in nested loops, too: from the start, or once that takes less."""


class Lockstep(Runner):
    """Lanes take each step of a nested loop together."""

    def run_nest(self, axis, loop):
        return None


ONE_FUNCTION = Lockstep(
    thresholds=EVERYWHERE._replace(
        max_move_steps=2, min_core_work=1e9, min_tail_gain=inf, kernel_lanes=16
    )
)
"""Tiles of adjacent lanes run, one after another, in a single kernel; in nested loops, too."""
KERNELS = Lockstep(thresholds=ONE_FUNCTION.thresholds._replace(kernel_lanes=2))
"""The same for so few lanes as random programs have."""
SERIAL = Lockstep(thresholds=EVERYWHERE._replace(kernel_lanes=1 << 20))
"""One lane after another, in a single kernel if that can be."""
LAST = Lockstep(
    thresholds=EVERYWHERE._replace(min_work_per_launch=inf, min_tail_gain=0, min_operations=0)
)
"""All lanes run first, and the last ones in a window."""
MASKED_DERIVATIVES = Runner(thresholds=EVERYWHERE._replace(min_core_work=inf, min_copy_cost=inf))
"""Branches run for the lanes that take them; derivatives of expensive ones for all, masked."""
DECIDED = Lockstep(
    thresholds=EVERYWHERE._replace(min_core_work=inf, min_gain_per_operation=0, min_copy_cost=0)
)
"""Branches and their derivatives are compiled twice: for the lanes that take them, and for all."""
