"""Running the steps of a scan whose arrays have the axis of the steps anywhere."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import unmapped_aval

from batchax import _compat
from batchax.execution.buffers import blank
from batchax.execution.slices import scan_slices, with_derivative_of
from batchax.jaxprs.program_key import program_key
from batchax.kernel.axis import AxisPosition, expand_axis
from batchax.rules.masking import is_inexact


@dataclass(frozen=True)
class ScanProgram:
    """What a scan does. Equal to another one that does the same.

    Attributes:
      body: the program of one step, without constants: from values that are the same at
        each step, the carry and one entry of each of the xs to the carry and the ys.
      n_carry: number of values in the carry.
      in_axes: where each of the xs has the axis of the steps; None: the same at each.
      out_axes: where each of the ys gets it, counted from the front.
      length: number of steps.
      reverse: whether the last step comes first.
      unroll: as for ``lax.scan``.
    """

    body: _compat.ClosedJaxpr = field(compare=False)
    n_carry: int
    in_axes: tuple[AxisPosition, ...]
    out_axes: tuple[int, ...]
    length: Any
    reverse: bool
    unroll: int | bool
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", program_key(self.body))

    def run(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        """The last carry and the stacked ys."""
        return _run(self, list(consts), list(carry), list(xs))


# Compiled as one program, in which what only derivatives need is dropped. Outside of `jit` it would
# be computed.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(steps: ScanProgram, consts: list[Any], carry: list[Any], xs: list[Any]) -> list[Any]:
    types = steps.body.out_avals[steps.n_carry :]
    axes = steps.out_axes
    # lax.scan stacks along axis 0. Along another one, each step writes its entry where it
    # belongs in an array that is part of the carry.
    written = [k for k, a in enumerate(axes) if a != 0 and steps.length != 0]
    # Their derivatives are those of what lax.scan stacks as well. Nobody looks at the values of
    # that, so the compiler drops it where nothing is differentiated.
    stacked = [k for k, t in enumerate(types) if k not in written or is_inexact(t)]
    first = len(steps.body.jaxpr.eqns)
    arrays = []
    for k in written:
        array = blank(unmapped_aval(steps.length, axes[k], types[k]), first + k)
        arrays.append(_compat.varying_as(array, types[k]))

    def step(index: Any, carry: Any, parts: list[Any]) -> Any:
        values, arrays = carry
        outs = eval_jaxpr(steps.body.jaxpr, (), *consts, *values, *parts)
        values, ys = outs[: steps.n_carry], outs[steps.n_carry :]
        arrays = [
            lax.dynamic_update_slice_in_dim(
                array, _fixed_entry(ys[k], axes[k]), index, axes[k], allow_negative_indices=False
            )
            for array, k in zip(arrays, written, strict=True)
        ]
        return (values, arrays), [y if k in stacked else None for k, y in enumerate(ys)]

    (carry, arrays), ys = scan_slices(
        step, (carry, arrays), xs, steps.in_axes, None, steps.length,
        reverse=steps.reverse, unroll=steps.unroll,
    )  # fmt: skip
    ys = [
        y if a == 0 or y is None else jnp.moveaxis(y, 0, a) for y, a in zip(ys, axes, strict=True)
    ]
    for array, k in zip(arrays, written, strict=True):
        array = _compat.weakly(array) if types[k].weak_type else array
        ys[k] = with_derivative_of(array, ys[k]) if k in stacked else array
    return [*carry, *ys]


def _fixed_entry(y: Any, axis: int) -> Any:
    return expand_axis(lax.stop_gradient(y) if is_inexact(y) else y, axis)
