"""When lanes that wait for others stop waiting: once that has cost as much as moving them.

How many steps are to come is not known. Who rents skis until the rent has reached their price pays
at most twice what the best choice would have cost that knew how many days there are (Karlin,
Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988). Here the rent is the lane-steps
that idle lanes waste, and the price is that of moving lanes: both are counted in steps of a lane.

All waiting follows this rule, with these prices:

| who waits | for | the price |
|---|---|---|
| all lanes, masked (`windows.Together`) | the last ones | to move those that are left to a window |
| a window (`windows._GoesOn`) | its slowest lanes | to refill it |
| a tile (`tiles._Tiles`) | its last lanes | to leave them for later, and search them |
| a bounded loop that is differentiated | the last ones | to move those to blocks |
| lanes of a nested loop (`flat.Lanes`) | those in a loop inside | what follows it, for all lanes |

The last one counts nanoseconds in place of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import lax

from batchax.jaxprs.types import Value


@dataclass(frozen=True)
class SkiRental:
    """The rule for lanes of which one costs so many steps to move."""

    # How many steps of a lane cost as much as moving it. With an integer, all that it counts are.
    price: float

    def limit(self, lanes: Value) -> Value:
        """How many lane-steps cost as much as moving so many lanes."""
        return lax.mul(self._as_price(self.price), self._as_price(lanes))

    def waits(self, wasted: Value, lanes: Value) -> Value:
        """Whether so many wasted lane-steps cost less than it costs to move so many lanes."""
        return lax.lt(self._as_price(wasted), self.limit(lanes))

    def _as_price(self, x: Value) -> Value:
        dtype = np.dtype(np.int32 if isinstance(self.price, int) else np.float32)
        return dtype.type(x) if isinstance(x, int | float) else lax.convert_element_type(x, dtype)
