"""Calls that give away none of the arrays that they compute with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchax import _compat
from batchax.jaxprs.words import Eqn


def without_donations(eqns: Iterable[Eqn]) -> list[Eqn]:
    """Equations of which no call of ``jax.jit`` donates an argument.

    The author of a function knows that nothing reads an array after the call that it is donated
    to. Section by section that is not so: what all lanes have in common is computed first, once,
    and the chunks, and the first lane by itself, read the same array. In what is compiled as a
    whole JAX does not heed donations inside; here calls may be met that are computed at once.
    """
    return list(map(_keeping, eqns))


def _keeping(eqn: Any) -> Any:
    donated = eqn.params.get("donated_invars", ())
    if not any(donated):
        return eqn
    params = eqn.params | {"donated_invars": (False,) * len(donated)}
    return _compat.named_equation(eqn, None, params)
