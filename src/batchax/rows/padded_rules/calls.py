"""Calls, branches, loops and custom derivatives: the program inside acts on padded rows, too."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import DropVar
from jax.interpreters import ad

from batchax import _compat
from batchax.custom_rules.call import DerivativeStep, per_example
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.errors import BatchaxError, UnsupportedError
from batchax.execution.slices import entry_of
from batchax.jaxprs.bodies import bind_call, program_called
from batchax.jaxprs.evaluate import bind_equation
from batchax.jaxprs.primitive_facts import expanded
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Value, Values
from batchax.kernel.own_primitive import tangents_of, transposed
from batchax.rows.padded import (
    CannotPad,
    Operation,
    Results,
    Row,
    padded_rule,
    run_padded,
)
from batchax.rows.padded_rules.own_steps import Steps, may_take_own_steps, run_own_steps
from batchax.rows.row_rules import in_padding, size_of_rule
from batchax.rows.sizes import Dim, Sizes, has_symbols, needs_number, question_of
from batchax.rules.loops import split_operands
from batchax.rules.masking import hazards, is_inexact, safe_lanes

Flat = Callable[..., list[Any]]


class WrappedFunction(Protocol):
    """A function as JAX has it in the parameters of an equation."""

    call_wrapped: Callable[..., Any]


def run_inside(sizes: Sizes, body: Jaxpr | ClosedJaxpr, rows: Sequence[Row]) -> list[Row]:
    body = _compat.close(body)
    return run_padded(sizes.inside(), body.jaxpr, body.consts, rows)


def arrays(rows: Sequence[Row], avals: Sequence[Aval]) -> list[Any]:
    """The arrays of rows, in the dtypes of `avals`.

    What loops, branches and rules return must have the same types whichever program ran.
    """
    return [_array(row.value, aval.dtype) for row, aval in zip(rows, avals, strict=True)]


@contextlib.contextmanager
def explaining_rule(op: Operation) -> Iterator[None]:
    """Explains errors of a user's derivative rule, which is staged for a row of any length."""
    try:
        yield
    except BatchaxError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not needs_number(cause):
            cause = cause.__cause__
        if cause is None:
            error.add_note("Rows have a symbolic size in derivative rules, as in the function.")
            raise
        raise op.reject(
            "its derivative rule needs the length of a row as a number: "
            f'{question_of(cause)}. Call vmap outside of jit with layout="grouped".'
        ) from error


@contextlib.contextmanager
def after_the_batch() -> Iterator[None]:
    """Of a reverse rule: where it runs it is too late to group rows by their lengths."""
    try:
        yield
    except CannotPad as error:
        raise UnsupportedError(str(error)) from error.__cause__


def _array(x: Value, dtype: np.dtype) -> Value:
    same = dtype == jax.dtypes.float0 or getattr(x, "dtype", None) == dtype
    return x if same else lax.convert_element_type(x, dtype)


def typed_rows(values: Values, avals: Sequence[Aval]) -> list[Row]:
    return [Row(x, aval.shape) for x, aval in zip(values, avals, strict=True)]


class Moving:
    """Operands of a program that is staged again: as its arguments, only those that are not known.

    The others stay known inside, so that rules may look at them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [replace(row, packed=None) for row in rows]
        self.places = [i for i, row in enumerate(rows) if not row.known]

    @property
    def values(self) -> list[Any]:
        return [self.rows[i].value for i in self.places]

    def emptied(self) -> Moving:
        """A copy without the values that are not known: what lives on must not hold them."""
        empty = copy.copy(self)
        empty.rows = self.filled_in([None] * len(self.places))
        return empty

    def filled_in(self, values: Values) -> list[Row]:
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
    def of(cls, op: Operation, rows: Sequence[Row]) -> tuple[SizedCall, list[Any]]:
        """For an equation and its operands, and the values of those: rules may outlive them."""
        sizes, operands = op.sizes, Moving(rows)
        values = [*sizes.values.values(), *operands.values]
        op = Operation(op.eqn, sizes.inside({}))
        return cls(op, operands.emptied(), tuple(sizes.values)), values

    def opened(self, values: Values) -> tuple[Operation, list[Row]]:
        count = len(self.names)
        sizes = self.op.sizes.inside(dict(zip(self.names, values[:count], strict=True)))
        return Operation(self.op.eqn, sizes), self.operands.filled_in(values[count:])

    def for_each(self, values: Values, other: bool | None) -> list[Any]:
        """From one entry for each value of the call to one for each operand, else `other`."""
        given = dict(zip(self.operands.places, values[len(self.names) :], strict=True))
        return [given.get(i, other) for i in range(len(self.operands.rows))]

    def for_values(self, given: Values) -> list[Any]:
        """From entries for the operands of the equation to those for the values; None for sizes."""
        return [None] * len(self.names) + [given[i] for i in self.operands.places]

    def run(self, body: ClosedJaxpr, *values: Value) -> list[Any]:
        op, rows = self.opened(values)
        return arrays(run_inside(op.sizes, body, rows), body.out_avals)

    def zeros(self, values: Values, types: Sequence[Aval], symbolic: bool) -> list[Any]:
        """Derivatives in which those that are zero, or None, have the form that the rule wants.

        That is a `SymbolicZero` if it was defined with symbolic zeros, or else an array.
        """
        return [
            x
            if x is not None and not isinstance(x, SymbolicZero)
            else SymbolicZero(aval)
            if symbolic
            else np.zeros(self.op.sizes.bounds_of(aval.shape), aval.dtype)
            for x, aval in zip(values, types, strict=True)
        ]

    def constants(self, consts: Iterable[Value]) -> list[Row]:
        """What a rule closes over, which is to be no part of the row."""
        for x in consts:
            if isinstance(x, Tracer) and not _compat.is_live(x):
                raise self.op.reject(
                    "its derivative rule closes over a value that the function of the row "
                    f"computes, of shape {jax.typeof(x).str_short()}. Pass the value as an "
                    "argument of the function that has the rule."
                )
        return [Row(x, jax.typeof(x).shape) for x in consts]


def as_function(op: Operation, body: Jaxpr | ClosedJaxpr, operands: Moving) -> Flat:
    """A program as a function of those arrays of `operands` that are not known."""
    body = _compat.close(body)

    def run(*values: Value) -> list[Any]:
        return arrays(run_inside(op.sizes, body, operands.filled_in(values)), body.out_avals)

    return run


def staged(fun: Flat, values: Values) -> tuple[ClosedJaxpr, list[Any]]:
    (program,), consts = _compat.hoist_constants(_compat.stage(fun, list(map(jax.typeof, values))))
    return program, [*consts, *values]


@padded_rule("composite", "custom_vmap_call", "remat_opt", fact="is_plain_call")
def _call(op: Operation, *rows: Row, **params: Any) -> list[Row]:
    # A batching rule is written for arrays of one size: with rows of many, what counts is the
    # function of one example. Of the two programs of `remat_opt` this one returns residuals, too.
    names = ("fwd_jaxpr", "call", "jaxpr", "call_jaxpr")
    body = _compat.close(next(params[name] for name in names if params.get(name)))
    try:
        return run_padded(op.sizes, body.jaxpr, body.consts, rows)
    except CannotPad as error:
        raise error.within(op.eqn) from None


@padded_rule(fact="again")
@padded_rule(fact="marked")
def _kept_call(op: Operation, *rows: Row, **params: Any) -> list[Any]:
    """A call that says something about its program, such as that reverse mode computes it again."""
    operands = Moving(rows)
    op = replace(op, sizes=replace(op.sizes, again=True))
    fun = as_function(op, program_called(op.eqn), operands)
    program = _compat.stage(fun, list(map(jax.typeof, operands.values)))
    return bind_call(op.eqn.primitive, op.eqn.params, program, operands.values)


@padded_rule("custom_batched_call")
def _custom_batched(
    op: Operation, *rows: Row, jaxpr: ClosedJaxpr, steps: Sequence[DerivativeStep], **params: Any
) -> Results:
    """A call of a `batchax.custom_vmap` function, or of its derivatives."""
    name = size_of_rule(op.eqn)
    if name is not None:
        return in_padding(op, rows, name)
    body = _compat.stage(per_example(jaxpr, steps), [v.aval for v in op.eqn.invars])
    return run_padded(op.sizes, body.jaxpr, body.consts, rows)


@padded_rule("linear_with_transpose")
def _linear(
    op: Operation,
    *rows: Row,
    forward: ClosedJaxpr,
    transpose: ClosedJaxpr,
    count: int,
    **params: Any,
) -> list[Value]:
    residuals, values = SizedCall.of(op, rows[:count])

    def for_rows(
        body: ClosedJaxpr, shapes: Sequence[tuple[Dim, ...]]
    ) -> Callable[[Values, Values], list[Value]]:
        def run(values: Values, linear: Values) -> list[Any]:
            inner, own = residuals.opened(values)
            given = [Row(x, shape) for x, shape in zip(linear, shapes, strict=True)]
            outs = run_inside(inner.sizes, body, [*own, *given])
            return arrays(outs, body.out_avals)

        return run

    types = forward.in_avals[count:]
    ahead = for_rows(forward, [aval.shape for aval in types])
    back = for_rows(transpose, [aval.shape for aval in forward.out_avals])
    return linear_with_transpose(ahead, back, values, arrays(rows[count:], types))


@padded_rule("cond")
def _cond(
    op: Operation, index: Row, *rows: Row, branches: Sequence[ClosedJaxpr], **params: Any
) -> list[Value]:
    operands = Moving(rows)
    functions = [as_function(op, branch, operands) for branch in branches]
    if params.get("branches_platforms"):
        # The index is that of the platform compiled for, which must be known as such.
        by_platform: dict[str, Any] = {}
        for function, platforms in zip(functions, params["branches_platforms"], strict=True):
            by_platform.update(dict.fromkeys(platforms or ("default",), function))
        return lax.platform_dependent(*operands.values, **by_platform)
    return lax.switch(index.value, functions, *operands.values)


@padded_rule("scan")
def _scan(op: Operation, *rows: Row, jaxpr: Jaxpr, length: Dim, **params: Any) -> list[Any]:
    """The carry after the last step of the row, and the outputs of its steps."""
    body, steps = _compat.close(jaxpr), op.sizes.bound(length)
    without_outputs = len(body.out_avals) == _compat.scan_counts(params)[1]
    params = {"body": body, "length": length, **params}
    differs = steps and not op.sizes.is_exact(length) and without_outputs
    packed = {i: row.packed for i, row in enumerate(rows) if row.packed is not None}
    has_elements = all(x.size for x, _ in packed.values())  # else there are none to slice
    if not (differs and has_elements and may_take_own_steps(body)):
        return _masked_scan(op, *rows, **params)
    among = [Row(x, jnp.shape(x)) for pair in packed.values() for x in pair]
    call, values = SizedCall.of(op, [*rows, *among])
    first = arrays(split_operands(rows, *_compat.scan_counts(params))[1], body.out_avals)

    def given(values: Values) -> tuple[Operation, list[Row]]:
        op, given = call.opened(values)
        arrays = iter([row.value for row in given[len(rows) :]])
        for i in packed:
            given[i] = replace(given[i], packed=(next(arrays), next(arrays)))
        return op, given[: len(rows)]

    def scan(_: Steps, values: Values) -> list[Any]:
        op, rows = given(values)
        return _masked_scan(op, *rows, **params)

    def loop(steps: Steps, values: Values) -> list[Any]:
        op, rows = given(values)
        return _own_steps(op, steps, *rows, **params)

    size = jnp.asarray(op.sizes.size(length), np.int32)
    return run_own_steps(scan, loop, Steps(np.int32(0), size, first), values, steps)


def _own_steps(
    op: Operation,
    own: Steps,
    *rows: Row,
    body: ClosedJaxpr,
    length: Dim,
    reverse: bool,
    **params: Any,
) -> list[Any]:
    """As `_masked_scan`, of a scan without outputs, by a loop of as many steps as the row has."""
    consts, _, xs = split_operands(rows, *_compat.scan_counts(params))
    size = jnp.asarray(op.sizes.size(length), np.int32)
    parts = [(jnp.asarray(x.value), np.int32(0)) if x.packed is None else x.packed for x in xs]

    def step(state: tuple[Value, list[Any]]) -> tuple[Value, list[Any]]:
        i, carry = state
        t = size - i - np.int32(1) if reverse else i
        entries = [entry_of(x, lax.add(begin, t)) for x, begin in parts]
        own = [Row(x, row.shape[1:], row.fill) for x, row in zip(entries, xs, strict=True)]
        outs = run_inside(op.sizes, body, [*consts, *typed_rows(carry, body.out_avals), *own])
        return i + np.int32(1), arrays(outs, body.out_avals)

    first = tuple(_compat.varying_alike([own.begin, *own.carry], like=[own.end]))
    return lax.while_loop(lambda state: state[0] < own.end, step, (first[0], [*first[1:]]))[1]


def _masked_scan(
    op: Operation,
    *rows: Row,
    body: ClosedJaxpr,
    length: Dim,
    reverse: bool,
    unroll: int,
    **params: Any,
) -> list[Any]:
    consts, carry, xs = split_operands(rows, *_compat.scan_counts(params))
    carry_avals, y_avals = body.out_avals[: len(carry)], body.out_avals[len(carry) :]
    first = arrays(carry, carry_avals)
    parts = [jnp.asarray(x.value) for x in xs]
    steps, sizes, size = op.sizes.bound(length), op.sizes, None
    again: _Harmless | None = None
    # What nothing reads after the row's last step need not stay as it was then. In reverse the row
    # has yet to begin.
    unread = [isinstance(v, DropVar) and not reverse for v in op.eqn.outvars[: len(carry)]]
    if not op.sizes.is_exact(length):
        _reject_effects(op, body, length)
        size = op.sizes.size(length)
        first = _compat.varying_alike(first, like=[size])  # in a shard_map, of other rows elsewhere
        danger = hazards(body.jaxpr)
        if steps and (danger.nonlinear or danger.endless):
            operands = op, size, consts, first, xs
            again = _zeros(*operands) if _is_moderate(body) else _first_again(*operands, reverse)
            sizes, consts, parts = again.sizes, again.consts, again.parts

    def step(carry: list[Value], given: tuple[Value, Values]) -> tuple[list[Any], list[Any]]:
        i, parts = given
        active = None if size is None else lax.lt(i, jnp.asarray(size, i.dtype))
        before = carry
        if again is not None:
            before = [_keep(active, x, y) for x, y in zip(carry, again.carry, strict=True)]
        own = [Row(x, row.shape[1:], row.fill) for x, row in zip(parts, xs, strict=True)]
        inputs = [*consts, *typed_rows(before, carry_avals), *own]
        outs = arrays(run_inside(sizes, body, inputs), body.out_avals)
        new, ys = outs[: len(carry)], outs[len(carry) :]
        if active is None:
            return new, ys
        each = zip(new, carry, unread, strict=True)
        new = [x if lost else _keep(active, x, old) for x, old, lost in each]
        # Nothing comes back to a step that was not taken.
        ys = [safe_lanes(active, y, 0, "keep") if is_inexact(y) else y for y in ys]
        return new, ys

    counted = (jnp.arange(steps, dtype=np.int32), parts)
    last, ys = lax.scan(step, first, counted, steps, reverse, unroll)
    assert len(ys) == len(y_avals)
    return [*last, *ys]


def _keep(active: Value, new: Value, old: Value) -> Value:
    return old if new is old else lax.select(active, new, old)


@dataclass(frozen=True)
class _Harmless:
    """Operands of steps, such that those a row does not take do no harm."""

    sizes: Sizes  # the sizes of the row whose step it is
    consts: Sequence[Row]  # what is the same in each step
    carry: list[Value]  # the carry of steps not taken
    parts: list[Any]  # what has a part for each step


def _first_again(
    op: Operation,
    size: Value,
    consts: Sequence[Row],
    carry: Values,
    xs: Sequence[Row],
    reverse: bool,
) -> _Harmless:
    """Steps not taken are the first one again, and that of another row where there is none."""
    some = jnp.asarray(size) > 0
    start = jnp.maximum(jnp.asarray(size) - 1, 0) if reverse else 0

    def of_a_row_with_steps(x: Value) -> Value:
        return safe_lanes(some, x, 0)

    def filled(x: Value) -> jax.Array:
        constant = _without_derivative(x)
        first = lax.dynamic_index_in_dim(constant, start, 0, False) if reverse else constant[0]
        taken = jnp.arange(x.shape[0], dtype=np.int32) < jnp.asarray(size)
        mask = lax.broadcast_in_dim(taken, x.shape, (0,))
        other = of_a_row_with_steps(first)
        return lax.select(mask, x, lax.broadcast_in_dim(other, x.shape, tuple(range(1, x.ndim))))

    values = {k: of_a_row_with_steps(jnp.asarray(v)) for k, v in op.sizes.values.items()}
    safe = [
        row if row.known else replace(row, value=of_a_row_with_steps(row.value)) for row in consts
    ]
    first = [of_a_row_with_steps(_without_derivative(x)) for x in carry]
    return _Harmless(
        op.sizes.inside(values), safe, first, [filled(jnp.asarray(x.value)) for x in xs]
    )


def _zeros(
    op: Operation, size: Value, consts: Sequence[Row], carry: Values, xs: Sequence[Row]
) -> _Harmless:
    """Steps not taken are of zeros, which padding often holds already, and the first carry."""
    parts = [op.filled(x, 0, (0,)) if is_inexact(x.value) else x.value for x in xs]
    first = list(map(_without_derivative, carry))
    return _Harmless(op.sizes, consts, first, list(map(jnp.asarray, parts)))


def _is_moderate(body: ClosedJaxpr) -> bool:
    """Whether a step of zeros cannot make infinity or a NaN.

    Not where something is ragged within a step: an empty row has no element to take. Nor in types
    of a smaller range than float32 (whose largest exponent is 128), where numbers may overflow.
    """
    ranges = [jnp.finfo(a.dtype).maxexp for a in body.in_avals if is_inexact(a)]
    danger = hazards(body.jaxpr)
    ragged = any(has_symbols(a.shape) for a in body.in_avals)
    return not (danger.immoderate or danger.endless or ragged) and min(ranges, default=128) >= 128


def _without_derivative(x: Value) -> Value:
    """`x` as in a lane that is not active; unlike ``lax.stop_gradient`` that can be transposed."""
    return safe_lanes(np.zeros((), bool), x, 0, "keep") if is_inexact(x) else x


def _reject_effects(op: Operation, body: ClosedJaxpr, length: Dim) -> None:
    if hazards(body.jaxpr).collective:
        raise op.reject(
            f"it takes {length} steps, as many as the row has, with a collective in each: rows "
            "that have ended take no part in it. Put the collective outside the loop."
        )
    written = any(hasattr(aval, "inner_aval") for aval in body.in_avals)
    if written or _compat.calls_back(body.effects):
        raise op.reject(
            f"it takes {length} steps, as many as the row has, with an effect in each (a print, "
            "a callback, a write to a reference), which would come also from rows that have "
            "ended. Return values instead, or put the effect outside the loop."
        )


@padded_rule("while")
def _while(
    op: Operation,
    *rows: Row,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> list[Any]:
    tested, consts = rows[:cond_nconsts], rows[cond_nconsts:][:body_nconsts]
    carry = rows[cond_nconsts + body_nconsts :]
    avals = _compat.close(body_jaxpr).out_avals

    def run(program: ClosedJaxpr, consts: Sequence[Row], values: Values) -> list[Any]:
        outs = run_inside(op.sizes, program, [*consts, *typed_rows(values, avals)])
        return arrays(outs, program.out_avals)

    places = cond_jaxpr.out_avals[0].shape
    if not places:
        return lax.while_loop(
            lambda values: run(cond_jaxpr, tested, values)[0],
            lambda values: run(body_jaxpr, consts, values),
            arrays(carry, avals),
        )
    # A loop for each place of the row, as `vmap` of a `while_loop` over them makes: until all are
    # done, each keeps what it has when it is, and those in the padding are from the beginning.
    mask = op.sizes.mask(places, op.sizes.padded_axes(places))

    def active(values: Values) -> jax.Array:
        (going,) = run(cond_jaxpr, tested, values)
        return going if mask is None else lax.bitwise_and(going, mask)

    def step(state: tuple[jax.Array, list[Value]]) -> tuple[jax.Array, list[Value]]:
        going, values = state
        values = [
            lax.select(lax.broadcast_in_dim(going, x.shape, range(going.ndim)), x, old)
            for x, old in zip(run(body_jaxpr, consts, values), values, strict=True)
        ]
        return active(values), values

    first = arrays(carry, avals)
    going = active(first)
    return lax.while_loop(lambda state: jnp.any(state[0]), step, (going, first))[1]


OF_FUNCTIONS: dict[str, Callable[..., list[Value] | None]] = {}
"""By the name of a function of JAX with a jvp rule: how it acts on padded rows.

For a function whose rule asks whether a size is 1: JAX says no for any symbolic size, which may be
1 in some row. It returns None where the rule of the function will do.
"""


def staged_jvp_rule(eqn: Eqn) -> ClosedJaxpr:
    """The derivative rule of a ``custom_jvp``, where every operand has a tangent."""
    count = len(eqn.invars) - eqn.params["num_consts"]
    jaxpr, _, _ = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * count)
    return _compat.close(_compat.constants_as_inputs(jaxpr))


@padded_rule("custom_jvp_call")
def _custom_jvp(
    op: Operation,
    *rows: Row,
    call_jaxpr: ClosedJaxpr,
    jvp_jaxpr_fun: WrappedFunction,
    num_consts: int,
    symbolic_zeros: bool,
    **params: Any,
) -> list[Any]:
    body = _compat.close(call_jaxpr)
    own = OF_FUNCTIONS.get(_compat.name_within_jax(body.jaxpr))
    outs = None if own is None else own(op, *rows)
    if outs is not None:
        return outs
    call, values = SizedCall.of(op, rows)
    op = call.op
    function: Any = jax.custom_jvp(functools.partial(call.run, body))

    def rule(values: Values, tangents: Values) -> tuple[list[Value], list[Value]]:
        inner, rows = call.opened(values)
        types = [v.aval.to_tangent_aval() for v in op.eqn.invars]
        moving = call.for_each(tangents, None)
        moving = call.zeros(moving, types, symbolic_zeros)[num_consts:]
        zeros = [isinstance(t, SymbolicZero) for t in moving]
        with explaining_rule(op):
            jaxpr, consts, out_zeros = jvp_jaxpr_fun.call_wrapped(*zeros)
        rule = _compat.close(_compat.constants_as_inputs(jaxpr))
        rows = rows[num_consts:]
        given = [
            Row(t, row.shape) for t, row, zero in zip(moving, rows, zeros, strict=True) if not zero
        ]
        results = run_inside(inner.sizes, rule, [*call.constants(consts), *rows, *given])
        outs = arrays(results, rule.out_avals)
        count = len(body.out_avals)
        dots = iter(outs[count:])
        return outs[:count], [
            SymbolicZero(jax.typeof(x).to_tangent_aval()) if zero else next(dots)
            for x, zero in zip(outs, out_zeros, strict=False)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return function(*values)


@padded_rule("call_hi_primitive")
def _described_by_object(op: Operation, *rows: Row, _prim: object) -> list[Value] | list[Row]:
    # Its rules know nothing of rows. What it stands for is made of ordinary operations, whose
    # derivative need not be its own: `jnp.frexp` takes bits apart.
    types = [v.aval for v in op.eqn.invars]
    function = _compat.as_made_by_default(_prim) or _compat.by_reverse_rule(_prim)
    if function is not None:  # as JAX has functions with derivative rules by default
        body = _compat.stage(function, types)
        return run_padded(op.sizes, body.jaxpr, body.consts, rows)
    body = expanded(_prim, types)
    if op.sizes.expands_objects or not any(map(is_inexact, body.out_avals)):
        return run_padded(op.sizes, body.jaxpr, body.consts, rows)
    call, values = SizedCall.of(op, rows)
    op, count = call.op, len(rows)
    of = [k for k, aval in enumerate(body.out_avals) if is_inexact(aval)]

    def rule(values: Values, tangents: Values) -> tuple[list[Value], list[Value]]:
        inner, rows = call.opened(values)
        dots = call.for_each(tangents, None)
        # What a function closes over must not move: some objects have no derivative by that.
        moving = [i for i, t in enumerate(dots) if not isinstance(t, SymbolicZero | None)]

        def both(*xs: Value) -> list[Any]:
            bind = lambda *xs: list(bind_equation(op.eqn, xs))
            outs, moved = tangents_of(bind, xs[:count], moving, xs[count:], of)
            return [*outs, *moved]

        try:
            rule = _compat.stage(both, [*types, *(types[i].to_tangent_aval() for i in moving)])
        except (NotImplementedError, TypeError, ValueError):
            why = "it has no derivative for rows of any length."
            raise UnsupportedError(str(op.reject(why))) from None
        call.constants(rule.consts)
        given = [*rows, *(Row(dots[i], rows[i].shape) for i in moving)]
        results = arrays(run_inside(inner.sizes, rule, given), rule.out_avals)
        outs, made = results[: len(body.out_avals)], iter(results[len(body.out_avals) :])
        zero = lambda x: SymbolicZero(jax.typeof(x).to_tangent_aval())
        return outs, [next(made) if k in of else zero(x) for k, x in enumerate(outs)]

    function = jax.custom_jvp(functools.partial(_run_object, call, body))
    function.defjvp(rule, symbolic_zeros=True)
    return function(*values)


def _run_object(call: SizedCall, body: ClosedJaxpr, *values: Value) -> list[Any]:
    """Runs the operations that an object of JAX stands for, with the transpose of the object.

    JAX transposes what a derivative rule calls with tangents. The operations need not have a
    transpose: those of `jnp.ldexp` take bits apart.
    """
    op, rows = call.opened(values)
    types = [v.aval for v in op.eqn.invars]
    linear = [i for i, aval in enumerate(types) if is_inexact(aval)]
    if not _compat.has_transpose(op.eqn.params["_prim"]) or len(linear) != 1:
        return call.run(body, *values)
    order = [*(i for i in range(len(types)) if i not in linear), *linear]
    given, n = [types[i] for i in order], len(types) - 1

    def ahead(*xs: Value) -> list[Any]:
        return eval_jaxpr(body.jaxpr, body.consts, *(xs[order.index(i)] for i in range(n + 1)))

    def back(*xs: Value) -> list[Any]:
        bind = lambda *xs: list(bind_equation(op.eqn, xs))
        return transposed(bind, xs[:n], linear, given[n:], range(len(xs) - n))(xs[n:])

    try:
        transpose = _compat.stage(back, [*given[:n], *body.out_avals])
    except (NotImplementedError, TypeError, ValueError):  # it is not linear
        return call.run(body, *values)
    op = replace(op, sizes=replace(op.sizes, expands_objects=True))  # also those of the transpose
    forward = _compat.stage(ahead, given)
    return _linear(op, *(rows[i] for i in order), forward=forward, transpose=transpose, count=n)


@padded_rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom_vjp(
    op: Operation,
    *rows: Row,
    call_jaxpr: ClosedJaxpr,
    fwd_jaxpr_thunk: WrappedFunction,
    num_consts: int,
    out_trees: Callable[..., Any],
    symbolic_zeros: bool,
    **params: Any,
) -> list[Any]:
    body = _compat.close(call_jaxpr)
    call, values = SizedCall.of(op, rows)
    op = call.op
    _, perturbs, backward = op.eqn.primitive.get_bind_params(op.eqn.params)["subfuns"]
    function: Any = jax.custom_vjp(functools.partial(call.run, body))

    def forward(*primals: Value) -> tuple[list[Any], _Residuals]:
        values = [p.value for p in primals]
        inner, rows = call.opened(values)
        perturbed = call.for_each([p.perturbed for p in primals], False)
        if any(perturbed[:num_consts]):  # says that what is closed over has no derivative
            pairs = zip(rows, perturbed, strict=True)
            perturbs.call_wrapped(*(x for row, moves in pairs for x in (row.value, moves)))
        with explaining_rule(op):
            jaxpr, consts = fwd_jaxpr_thunk.call_wrapped(*perturbed[num_consts:])
        rule = _compat.close(_compat.constants_as_inputs(jaxpr))
        results = run_inside(inner.sizes, rule, [*call.constants(consts), *rows[num_consts:]])
        outs = arrays(results, rule.out_avals)
        count = len(outs) - len(body.out_avals)
        made = iter(zip(outs[:count], rule.out_avals[:count], strict=True))
        given = [v.aval for v in op.eqn.invars]
        pairs = [next(made) if i is None else (rows[i].value, given[i]) for i in out_trees()[2]]
        sizes = list(inner.sizes.values.values())
        residuals = _Residuals(sizes, [x for x, _ in pairs], tuple(a for _, a in pairs))
        return outs[count:], residuals

    @after_the_batch()
    def reverse(residuals: _Residuals, cotangents: Values) -> tuple[Any, ...]:
        sizes = op.sizes.inside(dict(zip(call.names, residuals.sizes, strict=True)))
        types = [v.aval.to_tangent_aval() for v in op.eqn.outvars]
        cotangents = call.zeros(cotangents, types, symbolic_zeros)
        given = [
            ct if isinstance(ct, SymbolicZero) else t
            for ct, t in zip(cotangents, types, strict=True)
        ]
        with explaining_rule(op):
            rule, zeros = _staged_reverse(backward, [*residuals.avals, *given])
        values = [*residuals.values, *(ct for ct in cotangents if not isinstance(ct, SymbolicZero))]
        inputs = typed_rows(values, rule.in_avals)
        call.constants(rule.consts)
        returned = iter(arrays(run_inside(sizes, rule, inputs), rule.out_avals))
        return tuple(call.for_values([None if z else next(returned) for z in zeros]))

    function.defvjp(forward, reverse, symbolic_zeros=True)
    return function(*values)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sizes", "values"], meta_fields=["avals"]
)
@dataclass(frozen=True)
class _Residuals:
    """What reverse mode needs of a call: sizes, and values with their types in the row."""

    sizes: list[Any]
    values: list[Value]
    avals: tuple[Aval, ...]


@_compat.patched()
def _staged_reverse(
    backward: WrappedFunction, inputs: Sequence[Any]
) -> tuple[ClosedJaxpr, list[bool]]:
    """The reverse rule for one row, for the inputs and results that are no symbolic zeros."""

    def one_row(*xs: Value) -> tuple[list[Any], list[bool]]:
        given = iter(xs)
        result = backward.call_wrapped(
            *(x if isinstance(x, SymbolicZero) else next(given) for x in inputs)
        )
        cotangents, _ = _compat.cotangents_and_logs(result)
        zeros = [isinstance(c, (ad.Zero, SymbolicZero)) for c in cotangents]
        return [c for c, zero in zip(cotangents, zeros, strict=True) if not zero], zeros

    types = [x for x in inputs if not isinstance(x, SymbolicZero)]
    return _compat.stage_described(one_row, types)
