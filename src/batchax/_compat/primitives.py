"""Finding primitives of JAX by name, those that it exports nowhere too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core.primitives as jex_primitives

# Exported nowhere, and absent from every table, as it has no operands to batch.
from jax._src.lax.control_flow.conditionals import platform_index_p

# The primitive of ``jax.shard_map`` is in none of the tables that JAX exports.
from jax._src.shard_map import shard_map_p
from jax.interpreters import batching

from batchax._compat.jaxprs import Primitive
from batchax._compat.staging import tracing


def find_primitive(name: str) -> Primitive | None:
    """The primitive JAX calls `name`, from any of the tables that JAX exports.

    Some primitives (``pure_callback``, ``random_wrap``, ...) are exported
    nowhere by themselves but are keys of the public table of batching rules.
    """
    global _tables
    tables = len(batching.fancy_primitive_batchers)
    if name not in _found and tables != _tables:  # a module imported since may have brought it
        _found.update({n: p for n, p in primitives_by_name().items() if n not in _found})
        _tables = tables
    return _found.get(name)


_found: dict[str, Primitive] = {}

_tables = 0


def is_namesake(primitive: Primitive) -> bool:
    """Whether `primitive` is another one than that which JAX calls by its name."""
    return find_primitive(primitive.name) not in (None, primitive)


def primitives_by_name() -> dict[str, Primitive]:
    """The primitives in the tables that JAX exports, by the names JAX gives them."""
    by_name: dict[str, Primitive] = {}
    for module in (jex_primitives, jax.lax, jax.lax.linalg):
        for value in vars(module).copy().values():  # which a thread may be adding to
            if isinstance(value, Primitive):
                by_name[value.name] = value
    for primitive in (*batching.fancy_primitive_batchers.copy(), shard_map_p):
        by_name.setdefault(primitive.name, primitive)  # what others call the same comes later
    return by_name


def platform_index(platforms: Any) -> Any:
    """The number of the platform that a program is compiled for.

    Only ``jax.lax.platform_dependent`` spells it, together with the branches.
    """
    return platform_index_p.bind(platforms=platforms)


def lower_early(
    primitive: Primitive,
    programs: Callable[[Any], Sequence[Any]],
    operations: Callable[..., Any],
    compute: Callable[..., Any],
) -> None:
    """Says what to do with `primitive` where the `programs` in its parameters are "high".

    JAX, from 0.12 on, describes some operations (``jnp.searchsorted``, ``jnp.nonzero``) by objects,
    and replaces what holds such a one by simpler operations before all else. Without a word from a
    primitive it looks into some of its parameters only, and then knows no replacement.

    Args:
      primitive: a primitive that runs programs.
      programs: from its parameters, those.
      operations: what takes its place in a program.
      compute: what it does where operands are arrays, and no program is made.
    """

    def is_high(*avals: Any, **params: Any) -> bool:
        return any(program.is_high for program in programs(params))

    def replaced(*operands: Any, **params: Any) -> Any:
        return (operations if tracing() else compute)(*operands, **params)

    primitive.is_high = is_high
    primitive.to_lojax = replaced


def weakly(x: Any) -> Any:
    """`x` with the weak type of a Python scalar, which no public function gives an array."""
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=jax.typeof(x).sharding
    )
