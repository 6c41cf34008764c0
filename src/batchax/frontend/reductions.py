"""Reductions over the batch: what one is, what is done with it, and those that have a name.

Lanes run at once, in chunks, on devices, in datasets: so a reduction is computed in parts. It is
described by a state, computed from some of the lanes, and a function that combines two states. That
is associative and has a neutral element, a monoid, and so it does not matter where lanes are cut
(Steele, "Organizing functions for parallel execution; or, foldl and foldr considered slightly
harmful", ICFP 2009). A lane that does not count has the neutral state.

Lanes that run at once are one part. Parts are chunks, shards, units of a dataset.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from batchax import _compat
from batchax.cache import cached
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.frontend.options import check_flags
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.primitive_facts import accumulator, highest, lowest
from batchax.jaxprs.types import Aval, Tree, Value, Values

State: TypeAlias = Tree
"""What describes some lanes: an array, or a pytree of arrays."""


@_compat.api_boundary
@dataclass(frozen=True, eq=False)
class Reduction:
    """Defines a reduction over the batch by the states of some lanes.

    Example:
      >>> norm = bx.Reduction(jnp.add, 0, lane=jnp.square, finish=lambda total, n: jnp.sqrt(total))
      >>> print(bx.vmap(lambda x: x, out_axes=bx.Reduce(norm), batch_size=1)(jnp.array([3.0, 4.0])))
      5.0

    ``bx.Reduce(bx.Reduction(...))`` in `out_axes` uses it. A state is an array or a pytree of
    arrays that describes some lanes. Derivatives are those of the operations; ``jax.custom_jvp``
    can replace them.

    Chunks are combined in order. Derivatives save the state of each chunk, unless `combine` is
    ``jnp.add``. ``jnp.add``, ``jnp.multiply``, ``jnp.maximum``, and ``jnp.minimum`` combine states
    array by array. `bx.map` combines the states of batches on the host, in double precision.

    Attributes:
      combine: A function of two states, of some lanes and of later lanes, that returns the state of
        both. It must be associative, and keep the types of states.
      neutral: The state of no lanes: ``combine(neutral, state)`` is ``state``. A number, or a
        function from a dtype to a number, for each array of a state or for all.
      lane: A function of the output of one example that returns its state. None: the output itself.
      finish: A function of the state of all lanes and of their number that returns the result, an
        array. None: the state itself.
      index: Whether `lane` also takes the index of the lane, an int32.
      fold: A function of states, along axis 0 of each array, that returns the state of all. None:
        `combine` of two at a time.
      of_lanes: A function ``(x, axis)`` of the outputs of all lanes along an axis that returns the
        result, for lanes that run at once. None: the functions above.
      of_copies: A function ``(x, n)`` that returns the result of `n` lanes with the same output.
        None: the result of copies.
      of_nothing: Whether no lanes have a result.

    Raises:
      ArgumentTypeError: A parameter has the wrong type; or, in a call, `lane`, `combine`,
        `neutral`, and `finish` do not fit each other or the output.
    """

    combine: Callable[[Any, Any], Any]
    neutral: Any
    lane: Callable[..., Any] | None = field(default=None, kw_only=True)
    finish: Callable[[Any, Any], Any] | None = field(default=None, kw_only=True)
    index: bool = field(default=False, kw_only=True)
    fold: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    of_lanes: Callable[..., Any] | None = field(default=None, kw_only=True)
    of_copies: Callable[[Any, Any], Any] | None = field(default=None, kw_only=True)
    of_nothing: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("combine", "lane", "finish", "fold", "of_lanes", "of_copies"):
            given = getattr(self, name)
            if not (callable(given) or (given is None and name != "combine")):
                raise ArgumentTypeError(
                    f"{name} of a Reduction must be a function, got {show(given)}."
                )
        for name in ("index", "of_nothing"):
            check_flags(**{f"{name} of a Reduction": getattr(self, name)})
        if self.index and self.lane is None:
            raise ArgumentTypeError(
                "index of a Reduction is True, but there is no lane. Pass a function of an output "
                "and the index of its lane."
            )
        for leaf in jax.tree.leaves(self.neutral, is_leaf=lambda x: x is None):
            if not callable(leaf) and not _is_number(leaf):
                raise ArgumentTypeError(
                    "neutral of a Reduction must be numbers, or functions that return one for a "
                    f"dtype, in the structure of a state; got {show(leaf)}."
                )

    def __getstate__(self) -> dict[str, Any]:
        # What is known of ``jnp.add`` is known of that object, and a copy of it would be another.
        name = getattr(self.combine, "__name__", "")
        return vars(self) | ({"combine": name} if getattr(jnp, name, 0) is self.combine else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        combine = state["combine"]
        named = isinstance(combine, str)
        vars(self).update(state, combine=getattr(jnp, combine) if named else combine)

    def __repr__(self) -> str:
        named = {name: getattr(self, name) for name in ("combine", "lane", "finish")}
        of = [f"{k}={getattr(f, '__name__', f)}" for k, f in named.items() if f is not None]
        return f"batchax.Reduction({', '.join(of)})"


def _is_number(x: Value) -> bool:
    return not isinstance(x, str) and np.ndim(x) == 0 and np.asarray(x).dtype.kind in "biufcV"


def operation_of(reduction: Reduction) -> Operation | None:
    """Returns what JAX and NumPy know of `combine`, if they do."""
    try:
        return _OPERATIONS.get(reduction.combine)
    except TypeError:  # an object of the user that cannot be hashed
        return None


def states_of(
    reduction: Reduction, x: Value, axis: int, index: Value | None, real: Value | None = None
) -> tuple[Any, int]:
    """Returns the states of lanes, and the axis along which they are.

    Of lanes that do not count in `real` the state is neutral.
    """
    states, at = x, axis
    if reduction.lane is not None:
        own = state_type(
            reduction, jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
        )
        # What has the shape of an output has its lanes where that has them.
        at = axis if _is_array(own) and own.ndim >= axis else 0
        given = (x, index) if reduction.index else (x,)
        of_lane = functools.partial(_of_lane, reduction)
        states = jax.vmap(of_lane, (axis, 0)[: len(given)], at)(*given)
    if real is not None:
        states = jax.tree.map(
            lambda s, none: lax.select(
                lax.broadcast_in_dim(real, s.shape, (at,)), s, lax.full_like(s, none)
            ),
            states,
            neutral_like(reduction, states),
        )
    return states, at


def _of_lane(reduction: Reduction, *given: Value) -> State:
    assert reduction.lane is not None
    return jax.tree.map(jnp.asarray, reduction.lane(*given))


def _lane_types(reduction: Reduction, output: Aval) -> list[Any]:
    return [output, jax.ShapeDtypeStruct((), np.int32)][: 1 + reduction.index]


def neutral_like(reduction: Reduction, state: State) -> State:
    numbers = jax.tree.broadcast(reduction.neutral, state)
    return jax.tree.map(lambda n, x: n(x.dtype) if callable(n) else n, numbers, state)


def folded(reduction: Reduction, states: State, axis: int = 0) -> State:
    """Returns the state of all lanes whose states are along an axis, or that of all parts."""
    operation = operation_of(reduction)
    if operation is not None:
        return jax.tree.map(lambda s: operation.fold(s, axis).astype(s.dtype), states)
    states = jax.tree.map(lambda s: jnp.moveaxis(s, axis, 0), states)
    return _in_pairs(reduction, states) if reduction.fold is None else reduction.fold(states)


def _in_pairs(reduction: Reduction, states: State) -> State:
    """Combines neighbors first, then neighbors of these, and so on."""
    size = jax.tree.leaves(states)[0].shape[0]
    if not isinstance(size, int):
        raise UnsupportedError(
            f"{reduction!r} combines lanes two at a time, and how many there are is {size}, a "
            "symbolic size. Pass fold, a function that combines all along axis 0."
        )
    if not size:
        return jax.tree.map(
            lambda s, none: jnp.full(s.shape[1:], none, s.dtype),
            states,
            neutral_like(reduction, states),
        )
    part = lambda states, *cut: jax.tree.map(lambda s: s[slice(*cut)], states)
    # With an odd number the last state waits for the next round.
    while size > 1:
        rest = part(states, size - size % 2, size)
        states = jax.vmap(reduction.combine)(part(states, 0, size - 1, 2), part(states, 1, size, 2))
        if size % 2:
            states = jax.tree.map(lambda *s: jnp.concatenate(s), states, rest)
        size = -(-size // 2)
    return jax.tree.map(lambda s: s[0], states)


def finished(reduction: Reduction, state: State, lanes: int) -> Value:
    return state if reduction.finish is None else reduction.finish(state, lanes)


def of_all(reduction: Reduction, x: Value, axis: int) -> Value:
    if reduction.of_lanes is not None:
        return reduction.of_lanes(x, axis=axis)
    lanes = x.shape[axis]
    index = jnp.arange(lanes, dtype=np.int32) if reduction.index else None
    return finished(reduction, folded(reduction, *states_of(reduction, x, axis, index)), lanes)


def of_shared(reduction: Reduction, x: Value, lanes: int) -> Value:
    if reduction.of_copies is not None:
        return reduction.of_copies(x, lanes)
    return of_all(reduction, jnp.broadcast_to(x, (lanes, *x.shape)), 0)


def state_type(reduction: Reduction, output: Aval) -> State:
    if reduction.lane is None:
        return jax.ShapeDtypeStruct(output.shape, output.dtype)
    return jax.eval_shape(functools.partial(_of_lane, reduction), *_lane_types(reduction, output))


def check(reduction: Reduction, output: Aval, path: str) -> None:
    """Raises an error for functions that do not fit each other, or an output of this type."""
    state = state_type(reduction, output)
    both = jax.eval_shape(lambda s: combined(reduction, s, s), state)
    # Types alone tell: nothing is computed.
    _check_same(reduction, "combine", both, state, path)
    if reduction.fold is not None and operation_of(reduction) is None:
        several = jax.tree.map(lambda s: jax.ShapeDtypeStruct((2, *s.shape), s.dtype), state)
        fold = jax.eval_shape(lambda s: folded(reduction, s), several)
        _check_same(reduction, "fold", fold, state, path)
    try:
        numbers = neutral_like(reduction, state)
    except ValueError:
        raise ArgumentTypeError(
            f"neutral of {reduction!r} is {brief(reduction.neutral)}, but a state of {path} is "
            f"{_shown(state)}. Pass a number, or one for each array of a state."
        ) from None
    for number, x in zip(jax.tree.leaves(numbers), jax.tree.leaves(state), strict=True):
        if jnp.issubdtype(x.dtype, jnp.integer) and not (
            jnp.iinfo(x.dtype).min <= number <= jnp.iinfo(x.dtype).max
        ):
            raise ArgumentTypeError(
                f"neutral of {reduction!r} is {brief(number)}, which is not a value of "
                f"{x.dtype}, the dtype of {path}. Pass a function of the dtype that returns one."
            )
    result = jax.eval_shape(lambda s: finished(reduction, s, 2), state)
    if not _is_array(result):
        function = "finish" if reduction.finish is not None else "lane, without finish,"
        raise ArgumentTypeError(
            f"{function} of {reduction!r} must return an array, and for {path} it returns "
            f"{_shown(result)}."
        )
    parts = jax.make_jaxpr(functools.partial(in_two_parts, reduction))(output, output)
    if any(isinstance(c, Tracer) for c in parts.consts):
        raise ArgumentTypeError(
            f"the functions of {reduction!r} close over a value that is traced, by jit or grad, "
            "and a Reduction is kept beyond that. Let the function of one example return what "
            "they need of it."
        )


def in_two_parts(reduction: Reduction, one: Value, other: Value) -> Value:
    """Returns what it makes of two lanes, and of none: all that its functions compute."""
    lanes = (jnp.stack([one, other]), 0, np.arange(2, dtype=np.int32))
    states, at = states_of(reduction, *lanes, real=np.array([True, False]))
    parts = (jax.tree.map(lambda s, k=k: jnp.take(s, k, at), states) for k in (0, 1))
    return finished(reduction, combined(reduction, *parts), 2)


def combined(reduction: Reduction, one: State, other: State) -> State:
    if operation_of(reduction) is not None:
        return jax.tree.map(reduction.combine, one, other)
    return reduction.combine(one, other)


def _check_same(reduction: Reduction, name: str, returned: Tree, state: State, path: str) -> None:
    types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    same = jax.tree.structure(returned) == jax.tree.structure(state)
    if not same or types(returned) != types(state):
        raise ArgumentTypeError(
            f"{name} of {reduction!r} must return a state as it takes them, {_shown(state)} for "
            f"{path}, and returns {_shown(returned)}."
        )


def on_host(reduction: Reduction, parts: list[Any]) -> State:
    """Returns the state of parts, arrays of NumPy, combined in pairs.

    The order depends on nothing but how many there are.
    """
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        both = [_combined_on_host(reduction, one, other) for one, other in pairs]
        parts = [*both, *parts[len(both) * 2 :]]
    return parts[0]


def _combined_on_host(reduction: Reduction, one: State, other: State) -> State:
    operation = operation_of(reduction)
    if operation is not None:
        with np.errstate(all="ignore"):
            return jax.tree.map(operation.of_numpy, one, other)
    with in_double_precision():
        return jax.tree.map(np.asarray, reduction.combine(one, other))


def finished_on_host(
    reduction: Reduction, state: State, lanes: int, dtype: DTypeLike
) -> np.ndarray:
    with np.errstate(all="ignore"), in_double_precision():
        return np.asarray(finished(reduction, state, lanes)).astype(dtype)


class Operation(NamedTuple):
    """Holds what is known of a function that combines."""

    fold: Callable[..., Any]  # the same of many, ``fold(x, axis)``
    of_numpy: Callable[[Any, Any], Any]  # the same in NumPy
    # what a chunk loop calls it, if it holds one result for all chunks
    held: Literal["sum", "max", "min"] | None = None


_OPERATIONS: dict[Any, Operation] = {
    jnp.add: Operation(lambda x, axis: jnp.sum(x, axis, x.dtype), np.add, "sum"),
    jnp.multiply: Operation(lambda x, axis: jnp.prod(x, axis, x.dtype), np.multiply),
    jnp.maximum: Operation(jnp.max, np.maximum, "max"),
    jnp.minimum: Operation(jnp.min, np.minimum, "min"),
}


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """Computes what JAX computes on this host's CPU and in double precision, as NumPy does."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _is_array(tree: Tree) -> bool:
    return jax.tree_util.all_leaves([tree]) and hasattr(tree, "shape")


def _shown(tree: Tree) -> str:
    text = str(jax.tree.map(lambda x: _Words(f"{x.dtype}{list(x.shape)}"), tree))
    return text if text != "()" else "empty"


class _Words(str):
    __repr__ = str.__str__


Kind = Literal[
    "sum", "mean", "max", "min", "prod", "logsumexp", "any", "all", "var", "argmax", "argmin"
]


def _whole_bytes(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a reduction of JAX that does not know how integers of less than a byte add up."""

    def over_batch(x: Value, axis: int) -> Value:
        if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
            x = x.astype(np.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else np.uint8)
        return reduce(x, axis=axis)

    return over_batch


_sum, _prod = map(_whole_bytes, (jnp.sum, jnp.prod))


@cached("dtypes of reductions", most=256)
def _dtype(reduce: Callable[..., Any], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which `reduce` is computed in parts: for floats at least float32."""
    one = jax.ShapeDtypeStruct((1,), dtype)
    return accumulator(jax.eval_shape(lambda x: reduce(x, axis=0), one).dtype)


def _wide(reduce: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: lax.convert_element_type(x, _dtype(reduce, x.dtype))


def _of_one(reduce: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns what makes of copies of a value what `reduce` makes of one."""
    return lambda x, n: reduce(x[None], axis=0)


def _itself(x: Value, n: int) -> Value:
    return x


def _of_two(fold: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns what combines two states, from what combines those along axis 0."""
    return lambda *states: fold(jax.tree.map(lambda *parts: jnp.stack(parts), *states))


def _truth(x: Value) -> Value:
    return x if x.dtype == np.bool_ else lax.ne(x, lax.full_like(x, 0))


# --- logsumexp: the largest exponent, and the sum of exponentials over that of the largest --------


def _exponential(x: Value) -> State:
    x = _wide(jax.nn.logsumexp)(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.real, jnp.exp(lax.complex(jnp.zeros_like(x.imag), x.imag))
    return x, jnp.ones_like(x)


def _if_finite(x: Value) -> Value:
    """Returns `x`; zero where it is not finite, so that no two infinities are subtracted."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _sum_exponentials(states: State) -> State:
    exponents, sums = states
    # As in ``jax.nn.logsumexp`` only the exponentials have a derivative, not what they are over.
    most = lax.stop_gradient(jnp.max(exponents, 0, initial=-np.inf))
    scaled = jnp.exp(exponents - _if_finite(most)[None]).astype(sums.dtype) * sums
    return most, jnp.sum(scaled, 0)


def _logarithm(state: State, n: int) -> Value:
    most, total = state
    return jnp.log(total) + _if_finite(most).astype(total.dtype)


def _as_often(x: Value, n: int) -> Value:
    one = jax.nn.logsumexp(x[None], axis=0)
    return one + jnp.log(jnp.asarray(n, accumulator(one.real.dtype))).astype(one.dtype)


# --- var: how many, their mean, what rounding left of it, squared deviations from it added up -----


def _moments(x: Value) -> State:
    x = _wide(jnp.mean)(x)
    return jnp.ones((), np.int32), x, jnp.zeros_like(x), jnp.zeros_like(x.real)


def _add_moments(states: State) -> State:
    """Returns moments of all parts from those of each, by Chan, Golub and LeVeque, 1979."""
    # Deviations are from the mean of all, so that squares do not cancel. The mean is rounded, and
    # what that leaves is a part of the state, as in their corrected two-pass algorithm (1983).
    # Without it, a mean that is much larger than the deviation would drift by more than that, chunk
    # by chunk.
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


# --- argmax and argmin: the value, and the index of the first lane that has it --------------------

_NONE = np.iinfo(np.int32).max  # later than every lane; -1 if no row of a dataset has a result


def _first_of(extreme: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what makes one of the states of lanes along axis 0; NaN is the most extreme."""

    def fold(states: Values) -> tuple[Any, ...]:
        values, lanes = states
        best = extreme(values, 0)
        holds = lax.eq(values, jnp.broadcast_to(best[None], values.shape))
        if jnp.issubdtype(values.dtype, jnp.floating):
            holds |= jnp.isnan(values)  # if one is, so is `best`, which no number equals
        return best, jnp.min(jnp.where(holds, lanes, jnp.full_like(lanes, _NONE)), 0)

    return fold


def _argument(
    of_lanes: Callable[..., Any], extreme: Callable[..., Any], neutral: Callable[..., Any]
) -> Reduction:
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
        finish=lambda total, n: total / n,
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
        finish=lambda state, n: state[-1] / n,
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


@cached("dtypes that have a reduction", most=256)
def has_reduction(kind: str, dtype: np.dtype[Any]) -> bool:
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    one = jax.ShapeDtypeStruct((1,), dtype)
    try:  # JAX says so only once it lowers the program
        jax.jit(lambda x: of_all(REDUCTIONS[kind], x, 0)).lower(one)
    except TypeError:
        return False
    return True
