"""Functions with derivative rules of their own: function and rules act on padded rows.

The rules are staged for the row, with its symbolic sizes, when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.own_primitives import expanded
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn, Value
from batchax.rows.padded import Operation, PaddedRule, Row, padded_rule, run_padded
from batchax.rows.padded_rules.inside import SizedCall, arrays, run_inside, typed_rows
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

_by_name: dict[str, PaddedRule] = {}


def padded_function(name: str) -> Callable[[PaddedRule], PaddedRule]:
    """Decorator: how a function of JAX by this name, with a jvp rule, acts on padded rows.

    For a function whose rule asks whether a size is 1: JAX says no for any symbolic size, which
    may be 1 in some row. It returns None where the rule of the function will do.
    """

    def decorate(rule: PaddedRule) -> PaddedRule:
        _by_name[name] = rule
        return rule

    return decorate


class _Call(SizedCall):
    """A call of a function that has derivative rules."""

    def for_each(self, values: Sequence[Value], other: Any) -> list[Any]:
        """From one entry for each value of the call to one for each operand, else `other`."""
        given = dict(zip(self.operands.places, values[len(self.names) :], strict=True))
        return [given.get(i, other) for i in range(len(self.operands.rows))]

    def for_values(self, given: Sequence[Value], other: Any) -> list[Any]:
        """From one entry for each operand of the equation to one for each value of the call."""
        return [other] * len(self.names) + [given[i] for i in self.operands.places]

    def run(self, body: Any, *values: Any) -> list[Any]:
        """The results of the function `body`, where the call has these `values`."""
        op, rows = self.opened(values)
        return arrays(run_inside(op.sizes, body, rows), body.out_avals)

    def zeros(self, values: Sequence[Value], types: Sequence[Aval], symbolic: bool) -> list[Any]:
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
                raise self.op.refuse(
                    "its derivative rule closes over a value that the function of the row "
                    f"computes, of shape {jax.typeof(x).str_short()}. Pass the value as an "
                    "argument of the function that has the rule."
                )
        return [Row(x, jax.typeof(x).shape) for x in consts]


def staged_jvp_rule(eqn: Eqn) -> ClosedJaxpr:
    """The derivative rule of a ``custom_jvp``, where every operand has a tangent."""
    count = len(eqn.invars) - eqn.params["num_consts"]
    jaxpr, _, _ = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * count)
    return _compat.close(_compat.constants_as_inputs(jaxpr))


@padded_rule("custom_jvp_call")
def _custom_jvp(
    op: Operation,
    *rows: Row,
    call_jaxpr: Any,
    jvp_jaxpr_fun: Any,
    num_consts: int,
    symbolic_zeros: bool,
    **params: Any,
) -> Any:
    body = _compat.close(call_jaxpr)
    own = _by_name.get(_compat.name_within_jax(body.jaxpr))
    outs = None if own is None else own(op, *rows)
    if outs is not None:
        return outs
    call, values = _Call.of(op, rows)
    op = call.op

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return call.run(body, *values)

    def rule(values: Sequence[Value], tangents: Sequence[Value]) -> Any:
        inner, rows = call.opened(values)
        types = [v.aval.to_tangent_aval() for v in op.eqn.invars]
        moving = call.for_each(tangents, None)
        moving = call.zeros(moving, types, symbolic_zeros)[num_consts:]
        zeros = [isinstance(t, SymbolicZero) for t in moving]
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
def _described_by_object(op: Operation, *rows: Row, _prim: Any) -> Any:
    # Its rules know nothing of rows. What it stands for is made of ordinary operations, and so are
    # its derivative and that one's transpose, which need not be those of these operations:
    # `jnp.frexp` takes bits apart.
    body = expanded(_prim, [v.aval for v in op.eqn.invars])
    if not any(map(is_inexact, body.out_avals)):
        return run_padded(op.sizes, body.jaxpr, body.consts, rows)
    call, values = _Call.of(op, rows)
    op = call.op

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return call.run(body, *values)

    def rule(values: Sequence[Value], tangents: Sequence[Value]) -> Any:
        moving = [
            i
            for i, t in enumerate(call.for_each(tangents, None))
            if is_inexact(op.eqn.invars[i].aval) and not isinstance(t, SymbolicZero | None)
        ]
        try:
            ahead, back = _staged_derivatives(op.eqn, moving)
        except NotImplementedError as error:
            raise op.refuse(f"it has no derivative for rows of any length: {error}.") from error

        def linear(program: ClosedJaxpr) -> Any:
            def run(values: Sequence[Value], given: Sequence[Value]) -> list[Any]:
                inner, rows = call.opened(values)
                types = program.in_avals[len(rows) :]
                outs = run_inside(inner.sizes, program, [*rows, *typed_rows(given, types)])
                return arrays(outs, program.out_avals)

            return run

        given = call.for_each(tangents, None)
        made = linear_with_transpose(
            linear(ahead), linear(back), values, [given[i] for i in moving]
        )
        outs, dots = function(*values), iter(made)
        return outs, [
            next(dots) if is_inexact(x) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in outs
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return function(*values)


@_compat.standing_in()
def _staged_derivatives(eqn: Eqn, moving: Sequence[int]) -> list[ClosedJaxpr]:
    """The derivative of an equation of one row with respect to some operands, and its transpose.

    Operands of both are those of the equation, and then derivatives of those that move, or
    cotangents of the results that are floats.
    """
    avals = [v.aval for v in eqn.invars]
    dots = [avals[i].to_tangent_aval() for i in moving]
    cotangents = [v.aval.to_tangent_aval() for v in eqn.outvars if is_inexact(v.aval)]

    def derivative(kind: Any) -> Any:
        def run(*xs: Any) -> list[Any]:
            primals, given = xs[: len(avals)], list(xs[len(avals) :])

            def function(*moved: Any) -> list[Any]:
                operands = list(primals)
                for i, x in zip(moving, moved, strict=True):
                    operands[i] = x
                outs = eqn.primitive.bind(*operands, **eqn.params)
                return [x for x in outs if is_inexact(x)]

            return kind(function, [primals[i] for i in moving], given)

        return run

    ahead = derivative(lambda function, xs, given: jax.jvp(function, xs, given)[1])
    back = derivative(lambda function, xs, given: list(jax.vjp(function, *xs)[1](given)))
    return [_compat.stage(ahead, [*avals, *dots]), _compat.stage(back, [*avals, *cotangents])]


@padded_rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom_vjp(
    op: Operation,
    *rows: Row,
    call_jaxpr: Any,
    fwd_jaxpr_thunk: Any,
    num_consts: int,
    out_trees: Any,
    symbolic_zeros: bool,
    **params: Any,
) -> Any:
    body = _compat.close(call_jaxpr)
    call, values = _Call.of(op, rows)
    op = call.op
    _, perturbs, backward = op.eqn.primitive.get_bind_params(op.eqn.params)["subfuns"]

    @jax.custom_vjp
    def function(*values: Any) -> list[Any]:
        return call.run(body, *values)

    def forward(*primals: Any) -> tuple[list[Any], _Residuals]:
        values = [p.value for p in primals]
        inner, rows = call.opened(values)
        perturbed = call.for_each([p.perturbed for p in primals], False)
        if any(perturbed[:num_consts]):  # says that what is closed over has no derivative
            pairs = zip(rows, perturbed, strict=True)
            perturbs.call_wrapped(*(x for row, moves in pairs for x in (row.value, moves)))
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

    def reverse(residuals: _Residuals, cotangents: Sequence[Value]) -> tuple[Any, ...]:
        sizes = op.sizes.inside(dict(zip(call.names, residuals.sizes, strict=True)))
        types = [v.aval.to_tangent_aval() for v in op.eqn.outvars]
        cotangents = call.zeros(cotangents, types, symbolic_zeros)
        given = [
            ct if isinstance(ct, SymbolicZero) else t
            for ct, t in zip(cotangents, types, strict=True)
        ]
        rule, zeros = _staged_reverse(backward, [*residuals.avals, *given])
        values = [*residuals.values, *(ct for ct in cotangents if not isinstance(ct, SymbolicZero))]
        inputs = typed_rows(values, rule.in_avals)
        call.constants(rule.consts)
        returned = iter(arrays(run_inside(sizes, rule, inputs), rule.out_avals))
        return tuple(call.for_values([None if z else next(returned) for z in zeros], None))

    function.defvjp(forward, reverse, symbolic_zeros=True)
    return function(*values)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Residuals:
    """What reverse mode needs of a call: sizes, and values with their types in the row."""

    sizes: list[Any]
    values: list[Value]
    avals: tuple[Aval, ...]

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.sizes, self.values), self.avals

    @classmethod
    def tree_unflatten(cls, avals: Any, children: tuple[Any, Any]) -> _Residuals:
        return cls(*children, avals)


@_compat.standing_in()
def _staged_reverse(backward: Any, inputs: Sequence[Any]) -> tuple[ClosedJaxpr, list[bool]]:
    """The reverse rule for one row, for the inputs and results that are no symbolic zeros."""

    def one_row(*xs: Any) -> tuple[list[Any], list[bool]]:
        given = iter(xs)
        result = backward.call_wrapped(
            *(x if isinstance(x, SymbolicZero) else next(given) for x in inputs)
        )
        cotangents, _ = _compat.cotangents_and_logs(result)
        zeros = [isinstance(c, (ad.Zero, SymbolicZero)) for c in cotangents]
        return [c for c, zero in zip(cotangents, zeros, strict=True) if not zero], zeros

    types = [x for x in inputs if not isinstance(x, SymbolicZero)]
    return _compat.stage_described(one_row, types)
