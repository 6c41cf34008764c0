"""What is measured: a function of one example whose lanes part ways, data, and other ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import batchax as bx
from benchmarks.measure import one_by_one_is_a_way
from benchmarks.workload import one_by_one

Function = Callable[..., Any]

BASE = "jax.vmap"
"""What all ways are compared with."""


@dataclass(frozen=True)
class LoopWorkload:
    """A function of one example, run over a batch in several ways.

    Attributes:
      name: what reports call it.
      fun: the function of one example; returns a pair of its result and how many steps it took
        (an array of counts for loops one after another, None for none).
      data: from a number of lanes and `steps` to the arguments.
      lanes: number of lanes in a full measurement.
      steps: how long lanes go on at most, in the unit of `data`; 0 where it has no such bound.
      in_axes: as for `vmap`.
      sequential: whether one lane after the other (`lax.map`) is among the ways.
      others: functions of the whole batch that compute the same.
      yardsticks: functions of the whole batch that do as much work and compute something else.
      gradient: with respect to which arguments the gradient is measured, too.
      turns: how often each way has its turn at most.
      family: the part of the table it is in.
    """

    name: str
    fun: Function
    data: Callable[[int, int], tuple[Any, ...]]
    lanes: int
    steps: int = 0
    in_axes: Any = 0
    sequential: bool = False
    others: dict[str, Function] = field(default_factory=dict)
    yardsticks: dict[str, Function] = field(default_factory=dict)
    gradient: tuple[int, ...] = ()
    turns: int = 11
    family: str = "Loops"

    def arguments(self, lanes: int, most_steps: int | None = None) -> tuple[Any, ...]:
        """A batch of so many lanes, that go on for no longer than `most_steps`."""
        return self.data(lanes, min(self.steps, most_steps or self.steps))

    def batched(self, divergence: Any) -> Function:
        """All lanes by batchax; a new function each time, so that it is traced anew."""
        return bx.vmap(lambda *args: self.fun(*args), self.in_axes, divergence=divergence)

    def ways(self) -> dict[str, Function]:
        """What computes the same for all lanes; new functions each time."""
        found = {
            "auto": self.batched("auto"),
            "compact": self.batched("compact"),
            "predicate": self.batched("predicate"),
            BASE: jax.vmap(lambda *args: self.fun(*args), self.in_axes),
        }
        if self.sequential and one_by_one_is_a_way():
            found["lax.map"] = self._one_by_one
        return found | self.others

    def uses(self) -> dict[str, dict[str, Function]]:
        """All ways of each use that is measured."""
        found = {"values": self.ways()}
        if self.gradient:
            found["gradient"] = {way: self._gradient(f) for way, f in self.ways().items()}
        return found

    def utilization(self, args: tuple[Any, ...]) -> tuple[float, float] | None:
        """Which share of the lane-steps some lane needed: of those of compact, and of masking.

        With loops in loops, all are counted for compact and the steps that `fun` tells of for
        masking.
        """
        counter = bx.LaneSteps()
        _, steps = jax.jit(self.batched(bx.Compact(steps=counter)))(*args)
        if steps is None:
            return None
        steps = np.asarray(steps, np.int64)
        masked = float(steps.sum() / (len(steps) * steps.max(0).sum()))
        return (counter.utilization if counter.run else masked), masked

    def _one_by_one(self, *args: Any) -> Any:
        return one_by_one(self.fun, self.in_axes, args)

    def _gradient(self, f: Function) -> Function:
        return jax.value_and_grad(lambda *args: (f(*args)[0] ** 2).sum(), self.gradient)
