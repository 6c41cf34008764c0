"""Packs rows that are shorter than those they are computed from, such as ``x[1:] - x[:-1]``.

They are where the longer rows are, until they are returned. On a CPU a loop over rows computes a
few numbers at a time, from elements that are near one another, and writes them where they belong:
so nothing else is written, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.analysis.cost import TRANSCENDENTAL
from batchax.execution.slices import entry_of, part_of, put_part
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Value, Values
from batchax.kernel.named_axes import bind_varying
from batchax.kernel.registry import is_replaced_in_jax
from batchax.rows.call import Shorter
from batchax.rows.index import moved, row_places
from batchax.rows.layouts import Constant, RowProgram, RowStep
from batchax.rows.packed_forms import offset_in_row
from batchax.rows.padded_rules.own_steps import Steps, run_own_steps
from batchax.rows.sizes import ragged_axes

# Bytes that the loop reads and writes at once. XLA compiles loops as one function if a step touches
# less than twice as many. Programs: differences along tracks.
_WINDOW = 512


Near = list[tuple[RowStep, int | None]]
"""Steps that compute elements from others nearby; of those that are part of rows, where it begins.
"""


def shortened(
    x: Value, own: Shorter, program: RowProgram, output: int, arguments: Values
) -> jax.Array:
    """An output `x` of packed rows without what is between its rows, behind which are zeros."""
    near, read = _find_near(program, output, {own.size.name: own.size.bound})
    each, rows, starts = math.prod(x.shape[1:]), own.size.rows, own.size.index.starts
    args = [arguments[v] for v in read if v < len(arguments)]
    wide = 1 << (_WINDOW // sum(y.dtype.itemsize for y in (x, *args))).bit_length() - 1
    further, zero, int32 = own.less * each, np.int32(0), np.int32
    fits = wide + further <= x.size <= np.iinfo(int32).max and wide <= own.capacity * each
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    if is_key or not (near and rows and fits and len(args) == len(read)):
        return _gathered(x, own)

    def loop(_: Steps, values: Values) -> list[Any]:
        x, *args = values
        flat = [y.reshape(-1) for y in args]
        begins, sizes = (jnp.asarray(y, int32) * int32(each) for y in (starts, own.lengths))
        # Behind the last row are zeros, which no window writes over. XLA makes several kernels of a
        # sum, and this is a loop like the others.
        end = lax.fori_loop(0, rows, lambda r, total: total + entry_of(sizes, r), zero)

        def row(r: Value, state: tuple[Value, Value]) -> tuple[Value, Value]:
            (to, out), begin, size = state, entry_of(begins, r), entry_of(sizes, r)
            left = lax.max(lax.min(int32(x.size - further) - begin, end - to), zero)

            def write(width: int) -> Callable[[Value, Value], Value]:
                def window(k: Value, out: Value) -> Value:
                    at = k * int32(width)
                    parts = (part_of(y, begin + at, 0, width + further) for y in flat)
                    part = _compute(near, dict(zip(read, parts, strict=True)), each)[:width]
                    # What this writes of the next row, that one writes over.
                    return put_part(out, part, to + at)

                return window

            # Windows that reach beyond an end are left: number by number.
            whole = lax.div(lax.min(left, size + int32(wide - 1)), int32(wide))
            out = lax.fori_loop(zero, whole, write(wide), out)
            return to + size, lax.fori_loop(whole * int32(wide), size, write(1), out)

        out = lax.full((own.capacity * each,), 0, x.dtype)
        out = lax.fori_loop(0, rows, row, (zero, out))[1]
        return [out.reshape(own.capacity, *x.shape[1:])]

    gather = lambda _, values: [_gathered(values[0], own)]
    no_steps = Steps(zero, zero, ())  # of a scan: here the loop is over rows
    return run_own_steps(gather, loop, no_steps, [x, *args], 0)[0]


def _gathered(x: Value, own: Shorter) -> jax.Array:
    index, axis = own.size.index, own.axis
    room, lengths, begins = x.shape[axis], own.lengths.astype(np.int32), jnp.asarray(index.starts)
    starts, _, _, source = row_places(jnp.asarray(lengths), own.capacity, own.bound, begins)
    source = jnp.where(source < room, source, -1)

    def to(before: Value, lengths: Value, starts: Value) -> Value:
        _, _, row, at = row_places(before, room, index.bound, starts)
        row = jnp.minimum(row, len(lengths) - 1)
        return jnp.where(at - starts[row] < lengths[row], at, -1)

    return moved(x, axis, source, to, jnp.asarray(index.lengths), jnp.asarray(lengths), starts)


def _find_near(
    program: RowProgram, output: int, bounds: Mapping[str, int]
) -> tuple[Near, list[int]]:
    """The last steps to an output that are parts of rows or cheap, and the values they read."""
    result, shapes = program.outputs[output], program.shapes
    assert isinstance(result, int)
    alike = lambda v: ragged_axes(shapes[v]) == [0] and shapes[v][1:] == shapes[result][1:]

    def is_operation(step: RowStep) -> bool:
        # All cores compute functions such as a sine: this loop runs on one.
        primitive = step.eqn.primitive
        scalars = all(not i.shape for i in step.inputs if isinstance(i, Constant))
        cheap = facts_of(primitive).elementwise and primitive.name not in TRANSCENDENTAL
        return scalars and cheap and not is_replaced_in_jax(primitive)

    near: Near = []
    read = {result}
    for step in reversed(program.steps):
        if not read.isdisjoint(step.outputs) and all(map(alike, (*step.used, *step.outputs))):
            begins = offset_in_row(step.eqn, bounds)
            if begins is not None or is_operation(step):
                near.insert(0, (step, begins))
                read = read.difference(step.outputs).union(step.used)
    return near, sorted(read)


def _compute(near: Near, values: dict[int, Value], each: int) -> Value:
    """The last result of `near`, of adjacent numbers; there are so many in each element."""
    value = None
    for step, begins in near:
        width = min(values[v].size for v in step.used)  # all that is behind it is of other elements
        operands = [i.value if isinstance(i, Constant) else values[i][:width] for i in step.inputs]
        if begins is None:
            with step.eqn.ctx.manager:
                (value,) = bind_varying(step.eqn, operands)
        else:
            value = operands[0][begins * each :]
        values = {**values, step.outputs[0]: value}
    return value
