"""The only module where batchax touches private JAX or differs by JAX version.

Each name below says why it cannot be had from public JAX. Nothing else in the
package imports from ``jax._src`` or asks which version of JAX is running.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as jex_primitives

# ``jax.make_jaxpr`` is the only public way to stage with a named axis in scope; it
# wraps its argument in a new ``jit`` at each call, which costs more than staging a
# small function does. This is the one piece of it that cannot be had otherwise.
from jax._src.core import extend_axis_env_nd

# The user's line and the profiler's names live in the source info of each
# equation. Re-emitting an equation under it has no public spelling other than
# ``jax.core.eval_jaxpr`` of a whole jaxpr, which cannot batch.
from jax._src import source_info_util
from jax.extend import linear_util
from jax.interpreters import batching, partial_eval

Primitive = jex_core.Primitive
ClosedJaxpr = jex_core.ClosedJaxpr

current_name_stack = source_info_util.current_name_stack
name_stack_extended = source_info_util.transform_name_stack


def user_source(source_info: Any, outer_name_stack: Any) -> AbstractContextManager[None]:
    """Context under which emitted operations carry the user's line and names."""
    return source_info_util.user_context(
        source_info.traceback, name_stack=outer_name_stack + source_info.name_stack
    )


def user_line(source_info: Any) -> str:
    """`file:line (function)` of the user's code that made an equation."""
    return source_info_util.summarize(source_info)


def named_axes(effects: Any) -> set[Hashable]:
    """Names of the mapped axes that an equation with these effects uses.

    The effect type is private; it is recognised by its class name.
    """
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


def stage(
    fun: Callable[..., Any], avals: Sequence[Any], axis_env: Sequence[tuple[Hashable, Any]] = ()
) -> ClosedJaxpr:
    """What ``jax.make_jaxpr(fun, axis_env=axis_env)(*avals)`` returns, in half the time.

    Args:
      fun: a function of flat arguments that returns a list.
      avals: the types of the arguments.
      axis_env: names and sizes of the mapped axes that `fun` may use.
    """
    debug_info = jax.api_util.debug_info("vmap", fun, tuple(avals), {})
    with extend_axis_env_nd(list(axis_env)):
        jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(
            linear_util.wrap_init(fun, debug_info=debug_info), list(avals)
        )
    return close(jaxpr, consts)


def close(jaxpr: Any, consts: Any = ()) -> ClosedJaxpr:
    """A closed jaxpr from one that a parameter holds open (remat, shard_map).

    JAX 0.12 has a single class and its parameters are closed already.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr  # pyright: ignore
    return ClosedJaxpr(jaxpr, list(consts))


def is_reference(x: Any) -> bool:
    """Whether `x` is a mutable reference; the class of their types is private."""
    return hasattr(jax.typeof(x), "inner_aval")


def find_primitive(name: str) -> Primitive | None:
    """The primitive JAX calls `name`, from any of the tables that JAX exports.

    Some primitives (``pure_callback``, ``random_wrap``, ...) are exported
    nowhere by themselves but are keys of the public table of batching rules.
    """
    return _primitives_by_name().get(name)


def jax_has_rule(primitive: Primitive) -> bool:
    """Whether JAX itself can batch `primitive`."""
    return primitive in batching.fancy_primitive_batchers or primitive.name in {
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    }


def _primitives_by_name() -> dict[str, Primitive]:
    found: dict[str, Primitive] = {}
    for module in (jex_primitives, jax.lax):
        for value in vars(module).values():
            if isinstance(value, Primitive):
                found[value.name] = value
    for primitive in batching.fancy_primitive_batchers:
        found[primitive.name] = primitive
    return found
