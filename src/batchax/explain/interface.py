"""The arguments and results of an explained function, and what values are called after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from batchax.explain.account import Value
from batchax.explain.listing import type_name, value_of
from batchax.explain.naming import Names
from batchax.frontend.outputs import AUTO, OutputArray, Reduce
from batchax.kernel.recording import PerExample
from batchax.programs.shapes import bytes_of
from batchax.rows.ragged import Ragged
from batchax.staging import Staged


def arguments_of(staged: Staged, example: PerExample | None, names: Names) -> tuple[Value, ...]:
    """The arguments, whose names their variables in the program get."""
    given = {} if example is None else example.arguments
    values = []
    for placeholder, path in zip(staged.placeholders, staged.paths, strict=True):
        variable, position = given.get(placeholder, (None, None))
        if variable is None:  # the program does not use it
            names.take(path)
            aval = placeholder.aval
            values.append(Value(path, type_name(aval), type_name(aval), None, bytes_of([aval])))
            continue
        names.give(variable, path)
        aval = variable.aval
        batched = placeholder.aval
        values.append(
            Value(path, type_name(aval), type_name(batched), position, bytes_of([batched]))
        )
    return tuple(values)


def outputs_of(
    example: PerExample, names: Names, described: Sequence[OutputArray], types: Sequence[Any]
) -> tuple[Value, ...]:
    """The results, under the names of their variables, as they are placed: their types then."""
    values = []
    for v, output, final in zip(example.outputs, described, types, strict=True):
        if isinstance(final, Ragged):
            position, final = final.element_axis, final.data
        else:
            position = _out_axis(output.spec, v.aval, final)
        aval = ShapedArray(final.shape, final.dtype)
        value = value_of(names.of(v), v.aval, None, example.axis)
        as_placed = type_name(aval), position, bytes_of([aval])
        values.append(Value(value.name, value.example, *as_placed, result=output.path))
    return tuple(values)


def _out_axis(spec: Any, example: Any, final: Any) -> int | None:
    """Where a result has the batch axis."""
    if spec is None or isinstance(spec, Reduce):
        return None
    if spec is AUTO:
        return None if len(final.shape) == len(example.shape) else 0
    return spec % len(final.shape)
