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
from batchax.jaxprs.words import Value
from batchax.kernel import recording

T = TypeVar("T")

WHOLE = "batchax.vmap"
"""What made the results of a call that is not looked at operation by operation."""


def jax_looks() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


_inside = ContextVar("batchax_unseen", default=False)


def checks_nans_here() -> bool:
    """Whether it would look at each operation here, and is to see no values but the user's."""
    return jax_looks() and not (_inside.get() or recording.is_on())


def in_jit() -> bool:
    """Whether operations become part of a program, rather than being computed here and now."""
    if _compat.staging():
        return True  # no need to stage an operation to see it
    return _compat.tracing() and isinstance(jnp.zeros(()), Tracer)


def hide_from_debug_nans(run: Callable[..., T], args: Any, name: str) -> T:
    """What `run` returns for `args`, two trees: of all its arrays JAX looks at these alone.

    Raises:
      FloatingPointError: JAX looks for what there is in one. `name` is what made it.
    """
    if not checks_nans_here():
        return run(*args)
    staged = in_jit()
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
    """`outs`, which JAX has looked at: also at values behind tracers, and later at cotangents."""
    try:
        return jax.tree.map(lambda x: copy_p.bind(x) if _is_inexact(x) else x, outs)
    except FloatingPointError as error:
        raise found(error, name) from None


def found(error: Exception, name: str) -> FloatingPointError:
    """JAX's error for what it found, where `name` made it."""
    infinite = "(inf)" in str(error) or getattr(error, "ty", "") == "inf"
    return FloatingPointError(
        f"invalid value ({'inf' if infinite else 'nan'}) encountered in {name}"
    )


def _as_one_program(run: Callable[..., T], args: Any) -> Callable[..., T]:
    """`run` for such `args` as a call of one compiled program, of what among them is traced."""

    def of_traced(*xs: Any) -> tuple[list[Any], Any]:
        given = iter(xs)
        own = [next(given) if isinstance(x, Tracer) else x for x in leaves]
        outs, out_tree = jax.tree.flatten(run(*jax.tree.unflatten(tree, own)))
        made = [x for x in outs if isinstance(x, Tracer)]
        return made, (out_tree, [None if isinstance(x, Tracer) else (x,) for x in outs])

    leaves, tree = jax.tree.flatten(args)
    types = [jax.typeof(x) for x in leaves if isinstance(x, Tracer)]
    program, (out_tree, at_hand) = _compat.stage_described(of_traced, types)
    evaluate = functools.partial(eval_jaxpr, program.jaxpr, program.consts)
    if in_jit() and not _compat.observed(program.effects):
        # What reverse mode keeps is looked at where a `jit` around ends: so it keeps arguments.
        evaluate = jax.checkpoint(evaluate)
    with jax.disable_jit(False):  # which is for the user's programs
        whole = _compat.stage(jax.jit(evaluate), types)

    def call(*args: Any) -> T:
        xs = [x for x in jax.tree.leaves(args) if isinstance(x, Tracer)]
        made = iter(eval_jaxpr(whole.jaxpr, whole.consts, *xs))
        outs = [next(made) if x is None else x[0] for x in at_hand]
        return jax.tree.unflatten(out_tree, outs)

    return call


def _is_inexact(x: Value) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
