"""Programs inside operations, on padded rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.rows.padded import Operation, Row, run_padded
from batchax.rows.sizes import Sizes

Flat = Callable[..., list[Any]]


def run_inside(sizes: Sizes, body: Any, rows: Sequence[Row]) -> list[Row]:
    """The results of a program, on rows of a function that is being staged inside another."""
    body = _compat.close(body)
    return run_padded(sizes.inside(), body.jaxpr, body.consts, rows)


def arrays(rows: Sequence[Row], avals: Sequence[Aval]) -> list[Any]:
    """The arrays of rows, in the dtypes of `avals`.

    What loops, branches and rules return must have the same types whichever program ran.
    """
    return [_array(row.value, aval.dtype) for row, aval in zip(rows, avals, strict=True)]


def _array(x: Value, dtype: Any) -> Any:
    same = dtype == jax.dtypes.float0 or getattr(x, "dtype", None) == dtype
    return x if same else lax.convert_element_type(x, dtype)


def typed_rows(values: Sequence[Value], avals: Sequence[Aval]) -> list[Row]:
    """Rows of which nothing but the type is known."""
    return [Row(x, aval.shape) for x, aval in zip(values, avals, strict=True)]


class Moving:
    """Operands of a program that is staged anew: as its arguments, only those that are not known.

    The others stay known inside, so that rules may look at them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.places = [i for i, row in enumerate(rows) if not row.known]

    @property
    def values(self) -> list[Any]:
        """The arrays that are not known."""
        return [self.rows[i].value for i in self.places]

    def emptied(self) -> Moving:
        """A copy without the values that are not known: what lives on must not hold them."""
        empty = copy.copy(self)
        empty.rows = self.filled_in([None] * len(self.places))
        return empty

    def filled_in(self, values: Sequence[Value]) -> list[Row]:
        """All operands, with `values` for those that are not known."""
        rows = list(self.rows)
        for i, x in zip(self.places, values, strict=True):
            rows[i] = replace(rows[i], value=x)
        return rows


@dataclass(frozen=True)
class SizedCall:
    """A call whose operands are the sizes of the row and the values that are not known.

    Sizes are operands because the rules may run in another trace than the function, in which
    tracers of the first are of no use.
    """

    op: Operation
    operands: Moving
    names: tuple[str, ...]

    @classmethod
    def of(cls, op: Operation, rows: Sequence[Row]) -> tuple[Self, list[Any]]:
        """For an equation and its operands, and the values of those: rules may outlive them."""
        sizes, operands = op.sizes, Moving(rows)
        values = [*sizes.values.values(), *operands.values]
        op = Operation(op.eqn, sizes.inside({}))
        return cls(op, operands.emptied(), tuple(sizes.values)), values

    def opened(self, values: Sequence[Value]) -> tuple[Operation, list[Row]]:
        """The equation and its operands, where the call has these `values`."""
        count = len(self.names)
        sizes = self.op.sizes.inside(dict(zip(self.names, values[:count], strict=True)))
        return Operation(self.op.eqn, sizes), self.operands.filled_in(values[count:])


def as_function(op: Operation, body: Any, operands: Moving) -> Flat:
    """A program as a function of those arrays of `operands` that are not known."""
    body = _compat.close(body)

    def run(*values: Any) -> list[Any]:
        return arrays(run_inside(op.sizes, body, operands.filled_in(values)), body.out_avals)

    return run


def staged(fun: Flat, values: Sequence[Value]) -> tuple[ClosedJaxpr, list[Any]]:
    """A program without constants that computes `fun`, and all of its operands."""
    (program,), consts = _compat.hoist_constants(_compat.stage(fun, list(map(jax.typeof, values))))
    return program, [*consts, *values]
