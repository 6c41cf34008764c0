"""What is measured: a program in plain JAX, batched by its user, and the table of all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import batchax as bx
from benchmarks.workload import one_by_one

PLAIN, BEFORE, COMPACT, SERIAL = "bx.vmap", "jax.vmap", "compact", "lax.map"


@dataclass(frozen=True)
class Program:
    """A program that its user batches.

    Attributes:
      name: what reports call it.
      library: whose users write it.
      fun: the function of one example; with `takes_vmap` its first argument is the `vmap` to use,
        and it returns the results of all lanes.
      data: from a number of lanes to the arguments of all.
      lanes: how many there are.
      in_axes: as for `vmap`.
      takes_vmap: see `fun`.
      options: keyword arguments of `bx.vmap`.
      instead: what is run today where `jax.vmap` cannot: of what `before` makes of the arguments.
      before: from the arguments to those of `instead`.
      uneven: whether counts of lanes differ by 3x or more, or lengths of rows by 2x.
      looked_at: whether the cost model may be tuned by it; the others are held out.
      serial: whether `lax.map` is measured as well.
      needs: modules to import; by default the library under its own name.
    """

    name: str
    library: str
    fun: Callable[..., Any]
    data: Callable[[int], tuple[Any, ...]]
    lanes: int
    in_axes: Any = 0
    takes_vmap: bool = False
    options: dict[str, Any] | None = None
    instead: Callable[..., Any] | None = None
    before: Callable[..., tuple[Any, ...]] | None = None
    uneven: bool = True
    looked_at: bool = False
    serial: bool = True
    needs: tuple[str, ...] = ()

    @property
    def half(self) -> str:
        """The half of the table that it is in."""
        return "looked at" if self.looked_at else "held out"

    def missing(self) -> list[str]:
        """Which modules it needs that are not installed."""
        needs = self.needs or (self.library.lower(),) * (self.library != "JAX")
        return [name for name in needs if importlib.util.find_spec(name) is None]

    def ways(self, args: tuple[Any, ...]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """What computes the same for all lanes, each with its arguments; new functions each."""
        if self.instead is not None:
            given = args if self.before is None else jax.block_until_ready(self.before(*args))
            ways = {BEFORE: (lambda *xs: self.instead(*xs), given)}
        else:
            ways = {
                BEFORE: (self._batched(jax.vmap), args),
                COMPACT: (self._batched(bx.vmap, divergence="compact"), args),
            }
        ways[PLAIN] = (self._batched(bx.vmap), args)
        if self.serial and not self.takes_vmap and self.instead is None:
            ways[SERIAL] = (lambda *xs: one_by_one(self.fun, self.in_axes, xs), args)
        return ways

    def _batched(self, vmap: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        options = {**((self.options or {}) if vmap is bx.vmap else {}), **more}
        if self.takes_vmap:
            return lambda *xs: self.fun(lambda f, *a, **k: vmap(f, *a, **{**options, **k}), *xs)
        return vmap(lambda *xs: self.fun(*xs), self.in_axes, **options)


PROGRAMS: dict[str, Program] = {}


def program(
    library: str, name: str, data: Callable[[int], tuple[Any, ...]], lanes: int, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that enters a function in the table."""

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[f"{library}: {name}"] = Program(
            f"{library}: {name}", library, fun, data, lanes, **how
        )
        return fun

    return decorate
