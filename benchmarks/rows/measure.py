"""Measuring a function of one row over a `Ragged`, and what one would write by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from benchmarks.measure import (
    FULL,
    QUICK,
    Effort,
    Ratio,
    Result,
    compare,
    in_turns,
    ratio_of_medians,
    repeated,
)
from benchmarks.rows.torch_encoder import torch_encoders
from benchmarks.rows.workloads import (
    TAIL_BOUND,
    Rows,
    RowWorkload,
    Weights,
    data,
    image_sizes,
    lengths,
    tailed_lengths,
)

COUNT = 128  # rows

PADDED, PACKED, LOOP = "padded by hand", "packed by hand", "a call for each row"


@dataclass(frozen=True)
class RowResult:
    """batchax and another way.

    Attributes:
      workload: what was measured.
      gradient: whether it was its gradient.
      way: the other way.
      run: the ratio of run times, batchax's over the other's.
      compared: all figures, where the other way is one program.
      seconds: of both.
    """

    workload: RowWorkload
    gradient: bool
    way: str
    run: Ratio
    compared: Result | None
    seconds: tuple[float, float]

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.workload.name}{', gradient' * self.gradient}"


def ours(workload: RowWorkload) -> Callable[[Rows, Weights], Any]:
    """All rows by batchax."""
    batched = bx.vmap(workload.row, in_axes=(0, None), buckets=workload.buckets)
    if not workload.known:
        return lambda rows, weights: batched(rows.ragged, weights)

    def of_images(rows: Rows, weights: Weights) -> Any:
        sizes = image_sizes(len(rows.ragged))
        images = bx.Ragged(rows.ragged.data, sizes, rows.ragged.max_length, axis=(0, 1))
        return batched(images, weights)

    return of_images


def measured(workload: RowWorkload, quick: bool) -> Iterator[RowResult]:
    """All that is measured of a workload, against one other way after the other."""
    effort = QUICK if quick else FULL
    batch = data(workload, min(COUNT, effort.most_lanes or COUNT))
    ways = {PADDED: workload.padded, PACKED: workload.packed}
    gradients = [False, True] if jax.tree.leaves(batch[1]) else [False]
    for gradient in gradients:
        wrap = _gradient if gradient else lambda fun: fun
        for way, other in ways.items():
            if other is not None:
                makers = [_anew(wrap(ours(workload))), _anew(wrap(other))]
                found = compare(workload.name, way, makers, batch, effort)
                seconds = found.ours.run_seconds, found.other.run_seconds
                yield RowResult(workload, gradient, way, found.run, found, seconds)
        yield _against_loop(workload, gradient, batch, effort)
        if workload.published and not gradient:
            yield from _against_torch(workload, batch, effort)


def waste(count: int = COUNT) -> float:
    """Padded elements for each true one."""
    sizes = lengths(count)
    return float(len(sizes) * sizes.max() / sizes.sum())


def tail_waste() -> float:
    """As `waste`, of the longer tail."""
    sizes = tailed_lengths()
    return float(len(sizes) * TAIL_BOUND / sizes.sum())


def _gradient(fun: Callable[[Rows, Weights], Any]) -> Callable[[Rows, Weights], Any]:
    """The gradient of a loss with respect to the weights."""

    def loss(weights: Weights, rows: Rows) -> Any:
        out = fun(rows, weights)
        return jnp.sum((out.data if isinstance(out, bx.Ragged) else out) ** 2)

    return lambda rows, weights: jax.grad(loss)(weights, rows)


def _anew(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda *args: fun(*args)


def _against_loop(
    workload: RowWorkload, gradient: bool, batch: tuple[Rows, Weights], effort: Effort
) -> RowResult:
    """Against a compiled function called for each row; it is compiled for each length."""
    rows, weights = batch
    function = jax.jit(_loss_of_row(workload) if gradient else workload.row)
    own = _gradient(ours(workload)) if gradient else ours(workload)
    program = jax.jit(own).lower(*batch).compile()
    alone = [jnp.asarray(x) for x in rows.ragged.rows()]

    def loop() -> int:
        outs = [function(x, weights) for x in alone]
        if gradient:
            outs = jax.tree.map(lambda *xs: sum(xs), *outs)
        jax.block_until_ready(outs)
        return 1

    return _in_turns(workload, gradient, LOOP, repeated(program, batch, 1), loop, effort)


def _against_torch(
    workload: RowWorkload, batch: tuple[Rows, Weights], effort: Effort
) -> Iterator[RowResult]:
    """Against the same layer in PyTorch, where that is installed."""
    program = jax.jit(ours(workload)).lower(*batch).compile()
    expected = np.asarray(program(*batch).to_padded())
    for name, way in torch_encoders(*batch).items():
        out = way()
        out = out.to_padded_tensor(0.0) if out.is_nested else out
        inside = np.asarray(batch[0].mask)[..., None]
        np.testing.assert_allclose(inside * out.numpy(), inside * expected, atol=1e-3)

        def other(way: Any = way) -> int:
            way()
            return 1

        yield _in_turns(workload, False, name, repeated(program, batch, 1), other, effort)


def _in_turns(
    workload: RowWorkload,
    gradient: bool,
    way: str,
    own: Callable[[], int],
    other: Callable[[], int],
    effort: Effort,
) -> RowResult:
    """Two sides that are not both programs of JAX, of which each run counts one."""
    sides = [own, other]
    for side in sides:
        side()
    times = in_turns(sides, effort.runs, time.perf_counter)
    medians = float(np.median(times[0])), float(np.median(times[1]))
    return RowResult(workload, gradient, way, ratio_of_medians(*times), None, medians)


def _loss_of_row(workload: RowWorkload) -> Callable[[Any, Weights], Any]:
    def loss(weights: Weights, x: Any) -> Any:
        return jnp.sum(workload.row(x, weights) ** 2)

    return lambda x, weights: jax.grad(loss)(weights, x)
