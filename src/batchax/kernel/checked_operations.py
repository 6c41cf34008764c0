"""``checkify`` of a primitive of batchax's own: errors of the operations that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from batchax import _compat
from batchax.jaxprs.bodies import LOOPS_AND_BRANCHES, bind_with, bodies_of, held_programs
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value
from batchax.kernel.derivatives import tangents_of, with_values


def report_errors(
    primitive: _compat.Primitive,
    programs: Sequence[str],
    operations: Callable[..., Sequence[Any]],
) -> None:
    """Has ``checkify`` report errors in the operations that `primitive` stands for.

    Where no error can be reported, the primitive stays.

    Args:
      primitive: a primitive that runs programs and returns a list.
      programs: the parameters that hold them.
      operations: what it stands for.
    """

    def rule(checking: _compat.Checking, operands: Any, params: Any) -> tuple[Any, Sequence[Any]]:
        effects = set().union(*(program.effects for program in held_programs(params, programs)))
        if not checking.needs(effects):
            return checking.error, primitive.bind(*operands, **params)
        types = list(map(jax.typeof, operands))
        stage = lambda params: _compat.stage(lambda *xs: list(operations(*xs, **params)), types)
        (program,), consts = _compat.hoist_constants(stage(params))
        if all(_compat.checks([effect]) for effect in effects):
            # A derivative is not checked: what has it is the primitive without its checks.
            params = {**params, **{name: _without_checks(params[name]) for name in programs}}
            effects = stage(params).effects if effects else effects
        bind = lambda *xs: primitive.bind(*xs, **params)
        run, leaves, structure = checking.with_errors(program)
        if not effects and not any(isinstance(x, Tracer) for x in consts):
            run = _with_derivative_of(bind, run, len(leaves) + len(consts))
        return jax.tree.unflatten(structure, run(*leaves, *consts, *operands))

    _compat.set_error_rule(primitive, rule)


def _without_checks(program: Any) -> Any:
    """A program, or some, or none, without the runtime checks in it."""
    if isinstance(program, tuple):
        return tuple(map(_without_checks, program))
    if not isinstance(program, ClosedJaxpr) or not _compat.checks(program.effects):
        return program

    def run_equation(eqn: Eqn, xs: Any) -> Sequence[Any]:
        if eqn.primitive.name == "check":
            return []
        if not _compat.checks(eqn.effects) or eqn.primitive.name not in {
            *LOOPS_AND_BRANCHES,
            "jit",
        }:
            return bind_equation(eqn, xs)
        inner = [_without_checks(_compat.close(body.program)) for body in bodies_of(eqn)]
        if eqn.primitive.name == "jit":
            return eval_jaxpr(inner[0].jaxpr, inner[0].consts, *xs)
        return bind_with(eqn, xs, inner, [])

    run = lambda *xs: evaluate(program.jaxpr, program.consts, xs, run_equation)
    return _compat.stage(run, program.in_avals)


def _with_derivative_of(
    bind: Callable[..., list[Any]], run: Callable[..., list[Any]], first: int
) -> Callable[..., list[Any]]:
    """`run`, of `first` other operands and those of `bind`, with the derivative that `bind` has.

    Its last results are those of `bind`, and only those have tangents. As for a ``jax.custom_jvp``
    function, ``checkify`` does not check the derivative; ``checkify`` of the derivative does.
    """
    checked = jax.custom_jvp(run)

    def jvp(primals: Sequence[Value], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = checked(*primals)
        dots: list[Any] = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in outs]
        moving = [i for i, t in enumerate(tangents[first:]) if type(t) is not SymbolicZero]
        given = [tangents[first + i] for i in moving]
        own = jax.eval_shape(bind, *primals[first:])
        smooth = [k for k, x in enumerate(own) if jnp.issubdtype(x.dtype, jnp.inexact)]
        _, moved = tangents_of(bind, primals[first:], moving, given, smooth)
        before = len(outs) - len(own)
        return outs, with_values(dots, [before + k for k in smooth], moved)

    checked.defjvp(jvp, symbolic_zeros=True)
    return checked
