"""What is measured: a function of one example that is a loop of loops, data, and other ways."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from benchmarks.measure import one_by_one_is_a_way
from benchmarks.workload import one_by_one

Function = Callable[..., Any]

BASE = "jax.vmap"
DIVERGENCES = ("predicate", "auto", "compact")


@dataclass(frozen=True)
class Peer:
    """Another program for the same task, by other means and with other random numbers.

    Attributes:
      needs: modules without which it is left out.
      make: from the arguments of all lanes to a function of nothing, which returns results such
        as `Nest.draws` has them, or anything.
    """

    make: Callable[..., Callable[[], Any]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nest:
    """A loop around loops as a function of one example, run over a batch in several ways.

    Attributes:
      name: what reports call it.
      fun: the function of one example; returns a pair of its result and what `counts` reads.
      data: from a number of lanes and of outer steps to the arguments.
      lanes: number of lanes in a full measurement.
      steps: number of outer steps in a full measurement.
      counts: from the arguments and the results of all lanes to how many steps the innermost loop
        takes: (lanes, outer steps), or (lanes, outer steps, steps of the next loop, ...).
      in_axes: as for `vmap`.
      draws: from the results of all lanes to (lanes, draws, size), where it is a sampler.
      peers: other programs for the same task.
      needs: modules without which it is left out.
      turns: how often each way has its turn at most.
      family: the part of the table it is in.
      gradient: whether what is measured is the gradient of the sum of all results, with respect to
        the first argument, in the place of these.
    """

    name: str
    fun: Function
    data: Callable[[int, int], tuple[Any, ...]]
    lanes: int
    steps: int
    counts: Callable[[Any, Any], Any] = lambda args, out: out[1]
    in_axes: Any = 0
    draws: Callable[[Any], Any] | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    turns: int = 7
    family: str = "Samplers"
    gradient: bool = False

    def ways(self) -> dict[str, Function]:
        """What computes the same for all lanes; new functions each time."""
        same = {BASE: jax.vmap(self._anew(), self.in_axes)}
        for divergence in DIVERGENCES:
            same[divergence] = bx.vmap(self._anew(), self.in_axes, divergence=divergence)
        same = {name: self._measured(batched) for name, batched in same.items()}
        return same | ({"lax.map": self.one_by_one} if one_by_one_is_a_way() else {})

    def one_by_one(self, *args: Any) -> Any:
        """One lane after the other."""
        return one_by_one(self._measured(self.fun), self.in_axes, args)

    def of_lanes(self, args: tuple[Any, ...], chosen: Any) -> tuple[Any, ...]:
        """The arguments of some of the lanes."""
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes,) * len(args)
        return tuple(x if a is None else x[chosen] for x, a in zip(args, axes, strict=True))

    def missing(self) -> list[str]:
        """Which modules it needs that are not installed."""
        return not_installed(self.needs)

    def inner_steps(self, args: Any, out: Any) -> np.ndarray:
        """`counts` as an array of NumPy with an axis of lanes and one for each loop around."""
        return np.asarray(self.counts(args, out), np.int64)

    def _measured(self, function: Function) -> Function:
        if not self.gradient:
            return function

        def run(x: Any, *args: Any) -> Any:
            def total(x: Any) -> Any:
                results, counts = function(x, *args)
                return sum(jnp.sum(y) for y in jax.tree.leaves(results)), counts

            return jax.grad(total, has_aux=True)(x)

        return run

    def _anew(self) -> Function:
        return lambda *args: self.fun(*args)


def not_installed(modules: tuple[str, ...]) -> list[str]:
    """Those of the modules that cannot be imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]
