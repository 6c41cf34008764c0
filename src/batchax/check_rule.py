"""`check_rule`: whether a batching rule computes what a loop over examples would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.comparing import difference_of_trees, directions, scales_nearby
from batchax.errors import ArgumentTypeError, RuleMismatchError
from batchax.frontend.options import check_callable, check_tolerances
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import Tree, Value, Values
from batchax.kernel.axis import move_axis
from batchax.kernel.own_primitive import with_values
from batchax.rules.masking import is_inexact
from batchax.vmap import vmap

_LANES = 8  # without `others`
_MOST_SUBSETS = 32  # that are tried: each compiles separate programs


@_compat.api_boundary
def check_rule(
    fun: Callable[..., Any],
    *example_args: Tree,
    others: Sequence[Sequence[Any]] = (),
    derivatives: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compares the batching rule of `fun` with a Python loop over examples.

    Example:
      >>> total = bx.custom_vmap(lambda x: jnp.sum(x))
      >>> _ = total.def_vmap(lambda axis_size, in_batched, x: (jnp.sum(x, axis=1), True))
      >>> bx.check_rule(total, jnp.ones(3))

    For test suites. It runs the rule with every combination of batched arguments, along the first
    and the last axis, compiled and not. It also runs the rule under a second vmap, and with
    derivatives of both modes and of second order. It raises at the first difference.

    Args:
      fun: A `custom_vmap` function, or any function that `vmap` can batch.
      example_args: Arguments for one example. Arrays are batched; Python numbers, strings, and
        other objects are shared.
      others: Arguments for other lanes: two or more sequences like `example_args`. Default: seven
        lanes are derived: floats change by up to a tenth, arrays of integers and bools are shifted
        along their first axis, keys are folded. Pass `others` if the function does not support such
        arguments, or to vary scalar integers.
      derivatives: Whether to compare derivatives that exist for one example.
      rtol: Relative tolerance. Default: 1,000 times the rounding of the dtype.
      atol: Absolute tolerance, relative to the largest value of the array, also for nearby
        arguments. Default: the same.

    Raises:
      RuleMismatchError: (an AssertionError) The rule differs from the loop, or raises. The message
        names the transformation, the batched arguments, the entry of the output, and both values.
      ArgumentTypeError: (a TypeError) `fun` is not callable, no argument is an array, or `others`
        do not have the structure of `example_args`.
    """
    check_callable("check_rule", "a function of one example", fun)
    examples = _Examples(example_args, others)
    check_tolerances(rtol=rtol, atol=atol)
    check = _Comparison(name_of(fun), rtol, atol)
    for subset in examples.subsets():
        case = _Case(fun, examples, subset)
        loop, one = case.over(_loop_over), case.one_example
        check("vmap", case, case.over(vmap), loop)
        at_last = _Case(fun, examples, subset, last=True)
        if at_last.axes != case.axes:
            check("vmap", at_last, at_last.over(vmap), at_last.over(_loop_over))
        check("jit of vmap", case, jax.jit(case.over(vmap)), loop)
        check("vmap of vmap", case, jax.jit(case.twice(vmap)), case.twice(_loop_over))
        if not (derivatives and case.smooth):
            continue
        for name, derivative in (("jvp", _jvp), ("vjp", _vjp), ("jvp of vjp", _jvp_of_vjp)):
            of_batch = jax.jit(derivative(case.over(vmap), case))  # compiled in one piece
            check(f"{name} of vmap", case, of_batch, derivative(loop, case), optional=True)
        of_batch, of_loop = (over(_vjp(one, case), case.axes) for over in (vmap, _loop_over))
        check("vmap of vjp", case, jax.jit(of_batch), of_loop, optional=True)


class _Examples:
    """Holds arguments for each lane."""

    def __init__(self, example: Sequence[Any], others: Sequence[Sequence[Any]]) -> None:
        leaves, self.structure = jax.tree.flatten(tuple(example))
        paths = jax.tree_util.tree_flatten_with_path(tuple(example))[0]
        self.arrays = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]
        self.leaves = leaves
        self.paths = [_path(keys) for keys, _ in paths]
        self.argument = [keys[0].idx for keys, _ in paths]
        if not self.arrays:
            raise ArgumentTypeError(
                "check_rule expects at least one array among the arguments for one example; "
                "all lanes share Python numbers. Pass jnp.float32(2.0) for 2.0."
            )
        lanes = [leaves]
        for k, other in enumerate(others):
            more, structure = jax.tree.flatten(tuple(other))
            if structure != self.structure:
                raise ArgumentTypeError(
                    f"others[{k}] must have the structure of the arguments for one example, "
                    f"{self.structure}, but it has {structure}."
                )
            lanes.append(more)
        if not others:
            lanes += [[_varied(x, k) for x in leaves] for k in range(1, _LANES)]
        self.lanes = lanes

    def subsets(self) -> Iterator[tuple[int, ...]]:
        """Iterates over the sets of leaves to batch: all, if they are not too many."""
        units = [(i,) for i in self.arrays]
        if 2 ** len(units) > _MOST_SUBSETS:  # then of whole arguments
            several = {self.argument[i] for i in self.arrays}
            units = [
                tuple(i for i in self.arrays if self.argument[i] == a) for a in sorted(several)
            ]
        sizes = range(1, len(units) + 1)
        every = itertools.chain.from_iterable(itertools.combinations(units, n) for n in sizes)
        for chosen in itertools.islice(every, _MOST_SUBSETS):
            yield tuple(itertools.chain.from_iterable(chosen))
        if 2 ** len(units) > _MOST_SUBSETS:
            yield tuple(self.arrays)


class _Case:
    """Is the function with some of its arguments batched, as a function of arrays."""

    def __init__(
        self,
        fun: Callable[..., Any],
        examples: _Examples,
        subset: Sequence[int],
        last: bool = False,
    ) -> None:
        arrays = examples.arrays
        self.paths = [examples.paths[i] for i in arrays]
        self.axes = tuple(
            None if i not in subset else np.ndim(examples.leaves[i]) if last else 0 for i in arrays
        )
        self.values = [
            jnp.asarray(examples.leaves[i])
            if a is None
            else move_axis(jnp.stack([jnp.asarray(lane[i]) for lane in examples.lanes]), 0, a)
            for i, a in zip(arrays, self.axes, strict=True)
        ]
        self.smooth = [k for k, x in enumerate(self.values) if is_inexact(x)]

        def one_example(*xs: Value) -> dict[str, Any]:
            leaves = with_values(examples.leaves, arrays, xs)
            return {"out": fun(*jax.tree.unflatten(examples.structure, leaves))}

        self.one_example = one_example

    def over(self, transformation: Callable[..., Any]) -> Callable[..., Any]:
        return transformation(self.one_example, self.axes)

    def twice(self, transformation: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same for two batches."""
        outer = tuple(None if a is None else 0 for a in self.axes)
        of_batches = transformation(self.over(transformation), outer)

        def run(*xs: Value) -> Tree:
            pairs = [
                # The second batch has the lanes in another order: a rule that mixes up both axes is
                # found.
                x if a is None else jnp.stack([x, jnp.roll(x, 1, a) if _is_plain(x) else x])
                for x, a in zip(xs, self.axes, strict=True)
            ]
            return of_batches(*pairs)

        return run

    def __str__(self) -> str:
        return ", ".join(
            f"{path} " + ("not" if a is None else f"along axis {a}")
            for path, a in zip(self.paths, self.axes, strict=True)
        )


def _loop_over(fun: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
    """Does what ``vmap(fun, axes)`` is to compute, as a Python loop."""

    def run(*xs: Value) -> Tree:
        pairs = list(zip(xs, axes, strict=True))
        size = next(x.shape[a] for x, a in pairs if a is not None)
        outs = []
        for lane in range(size):
            examples = (x if a is None else x[(slice(None),) * a + (lane,)] for x, a in pairs)
            outs.append(fun(*examples))
        return jax.tree.map(lambda *lanes: jnp.stack(list(map(jnp.asarray, lanes))), *outs)

    return run


def _of_smooth(fun: Callable[..., Any], case: _Case, xs: Values) -> Callable[..., list[Value]]:
    """Returns those outputs of `fun` that may have derivatives, from arguments that may."""

    def run(*points: Any) -> list[Value]:
        outs = fun(*with_values(xs, case.smooth, points))
        return [y for y in jax.tree.leaves(outs) if is_inexact(jnp.asarray(y))]

    return run


def _jvp(fun: Callable[..., Any], case: _Case) -> Callable[..., Any]:
    def run(*xs: Value) -> dict[str, Any]:
        points = [xs[k] for k in case.smooth]
        outs, dots = jax.jvp(_of_smooth(fun, case, xs), points, directions(points, 1))
        return {"out": outs, "tangent of out": dots}

    return run


def _vjp(fun: Callable[..., Any], case: _Case) -> Callable[..., Any]:
    def run(*xs: Value) -> dict[str, Any]:
        outs, pull = jax.vjp(_of_smooth(fun, case, xs), *(xs[k] for k in case.smooth))
        names = (f"cotangent of {case.paths[k]}" for k in case.smooth)
        return dict(zip(names, pull(directions(outs, 2)), strict=True))

    return run


def _jvp_of_vjp(fun: Callable[..., Any], case: _Case) -> Callable[..., Any]:
    def run(*xs: Value) -> dict[str, Any]:
        def pull(*points: Value) -> dict[str, Any]:
            return _vjp(fun, case)(*with_values(xs, case.smooth, points))

        points = [xs[k] for k in case.smooth]
        dots = jax.jvp(pull, points, directions(points, 1))[1]
        return {f"tangent of the {name}": dot for name, dot in dots.items()}

    return run


@dataclass(frozen=True)
class _Comparison:
    name: str
    rtol: float | None
    atol: float | None

    def __call__(
        self,
        transformation: str,
        case: _Case,
        batched: Callable[..., dict[str, Any]],
        loop: Callable[..., dict[str, Any]],
        optional: bool = False,
    ) -> None:
        """Raises if what `batched` and `loop` compute is not the same.

        If `optional`, and `loop` raises, there is nothing to compare.
        """
        try:
            expected = loop(*case.values)
        except Exception:
            if optional:
                return
            raise
        where = (
            f"the batching rule of {self.name} differs from a loop over the examples:\n"
            f"  transformation: {transformation}\n  batched: {case}\n  "
        )
        try:
            got = batched(*case.values)
        except Exception as error:
            message = f"{where}it raised {type(error).__name__}: {error}"
            raise RuleMismatchError(message) from _compat.without_hidden_frames(error)
        problem = difference_of_trees(got, expected, self.rtol, self.atol)
        if problem:  # it may be the rounding of terms that cancel: to find that out takes its time
            scales = scales_nearby(loop, case.values)
            problem = difference_of_trees(got, expected, self.rtol, self.atol, scales)
        if problem:
            raise RuleMismatchError(where + problem)


def _varied(x: Value, lane: int) -> Value:
    """Makes an argument for another lane; one that is no array is the same."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        folded = jax.vmap(lambda key: jax.random.fold_in(key, lane))(x.reshape(-1))
        return folded.reshape(x.shape)
    if is_inexact(x):
        change = 1 + 0.1 * np.random.default_rng(lane).uniform(-1, 1, x.shape)
        return x * jnp.asarray(change, x.dtype)
    if x.dtype == bool and not x.ndim:
        return x ^ bool(lane % 2)
    return jnp.roll(x, lane, 0) if x.ndim else x


def _is_plain(x: Value) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _path(keys: jax.tree_util.KeyPath) -> str:
    return f"args{jax.tree_util.keystr(keys)}"
