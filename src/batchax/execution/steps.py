"""Runs the steps of a scan, or steps until a predicate is false, along any axis.

A scan over other axes than the first is one primitive, which reads and writes entries where they
are. Its derivative is that of JAX's loop over arrays whose axis of steps was moved to the front:
JAX stacks residuals there, and entries that lie together are read faster than those of columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.bounded_derivatives import parts
from batchax.execution.bounded_loop import bounded_loop
from batchax.execution.call import without_references
from batchax.execution.eager import jitted
from batchax.execution.progress import Steps
from batchax.execution.slices import blank, part_of, put, put_part, take, with_derivative_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, expand_axis, match_axis
from batchax.kernel.inner import batch_function, inline_jaxpr, staging_lanes
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import Of, own_primitive
from batchax.rules.loops import settle
from batchax.rules.masking import is_inexact


def entry_axis(position: Position, steps_axis: int) -> Position:
    """Returns the batch axis of an entry, from that of an array of entries."""
    return position if position is None or position <= steps_axis else position - 1


def whole_axis(position: Position, steps_axis: int | None) -> Position:
    """Returns the batch axis of an array of entries, from that of an entry.

    With `steps_axis` None, entries are summed.
    """
    if position is None or steps_axis is None:
        return position
    return position + (steps_axis <= position)


def steps_axes(positions: Positions, axes: Sequence[int | None]) -> tuple[Any, ...]:
    """Returns the axes of the steps in arrays that have a batch axis, too."""
    return tuple(
        s if s is None else s + (a is not None and a <= s)
        for a, s in zip(positions, axes, strict=True)
    )


@dataclass(frozen=True)
class ScanProgram:
    """Describes a scan. Instances that do the same are equal."""

    # One step, without constants: from shared values, the carry, and one entry of each of the xs to
    # the carry and the ys.
    body: ClosedJaxpr = field(compare=False)
    n_carry: int
    in_axes: tuple[Position, ...]  # the axis of the steps in each of the xs; None: shared
    out_axes: tuple[int, ...]  # the axis of the steps in each of the ys, from the front
    steps: Steps
    reverse: bool  # whether the last step comes first
    unroll: int  # steps an iteration; 0: all, of a symbolic number
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", value_key(self.body))

    def run(self, consts: Values, carry: Values, xs: Values) -> list[Any]:
        run = jitted(self, functools.partial(run_steps, self), inline=True)
        return run(list(consts), list(carry), list(xs))


# Compiled as one program, in which what only derivatives need is dropped. Outside of `jit` it would
# be computed.
def run_steps(
    program: ScanProgram,
    consts: list[Value],
    carry: list[Value],
    xs: list[Value],
    differentiable: bool = True,
) -> list[Any]:
    """Runs a scan by ``lax.scan``, and returns the last carry and the ys.

    `differentiable` adds arrays to differentiate through.
    """
    types = program.body.out_avals[program.n_carry :]
    axes, length = program.out_axes, program.steps.most
    sweeps = _sweeps(program, xs)
    in_blocks, single = sweeps[0].width is not None, len(sweeps) == 1
    sliced = {i: a for i, a in enumerate(program.in_axes) if a is not None}
    # lax.scan slices and stacks along axis 0. Along another one, and for several sweeps, each step
    # reads its entry, or writes it, where it is in the whole array.
    scanned = [
        i
        for i, a in sliced.items()
        if single and (sweeps[0].count == 0 or (a == 0 and not in_blocks))
    ]
    stacked = [
        k for k, a in enumerate(axes) if length == 0 or (a == 0 and single and not in_blocks)
    ]
    read = {i: a for i, a in sliced.items() if i not in scanned}
    written = {k: a for k, a in enumerate(axes) if k not in stacked}
    # An array with the axis of the steps last is read and written in blocks, see `_WIDTH`.
    x_blocks = [i for i, a in read.items() if in_blocks and _is_last(a, xs[i].ndim)]
    y_blocks = [k for k, a in written.items() if in_blocks and _is_last(a, types[k].ndim + 1)]
    # Values are cut from constants, and derivatives flow through `handed` (see `scan_slices`).
    fixed = {i: lax.stop_gradient(xs[i]) if is_inexact(xs[i]) else xs[i] for i in read}
    first = len(program.body.jaxpr.eqns)

    def blanks(which: Iterable[int]) -> dict[int, Any]:
        avals = {k: unmapped_aval(length, axes[k], types[k]) for k in which}
        arrays = {k: blank(aval, first + k) for k, aval in avals.items()}
        return {k: _compat.varying_as(array, types[k]) for k, array in arrays.items()}

    def cut(state: _State, i: int, start: Value, width: int) -> Any:
        part = part_of(fixed[i], start, read[i], width)
        if i in state.handed:
            way, state.handed[i] = take(state.handed[i], start, read[i], width)
            part = with_derivative_of(part, way)
        return part

    def write(state: _State, k: int, part: Value, start: Value) -> None:
        if k in state.ways:
            state.ways[k] = put(state.ways[k], part, start, written[k])
            part = lax.stop_gradient(part)
        state.arrays[k] = put_part(state.arrays[k], part, start, written[k])

    def one(state: _State, at: Value, given: dict[int, Any]) -> tuple[_State, dict[int, Any]]:
        state = state.copy()
        for i in read:
            if i not in given:
                given[i] = lax.squeeze(cut(state, i, at, 1), [read[i]])
        entries = [
            x if a is None else given[i]
            for i, (x, a) in enumerate(zip(xs, program.in_axes, strict=True))
        ]
        outs = eval_jaxpr(program.body.jaxpr, (), *consts, *state.carry, *entries)
        ys = dict(enumerate(outs[program.n_carry :]))
        for k in written:
            if k not in y_blocks:
                write(state, k, expand_axis(ys.pop(k), written[k]), at)
        return state._replace(carry=outs[: program.n_carry]), ys

    def block(state: _State, at: Value, width: int) -> _State:
        state = state.copy()
        parts = {i: jnp.moveaxis(cut(state, i, at, width), read[i], 0) for i in x_blocks}
        inner = state.without(x_blocks, y_blocks)
        each = at + lax.iota(np.int32, width), parts
        inner, ys = lax.scan(
            lambda state, x: one(state, x[0], dict(x[1])),
            inner, each, length=width, reverse=program.reverse,
        )  # fmt: skip
        for k in y_blocks:
            write(state, k, jnp.moveaxis(ys[k], 0, written[k]), at)
        return inner.with_rest(state)

    def swept(sweep: _Sweep, state: _State) -> tuple[_State, Any]:
        def step(state: _State, x: Value) -> tuple[_State, Any]:
            index, given = x
            state = state._replace(carry=_begin(program, sweep, index, state.carry))
            at = sweep.first + index * np.int32(sweep.width or 1)
            if sweep.width:
                return block(state, at, sweep.width), {}
            return one(state, at, dict(given))

        given = {i: xs[i] if sliced[i] == 0 else jnp.moveaxis(xs[i], sliced[i], 0) for i in scanned}
        return lax.scan(
            step, state, (lax.iota(np.int32, sweep.count), given), length=sweep.count,
            reverse=program.reverse, unroll=1 if sweep.width else program.unroll,
        )  # fmt: skip

    smooth = [k for k in written if differentiable and is_inexact(types[k])]
    handed = {i: xs[i] for i in read if differentiable and is_inexact(xs[i])}
    state, ys = _State(carry, handed, blanks(written), blanks(smooth)), {}
    # Each sweep continues with the arrays of the one before.
    for sweep in reversed(sweeps) if program.reverse else sweeps:
        state, ys = swept(sweep, state)
    program.steps.end(length, results=state.carry)
    ys = {k: y if axes[k] == 0 else jnp.moveaxis(y, 0, axes[k]) for k, y in ys.items()}
    for k, array in state.arrays.items():
        array = with_derivative_of(array, state.ways[k]) if k in smooth else array
        ys[k] = _compat.weakly(array) if types[k].weak_type else array
    return [*state.carry, *(ys[k] for k in range(len(types)))]


class _State(NamedTuple):
    """Holds what a step hands to the next."""

    carry: list[Value]  # of the user
    handed: dict[int, Any]  # arrays to slice, for derivatives
    arrays: dict[int, Any]  # the ys, written in place
    ways: dict[int, Any]  # the ys again, for derivatives

    def copy(self) -> _State:
        return _State(self.carry, dict(self.handed), dict(self.arrays), dict(self.ways))

    def without(self, xs: Sequence[int], ys: Sequence[int]) -> _State:
        return _State(
            self.carry,
            {i: x for i, x in self.handed.items() if i not in xs},
            {k: y for k, y in self.arrays.items() if k not in ys},
            {k: y for k, y in self.ways.items() if k not in ys},
        )

    def with_rest(self, other: _State) -> _State:
        return _State(
            self.carry,
            {**other.handed, **self.handed},
            {**other.arrays, **self.arrays},
            {**other.ways, **self.ways},
        )


def _is_last(axis: int, ndim: int) -> bool:
    return axis > 0 and axis == ndim - 1


class _Sweep(NamedTuple):
    """Describes steps that run in one loop."""

    first: int  # the first step
    count: Any  # number of slices
    width: int | None  # steps of a slice; None: one, without the axis


_WIDTH = 16
"""Steps at a time, where an array has the axis of the steps last: a line of cache holds as many
entries of four bytes. One at a time, each of them would be read for every step. A scan of 1,000
steps over the columns of 4,096 rows took 2.3 times as long so as to transpose the array first;
columns in blocks of 16 take 0.8 times as long, and no second array. Other sizes take longer."""

_WIDTHS = (16, 20, 24, 12, 18, 22, 14, 10, 15, 21, 11, 13, 17, 19, 23, 9, 8)
"""As good, if there is nothing left over, the better ones first."""

_FEWEST = 4  # steps for which that is done


def _sweeps(program: ScanProgram, xs: Values) -> list[_Sweep]:
    """Plans all steps one by one, or in blocks, of which the last may be smaller."""
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
    # Blocks of one width are one loop, of a program that is compiled once.
    width = next((n for n in _WIDTHS if length % n == 0), _WIDTH)
    count, rest = divmod(length, width)
    sweeps = _Sweep(0, count, width), _Sweep(count * width, 1, rest)
    return [sweep for sweep in sweeps if sweep.count and sweep.width]


def _begin(program: ScanProgram, sweep: _Sweep, index: Value, carry: list[Value]) -> list[Any]:
    """Reports a step, or block, at its start, and returns the carry."""
    if program.steps.callback is None:
        return carry
    length, width = program.steps.most, sweep.width or 1
    steps = replace(program.steps, width=width, together=program.unroll or length)
    # Of fewer a compiler makes no loop, and nothing keeps calls in order, but that the last one is
    # told what was computed before: in reverse that is the one of the first steps.
    loops = sweep.count >= 2 * steps.together
    # Count steps from the one that runs first.
    done = sweep.first + index * np.int32(width)
    if program.reverse:
        done = np.int32(length - width) - done
    if loops:
        steps.begin(done)
    first = sweep.first + width == length if program.reverse else sweep.first == 0
    return steps.through(carry, done) if loops or (sweep.count == 1 and first) else carry


def run_scan(program: ScanProgram, consts: Values, carry: Values, xs: Values) -> list[Any]:
    operands = [*consts, *carry, *xs]
    in_place = _is_in_place(program, operands)
    return _bind(program, operands) if in_place else program.run(consts, carry, xs)


def _is_in_place(program: ScanProgram, operands: Values) -> bool:
    """Returns whether a scan uses this primitive instead of `scan_p`."""
    # Along axis 0, JAX's scan is as good. Inside a function of one example, readers of the jaxpr
    # know JAX's scan, and JAX orders effects.
    axes = [*(a for a in program.in_axes if a is not None), *program.out_axes]
    return (
        any(axes)
        and isinstance(program.steps.most, int)
        and program.steps.most > 0
        and program.steps.callback is None
        and not program.body.effects
        and not staging_lanes()
        and not any(map(_compat.is_reference, operands))
        and not any(_compat.varying_axes(jax.typeof(x)) for x in operands)
    )


def _bind(program: ScanProgram, operands: Values) -> list[Any]:
    return scan_steps_p.bind(*operands, program=program, body=program.body)


def _split(program: ScanProgram, operands: Values) -> list[list[Any]]:
    n_consts = len(operands) - program.n_carry - len(program.in_axes)
    return parts(operands, n_consts, program.n_carry)


def _operations(
    *operands: Value, program: ScanProgram, body: ClosedJaxpr, differentiable: bool = False
) -> list[Any]:
    consts, carry, xs = _split(program, operands)
    return run_steps(replace(program, body=body), consts, carry, xs, differentiable)


def _moved(*operands: Value, program: ScanProgram, body: ClosedJaxpr) -> list[Any]:
    consts, carry, xs = _split(program, operands)
    axes = program.in_axes
    in_front = replace(
        program,
        body=body,
        in_axes=tuple(a if a is None else 0 for a in axes),
        out_axes=(0,) * len(program.out_axes),
    )
    xs = [jnp.moveaxis(x, a, 0) if a else x for x, a in zip(xs, axes, strict=True)]
    carry, ys = parts(run_steps(in_front, consts, carry, xs), program.n_carry)
    return [*carry, *(jnp.moveaxis(y, 0, a) for y, a in zip(ys, program.out_axes, strict=True))]


def _compute(*operands: Value, program: ScanProgram, body: ClosedJaxpr) -> list[Any]:
    run = functools.partial(_operations, program=program, body=body)
    return jitted((program, "in place"), run)(*operands)


def _types(*avals: Any, program: ScanProgram, body: ClosedJaxpr) -> list[Any]:
    carry, ys = parts(body.out_avals, program.n_carry)
    axes = zip(ys, program.out_axes, strict=True)
    return [*carry, *(unmapped_aval(program.steps.most, a, y) for y, a in axes)]


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    program: ScanProgram,
    body: ClosedJaxpr,
) -> tuple[list[Any], Positions]:
    varies = any(_compat.varying_axes(jax.typeof(x)) for x in args)
    if varies or any_uses_axis(axis, body):  # in the way that the axis has for JAX's loop
        run = functools.partial(_operations, program=program, body=body, differentiable=True)
        return batch_function(axis, run, args, axes)
    consts_at, carry_at, xs_at = _split(program, axes)
    entries = [
        a if s is None else entry_axis(a, s) for a, s in zip(xs_at, program.in_axes, strict=True)
    ]
    # The batch axis of an entry need not be in front, so arrays are not transposed.
    batched, carry_at, ys_at = settle(axis, body, consts_at, carry_at, entries)
    targets = [*consts_at, *carry_at, *xs_at]
    placed = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(args, axes, targets, strict=True)
    ]
    program = replace(
        program,
        body=batched,
        in_axes=steps_axes(xs_at, program.in_axes),
        out_axes=(y_axes := steps_axes(ys_at, program.out_axes)),
    )
    return _bind(program, placed), [*carry_at, *map(whole_axis, ys_at, y_axes)]


scan_steps_p = own_primitive(
    "scan_steps",
    called="scan",
    operations=_operations,
    types=_types,
    programs=("body",),
    facts="costly control",
    rule=_batched,
    jvp=Of(_moved),
    transpose=Of(_moved),
    compute=_compute,
)


@dataclass(frozen=True)
class BoundedSteps:
    """Describes a loop that runs while its predicate is true.

    Instances that do the same are equal.
    """

    # The predicate, without constants: of shared values and the carry.
    test: ClosedJaxpr = field(compare=False)
    # One step, without constants: from shared values, the carry, and one entry of each of the xs to
    # the carry and the ys.
    body: ClosedJaxpr = field(compare=False)
    n_carry: int
    in_axes: tuple[Position, ...]  # the axis of the steps in each of the xs; None: shared
    out_axes: tuple[int, ...]  # the axis of the steps in each of the ys, from the front
    steps: Steps  # the bound, and progress
    reverse: bool = False  # whether the last entry comes first
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (value_key(self.test), value_key(self.body)))

    def run(
        self,
        test_consts: Sequence[Any],
        consts: Values,
        carry: Values,
        xs: Values,
    ) -> list[Any]:
        """Returns the last carry and the stacked ys, zeros for steps that were not taken."""
        # One program, compiled once: outside of `jit` each call stages its functions again.
        run = jitted(self, functools.partial(_run, self), inline=True)
        return run(list(test_consts), list(consts), list(carry), list(xs))


def _run(
    loop: BoundedSteps,
    test_consts: list[Any],
    consts: list[Value],
    carry: list[Value],
    xs: list[Value],
) -> list[Any]:
    axes = [a for a in loop.in_axes if a is not None]
    scanned = [x for x, a in zip(xs, loop.in_axes, strict=True) if a is not None]
    shared = [x for x, a in zip(xs, loop.in_axes, strict=True) if a is None]

    def turned(arrays: Values, axes: Sequence[int]) -> list[Any]:
        if not loop.reverse:
            return list(arrays)
        return [lax.rev(x, [a]) for x, a in zip(arrays, axes, strict=True)]

    def test(consts: Values, carry: Values) -> Any:
        return inline_jaxpr(loop.test, [*consts, *carry])[0]

    def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        entries, same = iter(x), iter(consts[len(consts) - len(shared) :])
        parts = [next(same) if a is None else next(entries) for a in loop.in_axes]
        own = consts[: len(consts) - len(shared)]
        outs = inline_jaxpr(loop.body, [*own, *carry, *parts])
        return outs[: loop.n_carry], outs[loop.n_carry :]

    results = bounded_loop(
        step,
        [*consts, *shared],
        carry,
        turned(scanned, axes),
        test=test,
        test_consts=test_consts,
        count=np.int32(loop.steps.most),
        steps=loop.steps,
        x_axes=axes,
        y_axes=loop.out_axes,
    )
    return [*results.carry, *turned(results.ys, loop.out_axes)]


def run_until(
    test: Any,
    body: Any,
    carry: Values,
    xs: Values,
    in_axes: tuple[Position, ...],
    out_axes: tuple[int, ...],
    steps: Steps,
    reverse: bool = False,
) -> list[Any]:
    """Runs traced steps while the traced predicate is true.

    Inside ``shard_map`` the xs are cast to the types that the steps were traced for. Raises
    UnsupportedError for a reference.
    """
    entries = body.in_avals[len(carry) :]
    test, test_consts = _hoisted(test)
    body, consts = _hoisted(body, xs)
    loop = BoundedSteps(test, body, len(carry), in_axes, out_axes, steps, reverse)
    return loop.run(test_consts, consts, carry, list(map(_compat.varying_as, xs, entries)))


def _hoisted(staged: ClosedJaxpr, xs: Values = ()) -> tuple[ClosedJaxpr, list[Any]]:
    """Turns constants of a program into leading inputs, and returns them."""
    if any(map(_compat.is_reference, (*staged.consts, *xs))):
        raise UnsupportedError(
            "a reference (jax.new_ref) is used in a loop that ends on a value and keeps what its "
            "derivative needs, which a reference would not hold. Put the array into the carry."
        )
    (program,), consts = _compat.hoist_constants(without_references(staged, None, 0))
    return program, consts
