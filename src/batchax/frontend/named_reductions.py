"""The reductions over the batch that have a name: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.frontend.reducing import of_all, operation_of
from batchax.frontend.reduction import Reduction
from batchax.jaxprs.neutral import accumulator, highest, lowest
from batchax.jaxprs.words import Value
from batchax.memo import memoized

Kind = Literal[
    "sum", "mean", "max", "min", "prod", "logsumexp", "any", "all", "var", "argmax", "argmin"
]


def _whole_bytes(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of JAX's that does not know how integers of less than a byte add up."""

    def over_batch(x: Value, axis: int) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
            x = x.astype(np.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else np.uint8)
        return reduce(x, axis=axis)

    return over_batch


_sum, _prod = map(_whole_bytes, (jnp.sum, jnp.prod))


@memoized("dtypes of reductions", most=256)
def _dtype(reduce: Callable[..., Any], dtype: Any) -> Any:
    """The dtype in which `reduce` is computed in parts: at least float32, if it has floats."""
    one = jax.ShapeDtypeStruct((1,), dtype)
    return accumulator(jax.eval_shape(lambda x: reduce(x, axis=0), one).dtype)


def _wide(reduce: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: lax.convert_element_type(x, _dtype(reduce, x.dtype))


def _of_one(reduce: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Of copies of a value what `reduce` makes of one."""
    return lambda x, n: reduce(x[None], axis=0)


def _itself(x: Value, n: Any) -> Any:
    return x


def _of_two(fold: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """What combines two states, from what combines those along axis 0."""
    return lambda *states: fold(jax.tree.map(lambda *parts: jnp.stack(parts), *states))


def _truth(x: Value) -> Any:
    return x if x.dtype == np.bool_ else lax.ne(x, lax.full_like(x, 0))


# --- logsumexp: the largest exponent, and the sum of exponentials over that of the largest --------


def _exponential(x: Value) -> Any:
    x = _wide(jax.nn.logsumexp)(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.real, jnp.exp(lax.complex(jnp.zeros_like(x.imag), x.imag))
    return x, jnp.ones_like(x)


def _if_finite(x: Value) -> Any:
    """`x`; zero where it is not finite, so that no two infinities are subtracted."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _sum_exponentials(states: Any) -> Any:
    """As ``jax.nn.logsumexp``: only the exponentials have a derivative, not what they are over."""
    exponents, sums = states
    most = lax.stop_gradient(jnp.max(exponents, 0, initial=-np.inf))
    scaled = jnp.exp(exponents - _if_finite(most)[None]).astype(sums.dtype) * sums
    return most, jnp.sum(scaled, 0)


def _logarithm(state: Any, n: Any) -> Any:
    most, total = state
    return jnp.log(total) + _if_finite(most).astype(total.dtype)


def _as_often(x: Value, n: Any) -> Any:
    one = jax.nn.logsumexp(x[None], axis=0)
    return one + jnp.log(jnp.asarray(n, accumulator(one.real.dtype))).astype(one.dtype)


# --- var: how many, their mean, what rounding left of it, squared deviations from it added up -----


def _moments(x: Value) -> Any:
    x = _wide(jnp.mean)(x)
    return jnp.ones((), np.int32), x, jnp.zeros_like(x), jnp.zeros_like(x.real)


def _add_moments(states: Any) -> Any:
    """Moments of all parts from those of each, by Chan, Golub and LeVeque, 1979.

    Deviations are from the mean of all: squares do not cancel. The mean is rounded, and what that
    leaves is a part of the state, as in their corrected two-pass algorithm (1983). Without it, a
    mean that is much larger than the deviation would drift by more than that, chunk by chunk.
    """
    counts, means, rests, deviations = states
    count = jnp.sum(counts, 0, counts.dtype)
    weights = counts.reshape((-1, *[1] * (means.ndim - 1))).astype(means.dtype)
    some = jnp.maximum(count, 1).astype(means.dtype)
    of_all = lambda x: jnp.sum(weights * x, 0) / some
    mean = of_all(means)
    apart = means - mean[None] + rests
    rest = of_all(apart)
    apart -= rest[None]
    return count, mean, rest, jnp.sum(deviations + (weights * apart * jnp.conj(apart)).real, 0)


def _variance(state: Any, n: Any) -> Any:
    return state[-1] / n


# --- argmax and argmin: the value, and the index of the first lane that has it --------------------

_NONE = np.iinfo(np.int32).max  # later than every lane; -1 if no row of a dataset has a result


def _first_of(extreme: Callable[..., Any]) -> Callable[[Any], Any]:
    """The states of lanes along axis 0 as one; a lane that is NaN is more extreme than others."""

    def fold(states: Any) -> Any:
        values, lanes = states
        best = extreme(values, 0)
        holds = lax.eq(values, jnp.broadcast_to(best[None], values.shape))
        if jnp.issubdtype(values.dtype, jnp.floating):
            holds |= jnp.isnan(values)  # if one is, so is `best`, which no number equals
        return best, jnp.min(jnp.where(holds, lanes, jnp.full_like(lanes, _NONE)), 0)

    return fold


def _argument(of_lanes: Callable[..., Any], extreme: Callable[..., Any], neutral: Any) -> Reduction:
    fold = _first_of(extreme)
    return Reduction(
        _of_two(fold),
        (neutral, _NONE),
        lane=lambda x, index: (lax.stop_gradient(x), jnp.full(x.shape, index)),
        finish=lambda state, n: jnp.where(state[1] == _NONE, -1, state[1]),
        index=True,
        fold=fold,
        of_lanes=of_lanes,
        of_copies=_of_one(of_lanes),
        of_nothing=False,
    )


def _mean(total: Any, n: Any) -> Any:
    return total / n


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(
        jnp.add,
        0,
        lane=_wide(_sum),
        of_lanes=_sum,
        of_copies=lambda x, n: _sum(x[None], axis=0) * n,
    ),
    "mean": Reduction(
        jnp.add,
        0,
        lane=_wide(jnp.mean),
        finish=_mean,
        of_lanes=jnp.mean,
        of_copies=_of_one(jnp.mean),
    ),
    "max": Reduction(jnp.maximum, lowest, of_lanes=jnp.max, of_copies=_itself, of_nothing=False),
    "min": Reduction(jnp.minimum, highest, of_lanes=jnp.min, of_copies=_itself, of_nothing=False),
    "prod": Reduction(
        jnp.multiply,
        1,
        lane=_wide(_prod),
        of_lanes=_prod,
        of_copies=lambda x, n: _prod(x[None], axis=0) ** n,
    ),
    "logsumexp": Reduction(
        _of_two(_sum_exponentials),
        (lowest, 0),
        lane=_exponential,
        finish=_logarithm,
        fold=_sum_exponentials,
        of_lanes=jax.nn.logsumexp,
        of_copies=_as_often,
    ),
    "any": Reduction(jnp.maximum, False, lane=_truth, of_lanes=jnp.any, of_copies=_of_one(jnp.any)),
    "all": Reduction(jnp.minimum, True, lane=_truth, of_lanes=jnp.all, of_copies=_of_one(jnp.all)),
    "var": Reduction(
        _of_two(_add_moments),
        0,
        lane=_moments,
        finish=_variance,
        fold=_add_moments,
        of_lanes=jnp.var,
        of_copies=_of_one(jnp.var),
    ),
    "argmax": _argument(jnp.argmax, jnp.max, lowest),
    "argmin": _argument(jnp.argmin, jnp.min, highest),
}
"""What `batchax.Reduce` calls them; `Kind` names them for type checkers."""


def adds_up(reduction: Reduction) -> bool:
    """Whether it adds lanes up as they are, floats of less than 32 bits perhaps in float32."""
    if any(reduction is REDUCTIONS[kind] for kind in ("sum", "mean")):
        return True
    operation = operation_of(reduction)
    return reduction.lane is None and operation is not None and operation.held == "sum"


@memoized("dtypes that have a reduction", most=256)
def has_reduction(kind: str, dtype: Any) -> bool:
    """Whether lanes of such a dtype have the reduction of that name."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    one = jax.ShapeDtypeStruct((1,), dtype)
    try:  # JAX says so only once it lowers the program
        jax.jit(lambda x: of_all(REDUCTIONS[kind], x, 0)).lower(one)
    except TypeError:
        return False
    return True
