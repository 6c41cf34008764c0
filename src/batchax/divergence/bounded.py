"""Bounded loops whose lanes take different numbers of steps, and the sweeps back over them.

Values are computed as in any loop that lanes leave when they are done. That has no derivative in
reverse, so derivatives are taken of the same loop run in blocks of lanes. How many steps each
lane takes is known by then, and lanes of about as many make a block: it goes on until the last
of them is done. A block is a bounded loop or a sweep, which can be differentiated, inside a chunk
loop, which computes it again for that.

Checkpoints are not recorded on the way: those of all lanes would take more memory than a block
does, and a sweep without any makes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax import _compat
from batchax.execution.bounded_as_while import as_while
from batchax.execution.bounded_batching import batch_bounded_loop
from batchax.execution.bounded_forms import Form
from batchax.execution.bounded_loop import no_checkpoints
from batchax.execution.chunk_loop import ChunkBody, ChunkLoop, chunk_loop
from batchax.execution.operand_specs import WHOLE, Lanes
from batchax.execution.slices import with_derivative_of
from batchax.execution.watched import Steps
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, match_axis, move_axis
from batchax.kernel.divergence import BoundedLoop, PlacedOutputs
from batchax.kernel.inner import remembered
from batchax.kernel.named_axes import any_uses_axis
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose


def run_bounded_loop(axis: Axis, loop: BoundedLoop, width: int) -> PlacedOutputs | None:
    """The results of all lanes, at the front; None where lanes are to be masked.

    Args:
      axis: the axis being mapped.
      loop: the loop, or the sweep.
      width: how many lanes make a block.
    """
    programs = (loop.test, *loop.steps, *loop.guarded)
    if any_uses_axis(axis, *filter(None, programs)):
        return None
    if any(_compat.varying_axes(jax.typeof(x)) for x in loop.args):
        return None
    form = loop.form
    recorded = isinstance(form, Form) and form.kept is not None
    # Lanes at steps of their own have a common count at the end only. And in blocks a call of the
    # host would keep what only derivatives need.
    loop = replace(loop, form=replace(form, steps=Steps(form.steps.most)))
    if recorded:
        loop = replace(loop, form=replace(loop.form, kept=None))
    blocks = _Blocks(replace(axis, name=None, divergence=None), replace(loop, args=()), width)

    def build() -> Any:
        def run(args: Sequence[Value]) -> list[Any] | None:
            if loop.test is None:
                return blocks.run(lax.neg(args[0]), args)
            whole, finish = as_while(
                axis, args, loop.axes, test=loop.test, body=loop.steps[0], form=loop.form
            )
            last = axis.divergence.run(axis, whole)
            if last is None:
                return None
            outs, _ = finish(last[0])
            form.steps.end(lax.reduce_max(outs[-1], (0,)), results=outs)
            other = blocks.run(lax.neg(outs[-1]), args)
            return [
                with_derivative_of(x, y) if is_inexact(x) else x
                for x, y in zip(outs, other, strict=True)
            ]

        # Compiled as one program, in which what only derivatives need is dropped.
        return jax.jit(run)

    key = (
        axis,
        loop.test,
        *loop.guarded,
        loop.form,
        form.steps,
        tuple(loop.axes),
        width,
        "bounded",
    )
    outs = remembered(loop.steps[-1], key, build)(list(loop.args))
    if outs is None or not recorded:
        return None if outs is None else (outs, [0] * len(outs))
    none = no_checkpoints(loop.steps[0], form)
    return [*outs[:-1], *none, outs[-1]], [*[0] * len(outs[:-1]), *[None] * len(none), 0]


@dataclass(frozen=True)
class _Blocks:
    """A bounded loop, or a sweep, for blocks of lanes that take about as many steps.

    Attributes:
      axis: the axis of all lanes.
      loop: what each lane does; it has no operands.
      width: how many lanes make a block.
    """

    axis: Axis
    loop: BoundedLoop
    width: int

    def run(self, order: Any, args: Sequence[Value]) -> list[Any]:
        """The results of all lanes, at the front; blocks are formed by `order`."""
        places = jnp.argsort(order)
        back = jnp.zeros_like(places).at[places].set(lax.iota(places.dtype, places.shape[0]))
        axes = self.loop.axes
        args = [
            x if a is None else _permuted(move_axis(x, a, 0), places, back)
            for x, a in zip(args, axes, strict=True)
        ]
        specs = tuple(WHOLE if a is None else Lanes(0) for a in axes)
        body, results = ChunkBody(self._of_width), (Lanes(0),) * self.loop.form.n_results
        whole = ChunkLoop(body, specs, results, self.axis.size, self.width)
        return [_permuted(x, back, places) for x in chunk_loop(whole, args)]

    def _of_width(self, width: int) -> Any:
        axis = replace(self.axis, size=width)
        positions: list[Position] = [None if a is None else 0 for a in self.loop.axes]

        def run(start: Any, *xs: Any) -> list[Any]:
            outs, at = batch_bounded_loop(axis, replace(self.loop, args=xs, axes=positions))
            return [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]

        return run


def _permuted(x: Value, places: Any, back: Any) -> Any:
    """The entries of `x` at `places`; `back` is the inverse permutation.

    With it the transpose is a gather, too. JAX's own transpose of a gather is a scatter.
    """
    if not is_inexact(x):
        return x.at[places].get(mode="promise_in_bounds")

    def take(indices: Sequence[Any], xs: Sequence[Value]) -> list[Any]:
        return [xs[0].at[indices[0]].get(mode="promise_in_bounds")]

    def put_back(indices: Sequence[Any], xs: Sequence[Value]) -> list[Any]:
        return [xs[0].at[indices[1]].get(mode="promise_in_bounds")]

    return linear_with_transpose(take, put_back, [places, back], [x], key="permuted")[0]
