"""Rows in padded arrays: a program of one row becomes one of a padded row and its length.

What it computes within the row is what the row alone would give; what it leaves in the padding
is never seen. The result is an ordinary function of arrays of one size and of the row's
lengths, which `vmap` batches as it does any other.

Each operation that mixes the elements of a row has its operands' padding filled with what does
no harm there (zero for a sum), by the tables and rules in `padded_rules`. Derivatives flow the
other way: what spreads one value over a row, such as a broadcast, collects in reverse what
padding sends back. That must be nothing, not zero times infinity, and `cut` sees to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import programs_inside
from batchax.jaxprs.error_format import line_of
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of, shown
from batchax.jaxprs.types import Aval, Eqn, Jaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.named_axes import bind_varying
from batchax.kernel.registry import is_replaced_in_jax
from batchax.rows.sizes import Dim, Shape, Sizes, depends_on_sizes, finds_size, leaves_with_found
from batchax.rules.masking import is_inexact, safe_lanes


@dataclass
class Row:
    """A value of one row."""

    # An array whose shape has the bound of each size. A NumPy array where the value is known
    # while the program is staged.
    value: Value
    shape: tuple[Dim, ...]  # the shape of the row's own part, of which sizes may be symbolic
    fill: Any = None  # what all of the padding holds; None if it may hold anything
    # A value, and the axes along which the padding is known to hold it.
    partly: tuple[Any, tuple[int, ...]] | None = None
    # Where its elements are among those of other rows, packed along axis 0: the array, and where
    # in it the row begins. What reads few elements at a time reads them there.
    packed: tuple[Value, Value] | None = None
    # Computes its array again from operands whose padding is zero, as its own then is, too; and how
    # many elements that masks. Copies have neither, since they may be of another trace.
    with_zeros: Callable[[], Value] | None = field(default=None, init=False)
    masked: int | None = field(default=None, init=False)

    @property
    def to_mask(self) -> int:
        """How many elements are masked for its padding to be zero."""
        if _same(self.fill, 0):
            return 0
        return self.size if self.masked is None else self.masked

    @property
    def size(self) -> int:
        return math.prod(np.shape(self.value))

    @property
    def known(self) -> bool:
        return _is_known(self.value)


Results: TypeAlias = Value | Row | Sequence[Value | Row]
"""What a rule returns: for each result an array or a `Row`."""

PaddedRule = Callable[..., Results]
"""``rule(op, *rows, **params)``"""

_rules: dict[str, PaddedRule] = {}
_rules_by_fact: dict[str, PaddedRule] = {}


R = TypeVar("R", bound=PaddedRule)


def padded_rule(*primitives: str, fact: str | None = None) -> Callable[[R], R]:
    """Decorator: how primitives of these names, or of which `fact` is true, act on padded rows."""

    def decorate(rule: R) -> R:
        _rules.update(dict.fromkeys(primitives, rule))
        if fact is not None:
            _rules_by_fact[fact] = rule
        return rule

    return decorate


def _find_rule(primitive: _compat.Primitive) -> PaddedRule | None:
    rule = None if _compat.is_namesake(primitive) else _rules.get(primitive.name)
    facts = facts_of(primitive)
    return rule or next((r for fact, r in _rules_by_fact.items() if getattr(facts, fact)), None)


@dataclass(frozen=True)
class Operation:
    """The equation that a rule is called for, and what its sizes are."""

    eqn: Any
    sizes: Sizes

    @property
    def out_shape(self) -> tuple[Any, ...]:
        return self.eqn.outvars[0].aval.shape

    def bind(self, *values: Value, **changes: Any) -> Any:
        """The operation on padded arrays, with the bound of each size; `changes` are parameters."""
        params = self.sizes.filled_in({**self.eqn.params, **changes})
        outs = bind_varying(self.eqn, values, **params)
        return outs if self.eqn.primitive.multiple_results else outs[0]

    def filled(self, row: Row, value: Value, axes: Sequence[int] | None = None) -> Value:
        """The array of `row` with `value` in its padding along `axes` (default: all)."""
        padded = self.sizes.padded_axes(row.shape)
        to_fill = {a for a in padded if axes is None or a in axes}
        if _same(row.fill, value) or not to_fill:
            return row.value
        done: set[int] = set()
        if row.partly is not None and _same(row.partly[0], value):
            done = set(row.partly[1])
        if row.with_zeros is not None and _same(value, 0):
            row.value, row.fill = row.with_zeros(), 0
        elif not to_fill <= done:
            # The row stays filled: what uses it next may want the same.
            row.value = self.masked(row, value, sorted(to_fill - done))
            done |= to_fill
            row.fill = value if done == set(padded) else None
            row.partly = value, tuple(sorted(done))
        return row.value

    def masked(self, row: Row, value: Value, axes: Sequence[int] | None = None) -> jax.Array:
        """As `filled`, for a `value` that may be traced: what padding holds is not noted."""
        axes = self.sizes.padded_axes(row.shape) if axes is None else axes
        mask = self.sizes.mask(row.shape, axes)
        x = jnp.asarray(row.value)
        return x if mask is None else lax.select(mask, x, lax.full_like(x, value))

    def keeping_zeros(self, rows: Sequence[Row], compute: Callable[..., Value]) -> Row:
        """The result of an operation that makes zeros of the zeros that `rows` are padded with.

        `rows` are padded along the axes that the result is. A mask between a product and its sums
        keeps XLA from computing them in one pass, and has it compute the product for each of them.
        So the operands are masked, where one of them is smaller than the result, or zero already.
        """
        name, out = self.eqn.primitive.name, self.result(compute(*(row.value for row in rows)))
        masked = [row.to_mask for row in rows]
        if rows and not any(masked):
            out.fill = 0
        elif rows and min(masked) < out.to_mask and (len(rows) == 1 or name == "mul"):
            out.masked = sum(masked)
            out.with_zeros = lambda: compute(*(self._zeroed(row, out.size) for row in rows))
        return out

    def _zeroed(self, row: Row, size: int) -> Value:
        """The array of `row` with zeros in its padding, an operand of a result of that `size`.

        If its elements are repeated there, XLA would compute all that is cheap for each of their
        copies. It does not for a division that no compiler can simplify.
        """
        value = self.filled(row, 0)
        mask = self.sizes.mask(row.shape, self.sizes.padded_axes(row.shape))
        if mask is None or row.size >= size or not is_inexact(value):
            return value
        one, two = (lax.full_like(value, x) for x in (1, 2))
        return lax.div(value, lax.select(mask, one, two))

    def cut(self, value: Value, shape: Shape, axes: Sequence[int] | None = None) -> Value:
        """`value` as it is, but no derivative passes through its padding along `axes`.

        What comes back from padding may be infinite, or no number, and zero times that is none.
        """
        if not is_inexact(value):
            return value
        axes = self.sizes.padded_axes(shape) if axes is None else axes
        mask = self.sizes.mask(shape, axes)
        return value if mask is None else safe_lanes(mask, value, value.ndim, "keep")

    def result(self, value: Value, fill: Value = None, index: int = 0) -> Row:
        return Row(value, self.eqn.outvars[index].aval.shape, fill)

    def reject(self, why: str) -> CannotPad:
        return CannotPad(shown(self.eqn.primitive), why).within(self.eqn)


class CannotPad(UnsupportedError):
    """A program of which no padded form is exact; rows of one length can still run together."""

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(operation, why)
        self._line = self._running = ""

    def within(self, eqn: Eqn) -> CannotPad:
        """This error, of something inside an equation. What JAX has cached knows no line."""
        self._line = self._line or line_of(eqn, running=False)
        self._running = self._running or line_of(eqn)
        return self

    def __str__(self) -> str:
        operation, why = self.args
        line = self._line or self._running
        where = f" at {line}" if line else ""
        return (
            f"the operation `{operation}`{where} cannot be computed for rows of different lengths "
            f"at once: {why}"
        )


def _same(a: Value, b: Value) -> bool:
    if a is None or b is None:
        return False
    return bool(a == b or (a != a and b != b))


def run_padded(sizes: Sizes, jaxpr: Jaxpr, consts: Values, rows: Sequence[Row]) -> list[Row]:
    with recording.run(jaxpr):
        return evaluate(
            jaxpr,
            [Row(x, v.aval.shape) for v, x in zip(jaxpr.constvars, consts, strict=True)],
            list(map(replace, rows)),  # copies: to fill them must not change the caller's
            functools.partial(run_equation, sizes),
            lambda literal: Row(literal.val, jnp.shape(literal.val)),
            lambda eqn: eqn.effects or finds_size(eqn),
        )


def run_equation(sizes: Sizes, eqn: Eqn, rows: Sequence[Row]) -> list[Row]:
    with recording.meant(eqn) as record:
        outs = _run_equation(sizes, eqn, rows)
        if record is not None:
            record.notes.update(service="own", rule="rows.padded")
            record.stand_in = [_compat.staged_variable(row.value) for row in outs]
    return outs


_OWN = {
    "safe_lanes": (
        "it is a branch or loop in a `batchax.vmap` over the places of the row, which take "
        "different ways."
    ),
    "bounded_loop": "loops of `bounded_while` and `scan(until=)` run over rows of one length only.",
}
"""Why primitives of batchax, which users have not heard of, are not supported."""


def _run_equation(sizes: Sizes, eqn: Eqn, rows: Sequence[Row]) -> list[Row]:
    shapes = [v.aval.shape for v in eqn.outvars]
    if not depends_on_sizes(eqn):
        values = [row.value for row in rows]
        folded = fold_known(eqn, values)
        outs = bind_varying(eqn, values) if folded is None else folded
        return [Row(x, shape) for x, shape in zip(outs, shapes, strict=True)]
    op = Operation(eqn, sizes)
    rule = _find_rule(eqn.primitive)
    if rule is None:
        raise op.reject(_OWN.get(eqn.primitive.name, "it has no rule for rows."))
    if is_replaced_in_jax(eqn.primitive) and not facts_of(eqn.primitive).elementwise:
        raise op.reject("your rule for it in jax.vmap is for arrays of one size.")
    if (size := leaves_with_found(eqn)) is not None:
        raise op.reject(
            f"it returns an array of the size {size}, which is found in it. Return what does not "
            "have that size, or find it outside."
        )
    outs = rule(op, *rows, **eqn.params)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    return [
        x if isinstance(x, Row) else Row(x, shape) for x, shape in zip(outs, shapes, strict=True)
    ]


def fold_known(eqn: Eqn, values: Values) -> list[Any] | None:
    """The results of an equation on small integers that are known while staging; else None.

    They stay known, as NumPy arrays, so that a rule may look at indices.
    """
    if not all(map(_is_known, values)) or eqn.effects:
        return None
    avals = [v.aval for v in eqn.outvars]
    if programs_inside(eqn) or not all(map(_is_index, avals)):
        return None
    arrays, in_numpy = list(map(np.asarray, values)), _IN_NUMPY.get(eqn.primitive.name)
    if in_numpy is not None and all(x.dtype.kind in "iub" for x in arrays):
        # JAX would compile each operation by itself, which takes longer than the rest of a trace.
        with np.errstate(over="ignore"):
            out = in_numpy(*arrays, **eqn.params)
        return [np.asarray(out, avals[0].dtype).reshape(avals[0].shape)]
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in bind_equation(eqn, values)]


def _broadcast(x: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = [1] * len(shape)
    for own, at in zip(x.shape, broadcast_dimensions, strict=True):
        sizes[at] = own
    return np.broadcast_to(x.reshape(sizes), shape)


_IN_NUMPY: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    **{
        name: lambda *xs, of=of, **_: of(*xs)
        for name, of in {
            "add": np.add,
            "convert_element_type": np.asarray,
            "max": np.maximum,
            "min": np.minimum,
            "mul": np.multiply,
            "neg": np.negative,
            "sign": np.sign,
            "squeeze": np.asarray,
            "sub": np.subtract,
        }.items()
    },
}
"""Operations on integers that NumPy computes as JAX does."""


_FEW = 16  # numbers that are computed when a program is read: indices, not arrays of data


def _is_index(aval: Aval) -> bool:
    small = np.prod(aval.shape) <= _FEW
    return bool(small and jnp.issubdtype(aval.dtype, jnp.integer) and not aval.weak_type)


def _is_known(x: Value) -> bool:
    return isinstance(x, (np.ndarray, np.generic, bool, int, float, complex))
