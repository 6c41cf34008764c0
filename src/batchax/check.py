"""`check`: whether a function is right under batching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.comparing import difference_of_trees, directions, lanes_that_differ
from batchax.errors import MismatchError, UnsupportedError
from batchax.frontend.arguments import check_untraced
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import check_in_axes, is_position, spread_in_axes, without_objects
from batchax.frontend.options import (
    check_callable,
    check_count,
    check_flags,
    check_tolerances,
    wraps,
)
from batchax.frontend.outputs import lanes_first
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import AxesTree, Tree, Value, Values
from batchax.kernel.inner import NEEDS_VALUES
from batchax.kernel.own_primitive import with_values
from batchax.rows.ragged import Ragged
from batchax.rules.masking import is_inexact
from batchax.vmap import Options, vmap

P = ParamSpec("P")

_LANES = 64  # compared by default
_IN_A_LOOP = 64  # times as many lanes run in one program


@dataclass(frozen=True)
class Checked:
    """Lists what `check` compared and found to agree.

    Attributes:
      name: The name of the function.
      lanes: The indices of the lanes compared one by one.
      looped: The number of lanes whose values one loop compared, to find those that differ.
      size: The number of lanes in the batch.
      derivatives: The arguments whose derivatives were compared. Empty if one example has none, or
        with ``derivatives=False``.

    Example:
      >>> print(bx.check(jnp.sin)(jnp.ones(8)))
      sin agrees with a loop over the examples. Compared: all 8 lanes, values and derivatives by x.
    """

    name: str
    lanes: tuple[int, ...]
    size: int
    derivatives: tuple[str, ...] = ()
    looped: int = 0

    def __str__(self) -> str:
        by = ", ".join(self.derivatives)
        what = f"values and derivatives by {by}" if by else "values, no derivatives"
        many = "all lanes" if self.looped == self.size else f"{self.looped:,} lanes"
        return (
            f"{self.name} agrees with a loop over the examples. "
            f"Compared: {_budget(self.lanes, self.size)}, {what}."
            + f" One loop compared the values of {many}."
            * bool(self.looped)
        )

    __repr__ = __str__


def _budget(lanes: Sequence[int], size: int) -> str:
    """Says which of the lanes are compared."""
    if len(lanes) == size:
        return f"all {size:,} lanes" if size != 1 else "the only lane"
    return f"{len(lanes):,} of {size:,} lanes (lanes={size} compares all)"


@_compat.api_boundary
def check(
    fun: Callable[P, Any],
    in_axes: AxesTree = 0,
    *,
    lanes: int = _LANES,
    derivatives: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Unpack[Options],
) -> Batched[P, Checked, Checked]:
    """Compares a batched function with a loop over its examples.

    Example:
      >>> def energy(charge, positions):
      ...     return charge * jnp.sum(positions**2)
      >>> bx.check(energy, (None, 0), batch_size=2)(2.0, jnp.ones((5, 3)))
      energy agrees with a loop over the examples. Compared: all 5 lanes, values and derivatives by
      positions.

    For test suites. The batched function runs for all lanes, with the options that are passed. The
    function of one example runs for up to `lanes` of them. Values and derivatives are compared,
    with respect to mapped and shared arguments. Before that, the function of one example runs in
    one loop over 64 times as many lanes. Lanes whose values differ there are compared, too.

    Args:
      fun: A function of one example, as for `vmap`.
      in_axes: As for `vmap`.
      lanes: The largest number of lanes to compare one by one. A larger batch is sampled: the
        first, the last, the middle, and random lanes, the same in each call.
      derivatives: Whether to compare derivatives that exist for one example.
      rtol: Relative tolerance. Default: 1,000 times the rounding of the dtype.
      atol: Absolute tolerance, relative to the largest value of the array. Default: the same.
      **options: Options of `vmap`, such as `batch_size`, `divergence`, `mesh`, or `layout`.
        `out_axes` has no effect.

    Returns:
      A function of the batch that returns a `Checked`.

    Raises:
      MismatchError: (an AssertionError) A result differs. The message names the lane, the entry,
        and both values.
      ArgumentTypeError: `fun` is not callable, `lanes` is not an int, or the arguments are traced.
      OptionError: `lanes` is less than one.
      UnsupportedError: `axis_name` is passed: one lane alone has no others to communicate with.
    """
    check_callable("check", "a function of one example", fun)
    check_in_axes(fun, in_axes, "check")
    if options.get("axis_name") is not None:
        raise UnsupportedError(
            "check compares with the function of one lane alone, so axis_name has no meaning "
            "there. Remove axis_name, or compare with jax.vmap."
        )
    check_count("lanes", lanes, 1)
    check_flags(derivatives=derivatives)
    tolerance = {"rtol": rtol, "atol": atol}
    check_tolerances(**tolerance)

    @wraps(fun)
    @_compat.api_boundary
    def checked(*args: Tree, **kwargs: Tree) -> Checked:
        comparison = _Comparison(fun, in_axes, dict(options), args, kwargs, lanes, tolerance)
        comparison.values()
        compared = comparison.derivatives() if derivatives else ()
        return Checked(
            comparison.name, comparison.lanes, comparison.size, compared, comparison.looped
        )

    return cast(Any, checked)


class _Comparison:
    """Holds a batched function, and examples of some of its lanes."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_axes: AxesTree,
        options: dict[str, Any],
        args: tuple[Value, ...],
        kwargs: dict[str, Any],
        lanes: int,
        tolerance: dict[str, float | None],
    ) -> None:
        check_untraced("check compares values", (args, kwargs))
        self._batched = vmap(fun, in_axes, **lanes_first(options))
        leaves, rebuild = spread_in_axes(fun, in_axes, args, kwargs)
        # A tree that all lanes share is one leaf there, and here its arrays are: for derivatives.
        parts = [_parts_of(leaf.value) if leaf.spec is None else None for leaf in leaves]
        spread = [
            (leaf.path + key, x, leaf.spec)
            for leaf, part in zip(leaves, parts, strict=True)
            for key, x in (part[0] if part else [("", leaf.value)])
        ]

        def joined(values: Sequence[Any]) -> Tree:
            rest = iter(values)
            each = (
                part[1].unflatten([next(rest) for _ in part[0]]) if part else next(rest)
                for part in parts
            )
            return rebuild(list(each))

        self._rebuild = joined
        self._fun, self._tolerance = fun, tolerance
        self.name = name_of(fun)
        self._paths = [path for path, _, _ in spread]
        self._whole = [x for _, x, _ in spread]
        specs = [spec for _, _, spec in spread]
        self._got = self._called(self._batched, self._whole)
        # What the function sees of each lane `vmap` says itself, of any kind of axis.
        self._mapped = [i for i, spec in enumerate(specs) if spec is not None]
        # An axis that a position names is a view; others are laid out for all lanes.
        self._positions = [s if is_position(s) else None for s in specs]
        seen = vmap(lambda xs: [xs[i] for i in self._mapped], (specs,), **_kept(options))
        examples = seen(self._whole)
        self.size: int = next(map(_size, examples), options.get("axis_size", 0))
        self.lanes = _chosen(self.size, lanes)
        self._ends = sorted({*self.lanes[:1], *self.lanes[-1:]})
        self.looped = 0
        self._parts = dict(zip(self._mapped, map(_by_lane, examples), strict=True))
        self._smooth = [
            i
            for i, x in enumerate(self._whole)
            if _is_smooth(x) and (i not in self._mapped or self._positions[i] is not None)
        ]
        self._traced = sorted({*self._mapped, *self._smooth})
        self._add_different(examples, lanes)

    def _called(self, fun: Callable[..., Any], leaves: Sequence[Any]) -> Tree:
        args, kwargs = self._rebuild(leaves)
        return without_objects(fun(*args, **kwargs))

    def _example(self, lane: int) -> list[Value]:
        """Returns the leaves of the arguments of a lane that may be traced."""
        return [self._parts[i](lane) if i in self._parts else self._whole[i] for i in self._traced]

    def _leaves(self, traced: Sequence[Any]) -> list[Value]:
        return with_values(self._whole, self._traced, traced)

    def _add_different(self, examples: Sequence[Any], most: int) -> None:
        """Adds lanes whose values differ in a loop over many lanes, at most as many as before."""
        many = np.array(_chosen(self.size, _IN_A_LOOP * most))
        trees = examples, self._got
        rows = any(map(_is_rows, jax.tree.leaves(trees, is_leaf=_is_rows)))
        if rows or len(many) == len(self.lanes):
            return

        def one(mapped: Sequence[Any]) -> Tree:
            given = dict(zip(self._mapped, mapped, strict=True))
            return self._called(self._fun, [given.get(i, x) for i, x in enumerate(self._whole)])

        try:
            given, got = jax.tree.map(lambda x: x[many], trees)
            expected = jax.block_until_ready(jax.jit(lambda xs: jax.lax.map(one, xs))(given))
        except Exception:  # it needs values, say: the function runs for the chosen lanes alone
            return
        if jax.tree.leaves(got) and jax.tree.structure(got) == jax.tree.structure(expected):
            self.looped = len(many)
            different = many[lanes_that_differ(got, expected, **self._tolerance)]
            self.lanes = tuple(sorted({*self.lanes, *map(int, different[:most])}))

    def values(self) -> None:
        run = _compiled(lambda xs: self._called(self._fun, self._leaves(xs)))
        got = _by_lane(self._got)
        for lane in self.lanes:
            if lane in self._ends:  # uncompiled: a function that changes between calls is noticed
                expected = self._called(self._fun, self._leaves(self._example(lane)))
            else:
                expected = run(self._example(lane))
            self._same(lane, "out", got(lane), expected)

    def derivatives(self) -> tuple[str, ...]:
        """Compares cotangents of the arguments; returns the names of those that have some."""
        if not self._smooth or not self.lanes:
            return ()
        by_lane = _by_lane(self._got)
        run = _compiled(lambda xs, ys: self._vjp(self._fun, self._leaves(xs))[1](ys))
        expected = {}
        for lane in self.lanes:
            ys = directions(map(_array, _inexact(by_lane(lane))), lane)
            try:
                expected[lane] = ys, run(self._example(lane), ys)
            except Exception:  # there is none for one example
                return ()
        outs, pull = self._vjp(self._batched, self._whole)
        # Zero times infinity: of a lane's own making, though its results have no cotangent.
        never = [jnp.isnan(g) for g in pull([jnp.zeros_like(y) for y in outs])]

        def compare(*lanes: int) -> None:
            """Compares with cotangents for the results of some lanes, and zeros for the others."""
            of_lanes = [expected[lane] for lane in lanes]
            cotangents = zip(*(ys for ys, _ in of_lanes), strict=True)
            placed = zip(outs, _inexact(self._got), cotangents, strict=True)
            alone = pull([_place(y, of, lanes, c) for y, of, c in placed])
            gradients = zip(*(gs for _, gs in of_lanes), strict=True)
            for i, g, es, nan in zip(self._smooth, alone, gradients, never, strict=True):
                what, axis = f"cotangent of {self._paths[i]}", self._positions[i]
                # An argument that all lanes share has the sum of their cotangents.
                if axis is None:
                    total = functools.reduce(jnp.add, es)
                    self._same(lanes[0], what, jnp.where(nan, total, g), total)
                    continue
                self._alone(lanes, i, jnp.moveaxis(jnp.where(nan, 0, g), axis, 0))
                for lane, e in zip(lanes, es, strict=True):
                    self._same(lane, what, jnp.take(g, lane, axis), e)

        # One backward pass serves all lanes. Where it differs, each lane gets its own pass, which
        # names the lane and is free of the rounding of a sum over lanes.
        for lane in self._ends:
            compare(lane)
        try:
            compare(*self.lanes)
        except MismatchError:
            for lane in self.lanes:
                compare(lane)
        return tuple(self._paths[i] for i in self._smooth)

    def _vjp(
        self, fun: Callable[..., Any], leaves: Sequence[Any]
    ) -> tuple[list[Value], Callable[[Values], tuple[Value, ...]]]:
        def of_points(*points: Value) -> list[Value]:
            outs = self._called(fun, with_values(leaves, self._smooth, points))
            return [_array(y) for y in _inexact(outs)]

        return jax.vjp(of_points, *(leaves[i] for i in self._smooth))

    def _alone(self, lanes: Sequence[int], leaf: int, cotangents: Value) -> None:
        size = np.abs(np.asarray(cotangents)).reshape(len(cotangents), -1).max(1, initial=0)
        size[list(lanes)] = 0
        if size.any():
            raise MismatchError(
                f"{self.name} differs under batching from what it does for one example: results "
                f"of lane {lanes[0]} have a derivative by {self._paths[leaf]} of lane "
                f"{int(size.argmax())}."
            )

    def _same(self, lane: int, what: str, got: Value, expected: Value) -> None:
        rtol, atol = self._tolerance["rtol"], self._tolerance["atol"]
        problem = difference_of_trees({what: got}, {what: expected}, rtol, atol)
        if problem:
            raise MismatchError(
                f"{self.name} differs under batching from what it does for one example: in lane "
                f"{lane}, {problem}. Compared: {_budget(self.lanes, self.size)}."
            )


def _parts_of(tree: Tree) -> tuple[list[tuple[str, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(keys), x) for keys, x in leaves], structure


def _kept(options: dict[str, Any]) -> dict[str, Any]:
    """Returns those options that say which lanes there are."""
    return {k: v for k, v in options.items() if k == "axis_size"}


def _is_rows(x: Value) -> bool:
    return isinstance(x, Ragged)


def _size(x: Value) -> int:
    return len(x) if _is_rows(x) else jax.tree.leaves(x)[0].shape[0]


def _compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, unless it needs values: those to branch on, or of sizes."""
    compiled = jax.jit(fun)

    def run(*args: Tree) -> Tree:
        try:
            return compiled(*args)
        except (*NEEDS_VALUES, UnsupportedError):
            return fun(*args)

    return run


def _chosen(size: int, most: int) -> tuple[int, ...]:
    """Chooses lanes to compare, in order: all, or first, last, middle, and random ones."""
    if size <= most:
        return tuple(range(size))
    order = dict.fromkeys([0, size - 1, size // 2])
    order |= dict.fromkeys(np.random.default_rng(0).permutation(size).tolist())
    return tuple(sorted(list(order)[:most]))


def _by_lane(tree: Tree) -> Callable[[int], Any]:
    """Returns a function from a lane to its part of a tree."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_rows)
    leaves = [x.rows() if _is_rows(x) else x for x in leaves]
    return lambda lane: structure.unflatten([x[lane] for x in leaves])


def _array(x: Value) -> Value:
    return x.data if _is_rows(x) else x


def _inexact(outs: Tree) -> list[Value]:
    leaves = jax.tree.leaves(outs, is_leaf=_is_rows)
    return [x for x in leaves if is_inexact(jnp.asarray(_array(x)))]


def _place(y: Value, of: Value, lanes: Sequence[int], parts: Sequence[Any]) -> Value:
    """Makes an array for all lanes like `y`, of zeros except for the parts of some lanes."""
    if not _is_rows(of):
        return jnp.zeros_like(y).at[np.array(lanes)].set(jnp.stack(parts))
    offsets, axis = np.asarray(of.offsets), of.element_axis
    places = np.concatenate([np.arange(offsets[k], offsets[k + 1]) for k in lanes])
    elements = [_elements(of, part) for part in parts]
    return (
        jnp.zeros_like(y).at[(*[slice(None)] * axis, places)].set(jnp.concatenate(elements, axis))
    )


def _elements(rows: Ragged, row: Value) -> Value:
    """Returns the elements of a row as `data` has them, along one axis."""
    first, several = rows.element_axis, len(rows.axes)
    row = jnp.moveaxis(row, rows.axes, range(first, first + several))
    return row.reshape(*row.shape[:first], -1, *row.shape[first + several :])


def _is_smooth(x: Value) -> bool:
    """Whether a leaf is an array that there may be derivatives by."""
    return isinstance(x, (jax.Array, np.ndarray)) and is_inexact(x)
