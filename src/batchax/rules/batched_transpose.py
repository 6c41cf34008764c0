"""Cotangents: running a reverse rule written for one example on a whole batch.

A reverse rule returns cotangents for each example. The cotangent of an input that all
lanes share is their sum over the lanes. An output that all lanes share has a single
cotangent, which must enter that sum once, not once for each lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Jaxpr, Value
from batchax.kernel.axis import Axis, Position, lanes_vary_over, match_axis
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import gives_index


def batched_transpose(
    axis: Axis,
    jaxpr: Jaxpr,
    args: Sequence[Value],
    axes: Sequence[Position],
    cotangents: range,
    in_axes: Sequence[Position],
) -> list[Any]:
    """Runs a per-example reverse rule for all lanes.

    Args:
      axis: the axis being mapped.
      jaxpr: the rule; it has no constants.
      args: what it is applied to, with batch axes at `axes`.
      cotangents: which of `args` are cotangents; the others are residuals.
      in_axes: where the primal input of each cotangent that the rule returns has its
        batch axis, None for an input that all lanes share.
    """
    shared = [axes[i] is None and i in cotangents for i in range(len(args))]
    from_shared = reached(jaxpr, shared)
    from_lanes = reached(jaxpr, [a is not None for a in axes])
    summed = [a is None for a in in_axes]
    # Where a sum over lanes has a part that comes of a shared cotangent, only the first lane is
    # given that cotangent, and the others zero: so it is counted once.
    if any(map(all, zip(from_shared, from_lanes, summed, strict=True))):
        args = [_in_first_lane(axis, x) if s else x for x, s in zip(args, shared, strict=True)]
        axes = [0 if s else a for a, s in zip(axes, shared, strict=True)]
    outs, out_axes = interpret(axis, jaxpr, (), args, axes)
    return [_sum_or_match(axis, x, a, to) for x, a, to in zip(outs, out_axes, in_axes, strict=True)]


def reached(jaxpr: Jaxpr, marked: Sequence[bool]) -> list[bool]:
    """Which outputs of `jaxpr` depend on the `marked` inputs."""
    marks = {v for v, m in zip(jaxpr.invars, marked, strict=True) if m}
    for eqn in jaxpr.eqns:
        if any(_is_in(marks, v) for v in eqn.invars):
            marks.update(eqn.outvars)
    return [_is_in(marks, v) for v in jaxpr.outvars]


def multiplies(
    axis: Axis, jaxpr: Jaxpr, cotangents: Sequence[bool], batched: Sequence[bool]
) -> bool:
    """Whether what a reverse rule computes from some cotangents differs between lanes of `axis`.

    It does if a value computed from those `cotangents` and another computed from the `batched`
    inputs, or from the index of the lane, meet in an operation, other than an addition.
    """
    linear = {v for v, m in zip(jaxpr.invars, cotangents, strict=True) if m}
    varying = {v for v, m in zip(jaxpr.invars, batched, strict=True) if m}
    for eqn in jaxpr.eqns:
        by = [i for i, v in enumerate(eqn.invars) if _is_in(linear, v)]
        over = [i for i, v in enumerate(eqn.invars) if _is_in(varying, v)]
        additive = facts_of(eqn.primitive).additive
        if not additive and any(i != j for i in by for j in over):
            return True
        if by:
            linear.update(eqn.outvars)
        if over or gives_index(eqn, axis.name):
            varying.update(eqn.outvars)
    return False


def match_or_zeros(axis: Axis, x: Value, source: Position, destination: Position) -> Any:
    """`x` with its batch axis at `destination`, also where it is of the type float0.

    That is the type of the cotangent of an integer. JAX computes nothing with it, so its zeros
    are made with NumPy.
    """
    if source == destination:
        return x
    assert destination is not None
    if jax.typeof(x).dtype != jax.dtypes.float0:
        return match_axis(axis, x, source, destination)
    shape = [n for d, n in enumerate(np.shape(x)) if d != source]
    shape.insert(destination, axis.size)
    return np.zeros(shape, jax.dtypes.float0)


def _sum_or_match(axis: Axis, x: Value, source: Position, destination: Position) -> Any:
    if destination is None and source is not None:
        x, over = jnp.sum(x, axis=source), lanes_vary_over(axis)
        return lax.psum(x, tuple(over)) if over else x
    return match_or_zeros(axis, x, source, destination)


def _in_first_lane(axis: Axis, x: Value) -> Any:
    """A batch, at axis 0, whose first lane is `x` and whose other lanes are zero."""
    if jax.typeof(x).dtype == jax.dtypes.float0:
        return match_or_zeros(axis, x, None, 0)
    others = (0, axis.size - 1, 0)
    zero = jnp.zeros((), x.dtype)
    return lax.pad(lax.expand_dims(x, (0,)), zero, [others] + [(0, 0, 0)] * x.ndim)


def _is_in(marks: set[Any], v: Any) -> bool:
    return not isinstance(v, Literal) and v in marks
