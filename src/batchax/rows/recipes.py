"""Whether two programs compute an output in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.evaluate import plan


def same_recipe(a: _compat.ClosedJaxpr, b: _compat.ClosedJaxpr, index: int) -> bool:
    """Whether output `index` of two programs comes of the same operations and constants."""
    steps, other_steps = _recipe(a, index), _recipe(b, index)
    return len(steps) == len(other_steps) and all(map(same_value, steps, other_steps))


def _recipe(program: _compat.ClosedJaxpr, index: int) -> list[Any]:
    """All that an output depends on, one after another: texts, and constants as they are."""
    jaxpr = program.jaxpr
    names: dict[Any, Any] = {v: f"input {i}" for i, v in enumerate(jaxpr.invars)}
    names.update(zip(jaxpr.constvars, program.consts, strict=True))
    out = jaxpr.outvars[index]

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else names[v]

    steps: list[Any] = []
    for eqn, *_ in plan(jaxpr.eqns, [out]):
        steps += [eqn.primitive.name, _text(eqn.params), *map(read, eqn.invars)]
        steps += _constants_in(eqn.params)
        names.update((v, f"{len(steps)}, {i}, {v.aval}") for i, v in enumerate(eqn.outvars))
    return [*steps, read(out)]


def _constants_in(params: Any) -> Iterator[Any]:
    """The constants of programs inside an operation, which its text does not show."""
    for inner in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, _compat.JAXPR_TYPES)):
        if not isinstance(inner, _compat.JAXPR_TYPES):
            continue
        yield from getattr(inner, "consts", ())
        for eqn in getattr(inner, "jaxpr", inner).eqns:
            yield from _constants_in(eqn.params)


def _text(params: Any) -> str:
    """Parameters as text, without addresses of objects, which say nothing of what they do."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(params))


def same_value(a: Any, b: Any) -> bool:
    """Whether two constants are known to be the same."""
    if a is b:
        return True
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        return False
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
