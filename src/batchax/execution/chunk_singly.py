"""A few of the lanes that a mask picks, one after another; more of them all at once.

A processor takes a third of a microsecond to begin an operation, for one lane as for many. Where a
lane is little work and few are picked, that is most of the time. One after another, in a loop that
is compiled as one function, they begin nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.chunk_loop import ChunkLoop, result_types
from batchax.execution.chunk_results import results_before
from batchax.execution.entries import entry_of, part_of, put_part
from batchax.execution.gathered_lanes import count_active
from batchax.execution.operand_specs import ActiveMask, Gathered, Whole
from batchax.jaxprs.words import Value
from batchax.kernel.inner import written_into
from batchax.programs.one_function import fits_one_function


def run_few_or_all(loop: ChunkLoop, operands: Sequence[Value]) -> list[Any]:
    """What a loop computes whose lanes run one after another if there are few, on a processor.

    Lanes that are not picked have anything in its results.
    """
    count = count_active(operands[0])
    few = lambda *operands: _few(loop, count, operands)
    if loop.singly >= loop.size:
        return few(*operands)
    return list(lax.cond(count <= loop.singly, few, lambda *xs: _all(loop, xs), *operands))


def _all(loop: ChunkLoop, operands: Sequence[Value]) -> list[Any]:
    program = loop.program([jax.typeof(x) for x in operands], loop.size)
    (start,) = _compat.varying_alike([np.int32(0)], like=operands)
    return written_into(program, [start, *operands])


def _few(loop: ChunkLoop, count: Any, operands: Sequence[Value]) -> list[Any]:
    program = loop.program([jax.typeof(x) for x in operands], 1)

    def run(count: Any, *operands: Any) -> list[Any]:
        def lane(i: Any, results: Sequence[Any]) -> list[Any]:
            parts = []
            for x, spec in zip(operands, loop.operands, strict=True):
                if not isinstance(spec, Whole):
                    axis = 0 if isinstance(spec, ActiveMask) else spec.axis
                    x = part_of(x, i, axis, 1)
                parts.append(x)
            outs = written_into(program, [i, *parts])
            axes = [spec.axis for spec in loop.results if isinstance(spec, Gathered)]
            put = lambda x, out, axis: put_part(x, out, i, axis)
            return list(map(put, results, outs, axes))

        def step(i: Any, results: Sequence[Any]) -> list[Any]:
            (i,) = _compat.varying_alike([lax.convert_element_type(i, np.int32)], like=operands)
            active = entry_of(operands[0], i, 0)
            return list(lax.cond(active, lane, lambda i, results: list(results), i, results))

        before = _compat.varying_alike(results_before(loop, program), like=operands)
        return [count, *lax.fori_loop(np.int32(0), np.int32(loop.size), step, before)]

    operands = [count, *operands]
    if not fits_one_function(program.jaxpr):
        return run(*operands)[1:]
    types = [jax.typeof(count), *result_types(loop, program)]
    return _compat.in_one_function(run, types, operands)[1:]
