"""What is measured: a function of one example, and the program that somebody wrote in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

import batchax as bx

JAX, HAND, OURS = "jax.vmap", "by hand", "bx.vmap"


@dataclass(frozen=True)
class Slow:
    """A function of one example that a batch makes slow.

    Attributes:
      name: what reports call it.
      family: what of a batch is slow.
      one: the function of one example.
      by_hand: the program for the whole batch, of the same arguments; reports show its source.
      data: from a number of lanes to the arguments.
      lanes: of a full measurement.
      goal: at most so much of the time of `rival`.
      rival: what it is to be held against.
      in_axes: of `one`, for both vmaps.
      summed: whether the results of the lanes are added up.
      options: of `bx.vmap`.
      around: what is done with the batched function, such as its gradient.
      batched: whether there is a batch; else `one` is of the whole, and so has no `jax.vmap`.
    """

    name: str
    family: str
    one: Callable[..., Any]
    by_hand: Callable[..., Any]
    data: Callable[[int], tuple[Any, ...]]
    lanes: int
    goal: float
    rival: Literal["jax.vmap", "by hand"] = JAX
    in_axes: Any = 0
    summed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda batched: batched
    batched: bool = True

    def ways(self) -> dict[str, Callable[..., Any]]:
        """The programs by name, each made anew, ours last."""
        hand = {HAND: lambda *args: self.by_hand(*args)}
        if not self.batched:
            return hand | {OURS: lambda *args: self.one(*args)}
        options = self.options | ({"out_axes": bx.Reduce("sum")} if self.summed else {})
        vmapped = jax.vmap(lambda *args: self.one(*args), self.in_axes)

        def summed(*args: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.sum(0), vmapped(*args))

        ours = bx.vmap(lambda *args: self.one(*args), self.in_axes, **options)
        return {
            JAX: self.around(summed if self.summed else vmapped),
            **hand,
            OURS: self.around(ours),
        }
