"""Primitives of libraries that are batched as the program of one example in their place.

A library may define the batch of its primitive as ``jax.vmap`` of its `impl`, ordinary operations
of JAX: `linear_solve` of lineax is such a primitive. By JAX's rule for it lanes would wait for the
slowest one in loops of the `impl`, and a loop around it could not be a single kernel. So an
equation becomes a function with a custom derivative: it computes the `impl`, and its derivative is
that of the primitive.

A limit: ``jax.linear_transpose`` of the batched function goes through the `impl`, and fails at a
``while`` in it. Derivatives do not: they transpose the primitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core.primitives import copy_p

from batchax import _compat
from batchax.cache import cached_on
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import Inside, Rewriter, rewritten
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Program, Values
from batchax.kernel.own_primitive import tangents_of, with_tangent_rule, with_values
from batchax.kernel.registry import find


def with_impl_programs(program: ClosedJaxpr) -> Jaxpr:
    """Returns the jaxpr of a program, with the `impl` in the place of such primitives."""
    return _with_impls(program.jaxpr) if _has_impl.in_program(program) else program.jaxpr


@cached_on("programs with the `impl` of primitives")
def _with_impls(program: Program) -> Any:
    return rewritten(program, _change, _with_impls)


_has_impl = Anywhere(
    lambda eqn: _compat.is_vmap_of_impl(eqn.primitive) and find(eqn.primitive) is None
)


def _change(eqn: Eqn, inside: Inside) -> Eqn | list[Eqn]:
    if not _has_impl.in_equation(eqn):
        return eqn
    if not _has_impl.is_true(eqn):
        return eqn.replace(params=inside())
    staged = _staged(eqn)
    if staged is None:
        return eqn
    to = Rewriter(staged)
    to.inline(staged, eqn.invars, eqn.outvars)
    return [e.replace(source_info=eqn.source_info) for e in to.eqns]


def _staged(eqn: Eqn) -> ClosedJaxpr | None:
    primitive, params = eqn.primitive, eqn.params
    types = [v.aval for v in eqn.invars]
    bind = lambda *xs: primitive.bind(*xs, **params)
    program = _compat.stage(lambda *xs: list(primitive.impl(*xs, **params)), types)
    # With values of a trace around, or callbacks, it stays what the library made it.
    if program.consts or program.effects or _calls_host.in_program(program):
        return None
    program = _with_impls(rewritten(program, _unchecked))

    def rule(primals: Values, moving: Sequence[int], dots: Values) -> tuple[list[Any], list[Any]]:
        outs = jax.eval_shape(bind, *primals)
        smooth = [k for k, x in enumerate(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
        outs, moved = tangents_of(bind, primals, moving, dots, smooth)
        return outs, with_values([None] * len(outs), smooth, moved)

    run = with_tangent_rule(lambda *xs: eval_jaxpr(program.jaxpr, [], *xs), rule)
    return _compat.stage(lambda *xs: run(*xs), types)


_calls_host = Anywhere(lambda eqn: eqn.primitive.name in ("pure_callback", "io_callback"))


def _unchecked(eqn: Eqn, inside: Inside) -> Eqn:
    # An identity that raises where it is transformed: that nothing is closed over was checked.
    if eqn.primitive.name == "nontraceable":
        return eqn.replace(primitive=copy_p, params={})
    return eqn.replace(params=inside())
