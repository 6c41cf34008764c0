"""Where ``jax.debug_nans`` and ``jax.debug_infs`` look, and where they must not.

With these options JAX looks at the results of each operation that it computes eagerly, and at those
of each compiled program. A batched function computes more than its examples do: for lanes that are
masked, in padding, in blank buffers, of neutral values. A NaN there is not the user's. So such
operations run with the options off, and then their results, which are the user's, are checked. If
they are differentiated they are one compiled program besides, because the reverse pass would check
each operation that was computed eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.extend.core.primitives import copy_p

from batchax import _compat
from batchax.jaxprs.types import Tree, Value
from batchax.kernel import recording

T = TypeVar("T")

WHOLE = "batchax.vmap"
"""What made the results of a call that is not looked at operation by operation."""


def jax_looks() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


_inside = ContextVar("batchax_unseen", default=False)


def checks_nans_here() -> bool:
    """Returns whether JAX would check each operation here, where it must see only user values."""
    return jax_looks() and not (_inside.get() or recording.is_on())


def in_jit() -> bool:
    """Returns whether operations are traced into a program instead of being computed now."""
    if _compat.staging():
        return True  # no need to stage an operation to see it
    # An operation on constants shows whether the trace in scope makes tracers of them.
    return _compat.tracing() and isinstance(jnp.zeros(()), Tracer)


def hide_from_debug_nans(run: Callable[..., T], args: Tree, name: str) -> T:
    """Runs `run(*args)` so that JAX checks only its final arrays for NaN.

    Raises FloatingPointError, which names `name`, if there is one in the results.
    """
    if not checks_nans_here():
        return run(*args)
    staged = in_jit()
    # Traced operands are checked later, by JAX or a transform. One compiled program hides the
    # intermediate values from that check.
    if staged or any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        token = _inside.set(True)
        try:
            run = _as_one_program(run, args)
        finally:
            _inside.reset(token)
    with jax.debug_nans(False), jax.debug_infs(False):
        outs = run(*args)
    return outs if staged else seen(outs, name)


def seen(outs: T, name: str) -> T:
    """Copies `outs`, so that JAX checks them, values behind tracers, and later cotangents."""
    try:
        return jax.tree.map(lambda x: copy_p.bind(x) if _is_inexact(x) else x, outs)
    except FloatingPointError as error:
        raise found(error, name) from None


def found(error: Exception, name: str) -> FloatingPointError:
    infinite = "(inf)" in str(error) or getattr(error, "ty", "") == "inf"
    return FloatingPointError(
        f"invalid value ({'inf' if infinite else 'nan'}) encountered in {name}"
    )


def _as_one_program(run: Callable[..., T], args: Tree) -> Callable[..., T]:
    """Wraps `run` in a call of one compiled program of the traced leaves of `args`."""

    def of_traced(*xs: Value) -> tuple[list[Any], Any]:
        given = iter(xs)
        own = [next(given) if isinstance(x, Tracer) else x for x in leaves]
        outs, out_tree = jax.tree.flatten(run(*jax.tree.unflatten(tree, own)))
        # Results that are not traced are returned with their values, outside of the program.
        made = [x for x in outs if isinstance(x, Tracer)]
        return made, (out_tree, [None if isinstance(x, Tracer) else (x,) for x in outs])

    leaves, tree = jax.tree.flatten(args)
    types = [jax.typeof(x) for x in leaves if isinstance(x, Tracer)]
    program, (out_tree, at_hand) = _compat.stage_described(of_traced, types)
    evaluate = functools.partial(eval_jaxpr, program.jaxpr, program.consts)
    if in_jit() and not _compat.observed(program.effects):
        # What reverse mode keeps is looked at where a `jit` around ends: so it keeps arguments.
        evaluate = jax.checkpoint(evaluate)
    # `jax.disable_jit` is meant for the programs of the user.
    with jax.disable_jit(False):
        whole = _compat.stage(jax.jit(evaluate), types)

    def call(*args: Tree) -> T:
        xs = [x for x in jax.tree.leaves(args) if isinstance(x, Tracer)]
        made = iter(eval_jaxpr(whole.jaxpr, whole.consts, *xs))
        outs = [next(made) if x is None else x[0] for x in at_hand]
        return jax.tree.unflatten(out_tree, outs)

    return call


def _is_inexact(x: Value) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
