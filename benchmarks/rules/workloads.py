"""The functions that are measured, with the rule that changes nothing, and their uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx
from benchmarks.workload import normal
from benchmarks.workloads.networks import mlp, mlp_parameters

IN_AXES = (None, 0)


@dataclass(frozen=True)
class RuleWorkload:
    """A function of shared arguments and of one example, with a number as its result.

    Attributes:
      name: what reports call it.
      fun: the function.
      data: from a number of lanes to the arguments, of which the second is batched.
      lanes: number of lanes in a full measurement.
      loops: whether the function contains a loop.
    """

    name: str
    fun: Callable[[Any, Any], Any]
    data: Callable[[int], tuple[Any, Any]]
    lanes: int
    loops: bool = False

    def with_rule(self) -> Callable[[Any, Any], Any]:
        """The function with the rule that does what ``bx.vmap`` would have done."""
        ruled = bx.custom_vmap(self.fun)

        @ruled.def_vmap
        def rule(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[Any, bool]:
            # Every leaf of an argument is batched, or none is.
            axes = tuple(0 if any(jax.tree.leaves(b)) else None for b in in_batched)
            return bx.vmap(self.fun, axes)(*args), True

        return ruled

    def arguments(self, use: str, lanes: int) -> tuple[Any, Any]:
        """The arguments for one use: a batch, or an example of it."""
        shared, xs = self.data(lanes)
        return (shared, xs) if USES[use].batched else (shared, xs[0])


@dataclass(frozen=True)
class Use:
    """What is done with a function.

    Attributes:
      of: from the function to a new one each time, which is therefore traced anew.
      batched: whether that is one of a batch.
    """

    of: Callable[[Callable[..., Any]], Callable[..., Any]]
    batched: bool


def _call(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shared, x: f(shared, x)


def _vmap(f: Callable[..., Any]) -> Callable[..., Any]:
    return bx.vmap(_call(f), IN_AXES)


def _gradient(f: Callable[..., Any], wrt: Any) -> Callable[..., Any]:
    return jax.value_and_grad(_call(f), wrt)


def _tangents(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shared, x: jax.jvp(lambda x: f(shared, x), (x,), (2 * x,))


USES = {
    "call": Use(_call, False),
    "gradient": Use(lambda f: _gradient(f, (0, 1)), False),
    "vmap": Use(_vmap, True),
    "gradient of vmap": Use(lambda f: _gradient(lambda *args: _vmap(f)(*args).sum(), (0, 1)), True),
    "vmap of gradient": Use(lambda f: _vmap(_gradient(f, 1)), True),
    "vmap of gradient by what is shared": Use(lambda f: _vmap(_gradient(f, 0)), True),
    "vmap of tangents": Use(lambda f: _vmap(_tangents(f)), True),
}


def few_operations(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(w * x))


def network(parameters: Any, x: Any) -> Any:
    return jnp.sum(mlp(parameters, x) ** 2)


def linear_solve(a: Any, b: Any) -> Any:
    return jnp.sum(jnp.linalg.solve(a, b) ** 2)


def scan(w: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, None]:
        return jnp.tanh(w @ h + x), None

    return jnp.sum(lax.scan(step, jnp.zeros_like(xs[0]), xs)[0] ** 2)


WORKLOADS = {
    w.name: w
    for w in (
        RuleWorkload(
            "few operations", few_operations, lambda n: (normal(256), normal(n, 256)), 1024
        ),
        RuleWorkload(
            "network",
            network,
            lambda n: (mlp_parameters(64, 128, 128, 10), normal(n, 64)),
            512,
        ),
        RuleWorkload(
            "linear solve",
            linear_solve,
            lambda n: (4 * jnp.eye(32) + normal(32, 32) / 3, normal(n, 32)),
            256,
        ),
        RuleWorkload(
            "scan of 100 steps",
            scan,
            lambda n: (normal(32, 32) / 6, normal(n, 100, 32)),
            64,
            loops=True,
        ),
    )
}
