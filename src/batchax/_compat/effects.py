"""What effects say of equations, and which values are references.

The types of effects, and that of references, are private: they are recognised by the names of their
classes, and by an attribute.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Of a primitive that calls the host where that can be seen, as ``jax.debug.callback`` does.
from jax._src.debugging import debug_effect as debug_effect


def named_axes(effects: Any) -> set[Hashable]:
    """Names of the mapped axes that an equation with these effects uses."""
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


def observed(effects: Any) -> bool:
    """Whether these effects of an equation are anything but the use of a named axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)


def in_order(effects: Any) -> bool:
    """Whether calls of Python in a program with these effects are to happen in order."""
    return any(type(e).__name__ in ("OrderedIOEffect", "OrderedDebugEffect") for e in effects)


def ordered_by_lane(effects: Any) -> bool:
    """Whether a program with these effects does input or output, or what is to happen in order."""
    return in_order(effects) or any(type(e).__name__ == "IOEffect" for e in effects)


def calls_back(effects: Any) -> bool:
    """Whether a program with these effects calls Python where it can be seen."""
    return ordered_by_lane(effects) or any(type(e).__name__ == "DebugEffect" for e in effects)


def does_more_than_show(effects: Any) -> bool:
    """Whether a program with these effects does anything but show values to the host."""
    return any(type(e).__name__ != "DebugEffect" for e in effects)


def checks(effects: Any) -> bool:
    """Whether a program with these effects has a runtime check of ``checkify``."""
    return any(type(e).__name__ == "ErrorEffect" for e in effects)


@contextmanager
def callbacks_fail_silently() -> Iterator[None]:
    """While it is known that callbacks fail, JAX does not log each time that they do.

    The logger is that of a private module, and is known by the module's name.
    """
    logger = logging.getLogger("jax._src.callback")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_reference(x: Any) -> bool:
    """Whether `x` is a mutable reference."""
    return hasattr(jax.typeof(x), "inner_aval")


def makes_references(effects: Any) -> bool:
    """Whether a program with these effects creates references."""
    return any(type(e).__name__ == "InternalMutableArrayEffect" for e in effects)


def touches_references(eqn: Any) -> bool:
    """Whether an equation creates references, or is given one."""
    given = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
    return given or makes_references(eqn.effects)


def written_inputs(jaxpr: Any) -> set[int]:
    """Which inputs of `jaxpr`, or of an equation, are references that it writes to."""
    writes = [e.input for e in jaxpr.effects if type(e).__name__ in {"WriteEffect", "AccumEffect"}]
    return {i for i, v in enumerate(jaxpr.invars) if v in writes}
