"""Whether two staged programs do the same, so that one compiled program serves both.

A call outside ``jit`` stages its function again, and JAX knows programs by identity: it
would compile each time. Two programs with equal keys have the same operations, with the
same parameters, wired alike, and the same functions of the user's behind callbacks and
derivative rules. What cannot be compared counts as different.

There are two other equalities, each for another purpose: the canonical form (of `analysis/`)
sees through other ways to write what is computed, and compares constants by what they hold; and
the fingerprint of a dataset outlives the process.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.types import Atom, Program, Value


@dataclass(frozen=True, eq=False)
class _Same:
    """Is equal to what holds the same object; keeps the object alive, unlike its ``id``."""

    value: Value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def value_key(x: Value) -> Hashable:
    """Returns what is equal for programs that do the same, and for objects that mean the same."""
    return _key(x, ())


def _key(x: Value, inside: tuple[int, ...]) -> Hashable:
    if id(x) in inside:
        # A cycle: the object is known by how far out it is.
        return inside.index(id(x))
    make = next((m for kind, m in _KEYS if isinstance(x, kind)), None)
    if make is not None:
        return type(x), make(x, (*inside, id(x)))
    if _compat.is_tracing_state(x):
        # tracing state that JAX stores with a derivative rule does not affect the rule
        return type(x)
    parts = _compat.wrapped_parts(x)
    if parts:
        return type(x), _of_items(parts, (*inside, id(x)))
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return type(x), x


def _of_program(program: Program, inside: tuple[int, ...]) -> Hashable:
    jaxpr = _compat.jaxpr_of(program)
    # Variables by the order of their first appearance: names and identities do not matter.
    numbers: dict[Any, int] = {}

    def number(v: Atom) -> Hashable:
        if isinstance(v, Literal):
            # by bits: NaN, and the sign of zero
            return _key(v.aval, inside), np.asarray(v.val).tobytes()
        return numbers.setdefault(v, len(numbers))

    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return (
        *((number(v), _key(v.aval, inside)) for v in inputs),
        # by identity: comparing elements would take long
        *map(_Same, getattr(program, "consts", ())),
        *(
            (
                eqn.primitive,
                tuple(map(number, eqn.invars)),
                tuple(map(number, eqn.outvars)),
                _of_items(eqn.params.items(), inside),
                _Same(eqn.ctx),
            )
            for eqn in jaxpr.eqns
        ),
        *map(number, jaxpr.outvars),
    )


def _of_items(items: Iterable[object], inside: tuple[int, ...]) -> Hashable:
    return tuple(_key(x, inside) for x in items)


def _of_function(f: types.FunctionType, inside: tuple[int, ...]) -> Hashable:
    # JAX wraps a function of the user's again each time. That function itself is known by
    # identity: what it closes over, a list for example, it may change.
    if not (f.__module__ or "").startswith("jax."):
        return _Same(f)
    try:
        values = [cell.cell_contents for cell in f.__closure__ or ()]
    except ValueError:  # one that is not filled yet
        return _Same(f)
    defaults = (f.__defaults__, f.__kwdefaults__)
    return f.__code__, _of_items([*values, *defaults], inside)


def _of_type(aval: ShapedArray, inside: tuple[int, ...]) -> Hashable:
    if not any(map(jax.export.is_symbolic_dim, aval.shape)):
        return aval
    return _of_items(aval.shape, inside), aval.dtype, aval.weak_type


_Parts = Callable[[Any, tuple[int, ...]], Hashable]
_KEYS: Sequence[tuple[type | tuple[type, ...], _Parts]] = (
    (_compat.JAXPR_TYPES, _of_program),
    (Tracer, lambda x, inside: _Same(x)),
    (types.FunctionType, _of_function),
    (dict, lambda d, inside: _of_items(d.items(), inside)),
    ((tuple, list), _of_items),
    (float, lambda x, inside: repr(x)),  # of zeros the sign, too
    (ShapedArray, _of_type),
    # Symbols of sizes belong to one program, and do not compare with others.
    (_compat.SIZE, lambda dim, inside: str(dim)),
)
