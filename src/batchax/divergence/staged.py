"""Staging the programs of windows, which takes longer than staging the steps in them does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.memo import Memo

_programs = Memo("what moves lanes in windows, and counts them", most=512)


def staged_once(key: Hashable, fun: Callable[..., Sequence[Any]], *operands: Any) -> list[Any]:
    """What `fun` returns for these operands: it says `key`, and their types, what it does."""
    types = tuple(map(jax.typeof, operands))
    whole = key, types, jax.default_backend(), _compat.trace_context()
    program = _programs.get(whole, lambda: _compat.stage(lambda *xs: list(fun(*xs)), types))
    return eval_jaxpr(program.jaxpr, program.consts, *operands)


def while_loop(goes_on: Callable[[Any], Any], once: Callable[[Any], Any], state: Any) -> Any:
    """As ``lax.while_loop``, which takes five times as long to find out what the loop closes over.

    `goes_on` closes over nothing.
    """
    leaves, structure = jax.tree.flatten(state)
    leaves = list(map(_strong, leaves))

    def flat(*leaves: Any) -> list[Any]:
        return list(map(_strong, jax.tree.leaves(once(structure.unflatten(leaves)))))

    types = list(map(jax.typeof, leaves))
    test = _compat.stage(lambda *leaves: [goes_on(structure.unflatten(leaves))], types)
    body = _compat.stage(flat, types)
    if list(body.out_avals) != types:  # JAX says what is wrong
        return lax.while_loop(goes_on, once, state)
    (body,), consts = _compat.hoist_constants(body)
    outs = while_p.bind(
        *consts,
        *leaves,
        cond_nconsts=0,
        cond_jaxpr=test,
        body_nconsts=len(consts),
        body_jaxpr=body,
    )
    return structure.unflatten(outs)


def _strong(x: Any) -> Any:
    """`x`, not weakly typed: what a step makes of weak types may be strong."""
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x
