"""What happens to a primitive that batchax has no rule for.

First JAX's own rule, reached through ``jax.vmap`` of that one equation; where
JAX has none either, one lane after another, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import SequentialFallbackWarning
from batchax.jaxprs.evaluate import bind_equation
from batchax.jaxprs.spoken import line_of, spoken
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, move_axis, sharding_on_mesh

# Where the warning was given: by default once for each line of the user's.
_warned: dict[Any, Any] = {}


def run_without_rule(
    axis: Axis, eqn: Eqn, operands: list[Value], operand_axes: list[Position]
) -> tuple[Sequence[Any], Sequence[Position]]:
    """Outputs of an equation whose primitive has no rule here."""
    primitive = eqn.primitive

    def one_lane(*xs: Any) -> list[Any]:
        return list(bind_equation(eqn, xs))

    if _compat.jax_has_rule(primitive):
        # The results leave `jax.vmap` as a description, beside its outputs: as one of those, each
        # would have to be placed at an axis, be it batched or not.
        def look(*xs: Any) -> tuple[list[Any], list[tuple[Any, Position]]]:
            return [], list(map(_compat.batched_by_jax, one_lane(*xs)))

        def batch(fun: Callable[..., Any]) -> Any:
            return jax.vmap(
                fun,
                in_axes=tuple(operand_axes),
                axis_name=axis.name,
                axis_size=axis.size,
                spmd_axis_name=axis.spmd_name,
            )(*operands)

        _, placed = _compat.described(look, batch)
        return [x for x, _ in placed], [position for _, position in placed]

    if not recording.is_watched():  # if one is, `explain` has a finding for it
        _warn(axis, eqn)
    outs = one_after_another(axis, one_lane, operands, operand_axes)
    return outs, [0] * len(outs)


def _warn(axis: Axis, eqn: Eqn) -> None:
    warnings.warn_explicit(
        f"the primitive {spoken(eqn)} at {line_of(eqn)} has no batching rule: it runs for the "
        f"{axis.size} lanes one after another. Give it a rule with @batchax.register_rule to run "
        "them together.",
        SequentialFallbackWarning,
        *_compat.user_file_and_line(eqn.source_info),
        registry=_warned,
    )


def one_after_another(
    axis: Axis,
    one_lane: Callable[..., Any],
    operands: Sequence[Value],
    operand_axes: Sequence[Position],
    unroll: bool = False,
) -> list[Any]:
    """`one_lane` applied to each lane in order; outputs have the lanes first.

    Lanes run in order of their index, which keeps ordered effects in order.
    """
    recording.note(service="lanes")
    batched = [
        lanes_together(move_axis(x, a, 0))
        for x, a in zip(operands, operand_axes, strict=True)
        if a is not None
    ]

    def step(carry: None, lane: list[Any]) -> tuple[None, list[Any]]:
        mine = iter(lane)
        xs = [x if a is None else next(mine) for x, a in zip(operands, operand_axes, strict=True)]
        return carry, one_lane(*xs)

    _, outs = lax.scan(step, None, batched, length=axis.size, unroll=unroll)
    return [lanes_spread(axis, x) for x in outs]


def lanes_together(x: Value) -> Any:
    """`x` with axis 0 on each device, where its type says that it is sharded: to be taken apart."""
    sharding: Any = jax.typeof(x).sharding
    if sharding.mesh.empty or sharding.spec[:1] in ((), (None,)):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(None, *sharding.spec[1:])))


def lanes_spread(axis: Axis, x: Value) -> Any:
    """`x`, with lanes along axis 0, of the type that values batched over `axis` have."""
    if axis.mesh_axis is None:
        return x
    sharding = sharding_on_mesh(axis, jax.typeof(x).sharding)
    spec = PartitionSpec(axis.mesh_axis, *sharding.spec[1:])
    return jax.sharding.reshard(x, sharding.update(spec=spec))
