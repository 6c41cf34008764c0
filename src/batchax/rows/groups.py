"""Rows in groups that run one after another: in buckets, by length, and in regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.analysis.canonical import Table
from batchax.analysis.canonical_form import same_results
from batchax.errors import AxisError, UnsupportedError
from batchax.execution.call import Call, Strategy, apply_passes, execute
from batchax.execution.call import Outputs as CallOutputs
from batchax.execution.chunked import Chunking
from batchax.execution.devices.shards import Shards
from batchax.execution.on_devices import chunk_lanes, shard_lanes
from batchax.frontend.arguments import Mapped
from batchax.frontend.in_axes import is_array, is_same
from batchax.frontend.outputs import AUTO, FlatOutputs, OutputArray, Reduce, check_unbatched, place
from batchax.frontend.rows import GroupsOfRows
from batchax.jaxprs.types import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, axis_to_front, broadcast_axis, move_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.named_axes import any_uses_axis
from batchax.rows.buckets import (
    Buckets,
    bucket,
    groups_of,
    join_lanes,
    join_rows,
    known_elements,
    split_lanes,
    split_rows,
)
from batchax.rows.building import as_tuple, known_lengths
from batchax.rows.call import RowCall, SizesOf, place_ragged, reject_ordered, with_room
from batchax.rows.packed import PackedRows
from batchax.rows.packed_forms import Packed, names_of
from batchax.rows.ragged import Ragged, rows_of_one_size
from batchax.rows.sizes import Dim, Sizes, ragged_axes
from batchax.rules.calls import calls_library
from batchax.rules.calls import in_turn as run_in_turn

Placed = tuple[Any, Position]
"""An output and where it has its rows: 0 for a `Ragged`, None for what all rows share."""

RunGroup = Callable[[int, Axis, list[Mapped]], tuple[list[Placed], FlatOutputs]]


def run_in_groups(
    axis: Axis,
    mapped: Sequence[Mapped],
    groups: Sequence[np.ndarray],
    run_group: RunGroup,
    in_turn: bool = True,
) -> list[Placed]:
    """What `run_group` computes for each group of rows, in the order of the rows.

    Each row is in one of the `groups`. Lengths of `Ragged` arguments are known. `run_group` runs
    one group, given its number, axis and arguments, and describes the outputs: groups agree in
    their number, dtypes, and shapes except for ragged axes. `in_turn` is whether no two groups may
    run at once, as each may call a library (`batchax.rules.calls`).
    """
    parts = [_split_argument(axis, m, groups) for m in mapped]
    results: list[list[Placed]] = []
    descriptions: list[FlatOutputs] = []
    for g, rows in enumerate(groups):
        given = [replace(m, value=part[g]) for m, part in zip(mapped, parts, strict=True)]
        if in_turn and results:
            results[-1], given = _one_after_another(results[-1], given)
        result, description = run_group(g, replace(axis, size=len(rows)), given)
        results.append(result)
        descriptions.append(description)
    counts = {len(result) for result in results}
    if len(counts) > 1:
        raise UnsupportedError(
            "the function returns different numbers of arrays for rows of different lengths: "
            f"{sorted(counts)}. Let it return the same for each row."
        )
    check_constants(descriptions)
    ragged = [m.value for m in mapped if isinstance(m.value, Ragged)]
    return [
        _joined_output(axis, output, groups, [result[i] for result in results], ragged)
        for i, output in enumerate(descriptions[-1].described)
    ]


def run_in_buckets(call: RowCall, strategy: Strategy, buckets: int | GroupsOfRows) -> CallOutputs:
    """The outputs of a function of one row, run for the rows of each bucket by itself.

    Buckets are for the lengths of that `Ragged` with the most elements, and of those that have the
    same; others are as long in each bucket as their longest row there. `strategy` runs each bucket.
    """
    axis, mapped = call.axis, call.mapped
    rows = [(m, own) for m, own in call.arguments if own]
    x, leading = max(rows, key=lambda each: int(known_elements(each[0].value).sum()))
    if isinstance(buckets, int):
        buckets = bucket(x.value, buckets)
    assert isinstance(buckets, Buckets)
    if not buckets.are_of(x.value):
        raise AxisError(
            f"buckets were made for other lengths than those of {x.path}, which is {x.value}. "
            "Make them for these lengths: batchax.bucket(x)."
        )
    if not axis.size:
        return execute(Call(axis, call.function, mapped, strategy))
    of_row: list[Any] = []  # what describes the outputs of one row, and how many axes each has

    def one_row_in_bucket(*values: Value) -> tuple[list[Any], FlatOutputs]:
        arrays, outputs = call.function(*values)
        of_row[:] = outputs, list(map(jnp.ndim, arrays))
        return arrays, replace(outputs, described=list(map(in_front, outputs.described)))

    def run_group(g: int, group: Axis, part: list[Mapped]) -> tuple[list[Placed], FlatOutputs]:
        bounds = dict(zip([s.name for s in leading], as_tuple(buckets.sizes[g]), strict=True))

        def bounded(m: Mapped, own: SizesOf) -> Mapped:
            if not own:
                return m
            x = m.value
            most = tuple(bounds.get(s.name, n) for s, n in zip(own, x.each_bound, strict=True))
            return replace(m, value=Ragged(x.data, x.each_length, most, axis=x.axes))

        given = list(map(bounded, part, call.sizes_of))
        outs, outputs = execute(Call(group, one_row_in_bucket, given, strategy))
        return [
            (x, 0 if isinstance(x, Ragged) or np.ndim(x) > ndim else None)
            for x, ndim in zip(outs, of_row[1], strict=True)
        ], outputs

    # One by one: whether the function calls a library is known only when one bucket has run.
    outs = run_in_groups(axis, mapped, buckets.rows, run_group)
    return _placed(axis, of_row[0], outs), of_row[0]


def _placed(axis: Axis, outputs: FlatOutputs, outs: Sequence[Placed]) -> list[Any]:
    (n,) = jax.export.symbolic_shape("n")
    for output, (x, _) in zip(outputs.described, outs, strict=True):
        if isinstance(x, Ragged):
            place_ragged(output, x.shape_of_row([n] * len(x.axes)))
    return [
        x if isinstance(x, Ragged) else place(axis, output, x, position)
        for output, (x, position) in zip(outputs.described, outs, strict=True)
    ]


Lengths = tuple[Any, ...]
"""The length of a row, for each of the sizes that rows have: a number, or a symbol."""


def group_by_length(call: RowCall, chunking: Chunking | None, why: str = "") -> CallOutputs:
    """The outputs of a function of one row, by a batch for each length of rows.

    `why` is why rows of any length cannot run together, if they cannot.
    """
    axis, one_row = call.axis, call.function
    each = [x for size in call.sizes if (x := known_lengths(size.lengths)) is not None]
    if len(each) < len(call.sizes):
        raise UnsupportedError(
            "the function needs rows grouped by their length, and the lengths are traced here: "
            "call it outside of jit, or close over the Ragged so that its lengths are known."
        )
    if axis.size:
        groups = groups_of(*each)
        lengths = [tuple(int(x[rows[0]]) for x in each) for rows in groups]
    else:  # a group of no rows, for what the outputs are
        groups, lengths = [np.zeros(0, np.int32)], [tuple(size.bound for size in call.sizes)]
    recording.fact(
        "groups", lengths=lengths, rows=[len(rows) for rows in groups], why=why, branches=False
    )
    staged = list(map(call.staged_at, lengths))
    programs, outputs = [program for program, _ in staged], staged[-1][1]
    _check_programs(axis, programs, lengths)
    if len(groups) > 1:
        for program in programs:
            reject_ordered(program)
    check_constants([each for _, each in staged])
    # Lengths that no row has, to see how outputs change: longer ones, one size at a time.
    longest = lengths[-1]
    for i, n in enumerate(longest):
        for longer in (n + 1, 2 * n + 16):
            try:
                more, _ = call.staged_at((*longest[:i], longer, *longest[i + 1 :]))
            except Exception:  # no row has this length, so the function need not work for it
                continue
            if kinds(more) == kinds(programs[0]):
                programs.append(more)
    shapes = [symbolic_shape(kind) for kind in zip(*map(shapes_of, programs), strict=True)]
    of_groups = [
        place_for_lengths(axis, output, shape, same)
        for output, shape, same in zip(
            outputs.described, shapes, same_results(programs), strict=True
        )
    ]

    def one_row_in_group(*values: Value) -> tuple[list[Any], FlatOutputs]:
        arrays, outputs = one_row(*values)
        return arrays, replace(outputs, described=of_groups)

    def run_group(g: int, group: Axis, part: list[Mapped]) -> tuple[list[Placed], FlatOutputs]:
        outs, _ = execute_as_arrays(
            Call(group, one_row_in_group, list(map(_dense, part))), chunking
        )
        return [_of_group(group, x, shape) for x, shape in zip(outs, shapes, strict=True)], outputs

    # What the name of the axis stands for is all rows, in each of the groups.
    with _compat.named_scope(axis.name, axis.size):
        in_turn = any(calls_library(program.jaxpr) for program in programs)
        outs = run_in_groups(replace(axis, name=None), call.mapped, groups, run_group, in_turn)
    return _placed(axis, outputs, outs), outputs


@dataclass(frozen=True)
class KnownGroups:
    """Rows in groups, each of which is padded to its longest row."""

    rows: Sequence[np.ndarray]  # the indices of the rows of each group. Each row is in one.
    lengths: Mapping[str, np.ndarray]  # of all rows, for each size

    def run(
        self,
        rows: PackedRows,
        one_row: Callable[..., list[Any]],
        arguments: Sequence[Packed],
        shapes: Sequence[tuple[Any, ...]],
    ) -> list[Packed]:
        """The results of a function of one padded row for all rows: see `regions.RunPadded`."""
        whole = Sizes(rows.bounds, {})
        outputs = FlatOutputs([OutputArray("a result", 0) for _ in shapes], list, [])
        weak: list[bool] = []

        def run_group(g: int, lanes: Axis, part: list[Mapped]) -> tuple[list[Placed], FlatOutputs]:
            lengths = {name: x[self.rows[g]] for name, x in self.lengths.items()}
            # Many operations have no meaning for size zero.
            bounds = {name: max(int(x.max()), 1) for name, x in lengths.items()}
            room, padded_row = Sizes(bounds, {}), of_one_row(one_row, lengths, bounds)
            values: list[Any] = list(map(jnp.asarray, lengths.values()))
            axes: list[Position] = [0] * len(values)
            for m, given in zip(part, arguments, strict=True):
                x = m.value
                if isinstance(x, Ragged):
                    most = tuple(bounds[name] for name in names_of(given.shape) or ())
                    x = Ragged(x.data, x.each_length, most, axis=x.axes).to_padded()
                else:
                    for k in ragged_axes(given.shape):
                        x = lax.slice_in_dim(x, 0, room.bound(given.shape[k]), axis=k + 1)
                values.append(x)
                axes.append(m.axis)
            outs, out_axes = batch_function(lanes, padded_row, values, axes)
            weak[:] = [getattr(x, "weak_type", False) for x in outs]
            placed: list[Placed] = []
            for x, axis, shape in zip(outs, out_axes, shapes, strict=True):
                at = tuple(ragged_axes(shape))
                if at:
                    x, axis = axis_to_front(lanes, x, axis), 0
                if at and rows.holds(shape):
                    own = [lengths[name] for name in names_of(shape) or ()]
                    x = Ragged.from_padded(x, own if len(own) > 1 else own[0], axis=at)
                else:
                    for k in at:
                        x = with_room(x, k + 1, whole.bound(shape[k]))
                placed.append((x, axis))
            return placed, outputs

        # No two groups at once: each may call a library.
        mapped = list(map(self._mapped, arguments))
        joined = run_in_groups(rows.axis, mapped, self.rows, run_group)
        results = []
        for (x, axis), shape, is_weak in zip(joined, shapes, weak, strict=True):
            if isinstance(x, Ragged):
                capacity = rows.along(names_of(shape) or ()).capacity
                x, axis = with_room(x.data, x.element_axis, capacity), None
            results.append(Packed(_compat.weakly(x) if is_weak else x, shape, axis))
        return results

    def _mapped(self, x: Packed) -> Mapped:
        at = tuple(ragged_axes(x.shape))
        if not at or x.axis is not None:
            return Mapped("an argument", x.value, x.axis)
        lengths = [self.lengths[name] for name in names_of(x.shape) or ()]
        return Mapped("an argument", Ragged(x.value, lengths, axis=at), 0)


def of_one_row(
    one_row: Callable[..., list[Any]], lengths: Mapping[str, Any], bounds: Mapping[str, int]
) -> Callable[..., list[Any]]:
    """`one_row`, of `Sizes` and arrays, as a function of a row's lengths and of arrays.

    Nothing is padded along sizes that are known to be the bound in every row.
    """
    of_numpy = {name: x for name, x in lengths.items() if isinstance(x, np.ndarray)}
    exact = frozenset(name for name, x in of_numpy.items() if (x == bounds[name]).all())

    def padded_row(*values: Value) -> list[Any]:
        own = dict(zip(lengths, values, strict=False))
        own.update((name, np.int32(bounds[name])) for name in exact)
        return one_row(Sizes(bounds, own, exact), *values[len(lengths) :])

    return padded_row


def execute_as_arrays(
    call: Call, chunking: Chunking | None, shards: Shards | None = None
) -> tuple[list[Any], FlatOutputs]:
    """What a call of arrays returns that stands for rows, so many of them at a time.

    A padded row is computed by a program that was staged for one mesh, so it stays where it is,
    unless `shards` are those of the user, and no type says where arrays are.
    """
    passes = [shard_lanes(shards), chunk_lanes(chunking, where_types_say=False)]
    return execute(apply_passes(passes, call))


def shapes_of(program: ClosedJaxpr) -> list[tuple[int, ...]]:
    return [getattr(aval, "shape", ()) for aval in program.out_avals]


def kinds(program: ClosedJaxpr) -> list[Any]:
    """The dtype and the number of axes of each result."""
    return [
        (getattr(aval, "dtype", None), len(shape))
        for aval, shape in zip(program.out_avals, shapes_of(program), strict=True)
    ]


def _check_programs(
    axis: Axis, programs: Sequence[ClosedJaxpr], lengths: Sequence[Lengths]
) -> None:
    def shown(program: ClosedJaxpr, at: Lengths) -> tuple[str, str]:
        returned = ", ".join(a.str_short() for a in program.out_avals) or "nothing"
        return returned, " and ".join(map(str, at))

    for program, at in zip(programs, lengths, strict=True):
        if kinds(program) != kinds(programs[0]):
            (first, of_first), (other, of_other) = (
                shown(programs[0], lengths[0]),
                shown(program, at),
            )
            raise UnsupportedError(
                f"the function returns {first} for a row of length {of_first}, and {other} for one "
                f"of length {of_other}. Let it return the same number of arrays, of the same "
                "dtypes and numbers of axes, for each row."
            )
        if any_uses_axis(axis, program):
            raise UnsupportedError(
                f"the function uses the axis {axis.name!r}, whose lanes are all rows, but it can "
                "only run for rows of one length at a time. Compute what rows share outside of "
                "this vmap, or reduce over them with out_axes=batchax.Reduce(...)."
            )


def symbolic_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """The shape of an output for each row, with a symbol for what differs with the length."""
    (n,) = jax.export.symbolic_shape("n")
    return tuple(dims[0] if len(set(dims)) == 1 else n for dims in zip(*shapes, strict=True))


def place_for_lengths(
    axis: Axis, output: OutputArray, shape: tuple[Dim, ...], same: bool
) -> OutputArray:
    """Where an output goes in each group; `same`, if programs of all lengths compute it alike."""
    output = in_front(place_ragged(output, shape))
    shared = output.spec is None or output.spec is AUTO
    if not shared or same:
        return output
    check_unbatched(axis, [output], [0])
    return replace(output, spec=0)


def in_front(output: OutputArray) -> OutputArray:
    """`output` with its rows along axis 0, if it has any: for groups, whose rows are joined."""
    if output.spec is None or output.spec is AUTO:
        return output
    keeps = isinstance(output.spec, Reduce) and output.spec.unmapped == "keep"
    return replace(output, spec=AUTO if keeps else 0)


def _dense(m: Mapped) -> Mapped:
    """Rows of one length, all at the bound, as an array with the rows in front."""
    if not isinstance(m.value, Ragged):
        return m
    x, at, axes = m.value.data, m.value.element_axis, m.value.axes
    x = x.reshape(*x.shape[:at], len(m.value), *m.value.each_bound, *x.shape[at + 1 :])
    together = range(at + 1, at + 1 + len(axes))
    return Mapped(m.path, jnp.moveaxis(move_axis(x, at, 0), together, [k + 1 for k in axes]), 0)


def _of_group(group: Axis, x: Value, shape: tuple[Dim, ...]) -> Placed:
    """An output of rows of one length."""
    ragged = tuple(i for i, dim in enumerate(shape) if not isinstance(dim, int))
    if not ragged:
        return x, 0 if np.ndim(x) > len(shape) else None
    return rows_of_one_size(x, ragged), 0


def check_constants(groups: Sequence[FlatOutputs]) -> None:
    table, (first, *rest) = Table(), map(_constants, groups)
    for others in rest:
        for x, y in zip(first, others, strict=True):
            if table.contents(x) != table.contents(y) if is_array(x) else not is_same(x, y):
                raise AxisError(
                    f"the function returns a number that depends on the row, {x} for one length "
                    f"and {y} for another, but out_axes says None for it. Pass the position the "
                    "batch axis should have, or batchax.AUTO."
                )


def _constants(outputs: FlatOutputs) -> list[Any]:
    """What is returned as it is: numbers that are no arrays, where `out_axes` says None."""
    here = object()
    try:
        returned = outputs.rebuild([here] * len(outputs.described))
    except Exception:  # a container of the user that wants arrays
        return []
    return [leaf for leaf in jax.tree.leaves(returned) if leaf is not here]


def _one_after_another(
    results: list[Placed], given: list[Mapped]
) -> tuple[list[Placed], list[Mapped]]:
    """The results of a group and the arguments of the next one, which waits for them.

    See `rules/calls.py` for why it has to.
    """
    firsts, of_results = jax.tree.flatten([value for value, _ in results])
    waiting, of_given = jax.tree.flatten([m.value for m in given if m.axis is not None])
    firsts, waiting = run_in_turn(firsts, waiting)
    later = iter(jax.tree.unflatten(of_given, waiting))
    values = jax.tree.unflatten(of_results, firsts)
    placed = [(value, position) for value, (_, position) in zip(values, results, strict=True)]
    return placed, [m if m.axis is None else replace(m, value=next(later)) for m in given]


def _split_argument(axis: Axis, m: Mapped, groups: Sequence[np.ndarray]) -> list[Any]:
    if m.axis is None:
        return [m.value] * len(groups)
    if isinstance(m.value, Ragged):
        return split_rows(m.value, groups)
    if _compat.is_reference(m.value):
        raise UnsupportedError(
            f"{m.path} is a reference (jax.new_ref), and rows are run here in groups by their "
            "length, for which it would have to be split. Pass an array, and return what is to be "
            "written."
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
            "row, except for one axis."
        )
    if isinstance(values[0], Ragged):
        return _with_size_of(join_rows(values, groups), arguments), 0
    positions = [position for _, position in parts]
    if all(position is None for position in positions):
        return values[0], None
    check_unbatched(axis, [output], [0])
    fronted = [
        broadcast_axis(replace(axis, size=len(rows)), x, 0) if a is None else move_axis(x, a, 0)
        for rows, (x, a) in zip(groups, parts, strict=True)
    ]
    return join_lanes(fronted, groups), 0


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
