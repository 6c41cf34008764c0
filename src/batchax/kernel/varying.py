"""Over which axes of a mesh values vary, inside ``jax.shard_map``, and the casts that it asks for.

There the type of a value says over which axes of the mesh it varies, and an operation wants
operands that vary over the same. While a function of one example was staged, JAX cast those that
did not. Batched, some values vary over more than they did for one example: over the mesh axes that
``spmd_axis_name`` spreads the lanes over, or over those of the predicate that selects each lane's
branch. So whoever emits an equation again has to cast its operands again, and the programs inside
it are staged again for the types that they are given now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.errors import AxisError
from batchax.jaxprs.evaluate import bind_equation
from batchax.jaxprs.inside import programs_inside
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.spoken import spoken
from batchax.jaxprs.words import Aval, Eqn, Value
from batchax.kernel.axis import Axis, Position, lanes_vary_over
from batchax.kernel.named_axes import uses_name

Made = TypeVar("Made")

Varying = tuple[frozenset[Hashable], ...]
"""Over which axes of a mesh each of several values varies."""


_without: ContextVar[AbstractMesh | None] = ContextVar("batchax_without_mesh", default=None)
"""The mesh that functions are being staged without."""


def without_mesh() -> AbstractContextManager[None]:
    """Context to stage a function of one example in, for types `as_without_mesh` has them.

    Inside a ``shard_map`` that has a whole mesh, and whose types do not say what varies, the mesh
    is of no use to a function. It is staged as it is without one, then. Libraries compare types of
    arrays, and a number's never tells of a mesh; and JAX cannot compute with known values in
    there, where a mesh is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return _leaving_out(mesh) if _useless(mesh) else nullcontext()


@contextmanager
def _leaving_out(mesh: AbstractMesh) -> Iterator[None]:
    token = _without.set(mesh)
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            yield
    finally:
        _without.reset(token)


def as_without_mesh(types: Sequence[Aval]) -> list[Any]:
    """These types as they are where a function is staged `without_mesh`, if that leaves one out.

    What is derived of such a function later meets types of the mesh that was left out.
    """
    return [_without_mesh(x) if _tells_of_useless(x) else x for x in types]


def _without_mesh(aval: Aval) -> Any:
    spec = PartitionSpec(*[None] * aval.ndim)
    return aval.update(sharding=NamedSharding(AbstractMesh((), ()), spec))


def _tells_of_useless(aval: Aval) -> bool:
    if hasattr(aval, "inner_aval"):  # a reference is of the mesh that it was made in
        return False
    return _useless(aval.sharding.mesh) and not _compat.varying_axes(aval)


def _useless(mesh: Any) -> bool:
    if mesh.empty:
        return False
    return set(mesh.axis_types) == {AxisType.Manual} and not _compat.checked_axes()


def mesh_around() -> Any:
    """The mesh in scope, also where a function is staged `without_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    without = _without.get()
    return without if mesh.empty and without is not None else mesh


def may_be_spread(values: Sequence[Value], most: int = 1) -> bool:
    """Whether values may be spread over more devices than `most`.

    Of those that are traced nobody knows, but where each device has its own: inside a
    ``shard_map`` over all axes of its mesh.
    """
    if any(isinstance(x, Tracer) for x in values):
        mesh = mesh_around()
        own = bool(mesh.manual_axes) and not (mesh.auto_axes or mesh.explicit_axes)
        return jax.device_count() > most and not own
    return any(len(x.sharding.device_set) > most for x in values if isinstance(x, jax.Array))


def varying_of(values: Sequence[Value]) -> Varying:
    """Over which axes of a mesh each of `values` varies; over none where types do not say."""
    if not _compat.checked_axes():
        return (frozenset(),) * len(values)
    return tuple(_compat.varying_axes(jax.typeof(x)) for x in values)


def types_varying(types: Sequence[Aval]) -> Varying:
    """Over which axes of a mesh values of these types vary."""
    return tuple(map(_compat.varying_axes, types))


def vary_over(values: Sequence[Value], varying: Varying) -> list[Any]:
    """`values`, cast to vary over these axes, too."""
    return [_compat.varying_over(x, v) if v else x for x, v in zip(values, varying, strict=True)]


def vary_alike(eqn: Eqn, operands: Sequence[Value]) -> list[Any]:
    """The operands of an equation, cast to vary over the same axes if they did for one example."""
    if len(operands) < 2 or holds_programs(eqn):
        return list(operands)
    if len({_compat.varying_axes(v.aval) for v in eqn.invars}) > 1:
        return list(operands)
    return _compat.varying_alike(operands)


def bind_varying(eqn: Eqn, operands: Sequence[Value], **changes: Any) -> Sequence[Any]:
    """As `bind_equation`, for operands that may vary over more axes than for one example."""
    if not _compat.checked_axes():
        return bind_equation(eqn, operands, **changes)
    if eqn.primitive.name == "pvary":  # JAX refuses to cast a value that varies already
        return [_compat.varying_as(x, v.aval) for x, v in zip(operands, eqn.outvars, strict=True)]
    return bind_equation(eqn, vary_alike(eqn, operands), **changes)


def holds_programs(eqn: Eqn) -> bool:
    """Whether there are programs in `eqn` that its operands are passed to, one by one."""
    # The program in a scatter or a reduction combines two numbers: the operands of that meet, as
    # those of any operation do.
    combines = facts_of(eqn.primitive).combines
    return not combines and bool(programs_inside(eqn))


def varies_as_staged(eqn: Eqn, operands: Sequence[Value]) -> bool:
    """Whether operands vary over what they did for one example."""
    return all(
        _compat.varying_axes(v.aval) == _compat.varying_axes(jax.typeof(x))
        for v, x in zip(eqn.invars, operands, strict=True)
    )


def check_lanes_apart(axis: Axis, eqn: Eqn) -> None:
    """Refuses a collective of lanes over the very devices that they are spread over.

    Raises:
      AxisError: `eqn` is one.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for name in axis.spmd_name or ():
        casts = eqn.primitive.name == "pvary"
        if name in manual and not casts and not holds_programs(eqn) and uses_name(eqn, name):
            raise AxisError(
                f"spmd_axis_name {axis.spmd_name} shards the batch, but inside shard_map "
                f"{spoken(eqn)} is over {name!r}: different examples would meet in it. Shard "
                "the batch over another axis of the mesh."
            )


def as_lanes(axis: Axis, values: Sequence[Value], axes: Sequence[Position]) -> list[Any]:
    """`values`, of which those with the batch axis vary over the mesh axes it is spread over."""
    over = lanes_vary_over(axis)
    if not over:
        return list(values)
    return [
        x if a is None else _compat.varying_over(x, over) for x, a in zip(values, axes, strict=True)
    ]


def settle_varying(carry: Varying, build: Callable[[Varying], tuple[Made, Varying]]) -> Made:
    """What `build` makes for the carry of a loop, whose type must be the same before and after.

    The carry is taken to vary over more axes until a step adds none.

    Args:
      carry: over which axes of a mesh each part of the first carry varies.
      build: makes programs for a carry that varies so; and says what the next one varies over.
    """
    while True:
        made, after = build(carry)
        wider = tuple(old | new for old, new in zip(carry, after, strict=True))
        if wider == carry:
            return made
        carry = wider
