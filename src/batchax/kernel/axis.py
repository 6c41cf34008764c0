"""The batch axis, moving it about, and what it may carry for lanes that diverge.

A batched value is an array together with the position of its batch axis; a value that does not
depend on the batch has position ``None``. Rules receive both, as `args` and `axes`, and emit
ordinary JAX operations.

Lanes diverge where a loop ends at another step for some, or where they take different branches. By
default every lane runs what some lane runs, masked. An axis may carry a `Divergence`, which may run
a loop or the branches of a ``cond`` by another strategy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.error_format import show
from batchax.jaxprs.types import ClosedJaxpr, Value, Values

Position = int | None
"""Where the batch axis of a value is: a position, or None for "not batched"."""

Positions = Sequence[Position]

RuleOutputs = tuple[Any, Any]
"""What a rule returns: the result and its batch axis, or lists of both."""


@dataclass(frozen=True)
class Axis:
    """Describes the axis that a function is mapped over, for batching rules.

    Attributes:
      size: The number of lanes.
      name: The name for collectives, or None.
      spmd_name: The mesh axis names that sharding annotations inside gain, or None.
      mesh_axis: The mesh axis names that types of batched values carry (Explicit meshes), or None.
      mesh: The mesh of `mesh_axis`, or None.
      divergence: The execution strategy of diverging lanes (`kernel.divergence`), or None for
        masked lanes.
      bodies: An object with a method ``run(program, args, axes)`` that runs the bodies of loops and
        branches with collectives, or None.
      small_matrices: The option of `vmap` of that name.
      in_loop: The estimated number of loop steps in which operations run; 0 outside of loops.
      columns: Whether values keep their lanes last: a loop or the user passes them so. Otherwise
        they move to the front where ``jax.vmap`` moves them.
      lanes_first: Whether products of a shared matrix and vectors are rows, even short ones.

    Example:
      >>> from jax.extend.core import Primitive
      >>> lanes_p = Primitive("lanes")  # the number of lanes, one in a loop
      >>> _ = lanes_p.def_abstract_eval(lambda x: x)
      >>> @bx.register_rule(lanes_p)
      ... def _(axis, args, axes):
      ...     return jnp.int32(axis.size), None
      >>> print(bx.vmap(lanes_p.bind, out_axes=bx.AUTO)(jnp.arange(5, dtype="int32")))
      5
    """

    size: int
    name: Hashable | None = None
    spmd_name: tuple[Hashable, ...] | None = None
    mesh_axis: Hashable | None = None
    divergence: Any = None
    bodies: Any = None
    small_matrices: str = "auto"
    in_loop: int = 0
    columns: bool = False
    mesh: Any = None
    lanes_first: bool = False


def move_axis(x: Value, source: int, destination: int) -> Value:
    """Moves axis `source` of `x` to `destination`.

    It emits nothing if the axis is already there.

    Args:
      x: An array.
      source: The axis to move. Negative ints count from the end.
      destination: Its position in the result. Negative ints count from the end.

    Raises:
      AxisError: (a ValueError) `x` has no such axis.
      ArgumentTypeError: (a TypeError) `source` or `destination` is not an int.

    Example:
      >>> bx.move_axis(jnp.ones((2, 3, 4)), 0, -1).shape
      (3, 4, 2)
    """
    ndim = np.ndim(x)
    source = _in_range("source", source, x, ndim)
    destination = _in_range("destination", destination, x, ndim)
    if source == destination:
        return x
    order = [i for i in range(ndim) if i != source]
    order.insert(destination, source)
    return lax.transpose(x, order)


def broadcast_axis(axis: Axis, x: Value, destination: int) -> Value:
    """Repeats an unbatched `x` for every lane, with the batch axis at `destination`."""
    ndim = jax.numpy.ndim(x)
    destination = _in_range("destination", destination, x, ndim + 1)
    shape = list(jax.numpy.shape(x))
    shape.insert(destination, axis.size)
    kept = [i for i in range(ndim + 1) if i != destination]
    sharding = batch_sharding(axis, x, None, destination)
    if (
        sharding is not None
        and isinstance(axis.mesh, Mesh)
        and jax.typeof(x).sharding.mesh.empty
        and jax.sharding.get_abstract_mesh().empty
    ):
        # Computed outside of `jit`, where no mesh is set, this runs on the one device of `x`.
        out = lax.broadcast_in_dim(x, shape, kept)
        if not isinstance(out, Tracer):
            return jax.device_put(out, NamedSharding(axis.mesh, sharding.spec))
    # Where no mesh is set, JAX drops `out_sharding`.
    own: Any = nullcontext()
    if sharding is not None and jax.sharding.get_abstract_mesh().empty:
        own = jax.sharding.use_abstract_mesh(sharding.mesh)
    with own:
        out = lax.broadcast_in_dim(x, shape, kept, out_sharding=sharding)
    over = lanes_vary_over(axis)
    return _compat.varying_over(out, over) if over else out


def lanes_vary_over(axis: Axis) -> frozenset[Hashable]:
    """Returns the mesh axes of `spmd_axis_name` over which types can vary, inside ``shard_map``."""
    if axis.spmd_name is None:
        return frozenset()
    return _compat.checked_axes().intersection(axis.spmd_name)


def expand_axis(x: Value, destination: int) -> Value:
    """Gives an unbatched `x` a batch axis of size one, for broadcasting later."""
    ndim = np.ndim(x)  # also of a literal, which is a Python number
    destination = _in_range("destination", destination, x, ndim + 1)
    dims = tuple(i + (i >= destination) for i in range(ndim))
    return _expanded(x, inserted(np.shape(x), destination, 1), dims)


def expand_lanes(x: Value, destination: int, ndim: int) -> Value:
    """Reshapes one number for each lane to `ndim` dimensions of size one, and the lanes."""
    return _expanded(x, inserted((1,) * ndim, destination, x.shape[0]), (destination,))


def _expanded(x: Value, shape: tuple[int, ...], dims: tuple[int, ...]) -> Value:
    # What lax.expand_dims emits, without the time it takes: most mixed operands come here.
    return lax.broadcast_in_dim_p.bind(x, shape=shape, broadcast_dimensions=dims, sharding=None)


def match_axis(
    axis: Axis,
    x: Value,
    source: Position,
    destination: Position,
    *,
    sum_match: bool = False,
) -> Value:
    """Moves the batch axis of `x` to `destination`, or adds one by repeating `x`.

    Args:
      axis: The axis that a rule is called for.
      x: An array.
      source: The batch axis of `x`; None if it does not depend on the batch.
      destination: The batch axis of the result; None for none.
      sum_match: Whether an `x` with a batch axis is summed over it if `destination` is None, as the
        cotangent of a shared argument is.

    Raises:
      AxisError: (a ValueError) There is no such axis; or `destination` is None, `x` has a batch
        axis, and `sum_match` is False.
      ArgumentTypeError: (a TypeError) `source` or `destination` is neither an int nor None.

    Example:
      >>> axis = bx.Axis(size=5)
      >>> bx.match_axis(axis, jnp.ones((5, 3)), 0, 1).shape
      (3, 5)
      >>> bx.match_axis(axis, jnp.ones(3), None, 1).shape
      (3, 5)
      >>> bx.match_axis(axis, jnp.ones((5, 3)), 0, None, sum_match=True).shape
      (3,)
    """
    if destination is None:
        if source is None:
            return x
        source = _in_range("source", source, x, np.ndim(x))
        if not sum_match:
            raise AxisError(
                f"source is {source} and destination None, but lanes of shape {np.shape(x)} do not "
                "become one value by themselves. Pass sum_match=True for their sum, or a position."
            )
        return jax.numpy.sum(x, axis=source)
    if source is None:
        if not isinstance(axis, Axis):
            raise ArgumentTypeError(
                f"axis must be the batchax.Axis that a rule is given, got {show(axis)}."
            )
        return broadcast_axis(axis, x, destination)
    return move_axis(x, source, destination)


def axis_to_front(axis: Axis, x: Value, source: Position) -> Value:
    """Moves the batch axis of `x` to the front, or adds one by repeating `x`.

    Args:
      axis: The axis that a rule is called for.
      x: An array.
      source: The batch axis of `x`; None if it does not depend on the batch.

    Raises:
      AxisError: (a ValueError) `x` has no such axis.
      ArgumentTypeError: (a TypeError) `source` is neither an int nor None.

    Example:
      >>> axis = bx.Axis(size=5)
      >>> bx.axis_to_front(axis, jnp.ones((3, 5)), 1).shape
      (5, 3)
      >>> bx.axis_to_front(axis, jnp.ones(3), None).shape
      (5, 3)
    """
    return match_axis(axis, x, source, 0)


def _in_range(name: str, position: object, x: Value, ndim: int) -> int:
    if type(position) is int and -ndim <= position < ndim:  # by far the most frequent case
        return position % ndim
    if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
        raise ArgumentTypeError(f"{name} must be an int, got {show(position)}.")
    if -ndim <= position < ndim:
        return int(position) % ndim
    repeated = " once it is repeated for each lane" if ndim > np.ndim(x) else ""
    axes = f"{ndim} ax{'i' if ndim == 1 else 'e'}s" if ndim else "no axis"
    cure = f". Pass an int from {-ndim} to {ndim - 1}" if ndim else ""
    raise AxisError(
        f"{name} is {position}, but x, of shape {np.shape(x)}, has {axes}{repeated}{cure}."
    )


def shift_dims(dims: Sequence[int], position: int) -> tuple[int, ...]:
    """Shifts per-example dimension numbers for a batch axis at `position`."""
    return tuple([int(d + (d >= position)) for d in dims])  # NumPy ints occur


def batch_sharding(axis: Axis, x: Value, source: Position, destination: int) -> Any:
    """Returns the sharding in the type of `x` once its batch axis is at `destination`.

    None where types carry no sharding.
    """
    if axis.mesh_axis is None:
        return None
    sharding = sharding_on_mesh(axis, jax.typeof(x).sharding)
    # Types may name mesh axes of type Explicit only. Under `auto_axes` the entry is dropped.
    entry = axis.mesh_axis if is_in_types(sharding, axis.mesh_axis) else None  # None in `auto_axes`
    entries = [*sharding.spec, *[None] * (jax.numpy.ndim(x) - len(sharding.spec))]
    if source is not None:
        del entries[source]
    return sharding.update(spec=PartitionSpec(*inserted(entries, destination, entry)))


def sharding_on_mesh(axis: Axis, sharding: NamedSharding) -> NamedSharding:
    """Puts a sharding without a mesh, as constants have, on the mesh of the lanes."""
    if axis.mesh is None or not sharding.mesh.empty:
        return sharding
    # The mesh in scope may have other axis types, as inside ``shard_map``.
    here = jax.sharding.get_abstract_mesh()
    return NamedSharding(axis.mesh.abstract_mesh if here.empty else here, sharding.spec)


def sharding_with_axis(sharding: Any, position: int, args: Values, axes: Positions) -> Any:
    """Adds the batch axis at `position` to the ``out_sharding`` of one example."""
    if sharding is None:
        return None
    # The batch axis of a result is sharded as the batch axes of the operands are.
    entries = (
        jax.typeof(x).sharding.spec[a] for x, a in zip(args, axes, strict=True) if a is not None
    )
    batch_entry = next((entry for entry in entries if entry is not None), None)
    if not is_in_types(sharding, batch_entry):
        batch_entry = None
    spec = list(sharding.spec)
    # A spec may be shorter than the rank: trailing dimensions are unsharded.
    spec += [None] * (position - len(spec))
    spec.insert(position, batch_entry)
    return sharding.update(spec=sharding.spec.update(partitions=tuple(spec)))


def is_in_types(sharding: NamedSharding, entry: Hashable) -> bool:
    """Returns whether types on the mesh of `sharding` may have `entry`."""
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    names = entry if isinstance(entry, tuple) else (entry,)
    return entry is not None and all(types.get(n) == AxisType.Explicit for n in names)


def inserted(entries: Sequence[Any], position: int, entry: object) -> tuple[Any, ...]:
    return (*entries[:position], entry, *entries[position:])


def slot_after(dims: Sequence[int], count: int) -> int:
    # `dims` is sorted, so the slot after the first `count` dimensions follows the last of them.
    return dims[count - 1] + 1 if count else 0


def names_in(params: object) -> frozenset[Hashable]:
    """Collects every hashable in equation parameters that may be the name of an axis."""
    if isinstance(params, dict):
        return frozenset().union(*map(names_in, params.values()))
    if isinstance(params, (tuple, list, set, frozenset)):
        return frozenset().union(*map(names_in, params))
    # Names are nearly always strings: numbers are taken for sizes, dimensions and flags.
    if params is None or isinstance(params, (bool, int, float)):
        return frozenset()
    try:
        return frozenset([params])
    except TypeError:  # not hashable, as names are
        return frozenset()


PlacedOutputs = tuple[list[Any], list[Position]]
"""Values, and where each carries the batch axis."""


@dataclass(frozen=True, eq=False)
class WhileLoop:
    """Describes a ``while`` of one example whose predicate differs between lanes."""

    test: ClosedJaxpr  # of `test_consts` and the carry
    body: ClosedJaxpr  # of `body_consts` and the carry
    test_consts: Sequence[Any]
    test_at: Positions
    body_consts: Sequence[Any]
    body_at: Positions
    carry: Values  # the first carry, with the batch axis of each part at the front


@dataclass(frozen=True, eq=False)
class Branches:
    """Describes a ``cond`` or ``switch`` of one example whose index differs between lanes."""

    programs: Sequence[ClosedJaxpr]  # the branches, each of `operands`
    index: Any  # the branch that each lane takes, of shape (lanes,)
    operands: Values
    positions: Positions


@dataclass(frozen=True, eq=False)
class BoundedLoop:
    """Describes a bounded loop, or the reverse sweep of one, in which lanes diverge."""

    test: ClosedJaxpr | None  # None where the number of steps is known
    steps: Sequence[ClosedJaxpr]  # a step; for a sweep also its reverse step
    # Variants of `steps` that are differentiated in their place. Where they contain lanes of an
    # inner axis, derivatives may need operands of masked lanes replaced when values do not.
    guarded: Sequence[ClosedJaxpr]
    form: Any  # a `LoopSignature` or `SweepSignature`
    args: Values
    axes: Positions


@dataclass(frozen=True, eq=False)
class AnyLoop:
    """Describes a ``scan``, ``while``, bounded loop, or sweep. Lanes may leave loops in it."""

    primitive: Any
    params: dict[str, Any]
    args: Values
    axes: Positions


class Divergence(Protocol):
    """How lanes that diverge run. Hashable: jaxprs that are batched with it are cached."""

    @property
    def explicit(self) -> bool:
        """Returns whether the user asked for this policy.

        If so, loops draw lanes from all chunks, and each device runs the lanes that it has.
        """
        ...

    def why_lockstep(self, axis: Axis, loop: AnyLoop) -> str:
        """Returns why lanes cannot diverge in a loop or inside it; empty if they may.

        If they cannot, the loop is batched as usual.
        """
        ...

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        """Returns results for all lanes, each of which advances independently.

        None to run lanes in lockstep.
        """
        ...

    def run(
        self, axis: Axis, divergent: WhileLoop | BoundedLoop | Branches
    ) -> PlacedOutputs | None:
        """Returns the results of all lanes, or None to mask lanes."""
        ...

    def with_max_width(self, width: int) -> Divergence: ...
