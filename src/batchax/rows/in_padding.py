"""The whole program on padded rows, batched as `vmap` does for arrays of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from batchax.execution.call import Call, execute, through
from batchax.execution.chunked import Chunking
from batchax.execution.on_devices import in_parts
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs
from batchax.kernel import recording
from batchax.rows.arguments import RowSize, SizesOf, index_in
from batchax.rows.call import RowCall
from batchax.rows.found_sizes import with_lengths
from batchax.rows.index import pad_rows
from batchax.rows.padded import Row, run_padded
from batchax.rows.sizes import Sizes
from batchax.rows.steps import flatten


def executed_as_arrays(call: Call, chunking: Chunking | None) -> tuple[list[Any], FlatOutputs]:
    """What a call of arrays returns that stands for rows, so many of them at a time.

    A padded row is computed by a program that was staged for one mesh, so it stays where it is.
    """
    return execute(through([in_parts(chunking, where_types_say=False)], call))


def padded_arguments(
    mapped: Sequence[Mapped], sizes_of: Sequence[SizesOf], sizes: Sequence[RowSize]
) -> list[Mapped]:
    """The lengths of rows, for each size, and the arguments, each row padded to the longest."""
    arguments = [
        Mapped(f"the lengths {size.name}", jnp.asarray(size.index.lengths), 0) for size in sizes
    ]
    for m, own in zip(mapped, sizes_of, strict=True):
        if own:
            padded = pad_rows(m.value.data, index_in(m.value, own), m.value.axis)
            m = Mapped(m.path, padded, 0)
        arguments.append(m)
    return arguments


def execute_padded(call: RowCall, chunking: Chunking | None) -> tuple[list[Any], FlatOutputs]:
    """What a call returns, each of whose rows is padded to the longest."""
    if recording.is_on():
        steps = flatten(call.staged).steps
        recording.fact("region", layout="padded", steps=steps, rows=call.noted)
    recording.found_program(call.axis, call.staged, call.mapped)
    staged, bounds = call.staged, call.bounds
    shapes = [v.aval.shape for v in staged.jaxpr.invars]

    def padded_row(*values: Any) -> tuple[list[Any], FlatOutputs]:
        lengths = dict(zip(bounds, values, strict=False))
        arguments = [
            Row(x, shape, 0 if own else None)
            for x, shape, own in zip(values[len(bounds) :], shapes, call.sizes_of, strict=True)
        ]
        sizes = Sizes(bounds, lengths)
        rows = run_padded(sizes, staged.jaxpr, staged.consts, arguments)
        return with_lengths(sizes, rows, call.outputs, list, call)

    arguments = padded_arguments(call.mapped, call.sizes_of, call.sizes)
    outs, outputs = executed_as_arrays(Call(call.axis, padded_row, arguments), chunking)
    return outputs.rebuild(outs), call.outputs
