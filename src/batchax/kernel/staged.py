"""Staging what moves lanes, which takes longer than staging what is done for them.

An operator between tracers is a function of ``jax.numpy``: to call one takes two to five times as
long as the function of ``jax.lax`` that it comes to, which that is made of for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.kernel.inner import written_into
from batchax.memo import Memo

_programs = Memo("what moves lanes in windows, and counts them", most=512)


def staged_once(key: Hashable, fun: Callable[..., Sequence[Any]], *operands: Any) -> list[Any]:
    """What `fun` returns for these operands: it says `key`, and their types, what it does."""
    types = tuple(map(jax.typeof, operands))
    whole = key, types, jax.default_backend(), _compat.trace_context()
    program = _programs.get(whole, lambda: _compat.stage(lambda *xs: list(fun(*xs)), types))
    return written_into(program, operands)


def while_loop(goes_on: Callable[[Any], Any], once: Callable[[Any], Any], state: Any) -> Any:
    """As ``lax.while_loop``, which takes longer to find out what the loop closes over."""
    leaves, structure = jax.tree.flatten(state)
    leaves = list(map(_strong, leaves))

    def flat(*leaves: Any) -> list[Any]:
        return list(map(_strong, jax.tree.leaves(once(structure.unflatten(leaves)))))

    types = list(map(jax.typeof, leaves))
    test = _compat.stage(lambda *leaves: [goes_on(structure.unflatten(leaves))], types)
    body = _compat.stage(flat, types)
    if list(body.out_avals) != types:  # JAX says what is wrong
        return lax.while_loop(goes_on, once, state)
    (test,), asked = _compat.hoist_constants(test)
    (body,), consts = _compat.hoist_constants(body)
    outs = while_p.bind(
        *asked,
        *consts,
        *leaves,
        cond_nconsts=len(asked),
        cond_jaxpr=test,
        body_nconsts=len(consts),
        body_jaxpr=body,
    )
    return structure.unflatten(outs)


def _strong(x: Any) -> Any:
    """`x`, not weakly typed: what a step makes of weak types may be strong."""
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x
