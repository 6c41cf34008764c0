"""Lanes that diverge wherever they can, however little a step costs: `divergence="auto"`."""

from math import inf

from batchax.divergence import costs, nest
from batchax.divergence.runner import Runner
from batchax.programs import expensive_branches
from batchax.programs.thresholds import TABLE, Thresholds

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
    cache=0,
    max_devices=1_000,
    kernel_lanes=0,
)
FORCED = Runner(thresholds=EVERYWHERE)

# The same in nested loops, too, whose lanes are not at steps of their own:
TILES = Runner(
    thresholds=EVERYWHERE._replace(max_move_steps=2, min_core_work=inf, min_tail_gain=inf),
    lockstep=True,
)
"""Tiles of adjacent lanes run, one after another."""
ONE_FUNCTION = Runner(
    thresholds=TILES.thresholds._replace(min_core_work=1e9, kernel_lanes=16), lockstep=True
)
"""The same, each in a single kernel if it can be."""
KERNELS = Runner(thresholds=ONE_FUNCTION.thresholds._replace(kernel_lanes=2), lockstep=True)
"""The same for so few lanes as random programs have."""
SERIAL = Runner(thresholds=EVERYWHERE._replace(kernel_lanes=1 << 20), lockstep=True)
"""One lane after another, in a single kernel if that can be."""
NESTS = Runner(
    thresholds=EVERYWHERE._replace(
        min_core_work=1e9, min_tail_gain=0, min_operations=0, kernel_lanes=2
    )
)
"""Lanes of a nested loop are at steps of their own, in a single kernel."""
LAST = Runner(
    thresholds=EVERYWHERE._replace(min_work_per_launch=inf, min_tail_gain=0, min_operations=0),
    lockstep=True,
)
"""All lanes run first, and the last ones in a window."""
MASKED_DERIVATIVES = Runner(thresholds=EVERYWHERE._replace(min_copy_cost=inf, cache=1 << 60))
"""Branches run for the lanes that take them, and their derivatives for all lanes, masked."""
DECIDED = Runner(
    thresholds=EVERYWHERE._replace(min_core_work=inf, min_gain_per_operation=0, min_copy_cost=0),
    lockstep=True,
)
"""Branches and their derivatives are compiled twice: for the lanes that take them, and for all."""


EVERY_BRANCH = expensive_branches.ROW._replace(min_work=0.0, min_gain=0.0, min_unfused_share=0.0)
"""By these every branch is expensive."""


def wait_before_branches(monkeypatch):
    """Every branch counts as expensive: lanes wait before it whatever that costs, for blocks of
    two.
    """
    monkeypatch.setattr(expensive_branches, "ROW", EVERY_BRANCH)
    monkeypatch.setattr(costs, "NARROWEST", 2)
    monkeypatch.setattr(costs, "_ENOUGH", 0.0)
    monkeypatch.setattr(nest, "FEW_STEPS", inf)
    asked = TABLE["compact"]._replace(min_work=0.0)
    monkeypatch.setitem(TABLE, "compact", asked)
