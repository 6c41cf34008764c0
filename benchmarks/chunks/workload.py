"""What is measured in chunks and steps: a function, data for it, and where the axes are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FORWARD, GRADIENT, BOTH = "forward", "gradient", "value and gradient"


@dataclass(frozen=True)
class _Work:
    """A function and the data it is measured on.

    Attributes:
      name: what reports call it.
      fun: the function of one example, or of a carry and one step's values.
      data: from a number of lanes, or steps, to the arguments.
      lanes: number of lanes, or steps, in a full measurement.
      chunk: number of lanes in a chunk, in a full measurement; 1 for steps.
      in_axes: the batch axis of each argument; None for one that is the same for all.
      out_axes: the batch axis of every output.
      wrt: the arguments to differentiate by; if there are none, only the function itself
        is measured.
      both: whether value and gradient are also measured together.
    """

    name: str
    fun: Callable[..., Any]
    data: Callable[[int], tuple[Any, ...]]
    lanes: int
    chunk: int
    in_axes: tuple[Any, ...]
    out_axes: int = 0
    wrt: tuple[int, ...] = ()
    both: bool = True

    @property
    def uses(self) -> tuple[str, ...]:
        """What is measured of it."""
        if not self.wrt:
            return (FORWARD,)
        return (FORWARD, GRADIENT, BOTH) if self.both else (FORWARD, GRADIENT)

    def of_lanes(self, lanes: int, chunk: int | None = None) -> Any:
        """The same work on another number of lanes, in chunks of the same or another size."""
        return replace(self, lanes=lanes, chunk=chunk or self.chunk)

    def small(self) -> Any:
        """The same work on few lanes, with a remainder where there is one in full."""
        chunk = min(self.chunk, 4)
        return self.of_lanes(2 * chunk + (self.lanes % self.chunk > 0), chunk)

    def merged(self, which: Sequence[int], values: Sequence[Any], args: Sequence[Any]) -> list:
        """`args` with those at the positions `which` replaced by `values`."""
        replaced = dict(zip(which, values, strict=True))
        return [replaced.get(i, x) for i, x in enumerate(args)]

    def plain(self) -> Callable[..., Any]:
        """What is computed, written with JAX alone and without regard to memory."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChunkedWorkload(_Work):
    """A per-example function and the batch it is run on in chunks.

    Attributes:
      mean: whether only the mean of the outputs over the batch is wanted.
    """

    mean: bool = False

    @property
    def mapped(self) -> tuple[int, ...]:
        """The arguments that have a batch axis."""
        return tuple(i for i, a in enumerate(self.in_axes) if a is not None)

    def plain(self) -> Callable[..., Any]:
        """The function under ``jax.vmap``."""
        return self.then_mean(jax.vmap(self.fun, self.in_axes, self.out_axes))

    def then_mean(self, batched: Callable[..., Any]) -> Callable[..., Any]:
        """A batched function, followed by the mean if that is what is wanted."""
        if not self.mean:
            return batched
        return lambda *args: jax.tree.map(lambda x: jnp.mean(x, 0), batched(*args))


@dataclass(frozen=True)
class ScanWorkload(_Work):
    """A function of a carry and one step's values; the first argument is the first carry.

    `in_axes` says of each argument but the first where its steps are.
    """

    def plain(self) -> Callable[..., Any]:
        """The function under ``lax.scan``, which wants the steps first."""

        def scanned(init: Any, *xs: Any) -> Any:
            steps = [i for i, a in enumerate(self.in_axes) if a is not None]
            leading = [
                jax.tree.map(
                    functools.partial(jnp.moveaxis, source=self.in_axes[i], destination=0), xs[i]
                )
                for i in steps
            ]

            def step(carry: Any, parts: Any) -> Any:
                return self.fun(carry, *self.merged(steps, parts, xs))

            carry, ys = lax.scan(step, init, leading)
            return carry, jax.tree.map(lambda y: jnp.moveaxis(y, 0, self.out_axes), ys)

        return scanned
