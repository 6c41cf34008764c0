"""What a workload is: a per-example function, data for it, and where the axes are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Workload:
    """A per-example function and the batch it is measured on.

    Attributes:
      name: what reports call it.
      family: the part of JAX it exercises.
      fun: the function of one example. With `nests` its first argument is the
        `vmap` to use inside.
      data: from a number of lanes to the batched arguments.
      lanes: number of lanes in a full measurement.
      options: keyword arguments of `vmap`.
      nests: whether `fun` itself batches something.
      by_hand: what is written with `jax.vmap` instead, where that has no such `options`.
    """

    name: str
    family: str
    fun: Callable[..., Any]
    data: Callable[[int], tuple[Any, ...]]
    lanes: int
    options: dict[str, Any] = field(default_factory=dict)
    nests: bool = False
    by_hand: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def batched_by(self, vmap: Callable[..., Any]) -> Callable[..., Any]:
        """The workload under `vmap`: a new function each time, so that it is traced anew."""
        fun = functools.partial(self.fun, vmap) if self.nests else self.fun
        if vmap is jax.vmap and self.by_hand is not None:
            return self.by_hand(lambda *args: fun(*args))
        return vmap(lambda *args: fun(*args), **self.options)


WORKLOADS: dict[str, Workload] = {}


def workload(
    family: str,
    data: Callable[[int], tuple[Any, ...]],
    *,
    lanes: int,
    nests: bool = False,
    by_hand: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that enters a per-example function in the table, under its own name."""

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        name = fun.__name__.replace("_", " ")
        WORKLOADS[name] = Workload(name, family, fun, data, lanes, options, nests, by_hand)
        return fun

    return decorate


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """A fixed array of normally distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> jax.Array:
    """A fixed array of uniformly distributed numbers."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, shape), float)


def integers(*shape: int, below: int, seed: int = 0) -> jax.Array:
    """A fixed array of integers in [0, below)."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def keys(lanes: int) -> jax.Array:
    """A random key for each lane."""
    return jax.random.split(jax.random.key(0), lanes)


def one_by_one(fun: Callable[..., Any], in_axes: Any, args: tuple[Any, ...]) -> Any:
    """A function for one lane after the other; lanes are along the first axis where there are."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    own = [x for x, axis in zip(args, axes, strict=True) if axis is not None]

    def one(own: Any) -> Any:
        rest = iter(own)
        return fun(*(x if a is None else next(rest) for x, a in zip(args, axes, strict=True)))

    return lax.map(one, own)
