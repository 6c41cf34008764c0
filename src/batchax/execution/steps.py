"""Running the steps of a scan whose arrays have the axis of the steps anywhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.execution.buffers import blank
from batchax.execution.eager import jitted
from batchax.execution.slices import scan_slices, with_derivative_of
from batchax.execution.watched import Steps
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Position, expand_axis
from batchax.rules.masking import is_inexact


@dataclass(frozen=True)
class ScanProgram:
    """What a scan does. Equal to another one that does the same.

    Attributes:
      body: the program of one step, without constants: from values that are the same at
        each step, the carry and one entry of each of the xs to the carry and the ys.
      n_carry: number of values in the carry.
      in_axes: where each of the xs has the axis of the steps; None: the same at each.
      out_axes: where each of the ys gets it, counted from the front.
      steps: how many there are.
      reverse: whether the last step comes first.
      unroll: how many steps an iteration has; 0 for all, where their number is a symbol.
    """

    body: ClosedJaxpr = field(compare=False)
    n_carry: int
    in_axes: tuple[Position, ...]
    out_axes: tuple[int, ...]
    steps: Steps
    reverse: bool
    unroll: int
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", value_key(self.body))

    def run(
        self, consts: Sequence[Value], carry: Sequence[Value], xs: Sequence[Value]
    ) -> list[Any]:
        """The last carry and the stacked ys."""
        run = jitted(self, functools.partial(_run, self), inline=True)
        return run(list(consts), list(carry), list(xs))


# Compiled as one program, in which what only derivatives need is dropped. Outside of `jit` it would
# be computed.
def _run(
    program: ScanProgram, consts: list[Value], carry: list[Value], xs: list[Value]
) -> list[Any]:
    types = program.body.out_avals[program.n_carry :]
    axes, length = program.out_axes, program.steps.most
    sweeps = _sweeps(program, xs)
    # lax.scan stacks along axis 0. Along another one, and for several sweeps, each step writes its
    # entry where it belongs in an array that is part of the carry.
    written = [k for k, a in enumerate(axes) if (a != 0 or len(sweeps) > 1) and length != 0]
    # Their derivatives are those of what lax.scan stacks as well. Nobody looks at the values of
    # that, so the compiler drops it where nothing is differentiated.
    stacked = [k for k, t in enumerate(types) if k not in written or is_inexact(t)]
    first = len(program.body.jaxpr.eqns)
    arrays = []
    for k in written:
        array = blank(unmapped_aval(length, axes[k], types[k]), first + k)
        arrays.append(_compat.varying_as(array, types[k]))

    def one(carry: list[Value], entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = eval_jaxpr(program.body.jaxpr, (), *consts, *carry, *entries)
        return outs[: program.n_carry], outs[program.n_carry :]

    def swept(sweep: _Sweep, state: Any) -> tuple[Any, list[Any]]:
        def step(index: Any, state: Any, parts: list[Any]) -> Any:
            carry, arrays = state
            carry = _begin(program, sweep, index, carry)
            carry, ys = (
                _block(program, sweep.width, one, carry, parts)
                if sweep.width
                else one(carry, parts)
            )
            at = sweep.first + index * np.int32(sweep.width or 1)
            arrays = [
                lax.dynamic_update_slice_in_dim(
                    array, _part(ys[k], axes[k], sweep.width), at, axes[k],
                    allow_negative_indices=False,
                )
                for array, k in zip(arrays, written, strict=True)
            ]  # fmt: skip
            return (carry, arrays), [y if k in stacked else None for k, y in enumerate(ys)]

        part = [
            x if a is None or not sweep.first else lax.slice_in_dim(x, sweep.first, None, axis=a)
            for x, a in zip(xs, program.in_axes, strict=True)
        ]
        state, ys = scan_slices(
            step, state, part, program.in_axes, sweep.width, sweep.count,
            reverse=program.reverse, unroll=1 if sweep.width else program.unroll,
        )  # fmt: skip
        if sweep.width:
            ys = [y if y is None else y.reshape(-1, *y.shape[2:]) for y in ys]
        return state, ys

    state, ys_of = (carry, arrays), {}
    for sweep in reversed(sweeps) if program.reverse else sweeps:
        state, ys_of[sweep] = swept(sweep, state)
    carry, arrays = state
    program.steps.end(length, results=carry)
    ys = [
        None if pieces[0] is None else jnp.moveaxis(jnp.concatenate(pieces), 0, a)
        for *pieces, a in zip(*(ys_of[sweep] for sweep in sweeps), axes, strict=True)
    ]
    for array, k in zip(arrays, written, strict=True):
        array = _compat.weakly(array) if types[k].weak_type else array
        ys[k] = with_derivative_of(array, ys[k]) if k in stacked else array
    return [*carry, *ys]


class _Sweep(NamedTuple):
    """Steps that are taken in one loop.

    Attributes:
      first: the first of them.
      count: how many slices are taken.
      width: how many steps a slice holds; None for one, without the axis.
    """

    first: int
    count: Any
    width: int | None


_WIDTH = 16
"""Steps at a time, where an array has the axis of the steps last: a line of cache holds as many
entries of four bytes. One at a time, each of them would be read for every step. A scan of 1,000
steps over the columns of 4,096 rows took 2.3 times as long so as to transpose the array first;
columns in blocks of 16 take 0.8 times as long, and no second array. Other sizes take longer."""


_FEWEST = 4  # steps for which that is done


def _sweeps(program: ScanProgram, xs: Sequence[Value]) -> list[_Sweep]:
    """All steps one by one; or in blocks, of which the last one may be smaller."""
    types, length = program.body.out_avals[program.n_carry :], program.steps.most
    last = [
        *(x for x, a in zip(xs, program.in_axes, strict=True) if a is not None and a == x.ndim - 1),
        *(t for t, a in zip(types, program.out_axes, strict=True) if a and a == len(t.shape)),
    ]
    in_blocks = (
        isinstance(length, int)
        and length >= _FEWEST
        and program.unroll == 1
        and any(math.prod(x.shape[:-1]) >= _WIDTH for x in last)
        and not any(map(_compat.is_reference, xs))
    )
    if not in_blocks:
        return [_Sweep(0, length, None)]
    count, rest = divmod(length, _WIDTH)
    sweeps = _Sweep(0, count, _WIDTH), _Sweep(count * _WIDTH, 1, rest)
    return [sweep for sweep in sweeps if sweep.count and sweep.width]


def _begin(program: ScanProgram, sweep: _Sweep, index: Any, carry: list[Value]) -> list[Any]:
    """The carry at the start of a step, or of a block of them; tells that it begins."""
    if program.steps.told is None:
        return carry
    length, width = program.steps.most, sweep.width or 1
    steps = replace(program.steps, width=width, together=program.unroll or length)
    # Of fewer a compiler makes no loop, and nothing keeps calls in order, but that the last one is
    # told what was computed before: in reverse that is the one of the first steps.
    loops = sweep.count >= 2 * steps.together
    done = sweep.first + index * np.int32(width)
    if program.reverse:
        done = np.int32(length - width) - done
    if loops:
        steps.begin(done)
    first = sweep.first + width == length if program.reverse else sweep.first == 0
    return steps.through(carry, done) if loops or (sweep.count == 1 and first) else carry


def _block(
    program: ScanProgram, width: int, one: Any, carry: list[Value], parts: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """`width` steps: the carry after them, and their ys, stacked along axis 0."""
    scanned = [
        None if a is None else jnp.moveaxis(part, a, 0)
        for part, a in zip(parts, program.in_axes, strict=True)
    ]

    def step(carry: list[Value], entries: list[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(parts, entries, program.in_axes, strict=True)
        return one(carry, [part if a is None else entry for part, entry, a in pairs])

    return lax.scan(step, carry, scanned, length=width, reverse=program.reverse)


def _part(y: Value, axis: int, width: int | None) -> Any:
    """What is written of the ys of a step, or of a block of them: values without derivatives."""
    y = lax.stop_gradient(y) if is_inexact(y) else y
    return expand_axis(y, axis) if width is None else jnp.moveaxis(y, 0, axis)
