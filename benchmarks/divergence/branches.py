"""Branches that some lanes take: `bx.vmap` in both ways, `jax.vmap`, and grouped by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from benchmarks.divergence.workload import BASE
from benchmarks.workload import normal

SIZE = 64
BLOCK = 64
IN_AXES = (0, 0, None)


@dataclass(frozen=True)
class BranchWorkload:
    """A function of the branch a lane takes, of its example, and of weights that all share.

    Attributes:
      name: what reports call it.
      branches: functions of an example and the weights.
      shares: which part of the lanes takes each branch.
      size: how many numbers an example has; weights are square matrices of it.
      lanes: number of lanes in a full measurement.
    """

    name: str
    branches: tuple[Callable[[Any, Any], Any], ...]
    shares: tuple[float, ...]
    size: int = SIZE
    lanes: int = 8192
    turns: int = 11
    family: str = "Branches"
    yardsticks: dict[str, Any] = field(default_factory=dict)

    def fun(self, index: Any, x: Any, weights: Any) -> Any:
        """The function of one example."""
        return lax.switch(index, self.branches, x, weights)

    def uses(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """All ways of each use that is measured; new functions each time."""
        # A loop of blocks written by hand has no reverse mode.
        return {
            use: {
                way: of(make(self))
                for way, make in WAYS.items()
                if use == "values" or way != "by hand"
            }
            for use, of in USES.items()
        }

    def utilization(self, args: Any) -> None:
        """Branches have no steps to count."""

    def arguments(self, lanes: int, most_steps: int | None = None) -> tuple[Any, Any, Any]:
        """Indices, examples and weights."""
        counts = np.round(lanes * np.cumsum(self.shares)).astype(int)
        index = np.searchsorted(counts, np.arange(lanes), side="right")
        index = np.random.default_rng(0).permutation(index)
        weights = normal(len(self.branches), self.size, self.size, seed=1) / self.size**0.5
        return jnp.asarray(index, jnp.int32), normal(lanes, self.size, seed=2), weights

    def by_hand(self, index: Any, x: Any, weights: Any) -> Any:
        """All lanes, sorted by branch, in blocks of lanes that take the same."""
        order = jnp.argsort(index)
        out = jnp.zeros_like(x)
        start = jnp.int32(0)
        for i, branch in enumerate(self.branches):
            count = jnp.sum(index == i, dtype=jnp.int32)
            out = _in_blocks(jax.vmap(branch, (0, None)), weights, x, out, order, start, count)
            start += count
        return out


def _in_blocks(
    batched: Any, weights: Any, x: Any, out: Any, order: Any, start: Any, count: Any
) -> Any:
    lanes = x.shape[0]

    def block(i: Any, out: Any) -> Any:
        entries = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        places = order[jnp.minimum(start + entries, lanes - 1)]
        places = jnp.where(entries < count, places, lanes)
        results = batched(x.at[places].get(mode="clip"), weights)
        return out.at[places].set(results, mode="drop")

    return lax.fori_loop(0, (count + BLOCK - 1) // BLOCK, block, out)


def _anew(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fun(*args)


WAYS: dict[str, Callable[[BranchWorkload], Callable[..., Any]]] = {
    "auto": lambda w: bx.vmap(_anew(w.fun), IN_AXES),
    "compact": lambda w: bx.vmap(_anew(w.fun), IN_AXES, divergence="compact"),
    "predicate": lambda w: bx.vmap(_anew(w.fun), IN_AXES, divergence="predicate"),
    # Whose turn is beside it finds memory that is to be mapped anew, gigabytes for some.
    BASE: lambda w: jax.vmap(_anew(w.fun), IN_AXES),
    "by hand": lambda w: w.by_hand,
}


def _gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda index, x, w: jnp.sum(f(index, x, w) ** 2), (1, 2))


USES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "values": lambda f: f,
    "gradient": _gradient,
}


def layers(which: int) -> Callable[[Any, Any], Any]:
    """Twenty products with one of the matrices."""

    def branch(x: Any, weights: Any) -> Any:
        for _ in range(20):
            x = jnp.tanh(weights[which] @ x)
        return x

    return branch


def layers_in_a_loop(x: Any, weights: Any) -> Any:
    return lax.fori_loop(0, 20, lambda _, x: jnp.tanh(weights[0] @ x), x)


def often(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Two hundred times the same function of each element."""

    def branch(x: Any, _: Any) -> Any:
        for _ in range(200):
            x = f(x)
        return x

    return branch


def doubled(x: Any, _: Any) -> Any:
    return 2 * x


WORKLOADS = {
    w.name: w
    for w in (
        BranchWorkload("20 products, 10% of lanes", (doubled, layers(0)), (0.9, 0.1)),
        BranchWorkload("20 products, 5% of lanes", (doubled, layers(0)), (0.95, 0.05)),
        BranchWorkload(
            "20 products, 5% of 256 lanes", (doubled, layers(0)), (0.95, 0.05), lanes=256
        ),
        *(
            BranchWorkload(
                f"20 products of 24, {share:.0%} of {lanes:,} lanes",
                (doubled, layers(0)),
                (1 - share, share),
                size=24,
                lanes=lanes,
            )
            for lanes in (256, 1024)
            for share in (0.05, 0.2, 1.0)
        ),
        BranchWorkload("20 products, all lanes", (doubled, layers(0)), (0.0, 1.0)),
        # With 8,192 lanes `jax.vmap` takes ten gigabytes, and whoever has the turn after it waits
        # for memory: one program, under two names, took 6.2 times as long as itself.
        BranchWorkload(
            "eight of 20 products, 1,024 lanes",
            tuple(map(layers, range(8))),
            (1 / 8,) * 8,
            lanes=1024,
        ),
        BranchWorkload(
            "200 tanh or 200 sines, 50% each", (often(jnp.tanh), often(jnp.sin)), (0.5, 0.5)
        ),
        BranchWorkload("20 products, no lane", (doubled, layers(0)), (1.0, 0.0)),
        BranchWorkload("20 products or 20 others, 50% each", (layers(0), layers(1)), (0.5, 0.5)),
        BranchWorkload("loop of 20, 10% of lanes", (doubled, layers_in_a_loop), (0.9, 0.1)),
        BranchWorkload("loop of 20, no lane", (doubled, layers_in_a_loop), (1.0, 0.0)),
        BranchWorkload(
            "tanh or sine, 50% each",
            (lambda x, _: jnp.tanh(x), lambda x, _: jnp.sin(x)),
            (0.5, 0.5),
        ),
    )
}
