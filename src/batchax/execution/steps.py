"""Runs the steps of a scan, or steps until a predicate is false, along any axis.

A scan over other axes than the first is one primitive, which reads and writes entries where they
are. Its derivative is that of JAX's loop over arrays whose axis of steps was moved to the front:
JAX stacks residuals there, and entries that lie together are read faster than those of columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from batchax.execution.slices import blank, entry_of, part_of, put_entry, put_part
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, match_axis
from batchax.kernel.inner import batch_function, inline_jaxpr, staging_lanes
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import Of, own_primitive
from batchax.rules.loops import settle


def entry_axis(position: Position, steps_axis: int) -> Position:
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

    def run(self, consts: Values, carry: Values, xs: Values) -> list[Value]:
        run = jitted(self, functools.partial(run_steps, self), inline=True)
        return run(list(consts), list(carry), list(xs))


def run_steps(
    program: ScanProgram, consts: list[Value], carry: list[Value], xs: list[Value]
) -> list[Value]:
    """Runs a scan by ``lax.scan``, with the axis of the steps moved to the front."""
    length = program.steps.most
    # A reference stays as it is: it is read along axis 0.
    given = [
        None if a is None else jnp.moveaxis(x, a, 0) if a else x
        for x, a in zip(xs, program.in_axes, strict=True)
    ]

    def step(carry: Tree, x: Tree) -> tuple[Tree, Tree]:
        index, entries = x
        return _one(program, consts, xs, _begin(program, index, carry), entries)

    carry, ys = lax.scan(
        step,
        carry,
        (lax.iota(np.int32, length), given),
        length=length,
        reverse=program.reverse,
        unroll=program.unroll,
    )
    program.steps.end(length, results=carry)
    return [*carry, *(jnp.moveaxis(y, 0, a) for y, a in zip(ys, program.out_axes, strict=True))]


def _one(
    program: ScanProgram, consts: Values, xs: Values, carry: Values, entries: Values
) -> tuple[Values, Values]:
    pairs = zip(xs, entries, program.in_axes, strict=True)
    given = [x if a is None else entry for x, entry, a in pairs]
    outs = eval_jaxpr(program.body.jaxpr, (), *consts, *carry, *given)
    return outs[: program.n_carry], outs[program.n_carry :]


def _begin(program: ScanProgram, index: Value, carry: list[Value]) -> list[Value]:
    """Reports a step at its start, and returns the carry."""
    if program.steps.callback is None:
        return carry
    length = program.steps.most
    steps = replace(program.steps, together=program.unroll or length)
    # Of fewer a compiler makes no loop, and nothing keeps calls in order, but that the last one is
    # told what was computed before.
    loops = length >= 2 * steps.together
    # Count steps from the one that runs first.
    done = np.int32(length - 1) - index if program.reverse else index
    if loops:
        steps.begin(done)
    return steps.through(carry, done) if loops or length == 1 else carry


def run_scan(program: ScanProgram, consts: Values, carry: Values, xs: Values) -> list[Value]:
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


def _bind(program: ScanProgram, operands: Values) -> list[Value]:
    return scan_steps_p.bind(*operands, program=program, body=program.body)


def _split(program: ScanProgram, operands: Values) -> list[list[Any]]:
    n_consts = len(operands) - program.n_carry - len(program.in_axes)
    return parts(operands, n_consts, program.n_carry)


_WIDTH = 16
"""Steps at a time, where an array has the axis of the steps last: a line of cache holds as many
entries of four bytes. One at a time, each of them would be read for every step. A scan of 1,000
steps over the columns of 4,096 rows took 2.3 times as long so as to transpose the array first;
columns in blocks of 16 are 1.25x faster, without a second array. Other sizes take longer."""

_WIDTHS = (16, 20, 24, 12, 18, 22, 14, 10, 15, 21, 11, 13, 17, 19, 23, 9, 8)
"""As good, if there is nothing left over, the better ones first."""

_FEWEST = 4  # steps for which that is done


def _width(program: ScanProgram, xs: Values) -> int:
    """Returns how many steps read and write their entries at a time."""
    types, length = program.body.out_avals[program.n_carry :], program.steps.most
    last = [
        *(x for x, a in zip(xs, program.in_axes, strict=True) if a and a == x.ndim - 1),
        *(t for t, a in zip(types, program.out_axes, strict=True) if a and a == len(t.shape)),
    ]
    many = any(math.prod(x.shape[:-1]) >= _WIDTH for x in last)
    if length < _FEWEST or program.unroll != 1 or not many:
        return 1
    # Blocks of one width are one loop, of a program that is compiled once.
    return next((n for n in _WIDTHS if length % n == 0), min(_WIDTH, length))


def _operations(*operands: Value, program: ScanProgram, body: ClosedJaxpr) -> list[Value]:
    """Runs a scan that reads and writes entries where they are in the arrays."""
    program = replace(program, body=body)
    consts, carry, xs = _split(program, operands)
    types, axes, length = body.out_avals[program.n_carry :], program.out_axes, program.steps.most
    width, first = _width(program, xs), len(body.jaxpr.eqns)
    count, rest = divmod(length, width)
    run = functools.partial(_one, program, consts, xs)

    def parts_of(get: Callable[[Value, int], Any]) -> list[Value]:
        pairs = zip(xs, program.in_axes, strict=True)
        return [None if a is None else get(x, a) for x, a in pairs]

    def step(carry: Tree, arrays: Values, at: Value) -> tuple[Tree, Tree]:
        carry, ys = run(carry, parts_of(lambda x, a: entry_of(x, at, a)))
        written = zip(arrays, ys, axes, strict=True)
        return carry, [put_entry(x, y, at, a) for x, y, a in written]

    def block(carry: Tree, arrays: Values, at: Value, width: int) -> tuple[Tree, Tree]:
        parts = parts_of(lambda x, a: jnp.moveaxis(part_of(x, at, a, width), a, 0))
        carry, ys = lax.scan(run, carry, parts, length=width, reverse=program.reverse)
        written = zip(arrays, ys, axes, strict=True)
        return carry, [put_part(x, jnp.moveaxis(y, 0, a), at, a) for x, y, a in written]

    def each(state: tuple[Values, Values], index: Value) -> tuple[Any, None]:
        at = index * np.int32(width)
        return (step(*state, at) if width == 1 else block(*state, at, width)), None

    blanks = (blank(unmapped_aval(length, axes[k], t), first + k) for k, t in enumerate(types))
    state: Any = carry, list(map(_compat.varying_as, blanks, types))
    left = functools.partial(block, at=np.int32(count * width), width=rest)
    if rest and program.reverse:
        state = left(*state)
    state, _ = lax.scan(
        each,
        state,
        lax.iota(np.int32, count),
        reverse=program.reverse,
        unroll=program.unroll if width == 1 else 1,
    )
    if rest and not program.reverse:
        state = left(*state)
    carry, arrays = state
    weak = zip(arrays, types, strict=True)
    return [*carry, *(_compat.weakly(x) if t.weak_type else x for x, t in weak)]


def _moved(*operands: Value, program: ScanProgram, body: ClosedJaxpr) -> list[Value]:
    return run_steps(replace(program, body=body), *_split(program, operands))


def _compute(*operands: Value, program: ScanProgram, body: ClosedJaxpr) -> list[Value]:
    run = functools.partial(_operations, program=program, body=body)
    return jitted((program, "in place"), run)(*operands)


def _types(*avals: Aval, program: ScanProgram, body: ClosedJaxpr) -> list[Aval]:
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
) -> tuple[list[Value], Positions]:
    varies = any(_compat.varying_axes(jax.typeof(x)) for x in args)
    if varies or any_uses_axis(axis, body):  # in the way that the axis has for JAX's loop
        run = functools.partial(_moved, program=program, body=body)
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


def run_until(
    test: ClosedJaxpr,
    body: ClosedJaxpr,
    carry: Values,
    xs: Values,
    in_axes: tuple[Position, ...],
    out_axes: tuple[int, ...],
    steps: Steps,
    reverse: bool = False,
) -> list[Value]:
    """Runs traced steps while the traced predicate is true.

    `in_axes` and `out_axes` are those of the steps in the xs (None: shared) and in the ys, which
    are zeros for steps that were not taken. Inside ``shard_map`` the xs are cast to the types that
    the steps were traced for. Raises UnsupportedError for a reference.
    """
    n_carry, entries = len(carry), body.in_avals[len(carry) :]
    test, test_consts = _hoisted(test)
    body, consts = _hoisted(body, xs)
    # One program, compiled once: outside of `jit` each call stages its functions again.
    key = value_key(test), value_key(body), n_carry, in_axes, out_axes, steps, reverse

    def turned(arrays: Values, axes: Sequence[int]) -> list[Value]:
        if not reverse:
            return list(arrays)
        return [lax.rev(x, [a]) for x, a in zip(arrays, axes, strict=True)]

    def loop(test_consts: Values, consts: Values, carry: Values, xs: Values) -> list[Value]:
        axes = [a for a in in_axes if a is not None]
        scanned = [x for x, a in zip(xs, in_axes, strict=True) if a is not None]
        shared = [x for x, a in zip(xs, in_axes, strict=True) if a is None]

        def going_on(consts: Values, carry: Values) -> Value:
            return inline_jaxpr(test, [*consts, *carry])[0]

        def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
            own, shared = parts(consts, n_consts)
            entries, same = iter(x), iter(shared)
            given = [next(same) if a is None else next(entries) for a in in_axes]
            outs = inline_jaxpr(body, [*own, *carry, *given])
            return outs[:n_carry], outs[n_carry:]

        results = bounded_loop(
            step,
            [*consts, *shared],
            carry,
            turned(scanned, axes),
            test=going_on,
            test_consts=test_consts,
            count=np.int32(steps.most),
            steps=steps,
            x_axes=axes,
            y_axes=out_axes,
        )
        return [*results.carry, *turned(results.ys, out_axes)]

    n_consts = len(consts)
    xs = list(map(_compat.varying_as, xs, entries))
    return jitted(key, loop, inline=True)(test_consts, consts, list(carry), xs)


def _hoisted(staged: ClosedJaxpr, xs: Values = ()) -> tuple[ClosedJaxpr, list[Any]]:
    """Turns constants of a program into leading inputs, and returns them."""
    if any(map(_compat.is_reference, (*staged.consts, *xs))):
        raise UnsupportedError(
            "a reference (jax.new_ref) is used in a loop that ends on a value and keeps what its "
            "derivative needs, which a reference would not hold. Put the array into the carry."
        )
    (program,), consts = _compat.hoist_constants(without_references(staged, None, 0))
    return program, consts
