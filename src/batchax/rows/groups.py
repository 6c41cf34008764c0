"""Rows in groups that run one after another: taken apart by row, put together in row order.

Both ways move whole rows, or the elements of rows, to places that are known while a program is
staged. So each is one gather, and its transpose is the gather that takes everything back; JAX's
own transpose of a gather would be a scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.frontend.arguments import Mapped
from batchax.frontend.in_axes import is_array, is_same
from batchax.frontend.outputs import AUTO, FlatOutputs, OutputArray, Reduce, check_unbatched
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, broadcast_axis, move_axis
from batchax.programs.canonical_values import Table
from batchax.rows.checks import elements_of
from batchax.rows.index import take_clipped
from batchax.rows.ragged import Ragged
from batchax.rules.in_turn import in_turn as run_in_turn
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

Outputs = TypeVar("Outputs", bound=FlatOutputs)
Placed = tuple[Any, Position]
"""An output and where it has its rows: 0 for a `Ragged`, None for what all rows share."""

RunGroup = Callable[[int, Axis, list[Mapped]], tuple[list[Placed], Outputs]]


def run_in_groups(
    axis: Axis,
    mapped: Sequence[Mapped],
    groups: Sequence[np.ndarray],
    run_group: RunGroup[Outputs],
    in_turn: bool,
) -> tuple[list[Placed], Outputs]:
    """What `run_group` computes for each group of rows, in the order of the rows.

    Args:
      axis: the axis being mapped.
      mapped: the arguments: `Ragged`s whose lengths are known, arrays with an axis for the rows,
        and arrays that all rows share.
      groups: the indices of the rows of each group. Each row is in one.
      run_group: runs one group, given its number, axis and arguments, and describes the outputs.
        Groups agree in the number of outputs and in their dtypes, and in their shapes but for
        ragged axes.
      in_turn: whether no two groups may run at once; see `batchax.rules.in_turn`.

    Raises:
      UnsupportedError: an argument cannot be taken apart by rows, or outputs do not agree.
    """
    parts = [_split_argument(axis, m, groups) for m in mapped]
    results: list[list[Placed]] = []
    descriptions: list[Outputs] = []
    for g, rows in enumerate(groups):
        given = [replace(m, value=part[g]) for m, part in zip(mapped, parts, strict=True)]
        if in_turn and results:
            results[-1], given = _one_after_another(results[-1], given)
        result, description = run_group(g, replace(axis, size=len(rows)), given)
        results.append(result)
        descriptions.append(description)
    if len({len(result) for result in results}) > 1:
        raise UnsupportedError(
            "the function returns different numbers of arrays for rows of different lengths: "
            f"{sorted({len(result) for result in results})}. Let it return the same for each row."
        )
    check_constants(descriptions)
    ragged = [m.value for m in mapped if isinstance(m.value, Ragged)]
    outputs = descriptions[-1]
    return [
        _joined_output(axis, output, groups, [result[i] for result in results], ragged)
        for i, output in enumerate(outputs.described)
    ], outputs


def _one_after_another(
    results: list[Placed], given: list[Mapped]
) -> tuple[list[Placed], list[Mapped]]:
    """The results of a group and the arguments of the next one, which waits for them.

    See `rules/in_turn.py` for why it has to.
    """
    firsts, of_results = jax.tree.flatten([value for value, _ in results])
    waiting, of_given = jax.tree.flatten([m.value for m in given if m.axis is not None])
    firsts, waiting = run_in_turn(firsts, waiting)
    later = iter(jax.tree.unflatten(of_given, waiting))
    values = jax.tree.unflatten(of_results, firsts)
    placed = [(value, position) for value, (_, position) in zip(values, results, strict=True)]
    return placed, [m if m.axis is None else replace(m, value=next(later)) for m in given]


def in_front(output: OutputArray) -> OutputArray:
    """`output` with its rows along axis 0, if it has any: for groups, whose rows are joined."""
    if output.spec is None or output.spec is AUTO:
        return output
    keeps = isinstance(output.spec, Reduce) and output.spec.unmapped == "keep"
    return replace(output, spec=AUTO if keeps else 0)


def check_constants(groups: Sequence[FlatOutputs]) -> None:
    """Refuses numbers that are returned as they are and differ between groups.

    Raises:
      AxisError: some do.
    """
    table, (first, *rest) = Table(), map(_constants, groups)
    for others in rest:
        for x, y in zip(first, others, strict=True):
            if table.contents(x) != table.contents(y) if is_array(x) else not is_same(x, y):
                raise AxisError(
                    f"the function returns a number that depends on the row, {x} for one length "
                    f"and {y} for another, but out_axes says None for it. Give the position the "
                    "batch axis should have, or batchax.AUTO."
                )


def _constants(outputs: FlatOutputs) -> list[Any]:
    """What is returned as it is: numbers that are no arrays, where `out_axes` says None."""
    here = object()
    try:
        returned = outputs.rebuild([here] * len(outputs.described))
    except Exception:  # a container of the user's that wants arrays
        return []
    return [leaf for leaf in jax.tree.leaves(returned) if leaf is not here]


def _split_argument(axis: Axis, m: Mapped, groups: Sequence[np.ndarray]) -> list[Any]:
    if m.axis is None:
        return [m.value] * len(groups)
    if isinstance(m.value, Ragged):
        return split_rows(m.value, groups)
    if _compat.is_reference(m.value):
        raise UnsupportedError(
            f"{m.path} is a reference (jax.new_ref), and rows are run here in groups by their "
            "length, for which it would have to be taken apart. Pass an array, and return what is "
            "to be written."
        )
    if axis.mesh_axis is not None:
        raise UnsupportedError(
            f"{m.path} is sharded over the mesh axis {axis.mesh_axis!r} by its type, and rows "
            "are run here in groups by their length, which would have to be sharded each. "
            "Use jax.sharding.reshard to have all rows on each device."
        )
    return split_lanes(m.value, groups, m.axis)


def _joined_output(
    axis: Axis,
    output: OutputArray,
    groups: Sequence[np.ndarray],
    parts: Sequence[Placed],
    arguments: Sequence[Ragged],
) -> Placed:
    values = [value for value, _ in parts]
    shapes = {_shape_of_row(value, position) for value, position in parts}
    if len({value.dtype for value in values}) > 1 or len(shapes) > 1:
        kinds = sorted({f"{v.dtype}{list(_shape_of_row(v, a))}" for v, a in parts})
        raise UnsupportedError(
            f"{output.path} is of different types for rows of different lengths: "
            f"{', '.join(kinds).replace(chr(39), '')}. Let the function return the same for each "
            "row, but for one axis."
        )
    if isinstance(values[0], Ragged):
        return _with_size_of(join_rows(values, groups), arguments), 0
    positions = [position for _, position in parts]
    if all(position is None for position in positions):
        return values[0], None
    check_unbatched(axis, [output], [0])
    in_front = [
        broadcast_axis(replace(axis, size=len(rows)), x, 0) if a is None else move_axis(x, a, 0)
        for rows, (x, a) in zip(groups, parts, strict=True)
    ]
    return join_lanes(in_front, groups), 0


def _shape_of_row(value: Value, position: Position) -> tuple[Any, ...]:
    if isinstance(value, Ragged):
        return value.shape_of_row(["n"] * len(value.axes))
    shape = list(value.shape)
    if position is not None:
        del shape[position]
    return tuple(shape)


def _with_size_of(out: Ragged, arguments: Sequence[Ragged]) -> Ragged:
    """`out`, with the bounds of arguments whose rows have the same lengths."""
    given = [x for each in arguments for x in zip(each.each_length, each.each_bound, strict=True)]
    along = []
    for own in zip(out.each_length, out.each_bound, strict=True):
        same = (x for x in given if np.array_equal(np.asarray(x[0]), np.asarray(own[0])))
        along.append(next(same, own))
    lengths, bounds = zip(*along, strict=True)
    return Ragged(out.data, lengths, bounds, axis=out.axes)


def split_rows(x: Ragged, groups: Sequence[np.ndarray]) -> list[Ragged]:
    """The rows of each group, whose lengths must be known; its longest gives the bound."""
    datas = split_elements(x.data, _known(x), groups, x.element_axis)
    lengths = [np.asarray(each) for each in x.each_length]
    return [
        Ragged(
            data,
            [each[rows] for each in lengths],
            (None,) * len(lengths) if len(rows) else x.each_bound,
            axis=x.axes,
        )
        for data, rows in zip(datas, groups, strict=True)
    ]


def join_rows(parts: Sequence[Ragged], groups: Sequence[np.ndarray]) -> Ragged:
    """What `split_rows` took apart."""
    axis, order = parts[0].element_axis, np.concatenate(groups)
    place = _inverse(order, len(order))
    elements = np.concatenate([_known(part) for part in parts])[place]
    data = join_elements([part.data for part in parts], elements, groups, axis)
    every = zip(*(part.each_length for part in parts), strict=True)
    lengths = [np.concatenate(list(map(np.asarray, each)))[place] for each in every]
    bounds = tuple(map(max, zip(*(part.each_bound for part in parts), strict=True)))
    return Ragged(data, lengths, bounds, axis=parts[0].axes)


def split_elements(
    x: Value, lengths: np.ndarray, groups: Sequence[np.ndarray], axis: int
) -> list[Any]:
    """The elements of the rows of each group, of packed rows of these lengths along `axis`."""
    starts = np.cumsum(lengths) - lengths
    index = [_elements(starts, lengths, rows) for rows in groups]
    return _regroup([x], np.concatenate(index), [len(i) for i in index], axis)


def join_elements(
    parts: Sequence[Value], lengths: np.ndarray, groups: Sequence[np.ndarray], axis: int
) -> Any:
    """What `split_elements` took apart. Behind the last row of a part there may be room."""
    capacities = [part.shape[axis] for part in parts]
    counts = [lengths[rows] for rows in groups]
    within = [np.cumsum(count) - count for count in counts]
    offsets = np.cumsum(capacities) - capacities
    starts = np.concatenate([at + offset for at, offset in zip(within, offsets, strict=True)])
    place = _inverse(np.concatenate(groups), len(lengths))
    index = _elements(starts, np.concatenate(counts), place)
    return _regroup(parts, index, [len(index)], axis)[0]


def split_lanes(x: Value, groups: Sequence[np.ndarray], axis: int) -> list[Any]:
    """The lanes of each group, along `axis` of an array."""
    return _regroup([x], np.concatenate(groups), [len(rows) for rows in groups], axis)


def join_lanes(parts: Sequence[Any], groups: Sequence[np.ndarray], axis: int = 0) -> Any:
    """What `split_lanes` took apart."""
    index = np.concatenate(groups)
    return _regroup(parts, _inverse(index, len(index)), [len(index)], axis)[0]


def _known(x: Ragged) -> np.ndarray:
    """How many elements each row has."""
    elements = elements_of(x.lengths)
    assert elements is not None, "checked by those who make groups"
    return elements


def _elements(starts: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where the elements of `rows` are, one row after another."""
    count = lengths[rows]
    first = np.cumsum(count) - count
    return np.repeat(starts[rows] - first, count) + np.arange(count.sum())


def _inverse(index: np.ndarray, size: int) -> np.ndarray:
    """Where in `index` each number below `size` is; -1 for those that are not."""
    places = np.full(size, -1)
    places[index] = np.arange(len(index))
    return places


def _regroup(parts: Sequence[Any], index: np.ndarray, sizes: Sequence[int], axis: int) -> list[Any]:
    """The elements `index` of all parts together, in new parts of these sizes, along `axis`.

    No element is taken twice, so the transpose only moves them back, and is of the same form.
    """
    given = [x.shape[axis] for x in parts]

    def forward(residuals: Any, xs: Sequence[Value]) -> list[Any]:
        return _take_parts(xs, index, sizes, axis)

    def back(residuals: Any, xs: Sequence[Value]) -> list[Any]:
        return _take_parts(xs, _inverse(index, sum(given)), given, axis)

    if not all(map(is_inexact, parts)):
        return forward([], parts)
    return linear_with_transpose(forward, back, [], parts)


def _take_parts(
    xs: Sequence[Value], index: np.ndarray, sizes: Sequence[int], axis: int
) -> list[Any]:
    """As `_regroup`; zeros for each -1 in `index`."""
    x = xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)
    if not np.array_equal(index, np.arange(x.shape[axis])):
        x = _take(x, index, axis)
    if len(sizes) == 1:
        return [x]
    ends = np.cumsum(sizes)
    return [
        lax.slice_in_dim(x, end - size, end, axis=axis)
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]


def _take(x: Value, index: np.ndarray, axis: int) -> Any:
    shape = (*x.shape[:axis], len(index), *x.shape[axis + 1 :])
    if x.shape[axis] == 0 or len(index) == 0:
        if not len(index):
            return lax.slice_in_dim(x, 0, 0, axis=axis)
        return jnp.zeros(shape, x.dtype)
    taken = take_clipped(x, index.astype(np.int32), axis)
    if (index >= 0).all():
        return taken
    belongs = lax.broadcast_in_dim(jnp.asarray(index >= 0), shape, (axis,))
    return lax.select(belongs, taken, lax.full_like(taken, 0))


def groups_of(*lengths: np.ndarray) -> list[np.ndarray]:
    """The rows in groups of which each has equal lengths, in the order of those."""
    together = np.stack(lengths, 1)
    _, number = np.unique(together, axis=0, return_inverse=True)
    number = number.reshape(-1)
    order = np.argsort(number, kind="stable")
    ends = np.flatnonzero(np.diff(number[order])) + 1
    return np.split(order, ends)
