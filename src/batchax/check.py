"""`check`: whether a function is right under batching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.comparing import difference_of_trees, directions
from batchax.errors import ArgumentTypeError, MismatchError, UnsupportedError
from batchax.frontend.arguments import check_untraced
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import check_in_axes, is_position, spread_in_axes
from batchax.frontend.objects import without_objects
from batchax.frontend.options import check_callable, check_flags, check_tolerances
from batchax.frontend.outputs import lanes_first
from batchax.jaxprs.spoken import brief, name_of
from batchax.jaxprs.words import Value
from batchax.rows.ragged import Ragged
from batchax.rules.masking import is_inexact
from batchax.vmap import Options, vmap

P = ParamSpec("P")


@_compat.api_boundary
def check(
    fun: Callable[P, Any],
    in_axes: Any = 0,
    *,
    lanes: int = 4,
    derivatives: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Unpack[Options],
) -> Batched[P, None, None]:
    """Compares a batched function with the function itself, for some of the lanes.

    For test suites, "is my function right under batching?" in one line. The batched function runs
    as it does in the program, for all lanes, with the options given; the function runs by itself
    for the first lane, the last, and some between. Values are compared, and derivatives: with
    respect to what is mapped, and to arrays that all lanes share.

    Args:
      fun: a function of one example, as for `vmap`.
      in_axes: as for `vmap`.
      lanes: how many lanes to compare.
      derivatives: whether to compare derivatives. Those that the function does not have for one
        example are left out.
      rtol: relative tolerance; by default 1,000 times the rounding of the dtype.
      atol: absolute tolerance, relative to the largest value of the array; likewise.
      **options: of `vmap`, such as `batch_size`, `divergence`, `mesh`, `layout`. `out_axes` may be
        among them, and has no say: results are compared lane by lane.

    Returns:
      A function of the batch. It returns nothing.

    Raises:
      MismatchError: (an AssertionError) something differs: the message says in which lane, which
        entry of which output or derivative, what came and what was expected.
      ArgumentTypeError: `fun` is not callable, `lanes` is no positive int, or the arguments are
        traced.
      UnsupportedError: `axis_name` is given: a lane by itself has no others to meet.

    Example:
      >>> def energy(charge, positions):
      ...     return charge * jnp.sum(positions**2)
      >>> bx.check(energy, (None, 0), batch_size=2)(2.0, jnp.ones((5, 3)))
    """
    check_callable("check", "a function of one example", fun)
    check_in_axes(fun, in_axes, "check")
    if options.get("axis_name") is not None:
        raise UnsupportedError(
            "check compares with the function of one lane by itself, which has no others to meet: "
            "axis_name has no meaning there. Compare with jax.vmap instead."
        )
    if not (is_position(lanes) and lanes > 0):
        raise ArgumentTypeError(f"lanes must be a positive int, got {brief(lanes)}.")
    check_flags(derivatives=derivatives)
    tolerance = {"rtol": rtol, "atol": atol}
    check_tolerances(**tolerance)

    @functools.wraps(fun)
    @_compat.api_boundary
    def checked(*args: Any, **kwargs: Any) -> None:
        comparison = _Comparison(fun, in_axes, dict(options), args, kwargs, lanes, tolerance)
        comparison.values()
        if derivatives:
            comparison.derivatives()

    return cast(Any, checked)


class _Comparison:
    """A batched function, and examples of some of its lanes."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_axes: Any,
        options: dict[str, Any],
        args: tuple[Value, ...],
        kwargs: dict[str, Any],
        lanes: int,
        tolerance: dict[str, float | None],
    ) -> None:
        check_untraced("check compares values", (args, kwargs))
        self._batched = vmap(fun, in_axes, **lanes_first(options))
        leaves, self._rebuild = spread_in_axes(fun, in_axes, args, kwargs)
        self._fun, self._tolerance = fun, tolerance
        self._name = name_of(fun)
        self._paths = [leaf.path for leaf in leaves]
        self._whole = [leaf.value for leaf in leaves]
        specs = [leaf.spec for leaf in leaves]
        self._got = self._called(self._batched, self._whole)
        # What the function sees of each lane `vmap` says itself, of any kind of axis.
        self._mapped = [i for i, spec in enumerate(specs) if spec is not None]
        # An axis that a position names is a view; others are laid out for all lanes.
        self._positions = [s if is_position(s) else None for s in specs]
        seen = vmap(lambda xs: [xs[i] for i in self._mapped], (specs,), **_kept(options))
        self._examples = seen(self._whole)
        size = next(map(_size, self._examples), options.get("axis_size"))
        spread = np.linspace(0, size - 1, lanes).round() if size else ()
        self._lanes = sorted(set(map(int, spread)))

    def _called(self, fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        args, kwargs = self._rebuild(leaves)
        return without_objects(fun(*args, **kwargs))

    def _example(self, lane: int) -> list[Any]:
        """The leaves as the function of this lane sees them."""
        leaves = list(self._whole)
        for i, x in zip(self._mapped, self._examples, strict=True):
            leaves[i] = jax.tree.map(lambda x: _lane(x, lane), x, is_leaf=_is_rows)
        return leaves

    def values(self) -> None:
        """Compares what the functions return."""
        for lane in self._lanes:
            expected = self._called(self._fun, self._example(lane))
            got = jax.tree.map(lambda x: _lane(x, lane), self._got, is_leaf=_is_rows)
            self._same(lane, "out", got, expected)

    def derivatives(self) -> None:
        """Compares cotangents of the arguments, of results that have some in one lane alone."""
        smooth = [
            i
            for i, x in enumerate(self._whole)
            if _is_smooth(x) and (i not in self._mapped or self._positions[i] is not None)
        ]
        if not smooth or not self._lanes:
            return

        def vjp(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
            def of_points(*points: Any) -> list[Any]:
                given = dict(zip(smooth, points, strict=True))
                outs = self._called(fun, [given.get(i, x) for i, x in enumerate(leaves)])
                return [_array(y) for y in _inexact(outs)]

            return jax.vjp(of_points, *(leaves[i] for i in smooth))

        of_lanes = {}
        for lane in self._lanes:
            try:
                ys, pull = vjp(self._fun, self._example(lane))
                cotangents = directions(ys, lane)
                of_lanes[lane] = cotangents, pull(cotangents)
            except Exception:  # there is none for one example
                return
        outs, pull = vjp(self._batched, self._whole)
        # Zero times infinity: of a lane's own making, though its results have no cotangent.
        never = [jnp.isnan(g) for g in pull([jnp.zeros_like(y) for y in outs])]
        for lane, (cotangents, expected) in of_lanes.items():
            placed = zip(outs, _inexact(self._got), cotangents, strict=True)
            alone = [jnp.zeros_like(y).at[_place(of, lane)].set(c) for y, of, c in placed]
            for i, g, e, nan in zip(smooth, pull(alone), expected, never, strict=True):
                axis = self._positions[i]
                if axis is not None:
                    self._alone(lane, i, jnp.moveaxis(jnp.where(nan, 0, g), axis, 0))
                    g = jnp.take(g, lane, axis)
                else:
                    g = jnp.where(nan, e, g)
                self._same(lane, f"cotangent of {self._paths[i]}", g, e)

    def _alone(self, lane: int, leaf: int, cotangents: Any) -> None:
        """No other lane has a cotangent."""
        size = np.abs(np.asarray(cotangents)).reshape(len(cotangents), -1).max(1, initial=0)
        size[lane] = 0
        if size.any():
            raise MismatchError(
                f"{self._name} differs under batching from what it does for one example: results "
                f"of lane {lane} have a derivative by {self._paths[leaf]} of lane "
                f"{int(size.argmax())}."
            )

    def _same(self, lane: int, what: str, got: Any, expected: Any) -> None:
        rtol, atol = self._tolerance["rtol"], self._tolerance["atol"]
        problem = difference_of_trees({what: got}, {what: expected}, rtol, atol)
        if problem:
            raise MismatchError(
                f"{self._name} differs under batching from what it does for one example: in lane "
                f"{lane}, {problem}."
            )


def _kept(options: dict[str, Any]) -> dict[str, Any]:
    """Of options those that say which lanes there are."""
    return {k: v for k, v in options.items() if k == "axis_size"}


def _is_rows(x: Value) -> bool:
    return isinstance(x, Ragged)


def _size(x: Value) -> int:
    return len(x) if _is_rows(x) else jax.tree.leaves(x)[0].shape[0]


def _lane(x: Value, lane: int) -> Any:
    return x.rows()[lane] if _is_rows(x) else x[lane]


def _array(x: Value) -> Any:
    return x.data if _is_rows(x) else x


def _inexact(outs: Any) -> list[Any]:
    """The results that have derivatives."""
    leaves = jax.tree.leaves(outs, is_leaf=_is_rows)
    return [x for x in leaves if is_inexact(jnp.asarray(_array(x)))]


def _place(x: Value, lane: int) -> Any:
    """Where a lane is in the array that holds all of them."""
    if not _is_rows(x):
        return lane
    start, end = map(int, x.offsets[lane : lane + 2])
    return (*[slice(None)] * x.axis, slice(start, end))


def _is_smooth(x: Value) -> bool:
    """Whether a leaf is an array that there may be derivatives by."""
    return isinstance(x, (jax.Array, np.ndarray)) and is_inexact(x)
