"""Fourier transforms, which act on the last dimensions of their operand."""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, move_axis
from batchax.kernel.registry import register_rule

enter("library: fft")


@register_rule(lax.fft_p)
def _fft(
    axis: Axis, args: Any, axes: Any, /, *, fft_lengths: Any, **params: Any
) -> tuple[Any, Any]:
    (x,), (position,) = args, axes
    if position >= x.ndim - len(fft_lengths):
        x, position = move_axis(x, position, 0), 0
    return lax.fft_p.bind(x, fft_lengths=fft_lengths, **params), position
