"""What ``jax.debug_key_reuse`` is told of primitives that are not JAX's.

JAX knows by a signature which random keys a primitive consumes, and which of its results are keys
that nobody consumed. Without one, all keys that it returns count as consumed. JAX keeps signatures,
and what finds the one of a program, in a private module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.key_reuse._core import (
    KeyReuseSignature,
    Sink,
    dynamic_key_reuse_signature,
    jaxpr_type_signature,
    key_reuse_signatures,
)

from batchax._compat.jaxprs import ClosedJaxpr, Primitive


def set_key_use(
    primitive: Primitive,
    operations: Callable[[Any], ClosedJaxpr | None],
    steps: Callable[[Any], Sequence[ClosedJaxpr]],
) -> None:
    """Has ``jax.debug_key_reuse`` take from programs which keys `primitive` consumes.

    Args:
      primitive: a primitive.
      operations: from an equation, the program that it stands for.
      steps: from its parameters, programs that run for parts of its operands: the last inputs of
        each are parts of the last operands. What they consume is consumed in those.
    """

    def signature(eqn: Any) -> Any:
        program = operations(eqn)
        assert program is not None
        of_operations = jaxpr_type_signature(program.jaxpr)
        count = len(eqn.invars)  # constants come after them
        parts = [part for part in _parts(of_operations) if getattr(part, "idx", 0) < count]
        parts += [
            Sink(i)
            for program in steps(eqn.params)
            for sink in jaxpr_type_signature(program.jaxpr).sinks
            if 0 <= (i := sink.idx + count - len(program.in_avals)) < count
            if is_key(eqn.invars[i].aval) and sink.idx < len(program.in_avals)
        ]
        sunk = {part.idx for part in parts if isinstance(part, Sink) and part.mask is True}
        return KeyReuseSignature(
            *(p for p in parts if not isinstance(p, Sink) or p.mask is True or p.idx not in sunk)
        )

    key_reuse_signatures[primitive] = dynamic_key_reuse_signature(signature)


def _parts(signature: Any) -> list[Any]:
    return [*signature.sinks, *signature.sources, *signature.forwards]


def is_key(aval: Any) -> bool:
    """Whether a value of this type is an array of random keys."""
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def unconsumed(x: Any) -> Any:
    """`x`, keys in it as keys that nobody consumed: what uses them again does so on purpose."""
    config: Any = jax.config
    return jax.random.clone(x) if config.jax_debug_key_reuse and is_key(jax.typeof(x)) else x
