"""The primitive that finds a size: the places where a condition holds, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.inside import Anywhere, programs_inside, with_inside
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Aval, Eqn, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.rows.sizes import is_symbolic


def places_where(condition: Value, size: int) -> Any:
    """Where a vector of bools is true: the first `size` places, int32, then zeros."""
    target = jnp.where(condition, jnp.cumsum(condition, dtype=np.int32) - 1, size)
    own = jnp.arange(condition.shape[0], dtype=np.int32)
    return jnp.zeros(size, np.int32).at[target].set(own, mode="drop")


def _types(condition: Aval, *, size: Any, **params: Any) -> Any:
    return _compat.with_varying_axes(
        ShapedArray((size,), np.dtype(np.int32)), _compat.varying_axes(condition)
    )


def _operations(condition: Value, *, size: Any, **params: Any) -> Any:
    return places_where(condition, size)


def _batched(
    axis: Axis, args: Sequence[Value], axes: Sequence[Position], /, **params: Any
) -> tuple[Any, Position]:
    if is_symbolic(params["size"]):
        raise UnsupportedError(
            f"{params['called']} finds a size, which differs between the lanes of an inner vmap "
            "here, whose results are arrays of one size. Where that is jax.vmap use batchax.vmap, "
            "of a function that closes over no row."
        )
    operations = lambda condition: [_operations(condition, **params)]
    (out,), (at,) = batch_function(axis, operations, args, axes)
    return out, at


found_places_p = own_primitive(
    "found_places",
    called="places where a condition holds",
    operations=_operations,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=OF_OPERATIONS,
    transpose=OF_OPERATIONS,
    several=False,
)
"""The places where a vector of bools is true.

Its parameters are `size`, how many there are: a symbol that is new, or an int; `limit`, how many
there may be, or None for no limit; and `called`, what the user called.
"""


def finds_size(eqn: Eqn) -> bool:
    """Whether an equation finds a size, which others may need that read no result of it."""
    return eqn.primitive is found_places_p and is_symbolic(eqn.params["size"])


_finds = Anywhere(finds_size)

find_found = _finds.in_program
"""Whether a program finds a size."""


def leaves_with_found(eqn: Eqn) -> str | None:
    """A size that is found in a loop or branch, and which its results have; None if there is none.

    It is not known there, or is another one by the same name.
    """
    if not _finds.in_equation(eqn) or facts_of(eqn.primitive).is_plain_call or finds_size(eqn):
        return None
    inner = (inside for program in programs_inside(eqn) for inside in with_inside(program.eqns))
    inside_it = {str(each.params["size"]) for each in inner if finds_size(each)}
    dims = (d for v in eqn.outvars for d in getattr(v.aval, "shape", ()) if is_symbolic(d))
    return next((name for d in dims for name in _compat.symbols(d) if name in inside_it), None)
