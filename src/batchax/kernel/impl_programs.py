"""Primitives of libraries that are batched as the program of one example in their place.

A library may define the batch of its primitive as ``jax.vmap`` of its `impl`, ordinary operations
of JAX: `linear_solve` of lineax is such a primitive. By JAX's rule for it lanes would wait for the
slowest one in loops of the `impl`, and a loop around it could not be a single kernel. So an
equation becomes one of `impl_program`, which computes the `impl`, and whose derivatives and
transpose are those of the primitive.

A function of one example whose loops carry less without derivative rules becomes one, too: the
rules stay in what is differentiated (`MappedProgram.run`).
"""

from __future__ import annotations

from typing import Any

from jax.extend.core.primitives import copy_p

from batchax import _compat
from batchax.cache import cached_on
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import Inside, rewritten
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Program
from batchax.kernel.named_axes import as_without_mesh, staged_impl, without_mesh
from batchax.kernel.own_primitive import declare
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


def _change(eqn: Eqn, inside: Inside) -> Eqn:
    if not _has_impl.in_equation(eqn):
        return eqn
    if not _has_impl.is_true(eqn):
        return eqn.replace(params=inside())
    programs = _programs(eqn)
    return eqn.replace(primitive=impl_program_p, params=programs) if programs else eqn


def _programs(eqn: Eqn) -> dict[str, ClosedJaxpr] | None:
    """Returns the parameters of `impl_program`; None if the equation stays as it is."""
    program = staged_impl(eqn)
    # With a collective, values of a trace around, or callbacks, it stays what the library made it.
    if program is None or program.consts or program.effects or _calls_host.in_program(program):
        return None
    bind = lambda *xs: eqn.primitive.bind(*xs, **eqn.params)
    with without_mesh():
        of = _compat.stage(bind, as_without_mesh([v.aval for v in eqn.invars]))
    program = _with_impls(rewritten(program, _unchecked))
    return {"program": _compat.close(program.jaxpr), "of": of}


impl_program_p = declare("impl_program")


_calls_host = Anywhere(lambda eqn: facts_of(eqn.primitive).on_host)


def _unchecked(eqn: Eqn, inside: Inside) -> Eqn:
    # An identity that raises where it is transformed: that nothing is closed over was checked.
    if _compat.is_nontraceable(eqn.primitive):
        return eqn.replace(primitive=copy_p, params={})
    return eqn.replace(params=inside())
