"""Safe values for lanes that are masked out: branches not taken, loops finished.

Under a predicate that differs between lanes a program runs for all of them, and
for some its results are dropped. What it computes there must do no harm: a NaN
would reach the gradient of an operand that all lanes share (``0 * nan``), a loop
might never end (JAX #2947), a callback might see what it was never written for. So,
before the program runs, the operands of a masked lane are replaced by those of the
first active lane: all lanes then compute what some real lane computes.

The replacement is a primitive of its own, `safe_lanes`, because of its
derivative: nothing flows into or out of a masked lane. With
``jax.lax.stop_gradient`` in its place, which cannot be transposed, a branch inside
a ``custom_jvp`` rule could not be differentiated in reverse mode.

Where a program can only hurt the gradients of its own lanes, cutting derivatives is
enough, and values stay as they are: undifferentiated, such a branch costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, axis_to_front, move_axis
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.mask_plan import MaskPlan


def safe_lanes(active: Any, x: Value, depth: int, fill: str = "donor") -> Any:
    """`x` with its masked lanes replaced by the first active one.

    Args:
      active: a boolean array; each of its elements is a lane.
      x: an operand. Its first `depth` axes are the first of `active`; it is the
        same along the others.
      depth: 0 for an operand that all lanes share. Its value stays, and no
        derivative reaches it unless some lane is active.
      fill: "keep" leaves values as they are, and cuts derivatives only.

    Returns:
      An array of the type of `x`. If no lane is active, all hold what lane 0 holds.
    """
    x = _compat.varying_as(x, jax.typeof(active))
    return safe_lanes_p.bind(active, x, depth=depth, fill=fill)


@functools.partial(jax.jit, static_argnames=("depth", "fill"))
def _values(active: Any, x: Value, *, depth: int, fill: str) -> Any:
    """What `safe_lanes_p` stands for; masked lanes get the `fill` "donor" or "zero"."""
    no_lanes = any(isinstance(n, int) and n == 0 for n in active.shape)
    if fill == "keep" or (fill == "donor" and depth == 0) or no_lanes:
        return x
    if depth < active.ndim:
        active = lax.reduce_or(active, tuple(range(depth, active.ndim)))
    if fill == "zero":
        other = lax.full_like(x, 0)
    else:
        # All lanes in one row: an index into it is cheaper than one into each axis.
        lanes = math.prod(active.shape)
        first = lax.argmax(lax.reshape(active, (lanes,)), 0, np.int32)
        row = x if depth == 1 else lax.reshape(x, (lanes, *x.shape[depth:]))
        donor = _lane(row, first)
        other = expand_like(donor, depth, x)
    mask = expand_like(active, 0, x) if depth else active
    return _compat.unconsumed(lax.select(mask, *map(_compat.unconsumed, (x, other))))


def _lane(row: Any, index: Any) -> Any:
    """The entry at `index` along axis 0."""
    sharding: Any = jax.typeof(row).sharding
    if sharding.spec[:1] in ((), (None,)) or jnp.issubdtype(row.dtype, jax.dtypes.extended):
        return lax.dynamic_index_in_dim(row, index, 0, False, allow_negative_indices=False)
    # JAX slices no axis that types say is sharded (axes of type Explicit): all entries are added
    # up, of which the others are zero.
    places = lax.broadcasted_iota(
        np.int32, row.shape[:1], 0, out_sharding=sharding.update(spec=sharding.spec[:1])
    )
    mine = lax.select(expand_like(places == index, 0, row), row, lax.full_like(row, 0))
    return mine.any(0) if row.dtype == np.bool_ else mine.sum(0, dtype=row.dtype)


def _jvp(primals: Any, tangents: Any, *, depth: int, fill: str) -> tuple[Any, Any]:
    active, x = primals
    out = safe_lanes_p.bind(active, x, depth=depth, fill=fill)
    return out, _cut(tangents[1], active, depth)


def _transpose(cotangent: Any, active: Any, x: Value, *, depth: int, fill: str) -> list[Any]:
    return [None, _cut(cotangent, active, depth)]


def _cut(tangent: Any, active: Any, depth: int) -> Any:
    """A tangent or cotangent with zeros in masked lanes."""
    if type(tangent) is ad.Zero:
        return tangent
    return safe_lanes_p.bind(active, tangent, depth=depth, fill="zero")


def _batched(axis: Axis, args: Any, axes: Any, /, *, depth: int, fill: str) -> tuple[Any, Position]:
    (active, x), (live_at, x_at) = args, axes
    if live_at is None:  # the lanes are as they were; each holds one more axis
        if x_at < depth:
            x = move_axis(x, x_at, depth)
        return safe_lanes_p.bind(active, x, depth=depth, fill=fill), max(x_at, depth)
    # The lanes of both axes form one set: where a whole row of lanes is masked, it
    # borrows from another row.
    active = move_axis(active, live_at, 0)
    if x_at is None and depth == 0:
        return safe_lanes_p.bind(active, x, depth=0, fill=fill), None
    x = axis_to_front(axis, x, x_at)
    return safe_lanes_p.bind(active, x, depth=depth + 1, fill=fill), 0


safe_lanes_p = own_primitive(
    "safe_lanes",
    called="operands of masked lanes",
    operations=_values,
    types=lambda active, x, **how: x,
    programs=(),
    facts="linear",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)


def run_masked(
    active: Any,
    run: Callable[[list[Any], list[Position]], tuple[list[Any], list[Position]]],
    operands: Sequence[Value],
    positions: Sequence[Position],
    plan: MaskPlan,
    written: Collection[int],
) -> tuple[list[Any], list[Position]]:
    """Runs a program for all lanes so that masked lanes do no harm.

    Args:
      active: for each lane (along axis 0) whether its results count.
      run: the program: operands and positions to results and positions.
      operands: its operands.
      positions: where each carries the batch axis.
      plan: which operands masked lanes must not see as they are.
      written: which operands are references the program writes to: masked lanes
        of those are restored.

    Raises:
      UnsupportedError: the program writes to a reference that all lanes share.
    """
    operands, positions, saved = list(operands), list(positions), []
    replaced, fill = plan.replaced, plan.fill
    for i, (x, position) in enumerate(zip(operands, positions, strict=True)):
        if _compat.is_reference(x):
            if position is None and i in written:
                raise UnsupportedError(
                    "a reference (jax.new_ref) that all lanes share is written to where lanes "
                    "diverge: in a branch that not every lane takes, or in a loop that ends at a "
                    "different step in each lane. Create the reference inside the function, or "
                    "pass it with a batch axis, so that each lane has its own."
                )
            if position is not None and (i in written or i in replaced):
                saved.append((x, position, x[...]))
            if position is not None and i in replaced:
                safe = safe_lanes(active, move_axis(x[...], position, 0), 1)
                x[...] = move_axis(safe, 0, position)
        elif i in replaced and position is not None:
            if fill == "donor" or is_inexact(x):
                operands[i] = safe_lanes(active, move_axis(x, position, 0), 1, fill)
                positions[i] = 0
        elif i in replaced and isinstance(x, jax.Array) and is_inexact(x):
            operands[i] = safe_lanes(active, x, 0, fill)
    results = run(operands, positions)
    for reference, position, before in saved:
        reference[...] = select_lanes(active, position, reference[...], before)
    return results


def select_lanes(active: Any, position: int, new: Any, old: Any) -> Any:
    """`new` in active lanes and `old` in the others; both have their lanes at `position`."""
    if new is old:
        return old
    mask = expand_like(active, position, new)
    # Of keys, those that lanes keep are read by no step.
    return _compat.unconsumed(lax.select(mask, new, _compat.unconsumed(old)))


def expand_like(x: Value, position: int, like: Any) -> Any:
    """`x`, whose axes are those of `like` from `position` on, repeated to its shape."""
    if np.ndim(x) == np.ndim(like):
        return x
    dims = tuple(range(position, position + x.ndim))
    return lax.broadcast_in_dim(x, like.shape, dims, out_sharding=jax.typeof(like).sharding)


def is_inexact(x: Value) -> bool:
    """Whether a value, or a type, may have derivatives: floats and complex numbers do."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
