"""How programs of calls outside of tracing are known again."""

from __future__ import annotations

from collections.abc import Hashable

from batchax import _compat
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import ClosedJaxpr
from batchax.kernel.axis import Axis
from batchax.kernel.registry import registrations


def call_key(axis: Axis, program: ClosedJaxpr, *rest: Hashable) -> Hashable:
    """Equal for calls of programs that do the same, in the same surroundings, outside of tracing.

    A call outside of `jit` stages its function anew each time. What it takes longer to make of the
    program is remembered under this.

    Args:
      axis: the axis being mapped.
      program: the program of one example.
      rest: what else the call depends on: the types of its arguments, say.
    """
    return axis, value_key(program), registrations(), _compat.trace_context(), *rest
