"""What ``jax.vmap`` knows: rules, axes, and types that say themselves what a batch of them is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax.extend.core as jex_core

# What a third party's batching rule did is known only to the tracer it returned.
# Which types have a batch form of their own (sparse matrices) JAX lets one say, not ask.
from jax._src.interpreters.batching import (
    BatchTracer,
    from_elt_handlers,
    to_elt_handlers,
    vmappables,
)
from jax.interpreters import batching

from batchax._compat.jaxprs import Primitive


def jax_has_rule(primitive: Primitive) -> bool:
    """Whether JAX itself can batch `primitive`."""
    return primitive in batching.fancy_primitive_batchers or primitive.name in {
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    }


def is_jaxs_rule(rule: Callable[..., Any]) -> bool:
    """Whether a rule in JAX's table is one of JAX or of batchax, and not of a user's.

    JAX wraps what is put into its older tables, in a function that closes over the rule.
    """
    rule = getattr(rule, "func", rule)
    if "BatchersProxy" in getattr(rule, "__qualname__", ""):
        inside = (cell.cell_contents for cell in rule.__closure__ or ())
        rule = next(x for x in inside if callable(x) and not isinstance(x, Primitive))
        rule = getattr(rule, "func", rule)
    module = getattr(rule, "__module__", None) or ""
    return module.partition(".")[0] in ("jax", "jaxlib", "batchax")


def batched_by_jax(x: Any) -> tuple[Any, int | None]:
    """A value inside a function under ``jax.vmap``, and where its batch axis is.

    Returned from that function it could only be placed at an axis: whether it is
    batched at all, which rules of third parties decide, would be lost.
    """
    with jex_core.take_current_trace() as trace:
        if isinstance(x, BatchTracer) and x._trace is trace:
            return x.val, x.batch_dim
    return x, None


def axis_from(data: Any, axis_type: Any) -> Any:
    """An `Axis` from what JAX tells a batching rule about the axis being mapped.

    Where ``jax.vmap`` was given no name JAX has a bare object in its place.
    """
    name = None if type(data.name) is object else data.name
    return axis_type(data.size, name, data.spmd_name, data.explicit_mesh_axis)


def axis_data(name: Hashable, size: Any, spmd_name: Any) -> Any:
    """What the batching methods of JAX's extensible operations take for an axis.

    The operations (``jax.experimental.hijax``) are public, the class their methods expect is
    not. Since 0.12 functions of ``jax.numpy`` are made of them.
    """
    from jax._src.interpreters.batching import AxisData

    return AxisData(name, size, spmd_name, None)


def has_own_batches(x: Any) -> bool:
    """Whether `x` is of a type that says itself what a batch of it is, and an example of one."""
    return type(x) in vmappables


def own_batches(x: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that take such a batch apart for one example, and put one together.

    There is a public function to register them, and none to ask for them.
    """
    return to_elt_handlers[type(x)], from_elt_handlers[type(x)]


def type_of_batch_axis(x: Any) -> type:
    """Of what type the axis of such a batch is."""
    return vmappables[type(x)][0]


def types_of_batch_axes() -> set[type]:
    """Those of all such types, except for ints."""
    return {spec_type for spec_type, _ in list(vmappables.values())} - {int}


_lent: set[type] = set()


def lend_batches(
    type: type, spec_type: type, to_example: Callable[..., Any], to_batch: Callable[..., Any]
) -> None:
    """Tells JAX what a batch of `type` is, unless it knows from somebody else."""
    if type not in vmappables or type in _lent:
        batching.register_vmappable(type, spec_type, int, to_example, to_batch, None)
        _lent.add(type)


def forget_batches(type: type) -> None:
    """Undoes `lend_batches`."""
    if type in _lent:
        _lent.discard(type)
        # `batching.unregister_vmappable` is there, and does nothing on the JAX of today.
        for table in (vmappables, to_elt_handlers, from_elt_handlers):
            table.pop(type, None)
