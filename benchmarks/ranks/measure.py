"""Measuring a function under `auto_vmap` and under each other way to give it batch dimensions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

import batchax as bx
from benchmarks.measure import FULL, QUICK, Result, compare
from benchmarks.ranks.workloads import RankWorkload

try:  # Nothing of this project needs it: it is measured if it is there.
    jax_autovmap: Any = importlib.import_module("jax_autovmap")
except ImportError:
    jax_autovmap = None

BY_HAND, MERGED_BY_HAND = "in_axes by hand", "dimensions merged by hand"
VECTORIZE, AUTOVMAP = "jnp.vectorize", "jax-autovmap"


def others(workload: RankWorkload) -> dict[str, Callable[..., Any]]:
    """The other ways by name, each with the batched function."""
    ways = {BY_HAND: workload.by_hand(workload.fun)}
    if workload.merged_by_hand is not None:
        ways[MERGED_BY_HAND] = workload.merged_by_hand(workload.fun)
    if workload.signature is not None:
        ways[VECTORIZE] = jnp.vectorize(workload.fun, signature=workload.signature)
    if jax_autovmap is not None:
        ways[AUTOVMAP] = jax_autovmap.auto_vmap(*workload.ranks)(workload.fun)
    return ways


def ours(workload: RankWorkload) -> Callable[..., Any]:
    """The function under `auto_vmap`."""
    return bx.auto_vmap(*workload.ranks)(workload.fun)


def measured(workload: RankWorkload, quick: bool) -> Iterator[Result]:
    """All that is measured of a workload, against one other way after the other."""
    effort = QUICK if quick else FULL
    args = workload.data(min(workload.size, effort.most_lanes or workload.size))
    for name, other in others(workload).items():
        makers = [anew(ours(workload)), anew(other)]
        yield compare(f"{workload.name}, {name}", workload.name, makers, args, effort)


def anew(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Makes a new function each time, so that it is traced anew; decorated it is once."""
    return lambda: lambda *args: fun(*args)
