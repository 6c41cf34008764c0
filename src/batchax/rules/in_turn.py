"""One program after another, where the compiler would let both run at the same time.

On a CPU, a call of a library (LAPACK, a Fourier transform) is cut into parts for a pool of
threads, and the thread that made the call waits for them. Where that is a thread of the same
pool, and as many calls wait as it has threads, nobody is left to do the work: the program stops
for ever. So two such calls that need not run at once must not: what comes later is made to depend
on the results of what comes first. That takes a number that is zero, as no compiler can know.
``lax.optimization_barrier`` does not do: it is gone before anything is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.masking import is_inexact

calls_library = Anywhere(lambda eqn: facts_of(eqn.primitive).library).in_program
"""Whether a program, or one inside it, has a library called on CPUs."""


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Both as they are, but what is computed of `second` is computed after `first`.

    Derivatives in reverse are computed in reverse order. Only floats and complex numbers are
    made to wait.
    """
    before = [i for i, x in enumerate(first) if isinstance(x, jax.Array) and is_inexact(x)]
    after = [i for i, x in enumerate(second) if isinstance(x, jax.Array) and is_inexact(x)]
    firsts, seconds = list(first), list(second)
    outs = _bind([first[i] for i in before], [second[i] for i in after])
    for xs, places, values in ((firsts, before, outs[0]), (seconds, after, outs[1])):
        for i, x in zip(places, values, strict=True):
            xs[i] = x
    return firsts, seconds


def zero_after(values: Sequence[Value]) -> Any:
    """An int32 zero that is computed from the first entry of each of `values`.

    A 32-bit number has 32 bits that are set at most, which is less than 2**6: their count shifted
    by six bits is zero. Compilers do not know, and so they cannot leave the computation out.
    """
    zero = np.int32(0)
    for x in values:
        aval = jax.typeof(x)
        extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        if extended or 0 in aval.shape or not aval.sharding.mesh.empty:
            continue
        entry = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
        entry = lax.real(entry) if jnp.issubdtype(x.dtype, jnp.complexfloating) else entry
        ones = lax.population_count(lax.convert_element_type(entry, np.int32))
        zero = lax.add(zero, lax.shift_right_logical(ones, np.int32(6)))
    return zero


def _bind(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    if not first or not second:
        return list(first), list(second)
    outs = in_turn_p.bind(*_compat.varying_alike([*first, *second]), count=len(first))
    return outs[: len(first)], outs[len(first) :]


def _wait(*xs: Any, count: int) -> list[Any]:
    """What `in_turn_p` stands for."""
    first, second = xs[:count], xs[count:]

    def on_processor(first: Any, second: Any) -> list[Any]:
        come = lax.eq(zero_after(first), np.int32(0))
        return [lax.select(come, x, lax.full_like(x, 0)) for x in second]

    return [
        *first,
        *lax.platform_dependent(
            list(first),
            list(second),
            cpu=on_processor,
            default=lambda first, second: second,
        ),
    ]


def _apart(xs: Sequence[Value], count: int) -> tuple[list[Any], list[Any]]:
    """The values on both sides that are no symbolic zeros."""
    there = [type(x) is not ad.Zero for x in xs]
    return (
        [x for x, t in zip(xs[:count], there[:count], strict=True) if t],
        [x for x, t in zip(xs[count:], there[count:], strict=True) if t],
    )


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, count: int) -> Any:
    first, second = _bind(*_apart(tangents, count))
    computed = iter([*first, *second])
    dots = [t if type(t) is ad.Zero else next(computed) for t in tangents]
    return in_turn_p.bind(*primals, count=count), dots


def _transpose(cotangents: Sequence[Value], *operands: Any, count: int) -> list[Any]:
    first, second = _apart(cotangents, count)
    second, first = _bind(second, first)
    computed = iter([*first, *second])
    return [ct if type(ct) is ad.Zero else next(computed) for ct in cotangents]


def _batched(
    axis: Axis, args: Any, axes: Sequence[Position], /, *, count: int
) -> tuple[list[Any], Sequence[Position]]:
    return in_turn_p.bind(*args, count=count), axes


in_turn_p = own_primitive(
    "in_turn",
    called="order of calls of a library",
    operations=_wait,
    compute=lambda *xs, count: list(xs),
    types=lambda *avals, count: list(avals),
    programs=(),
    facts="linear",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
)
