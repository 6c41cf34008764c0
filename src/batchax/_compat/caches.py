"""What JAX keeps, what that depends on, and what programs raise that are kept."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

# What JAX raises where a compiled program gives NaN with ``jax.debug_nans``, and turns into a
# FloatingPointError in ``jax.jit`` alone: who evaluates a program that has a jitted one gets this.
from jax._src.api_util import InternalFloatingPointError

# JAX's options have public names each, but which of them a staged program depends on (and which
# contexts: a mesh, names of axes), only this says. It is in the keys of all that JAX keeps.
from jax._src.config import trace_context as jax_trace_context

# There is no public way to be told of ``jax.clear_caches()``, nor of what calls it: to leave a
# backend makes compiled programs useless, ours too.
# JAX keeps the parameters of equations, in its caches of their types for one. Those of these types
# it holds weakly: the programs of its own primitives, that is.
from jax._src.util import register_cache, weakref_cache_key_types

T = TypeVar("T", bound=type)

FoundNaN = InternalFloatingPointError


def trace_context() -> Hashable:
    """Equal wherever a function is staged, and a program compiled, alike."""
    return jax_trace_context()


def empty_with_caches(cache: Any) -> None:
    """Has JAX call ``cache.cache_clear()`` where it clears caches. It holds `cache` weakly."""
    register_cache(cache, f"batchax: {cache.of}")


def held_weakly(cls: T) -> T:
    """Decorator: parameters of equations that are of this class JAX's caches do not keep alive.

    They hold a program, or a function of the user's, and so whatever arrays that closes over.
    """
    weakref_cache_key_types.add(cls)
    return cls
