"""Counting the operations of a batched program, to compare with `jax.vmap`."""

from collections import Counter

import jax
import numpy as np

import batchax as bx


def operations(fun, *args):
    """How often each primitive occurs in `fun`, inner programs included."""
    counts = Counter()
    _count(jax.make_jaxpr(fun)(*args).jaxpr, counts)
    return counts


def no_more_operations(fun, *args, in_axes=0):
    """Checks that batchax emits no more equations, and no more transposes, than JAX."""
    ours = operations(bx.vmap(fun, in_axes=in_axes), *args)
    jaxs = operations(jax.vmap(fun, in_axes=in_axes), *args)
    assert ours.total() <= jaxs.total(), (ours, jaxs)
    assert ours["transpose"] <= jaxs["transpose"], (ours, jaxs)


def _count(jaxpr, counts):
    for eqn in jaxpr.eqns:
        permuted = eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
        counts["transpose" if permuted is not None else eqn.primitive.name] += 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                _count(getattr(inner, "jaxpr", inner), counts)


def _is_jaxpr(x):
    return not isinstance(x, np.ndarray) and (hasattr(x, "eqns") or hasattr(x, "jaxpr"))
