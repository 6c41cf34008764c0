"""Measuring one function with a rule and without, in every use of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.measure import FULL, QUICK, Result, compare
from benchmarks.rules.workloads import USES, RuleWorkload


def measured(workload: RuleWorkload, quick: bool) -> Iterator[Result]:
    """All that is measured of a workload, with the rule first."""
    effort = QUICK if quick else FULL
    lanes = min(workload.lanes, effort.most_lanes or workload.lanes)
    functions: tuple[Any, Any] = (workload.with_rule(), workload.fun)
    for name, use in USES.items():
        makers = [functools.partial(use.of, f) for f in functions]
        args = workload.arguments(name, lanes)
        name = f"{workload.name}, {name}"
        yield compare(name, workload.name, makers, args, effort, staging=_lowered)


def _lowered(f: Any) -> Any:
    """A call is differentiated when it is lowered, so that counts as tracing, too."""
    return jax.jit(f).lower
