"""Lanes that part ways wherever they can, however little a step costs: `divergence="auto"`."""

from math import inf

from batchax.divergence import compact, cut, price
from batchax.divergence.auto import Auto
from batchax.divergence.what_pays import Limits
from batchax.programs import dear_branches

EVERYWHERE = Limits(
    moving=inf,
    later=inf,
    begun=0,
    busy=0,
    gain=0,
    perhaps=inf,
    launched=0,
    cached=0,
    staying=inf,
    nest=0,
    places=0,
    leaving=0,
    windows=(3,),
    devices=1_000,
)
FORCED = Auto(limits=EVERYWHERE)

# The same in loops of loops, too, whose lanes are not at places of their own:
NEIGHBOURS = Auto(limits=EVERYWHERE._replace(moving=-inf, later=-inf, nest=inf))
"""Neighbours run together, some after others."""
ONE_FUNCTION = Auto(
    limits=EVERYWHERE._replace(
        moving=-inf,
        later=-inf,
        nest=inf,
        busy=1,
        together=16,
        one_core=inf,
        few=1_000,
    )
)
"""The same, in one function of the compiler if they can be."""
KERNELS = Auto(limits=ONE_FUNCTION.limits._replace(together=2))
"""The same for so few lanes as random programs have."""
NESTS = Auto(limits=EVERYWHERE._replace(together=2, one_core=inf, few=1_000))
"""Lanes of a loop of loops are at places of their own, in one function of the compiler."""
LAST = Auto(limits=EVERYWHERE._replace(begun=inf, saved=0, long=0, last=0, nest=inf))
"""All lanes run first, and the last ones in a window."""
MASKED_DERIVATIVES = Auto(limits=EVERYWHERE._replace(copying=inf, cached=inf))
"""Branches run for the lanes that take them, and their derivatives for all lanes, masked."""
DECIDED = Auto(
    limits=EVERYWHERE._replace(gain=inf, perhaps=0, counting=0, compiling=0, copying=0, nest=inf)
)
"""Branches and their derivatives are compiled twice: for the lanes that take them, and for all."""


def wait_before_branches(monkeypatch):
    """Every branch counts as dear: lanes wait before it whatever that costs, for blocks of two."""
    for limit in ("LEAST", "GAIN", "BEGUN"):
        monkeypatch.setattr(dear_branches, limit, 0.0)
    monkeypatch.setattr(price, "NARROWEST", 2)
    monkeypatch.setattr(price, "_ENOUGH", 0.0)
    monkeypatch.setattr(cut, "FEW_STEPS", inf)
    monkeypatch.setattr(compact, "NEST", 0.0)
