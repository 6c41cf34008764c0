"""``checkify`` of a primitive of batchax's own: errors of the operations that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.derivatives import tangents_of, with_values


def report_errors(
    primitive: _compat.Primitive,
    programs: Callable[[Any], Sequence[ClosedJaxpr]],
    operations: Callable[..., Sequence[Any]],
) -> None:
    """Has ``checkify`` report errors in the operations that `primitive` stands for.

    Where no error can be reported, the primitive stays.

    Args:
      primitive: a primitive that runs programs and returns a list.
      programs: from its parameters, those.
      operations: what it stands for.
    """

    def rule(checking: _compat.Checking, operands: Any, params: Any) -> tuple[Any, Sequence[Any]]:
        effects = set().union(*(program.effects for program in programs(params)))
        bind = lambda *xs: primitive.bind(*xs, **params)
        if not checking.needs(effects):
            return checking.error, bind(*operands)
        types = list(map(jax.typeof, operands))
        staged = _compat.stage(lambda *xs: list(operations(*xs, **params)), types)
        (program,), consts = _compat.hoist_constants(staged)
        run, leaves, structure = checking.with_errors(program)
        if not effects and not any(isinstance(x, Tracer) for x in consts):
            run = _with_derivative_of(bind, run, len(leaves) + len(consts))
        return jax.tree.unflatten(structure, run(*leaves, *consts, *operands))

    _compat.set_error_rule(primitive, rule)


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
