"""What ``jax.vmap`` knows: rules, axes, and types that say themselves what a batch of them is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax.extend.core as jex_core

# What a third party's batching rule did is known only to the tracer it returned.
# JAX lets types (sparse matrices) register a batch form, but has no query for it.
from jax._src.interpreters.batching import (
    AxisData,
    BatchTracer,
    from_elt_handlers,
    to_elt_handlers,
    vmappables,
)
from jax.interpreters import batching

from batchax._compat.jaxprs import Dim, Primitive, Value


def jax_has_rule(primitive: Primitive) -> bool:
    return primitive in batching.fancy_primitive_batchers or primitive.name in {
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    }


def is_jaxs_rule(rule: Callable[..., Any]) -> bool:
    """Returns whether a rule in JAX's table is from JAX or batchax."""
    module = getattr(_registered(rule), "__module__", None) or ""
    return module.partition(".")[0] in ("jax", "jaxlib", "batchax")


def is_vmap_of_impl(primitive: Primitive) -> bool:
    """Returns whether a library registered ``jax.vmap`` of its `impl` as the rule of `primitive`.

    That is what ``equinox.internal.create_vprim`` does.
    """
    rule = batching.fancy_primitive_batchers.get(primitive)
    made_by = getattr(rule and _registered(rule), "__qualname__", "")
    return made_by == "create_vprim.<locals>.batch_rule"


def is_nontraceable(primitive: Primitive) -> bool:
    """Returns whether it is Equinox's identity that raises where it is transformed."""
    return primitive.name == "nontraceable"


def _registered(rule: Callable[..., Any]) -> Callable[..., Any]:
    # JAX wraps rules in its older tables in a function that closes over the rule.
    rule = getattr(rule, "func", rule)
    if "BatchersProxy" in getattr(rule, "__qualname__", ""):
        inside = (cell.cell_contents for cell in rule.__closure__ or ())
        rule = next(x for x in inside if callable(x) and not isinstance(x, Primitive))
        rule = getattr(rule, "func", rule)
    return rule


def batched_by_jax(x: Value) -> tuple[Any, int | None]:
    """Returns a value inside ``jax.vmap`` with its batch axis."""
    # As an output it could only be placed at an axis. Whether it is batched at all, which rules of
    # third parties decide, would be lost.
    with jex_core.take_current_trace() as trace:
        if isinstance(x, BatchTracer) and x._trace is trace:
            return x.val, x.batch_dim
    return x, None


def axis_from(data: Any, axis_type: Any) -> Any:
    """Makes an `Axis` from JAX's description of the axis being mapped."""
    # Without a name, JAX has a bare object in its place.
    name = None if type(data.name) is object else data.name
    return axis_type(data.size, name, data.spmd_name, data.explicit_mesh_axis)


def axis_data(name: Hashable, size: Dim, spmd_name: tuple[Hashable, ...] | None) -> AxisData:
    """Makes the axis description that batching methods of JAX's extensible operations take."""
    # The operations (``jax.experimental.hijax``) are public, and the class that their methods take
    # is not. Since 0.12, functions of ``jax.numpy`` are built on them.
    return AxisData(name, size, spmd_name, None)


def own_batches(x: object) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that take such a batch apart, and that build one."""
    # There is a public function to register them, and none to look them up.
    return to_elt_handlers[type(x)], from_elt_handlers[type(x)]


def type_of_batch_axis(x: object) -> type:
    """Returns the type of the axis of such a batch."""
    return vmappables[type(x)][0]


def types_of_batch_axes() -> set[type]:
    """Returns the types of all such axes, except for ints."""
    return {spec_type for spec_type, _ in list(vmappables.values())} - {int}


_lent: set[type] = set()


def lend_batches(
    type: type, spec_type: type, to_example: Callable[..., Any], to_batch: Callable[..., Any]
) -> None:
    """Registers batches of `type` with JAX, unless they are registered."""
    if type not in vmappables or type in _lent:
        batching.register_vmappable(type, spec_type, int, to_example, to_batch, None)
        _lent.add(type)


def forget_batches(type: type) -> None:
    if type in _lent:
        _lent.discard(type)
        # `batching.unregister_vmappable` is there, and does nothing on the JAX of today.
        for table in (vmappables, to_elt_handlers, from_elt_handlers):
            table.pop(type, None)
