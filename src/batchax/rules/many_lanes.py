"""Operations that are computed otherwise for many lanes than for few.

Of many lanes small matrices are decomposed, and short rows sorted, in another way than by a
library: it takes a fraction of the time for each. Who runs some of the lanes at a time loses that,
if they are too few.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import jax
from jax import lax

from batchax.jaxprs.inside import with_inside
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.rules import sorting_network
from batchax.rules.small_matrices import together


def least_lanes(size: int, programs: Sequence[ClosedJaxpr]) -> int:
    """The number of lanes from which on programs in a loop run all operations as `size` do."""
    eqns = [e for p in programs for e in with_inside(p.jaxpr.eqns) if _is_for_many(e, size)]
    alike = lambda lanes: all(_is_for_many(eqn, lanes) for eqn in eqns)
    return 1 + bisect.bisect_left(range(1, size + 1), True, key=alike) if eqns else 1


def _is_for_many(eqn: Eqn, lanes: int) -> bool:
    """Whether so many lanes run an equation of one example, in a loop, in a way that few do not."""
    examples = [v.aval for v in eqn.invars]
    if eqn.primitive is lax.sort_p and len(examples) > 1:
        types = [jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype) for x in examples]
        dimension, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
        return sorting_network.pays(types, dimension + 1, num_keys, in_loop=True)
    if not all(isinstance(n, int) and n for x in examples for n in getattr(x, "shape", ())):
        return False
    return together(eqn.primitive.name, examples, lanes, eqn.params, in_loop=True)
