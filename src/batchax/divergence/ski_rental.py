"""When lanes that wait for others stop waiting: once that has cost as much as moving them.

How many steps are to come is not known. Who rents skis until the rent has reached their price pays
at most twice what the best choice would have cost that knew how many days there are (Karlin,
Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988). Here the rent is the lane-steps
that idle lanes waste, and the price is that of moving lanes: both are counted in steps of a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax


@dataclass(frozen=True)
class SkiRental:
    """The rule for lanes of which one costs so many steps to move.

    Attributes:
      price: how many steps of a lane cost as much as moving it.
    """

    price: float

    def waits(self, wasted: Any, lanes: Any) -> Any:
        """Whether so many wasted lane-steps cost less than it costs to move so many lanes."""
        wasted, lanes = (_float(x) for x in (wasted, lanes))
        return lax.lt(wasted, lax.mul(np.float32(self.price), lanes))


def _float(x: Any) -> Any:
    return np.float32(x) if isinstance(x, int) else lax.convert_element_type(x, np.float32)
