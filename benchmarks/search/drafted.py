"""The table of drafted programs: families of functions of one example, over data and lanes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workload import Workload

PROGRAMS: dict[str, Workload] = {}
HALVES = "tuned", "held out"
VALUES, GRADIENT = "values", "gradient"


def half(name: str) -> str:
    """Whether thresholds may be set by this program, or are tried on it, by a hash of its name."""
    # Nested loops had the name "nest" when halves were drawn, and each program stays in its half.
    name = name.replace("nested loop: ", "nest: ")
    return HALVES[zlib.crc32(f"search, seed 54: {name}".encode()) % 2]


def draft(
    family: str,
    name: str,
    fun: Callable[..., Any],
    data: Callable[[int], tuple[Any, ...]] | Mapping[str, Callable[[int], tuple[Any, ...]]],
    *lanes: int,
    uses: tuple[str, ...] = (VALUES,),
    wrt: int = 0,
    nests: bool = False,
    in_axes: Any = 0,
) -> None:
    """Enters a function of one example for all data, numbers of lanes, and uses.

    Args:
      family, name: of what kind it is, and what it is called.
      fun: the function; with `nests` its first argument is the `vmap` to use inside.
      data: from a number of lanes to the arguments of all lanes; several by name.
      *lanes: numbers of lanes.
      uses: "values", "gradient", or both.
      wrt: the argument that gradients are of.
      nests: whether `fun` itself batches something.
      in_axes: as of `vmap`.
    """
    kinds = data if isinstance(data, Mapping) else {"": data}
    for kind, arguments in kinds.items():
        for count in lanes:
            for use in uses:
                of = fun if use == VALUES else gradient(fun, wrt)
                parts = name, kind, f"{count:,} lanes", use if use == GRADIENT else ""
                label = f"{family}: {', '.join(filter(None, parts))}"
                options = {"in_axes": in_axes}
                PROGRAMS[label] = Workload(label, family, of, arguments, count, options, nests)


def gradient(fun: Callable[..., Any], wrt: int) -> Callable[..., Any]:
    """The value and the gradient of a sum over what `fun` returns."""

    def loss(*args: Any) -> Any:
        floats = (y for y in jax.tree.leaves(fun(*args)) if jnp.issubdtype(y.dtype, jnp.floating))
        return sum(jnp.sum(y**2) for y in floats)

    return jax.value_and_grad(loss, wrt)


def equal(lanes: int) -> Any:
    """As many steps in all lanes."""
    return jnp.full(lanes, 12, jnp.int32)


def spread(lanes: int) -> Any:
    """From 1 to 19 steps."""
    return jnp.asarray(np.random.default_rng(3).integers(1, 20, lanes), jnp.int32)


def heavy(lanes: int) -> Any:
    """A few steps in nearly all lanes, and 200 in one."""
    counts = np.minimum(np.random.default_rng(2).pareto(1.1, lanes) * 3 + 2, 200)
    counts[min(7, lanes - 1)] = 200
    return jnp.asarray(counts, jnp.int32)


COUNTS = {"equal counts": equal, "1 to 19 steps": spread, "heavy tail": heavy}
