"""Arrays of integers that say where rows are: a primitive that compilers have in different forms.

XLA compiles each sum, sort and gather of a program for a CPU as a function of its own, which takes
10 milliseconds or more, and where rows are takes some thirty of them. A loop of small steps is one
function, and runs faster (`docs/decisions/divergence.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from batchax import _compat
from batchax.jaxprs.words import Aval, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import NoDerivative, Of, own_primitive


class IndexProgram(NamedTuple):
    """How index arrays are computed: functions of arrays of int32, and of the same parameters.

    Attributes:
      operations: by sums and sorts, side by side.
      on_cpu: to the same results, in a form that a CPU compiles and runs sooner.
      shapes: those of the results, from the types of the operands.
    """

    operations: Callable[..., list[Any]]
    on_cpu: Callable[..., list[Any]]
    shapes: Callable[..., Sequence[tuple[int, ...]]]


PROGRAMS: dict[str, IndexProgram] = {}
"""By what they find."""


WINDOW = 16
"""So many elements loops write at once. They go over rows in order: where a window reaches into the
next row, that one writes over it."""


def index_arrays(find: str, operands: Sequence[Value], **params: Any) -> list[Any]:
    """The arrays that a program of `PROGRAMS` finds, of int32; with their operands they vary."""
    return index_arrays_p.bind(*_compat.varying_alike(operands), find=find, **params)


def _operations(*operands: Any, find: str, **params: Any) -> list[Any]:
    return PROGRAMS[find].operations(*operands, **params)


def _on_cpu(*operands: Any, find: str, **params: Any) -> list[Any]:
    return PROGRAMS[find].on_cpu(*operands, **params)


def _types(*avals: Aval, find: str, **params: Any) -> list[Any]:
    vector: Any = avals[0]
    shapes = PROGRAMS[find].shapes(*avals, **params)
    return [vector.update(shape=shape, dtype=np.dtype(np.int32)) for shape in shapes]


def _batched(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Sequence[Position]]:
    return batch_function(axis, lambda *xs: _operations(*xs, **params), args, axes)


index_arrays_p = own_primitive(
    "index_arrays",
    called="where rows are",
    operations=_operations,
    on_cpu=_on_cpu,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=Of(None),
    transpose=NoDerivative("where rows are is transposed, which is not linear."),
)
