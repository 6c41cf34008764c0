"""Operations with a reverse rule only, in programs that are differentiated in forward mode.

A derivative in reverse mode is the transpose of that in forward mode, which such operations do not
have: objects of ``jax.experimental.hijax``. As functions with a reverse rule (``jax.custom_vjp``)
they stay intact until they are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.bodies import Anywhere, bind_with, bodies_of, is_rebuilt
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Value


def _is_without_forward_mode(eqn: Eqn) -> bool:
    if eqn.primitive.name != "call_hi_primitive":
        return False
    prim = eqn.params["_prim"]
    if _compat.is_checkpoint(prim):
        return without_forward_mode.in_program(prim.jaxpr)
    return _compat.by_reverse_rule(prim) is not None


without_forward_mode = Anywhere(_is_without_forward_mode)
"""Whether a program has operations without a forward mode."""


def by_reverse_rules(eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
    """Runs an equation, with operations without a forward mode as ``custom_vjp`` functions."""
    if not without_forward_mode.in_equation(eqn):
        return bind_equation(eqn, operands)
    if eqn.primitive.name == "call_hi_primitive":
        prim = eqn.params["_prim"]
        if _compat.is_checkpoint(prim):
            inner = with_reverse_rules(_compat.close(prim.jaxpr))
            return type(prim)(**{**prim.params, "jaxpr": inner})(*operands)
        function = _compat.by_reverse_rule(prim)
        assert function is not None
        return function(*operands)
    inner = [with_reverse_rules(_compat.close(body.program)) for body in bodies_of(eqn)]
    if eqn.primitive.name == "jit":
        return eval_jaxpr(inner[0].jaxpr, inner[0].consts, *operands)
    if is_rebuilt(eqn.primitive):
        return bind_with(eqn, operands, inner, [])
    return bind_equation(eqn, operands)


def with_reverse_rules(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program that can be differentiated in forward mode and then transposed."""
    if not without_forward_mode.in_program(program):
        return program
    run = lambda *xs: evaluate(program.jaxpr, program.consts, xs, by_reverse_rules)
    return _compat.stage(run, program.in_avals, _compat.names_in_scope())


def staged_with_reverse_rules(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Does this for a function of arrays, which is staged."""

    def run(*xs: Value) -> list[Any]:
        program = _compat.stage(function, list(map(jax.typeof, xs)), _compat.names_in_scope())
        return evaluate(program.jaxpr, program.consts, xs, by_reverse_rules)

    return run
