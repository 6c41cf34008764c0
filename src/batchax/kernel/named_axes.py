"""Which equations use the name of the axis being mapped, or vary over the axes of a mesh.

An equation whose operands are all unbatched runs once, unless it is a collective over our axis, or
a call, loop or branch with one inside.

A reference is created before anything is written to it. Whether one that starts out the same for
all lanes can stay so is known only from later writes, so this is settled before a jaxpr is run.

Inside ``jax.shard_map`` a type has the mesh axes over which its value varies, and an operation
needs operands that vary over the same. JAX cast the operands of one example while it was traced.
Batched, some values vary over more axes: over those of ``spmd_axis_name``, or of the predicate that
selects each lane's branch. So an equation that is emitted again has its operands cast again, and
the jaxprs inside it are traced again for the types that they are given now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import unmapped_aval
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.cache import cached_on
from batchax.errors import AxisError
from batchax.jaxprs.bodies import Anywhere, programs_inside, with_inside
from batchax.jaxprs.error_format import spoken
from batchax.jaxprs.evaluate import bind_equation, variables_read
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Values
from batchax.kernel.axis import Axis, Position, Positions, axis_to_front, lanes_vary_over, names_in
from batchax.kernel.registry import is_foreign, registrations

# In the place of names, for a call whose batching rule, of a user, receives the name of the axis:
# whichever that is, the rule may use it.
ANY_NAME = object()


def as_names(axis_name: Hashable) -> tuple[Hashable, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def uses_name(eqn: Eqn, name: Hashable) -> bool:
    if eqn.effects and name in _compat.named_axes(eqn.effects):
        return True
    unmarked = _unmarked(eqn)
    return name in unmarked or ANY_NAME in unmarked


def uses_axis(axis: Axis, eqn: Eqn) -> bool:
    return axis.name is not None and uses_name(eqn, axis.name)


def any_uses_axis(axis: Axis, *programs: ClosedJaxpr) -> bool:
    return any(uses_axis(axis, eqn) for program in programs for eqn in program.jaxpr.eqns)


def may_use_name(eqn: Eqn, name: Hashable) -> bool:
    """Returns whether `eqn` uses `name`, or has derivative rules inside that may do so."""
    # JAX traces derivative rules later, and they leave no mark in a jaxpr. After the axis is
    # mapped, only the rule that batches their call knows its name.
    return uses_name(eqn, name) or _rules.in_equation(eqn)


def gives_index(eqn: Eqn, name: Hashable) -> bool:
    """Returns whether `eqn` or an equation inside it computes the lane index over `name`."""
    return any(
        e.primitive.name == "axis_index" and name in as_names(e.params["axis_name"])
        for e in with_inside([eqn])
    )


def has_rules(eqn: Eqn) -> bool:
    operation = eqn.params.get("_prim")  # of a `call_hi_primitive`, with separate parameters
    inside = not _HIGH_RULES.isdisjoint(getattr(operation, "params", ()))
    return inside or not _RULES.isdisjoint(eqn.params)


# The parameters that hold the derivative rules of ``custom_jvp`` and ``custom_vjp``.
_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk"})

# Those of JAX's operations that hold rules, or a program that may call functions with rules.
_HIGH_RULES = frozenset({"jvp_rule", "fwd", "jaxpr"})

_rules = Anywhere(has_rules)


def _unmarked(eqn: Eqn) -> frozenset[Hashable]:
    """Returns names that `eqn` uses without an effect; `ANY_NAME` if it may use any."""
    holder = facts_of(eqn.primitive).names
    if holder:
        return frozenset(as_names(eqn.params[holder]))
    if eqn.primitive.name == "call_hi_primitive":  # an object, which may hold what it traced
        operation = eqn.params["_prim"]
        traced = [x for x in vars(operation).values() if isinstance(x, jax.stages.Traced)]
        programs = [x.jaxpr.jaxpr for x in traced]
        used = frozenset(name for jaxpr in programs for name in _compat.named_axes(jaxpr.effects))
        if not type(operation).__module__.startswith("jax."):  # as below
            used |= names_in(operation.params)
        return used.union(*(_unmarked_inside(jaxpr, registrations()) for jaxpr in programs))
    if getattr(eqn.params.get("rule"), "takes_axis_name", False):
        return frozenset([ANY_NAME])
    # Which names count depends on whose rule a primitive has.
    inner = frozenset().union(
        *(_unmarked_inside(program, registrations()) for program in programs_inside(eqn))
    )
    if inner and "mesh" in eqn.params:  # shard_map binds the names of its mesh itself
        inner -= frozenset(eqn.params["mesh"].axis_names)
    if _impl_uses_names.is_true(eqn):
        return frozenset([ANY_NAME])
    # The primitive of a third party may be a collective: any parameter may hold the name.
    return inner | names_in(eqn.params) if is_foreign(eqn.primitive) else inner


def staged_impl(eqn: Eqn) -> ClosedJaxpr | None:
    """Returns the `impl` of a library's primitive as a program; None if it has a collective.

    Types are those outside of the mesh of a `shard_map`: Lineax compares them with its own.
    """
    run = lambda *xs: list(eqn.primitive.impl(*xs, **eqn.params))
    try:
        with without_mesh():
            program = _compat.stage(run, as_without_mesh([v.aval for v in eqn.invars]))
    except NameError:  # of an axis that is not known here
        return None
    return None if _compat.named_axes(program.effects) else program


_impl_uses_names = Anywhere(
    lambda eqn: _compat.is_vmap_of_impl(eqn.primitive) and staged_impl(eqn) is None
)


@cached_on("names of axes that programs use")
def _unmarked_inside(jaxpr: Jaxpr, _: int) -> frozenset[Hashable]:
    return frozenset[Hashable]().union(*map(_unmarked, jaxpr.eqns))


_CREATES = frozenset({"new_ref", "empty_ref"})


def references_to_batch(axis: Axis, jaxpr: Jaxpr, axes: Positions) -> frozenset[Any]:
    """Returns the references created by `jaxpr` that batched values may be written to.

    It errs on the side of batching.
    """
    created = {
        eqn.outvars[0] for eqn in jaxpr.eqns if eqn.effects and eqn.primitive.name in _CREATES
    }
    if not created:
        return frozenset()
    batched = {v for v, a in zip(jaxpr.invars, axes, strict=True) if a is not None}
    count = -1
    while count != len(batched):  # a loop, because an earlier equation may read what a later writes
        count = len(batched)
        # A batched operand is taken to make all results, and all that the equation writes, batched.
        for eqn in jaxpr.eqns:
            if not batched.isdisjoint(variables_read(eqn)) or uses_axis(axis, eqn):
                batched.update(eqn.outvars)
                batched.update(eqn.invars[i] for i in _compat.written_inputs(eqn))
    return frozenset(created & batched)


def create_batched(
    axis: Axis, eqn: Eqn, operands: Values, operand_axes: Positions
) -> tuple[list[Any], list[Position]]:
    """Creates a reference with a part for each lane."""
    if eqn.primitive.name == "empty_ref":
        params = {**eqn.params, "ty": unmapped_aval(axis.size, 0, eqn.params["ty"])}
        return [eqn.primitive.bind(**params)], [0]
    (x,), (position,) = operands, operand_axes
    if position is None:
        x, position = axis_to_front(axis, x, None), 0
    return [eqn.primitive.bind(x, **eqn.params)], [position]


Made = TypeVar("Made")

Varying = tuple[frozenset[Hashable], ...]
"""Over which axes of a mesh each of several values varies."""


_without: ContextVar[AbstractMesh | None] = ContextVar("batchax_without_mesh", default=None)
"""The mesh that functions are being staged without."""


def without_mesh() -> AbstractContextManager[None]:
    """Returns a context to trace a function of one example in. Types are from `as_without_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    # In a ``shard_map`` over a whole mesh with unchecked types, the mesh has no effect on a
    # function. Libraries compare types of arrays with types of numbers, which carry no mesh, and
    # JAX cannot compute with known values there while a mesh is set.
    return _leaving_out(mesh) if _useless(mesh) else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _leaving_out(mesh: AbstractMesh) -> Iterator[None]:
    token = _without.set(mesh)
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            yield
    finally:
        _without.reset(token)


def as_without_mesh(types: Sequence[Aval]) -> list[Any]:
    """Removes from types the mesh that `without_mesh` leaves out."""
    # Derivatives of the function meet types with the mesh later.
    return [_without_mesh(x) if _tells_of_useless(x) else x for x in types]


def _without_mesh(aval: Aval) -> Aval:
    spec = PartitionSpec(*[None] * aval.ndim)
    return aval.update(sharding=NamedSharding(AbstractMesh((), ()), spec))


def _tells_of_useless(aval: Aval) -> bool:
    # A reference is of the mesh that it was made in.
    if hasattr(aval, "inner_aval") or aval.sharding.mesh.empty:
        return False
    return _useless(aval.sharding.mesh) and not _compat.varying_axes(aval)


def _useless(mesh: AbstractMesh) -> bool:
    if mesh.empty:
        return False
    return set(mesh.axis_types) == {AxisType.Manual} and not _compat.checked_axes()


def mesh_around() -> AbstractMesh:
    """Returns the mesh in scope, also inside `without_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    without = _without.get()
    return without if mesh.empty and without is not None else mesh


def are_on_a_mesh(values: Values) -> bool:
    """Returns whether the sharding of a value, or for a traced one its type, has a mesh."""
    for x in values:
        sharding = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return True
    return False


def may_be_spread(values: Values, most: int = 1) -> bool:
    """Returns whether values may be on more devices than `most`.

    This is unknown for traced values, except inside ``shard_map`` over all mesh axes.
    """
    if any(isinstance(x, Tracer) for x in values):
        mesh = mesh_around()
        own = bool(mesh.manual_axes) and not (mesh.auto_axes or mesh.explicit_axes)
        return jax.device_count() > most and not own
    return any(len(x.sharding.device_set) > most for x in values if isinstance(x, jax.Array))


def varying_of(values: Values) -> Varying:
    """Returns the mesh axes that each value varies over, or none where types are unchecked."""
    if not _compat.checked_axes():
        return (frozenset(),) * len(values)
    return tuple(_compat.varying_axes(jax.typeof(x)) for x in values)


def types_varying(types: Sequence[Aval]) -> Varying:
    return tuple(map(_compat.varying_axes, types))


def vary_over(values: Values, varying: Varying) -> list[Any]:
    return [_compat.varying_over(x, v) if v else x for x, v in zip(values, varying, strict=True)]


def vary_alike(eqn: Eqn, operands: Values) -> list[Any]:
    """Casts operands to vary over the same mesh axes if they did for one example."""
    if len(operands) < 2 or holds_programs(eqn):
        return list(operands)
    # For one example they differed, so the equation accepts operands that differ.
    if len({_compat.varying_axes(v.aval) for v in eqn.invars}) > 1:
        return list(operands)
    return _compat.varying_alike(operands)


def bind_varying(eqn: Eqn, operands: Values, **changes: Any) -> Sequence[Any]:
    """Binds as `bind_equation`, for operands that vary over more axes than for one example."""
    if not _compat.checked_axes():
        return bind_equation(eqn, operands, **changes)
    if eqn.primitive.name == "pvary":  # JAX raises for a cast of a value that varies already
        return [_compat.varying_as(x, v.aval) for x, v in zip(operands, eqn.outvars, strict=True)]
    return bind_equation(eqn, vary_alike(eqn, operands), **changes)


def holds_programs(eqn: Eqn) -> bool:
    """Returns whether `eqn` holds jaxprs that its operands are passed to one by one."""
    # The program in a scatter or a reduction combines two numbers: the operands of that meet, as
    # those of any operation do.
    combines = facts_of(eqn.primitive).combines
    return not combines and bool(programs_inside(eqn))


def varies_as_staged(eqn: Eqn, operands: Values) -> bool:
    return all(
        _compat.varying_axes(v.aval) == _compat.varying_axes(jax.typeof(x))
        for v, x in zip(eqn.invars, operands, strict=True)
    )


def check_lanes_apart(axis: Axis, eqn: Eqn) -> None:
    """Raises AxisError for a collective over the mesh axes that shard the lanes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for name in axis.spmd_name or ():
        casts = eqn.primitive.name == "pvary"
        if name in manual and not casts and not holds_programs(eqn) and uses_name(eqn, name):
            raise AxisError(
                f"spmd_axis_name {axis.spmd_name} shards the batch, but inside shard_map "
                f"{spoken(eqn)} is over {name!r}: it would communicate between examples. Shard the "
                "batch over another axis of the mesh."
            )


def as_lanes(axis: Axis, values: Values, axes: Positions) -> list[Any]:
    """Casts batched values to vary over the mesh axes that shard the lanes."""
    over = lanes_vary_over(axis)
    if not over:
        return list(values)
    return [
        x if a is None else _compat.varying_over(x, over) for x, a in zip(values, axes, strict=True)
    ]


def settle_varying(carry: Varying, build: Callable[[Varying], tuple[Made, Varying]]) -> Made:
    """Builds a loop whose carry varies over the same mesh axes before and after a step.

    `build` returns the loop for a carry that varies so, and the axes after one step.
    """
    # Axes are only added, of finitely many, so this ends.
    while True:
        made, after = build(carry)
        wider = tuple(old | new for old, new in zip(carry, after, strict=True))
        if wider == carry:
            return made
        carry = wider
