"""The places where a condition holds: how many there are is a size from there on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax.rows.found_places import found_places_p, places_where
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.sizes import Limited


@padded_rule(found_places_p.name)
def _found_places(
    op: Operation, condition: Row, *, size: Any, limit: int | None, called: str
) -> Any:
    if str(size) in op.sizes.values and not op.sizes.again:
        raise op.refuse(
            f"{called} is in a function under jax.jit that is called more than once, and JAX takes "
            "the sizes that it finds for one. Call it without jax.jit: what is in a vmap is "
            "compiled as a whole."
        )
    mask = jnp.asarray(op.filled(condition, False))
    count = jnp.sum(mask, dtype=np.int32)
    limited = None if limit is None else Limited(called, limit, count)
    bound = op.sizes.find(str(size), condition.shape[0], count, limited)
    return op.result(places_where(mask, bound))
