"""Reductions over few elements, which a CPU computes in less time as terms.

XLA's CPU compiler makes of a sum of floats, and of their maximum and minimum, a call of a library
of vectorized loops. That takes 4 to 25 nanoseconds for each result, however few elements there are,
and what is reduced is no longer computed in the same pass. The length of vectors in space takes 5
to 15 times as long as their sum written as ``x[..., 0] + x[..., 1] + x[..., 2]``.

So the primitive here stands for a reduction, whose derivative it has, and is lowered for a CPU as
terms. Elsewhere it is the reduction itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.analysis.one_function import as_terms, is_short
from batchax.jaxprs.types import Aval, Eqn, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, shift_dims
from batchax.kernel.interpreter import hide_from_debug_nans
from batchax.kernel.named_axes import bind_varying
from batchax.kernel.own_primitive import declare, own_primitive
from batchax.kernel.registry import reducing, reducing_rule, register_rule

_RESULTS = 2048  # of fewer, both ways take as long (the benchmark `vmap`, "distances of points")

short_reduction_p = declare("short_reduction", several=False)


def reduce_as_terms(of: str, x: Value, over: tuple[int, ...]) -> jax.Array:
    """Returns the reduction `of` these dimensions of an array, where it `pays`."""
    return short_reduction_p.bind(x, of=of, over=over)


def _operations(x: Value, *, of: str, over: tuple[int, ...]) -> jax.Array:
    return _REDUCTIONS[of](x, over)


_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "reduce_sum": lax.reduce_sum,
    "reduce_max": lax.reduce_max,
    "reduce_min": lax.reduce_min,
}


def _types(x: Aval, *, of: str, over: tuple[int, ...]) -> Aval:
    # A maximum has the type of a sum, and its primitive other parameters on JAX 0.10.
    out, _ = lax.reduce_sum_p.abstract_eval(x, axes=over, out_sharding=None)
    return out


def _rule(
    axis: Axis, args: Values, axes: Positions, /, *, of: str, over: tuple[int, ...]
) -> tuple[jax.Array, Position]:
    ((x,), (position,)) = args, axes
    return short_reduction(of, x, position, over)


def short_reduction(
    of: str, x: Value, position: Position, over: Sequence[int]
) -> tuple[jax.Array, Position]:
    """Returns the reduction `of` dimensions `over` of one example, and where its lanes are."""
    assert position is not None  # a rule is called for what is batched
    dims = tuple(shift_dims(over, position))
    return reduce_as_terms(of, x, dims), position - sum(d < position for d in dims)


def _jvp(
    primals: Values, tangents: Sequence[Any], *, of: str, over: tuple[int, ...]
) -> tuple[jax.Array, Any]:
    ((x,), (dx,)) = primals, tangents
    if isinstance(dx, ad.Zero):
        out = reduce_as_terms(of, x, over)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    out = reduce_as_terms(of, x, over)
    if of == "reduce_sum":
        return out, reduce_as_terms(of, dx, over)
    # As JAX has it: elements equal to the extreme share its derivative evenly.
    at_best = lax.eq(x, jnp.broadcast_to(jnp.expand_dims(out, over), x.shape)).astype(x.dtype)
    total = lambda x: reduce_as_terms("reduce_sum", x, over)
    return out, lax.div(total(lax.mul(dx, at_best)), total(at_best))


@jax.disable_jit(False)
def _compute(x: Value, *, of: str, over: tuple[int, ...]) -> jax.Array:
    # Outside `jit`, too, the terms: XLA's library may drop NaNs from a maximum.
    # After a NaN, JAX would run this program operation by operation, which is to compile it again.
    return hide_from_debug_nans(lambda x: _compiled(of, x, over), (x,), of)


_compiled = jax.jit(reduce_as_terms, static_argnums=(0, 2))


def _on_cpu(x: Value, *, of: str, over: tuple[int, ...]) -> jax.Array:
    # Stored for all its users, as the library stores it: else each recomputes it.
    return lax.optimization_barrier(as_terms(of, x, over))


own_primitive(
    short_reduction_p,
    called="a reduction over few elements",
    operations=_operations,
    compute=_compute,
    on_cpu=_on_cpu,
    checked=_operations,
    types=_types,
    facts="moderate",
    rule=_rule,
    jvp=_jvp,
    several=False,
)


def pays(x: Value, dims: Sequence[int]) -> bool:
    """Whether `x` has few elements along `dims`, and many results, of floats a library takes."""
    aval = jax.typeof(x)
    known = all(isinstance(n, int) for n in aval.shape)
    if not known or aval.dtype not in (np.float32, np.float64):
        return False
    count = math.prod(aval.shape[d] for d in dims)
    split = any(entry is not None for entry in aval.sharding.spec)
    many = math.prod(aval.shape) >= _RESULTS * count
    return count > 1 and is_short(aval, dims) and many and not split


def reduce_few_or_many(eqn: Eqn, x: Value, axes: tuple[int, ...]) -> jax.Array:
    """Returns what the reduction `eqn` computes of an array without lanes, along these axes."""
    if eqn.primitive.name in SHORT and pays(x, axes):
        return reduce_as_terms(eqn.primitive.name, x, axes)
    return bind_varying(eqn, [x], **{**eqn.params, "axes": axes})[0]


SHORT = frozenset(_REDUCTIONS)
"""The names of primitives that may be short reductions."""


def reducing_few_or_many(primitive: _compat.Primitive) -> None:
    """Registers one of `SHORT`, as `reducing` does where there is nothing to gain."""
    reducing(primitive)
    whole = reducing_rule(primitive)

    @register_rule(primitive)
    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Any]:
        ((x,), (position,)) = args, axes
        assert position is not None  # a rule is called for what is batched
        if not pays(x, shift_dims(params["axes"], position)):
            return whole(axis, args, axes, **params)
        return short_reduction(primitive.name, x, position, params["axes"])
