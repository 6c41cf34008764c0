"""From a call of `vmap` with ragged arguments to what it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from batchax import _compat
from batchax.errors import ArgumentTypeError, BatchaxError, UnsupportedError
from batchax.execution.shards import Shards, check_shared
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import Described, FlatOutputs, check_unbatched, place
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.inner import stage_described
from batchax.kernel.lasting import evaluated
from batchax.kernel.named_axes import any_uses_axis
from batchax.memo import Memo
from batchax.rows.arguments import (
    SIZES_DIFFER,
    RowSize,
    all_known,
    capacity_of,
    check_meshes,
    find_sizes,
    row_avals,
    sizes_in_errors,
    with_room,
)
from batchax.rows.blocks import SizeClasses
from batchax.rows.buckets import Buckets
from batchax.rows.by_length import RunDense, run_by_length
from batchax.rows.call import Call
from batchax.rows.class_choice import choose_classes, find_classes
from batchax.rows.comparisons import question_of
from batchax.rows.host_calls import refuse_calls, refuse_order
from batchax.rows.in_buckets import by_bucket, check_buckets, run_in_buckets
from batchax.rows.index import pad_rows
from batchax.rows.layouts import Costs, choose_layouts
from batchax.rows.on_devices import run_on_devices
from batchax.rows.outputs import as_ragged, place_ragged
from batchax.rows.packed import Packed, PackedRows, Segments
from batchax.rows.padded import CannotPad, Operation, Row, run_padded
from batchax.rows.ragged import Ragged
from batchax.rows.regions import Region, find_regions, regions_of_classes, run_regions
from batchax.rows.size_classes import obstacle
from batchax.rows.sizes import Sizes, has_symbols
from batchax.rows.steps import RowProgram, flatten
from batchax.rows.user_code import line_of


@dataclass(frozen=True)
class RowOptions:
    """What `vmap` was asked for where rows are concerned.

    Attributes:
      layout: how rows are held while they are computed.
      in_chunks: whether there will be several chunks of that many rows.
      buckets: which rows run together, or how many groups of them there may be.
      shards: the devices that rows are dealt out to, if the user said so.
      of_bucket: whether there are other rows, in other buckets.
    """

    layout: Literal["auto", "packed", "padded", "grouped"]
    in_chunks: Callable[[Any], bool]
    buckets: int | Buckets | None = None
    shards: Shards | None = None
    of_bucket: bool = False


def check_row_options(layout: Any, buckets: Any, batch_size: Any) -> None:
    """Refuses, when `vmap` is called, options for rows that no call could use.

    Raises:
      ArgumentTypeError: one is of the wrong type, or they do not go together.
      AxisError: there are to be fewer than one bucket.
    """
    check_buckets(buckets)
    if layout not in ("auto", "packed", "padded", "grouped"):
        raise ArgumentTypeError(
            f'layout must be "auto", "packed", "padded" or "grouped", got {layout!r}.'
        )
    if layout == "packed" and batch_size is not None:
        raise ArgumentTypeError(
            'layout="packed" does not go with batch_size: chunks hold padded rows. Leave one of '
            "them out; buckets= helps where padding takes too much memory."
        )
    if layout == "grouped" and buckets is not None:
        raise ArgumentTypeError(
            'layout="grouped" runs rows of one length together, and buckets= rows of similar '
            "length. Give one of them."
        )


@_compat.standing_in()
def run_rows(
    axis: Axis,
    one_row: Described,
    mapped: list[Mapped],
    run_dense: RunDense,
    options: RowOptions,
) -> tuple[list[Any], FlatOutputs]:
    """The outputs of a function of one row for all rows.

    Args:
      axis: the axis being mapped, whose lanes are rows.
      one_row: the function, which returns arrays and what describes them.
      mapped: its arguments, some of which are `Ragged`.
      run_dense: what `vmap` does with a function of arrays of one size.
      options: how rows are to be run.
    """
    if not isinstance(axis.size, int):
        raise UnsupportedError(
            f"the number of rows is {axis.size}, a symbolic size, but where rows are must be "
            "known. Export the function for a known number of rows, whatever their lengths are."
        )
    check_meshes(mapped)
    recording.fact("rows", axis=axis)
    if options.buckets is not None and by_bucket(axis, mapped, options.buckets):
        each = replace(options, buckets=None, of_bucket=True)
        run_bucket = functools.partial(run_rows, run_dense=run_dense, options=each)
        return run_in_buckets(axis, one_row, mapped, options.buckets, run_bucket)
    by_length = functools.partial(run_by_length, axis, one_row, mapped, run_dense)
    if options.layout == "grouped":
        if options.shards is not None:
            raise UnsupportedError(
                'mesh was given, and layout="grouped": which rows have one length is known before '
                "they are dealt out to devices. Leave one of them out."
            )
        return by_length()
    may_go_by_length = all_known(mapped) and options.shards is None
    sizes_of, sizes = find_sizes(mapped)

    def stage(dims: Sequence[Any]) -> tuple[_compat.ClosedJaxpr, FlatOutputs]:
        avals = row_avals(axis, mapped, sizes_of, sizes, dims)
        with sizes_in_errors(mapped, sizes_of, sizes):
            return stage_described(axis, one_row, avals, [m.path for m in mapped])

    try:
        staged, outputs = stage([size.symbol for size in sizes])
    except Exception as error:
        # The function may need sizes as numbers, for an `if n > 5`: rows of one length have these.
        # If it is wrong, it fails again.
        if not may_go_by_length:
            told = _cannot_stage(error, sizes, lambda: _works_for_known(stage, sizes))
            raise told from _compat.without_hidden_frames(error)
        staged = outputs = None
    if staged is None or outputs is None:
        return by_length()
    if options.of_bucket:
        refuse_order(staged)
    described = list(map(place_ragged, outputs.described, [a.shape for a in staged.out_avals]))
    outputs = replace(outputs, described=described)
    call = Call(axis, staged, mapped, sizes_of, sizes, outputs)
    plain = jax.sharding.get_abstract_mesh().empty and not call.tells_of_mesh
    if not (call.traced or recording.is_on()) and (plain or options.shards is None):
        call = call.with_constants_passed()

    def staged_here(call: Call) -> Call:
        """The call where it is to run: on a device types tell of a mesh of all devices no more."""
        dims = [size.symbol for size in call.sizes]
        avals = row_avals(call.axis, call.mapped, call.sizes_of, call.sizes, dims)
        return replace(call, staged=stage_described(axis, one_row, avals)[0])

    # What is kept is made of this, and the function holds its arguments.
    there = (lambda call: call) if plain else staged_here

    try:
        if options.shards is not None:
            run_own = lambda call: _run_here(there(call), options, run_dense)
            return _run_on_devices(call, options, options.shards, run_own), outputs
        return _run_here(call, options, run_dense), outputs
    except _ASKED_FOR_NUMBERS as error:  # in a derivative rule, which is staged by now
        if not may_go_by_length:
            told = _cannot_stage(error, sizes, lambda: True)
            raise told from _compat.without_hidden_frames(error)
    except CannotPad as error:
        if not may_go_by_length:
            raise UnsupportedError(
                f"{error}\nRows of one length could run together, but the lengths are traced here: "
                "call it outside of jit, or close over the Ragged, so that they are known"
                + (", and leave mesh out." if options.shards else ".")
            ) from None
    return by_length()


def _cannot_stage(error: Exception, sizes: Sequence[RowSize], works_for_known: Any) -> Exception:
    """What to raise where a function fails for symbolic sizes, and lengths are not known.

    Args:
      error: how it failed.
      sizes: those of rows.
      works_for_known: whether it can be staged for rows of some known length.
    """
    asked = isinstance(error, _ASKED_FOR_NUMBERS)
    if isinstance(error, BatchaxError) and not asked:
        return error
    names = ", ".join(size.name for size in sizes)
    if asked or works_for_known():
        line = line_of(error)
        if str(error).startswith(SIZES_DIFFER):  # and they are alike for rows of known lengths
            return UnsupportedError(f"{line + ': ' if line else ''}{error}")
        return UnsupportedError(
            f"{line + ': ' if line else ''}the function needs the length of a row as a number, and "
            f"here rows have a symbolic size ({names}), because their lengths are traced: "
            f"{question_of(error)}."
            "\nCall it outside of jit, or close over the Ragged, so that lengths are known: then "
            "rows of one length run together, and with buckets= those of which it holds alike. To "
            "compute with a size use jnp.asarray(x.shape[0])."
        )
    error.add_note(
        f"Rows have a symbolic size ({names}) in the function, as their lengths are traced."
        + (
            " Arguments whose rows have the same lengths share a size if in_axes says so: "
            'batchax.ragged("n") for each of them.'
            if len(sizes) > 1
            else ""
        )
    )
    return error


_ASKED_FOR_NUMBERS = jax.errors.InconclusiveDimensionOperation


def _works_for_known(stage: Callable[[Sequence[int]], Any], sizes: Sequence[RowSize]) -> bool:
    """Whether rows of some lengths could be staged, where rows of any length cannot."""
    most = max(size.bound for size in sizes)
    for length in (most, most - 1, 4, 3, 2, 1):
        # Sizes of different names may differ, so they do here. None is 1 if there are several: JAX
        # repeats a single element along any number of others.
        lengths = [min(length - i, size.bound) for i, size in enumerate(sizes)]
        if min(lengths) < min(len(lengths), 2):
            continue
        try:
            stage(lengths)
        except Exception:
            continue
        return True
    return False


def _run_here(call: Call, options: RowOptions, run_dense: RunDense) -> list[Any]:
    """The outputs of a call, all of whose rows are in one place."""
    in_chunks = options.in_chunks(call.axis.size)
    most = _most_classes(call, options, in_chunks)
    if most is None and (in_chunks or _compat.calls_back(call.staged.effects)):
        # Regions would not keep the order in which programs call the host.
        return _run_padded(call, run_dense)
    return _run_regions(call, options.layout, most)


def _run_on_devices(
    call: Call, options: RowOptions, shards: Shards, run_rows: Callable[[Call], list[Any]]
) -> list[Any]:
    """The outputs of a call, whose rows are dealt out to devices, each of which does `run_rows`."""
    if any_uses_axis(call.axis, call.staged):
        raise UnsupportedError(
            "mesh was given, and the function has a collective over axis_name "
            f"{call.axis.name!r}, whose lanes are rows of different lengths: a device knows only "
            "its own. Reduce over the batch with out_axes=batchax.Reduce(...), or leave mesh out."
        )
    if not call.axis.size:
        return run_rows(call)
    check_shared([], call.staged.consts)
    if shards.count > 1:
        refuse_calls(call.staged)

    kept = call.without_values()

    def run(lengths: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        return run_on_devices(kept.with_values(lengths, values), shards, run_rows)

    given = [size.batch.lengths for size in call.sizes], call.values
    if call.traced or recording.is_on():
        return run(*given)
    # Lengths are arguments: one program serves all batches of such arrays.
    chunks = options.in_chunks(call.axis.size)
    specs = tuple(output.spec for output in call.described)
    key = call.key(lengths=False), shards, options.layout, options.buckets, chunks, specs
    return _on_devices.get(key, lambda: jax.jit(run))(*given)


_on_devices = Memo("calls outside of jit, of rows on devices", most=64)


def _run_padded(call: Call, run_dense: RunDense) -> list[Any]:
    """The whole program on padded rows, batched as `vmap` does for arrays of one size."""
    if recording.is_on():
        steps = flatten(call.staged).steps
        recording.fact("region", layout="padded", steps=steps, sizes=[s.noted for s in call.sizes])
    recording.found_program(call.axis, call.staged, call.mapped)
    staged, bounds = call.staged, call.bounds
    shapes = [v.aval.shape for v in staged.jaxpr.invars]

    def padded_row(*values: Any) -> tuple[list[Any], FlatOutputs]:
        lengths = dict(zip(bounds, values, strict=False))
        arguments = [
            Row(x, shape, None if size is None else 0)
            for x, shape, size in zip(values[len(bounds) :], shapes, call.sizes_of, strict=True)
        ]
        rows = run_padded(Sizes(bounds, lengths), staged.jaxpr, staged.consts, arguments)
        return [row.value for row in rows], call.outputs

    arguments = [
        Mapped(f"the lengths {size.name}", jnp.asarray(size.index.lengths), 0)
        for size in call.sizes
    ]
    for m, size in zip(call.mapped, call.sizes_of, strict=True):
        if size is not None:
            padded = pad_rows(m.value.data, size.index_in(m.value), m.value.axis)
            m = Mapped(m.path, padded, 0)
        arguments.append(m)
    outs, _ = run_dense(call.axis, padded_row, arguments)
    return [
        as_ragged(x, shape, call.sizes) if has_symbols(shape) else x
        for x, shape in zip(outs, call.shapes, strict=True)
    ]


def _most_classes(call: Call, options: RowOptions, in_chunks: bool) -> int | Literal["auto"] | None:
    """How many size classes rows may be in; None where they are in none.

    Raises:
      UnsupportedError: the program cannot run in size classes, but was asked to.
    """
    room = [capacity_of(size.batch) for size in call.sizes]
    if not (call.axis.size and max(call.bounds.values()) and all(room)):
        return None  # there is nothing to put anywhere
    why = obstacle(call.axis, call.staged, in_chunks)
    if options.buckets is None:
        # Outside of `jit` a loop over blocks would be compiled.
        return "auto" if options.layout == "auto" and call.traced and why is None else None
    if why is not None:
        raise UnsupportedError(
            "buckets was given, and the lengths of rows are traced here, so that they would be "
            f"put into buckets while they run; but {why}. Leave buckets out, or call vmap where "
            "lengths are known, outside of jit."
        )
    assert not isinstance(options.buckets, Buckets)  # those need known lengths, and run one by one
    return int(options.buckets)


def _find_regions(
    call: Call, layout: str, most: int | Literal["auto"] | None
) -> tuple[RowProgram, list[Region], SizeClasses | None]:
    """The program in regions of one layout each, and the classes that padded rows are in."""
    program = flatten(call.staged)
    batched = [m.axis is not None for m in call.mapped]
    room = {size.name: capacity_of(size.batch) for size in call.sizes}
    costs = Costs(Sizes(room, {}), Sizes(call.bounds, {}), len(call.sizes[0].batch))
    only = layout if layout in ("packed", "padded") else None
    layouts = choose_layouts(program, batched, costs, only)
    if most == "auto":
        classes = choose_classes(program, layouts, batched, costs)
    else:
        classes = None if most is None else find_classes(program, batched, costs, most)
    if classes is None:
        return program, find_regions(program, layouts), None
    return program, regions_of_classes(program, layouts, batched), classes


_staged = Memo("calls outside of jit, of rows, batched", most=64)


def _run_regions(call: Call, layout: str, most: int | Literal["auto"] | None) -> list[Any]:
    """The program region by region, each of which holds rows in one layout."""
    recording.found_program(call.axis, call.staged, call.mapped)
    segments = {size.name: Segments(size.index, capacity_of(size.batch)) for size in call.sizes}

    def run(*values: Any) -> tuple[list[Any], list[AxisPosition]]:
        program, regions, classes = _find_regions(call, layout, most)
        for region in regions if recording.is_on() else ():
            sizes = [s.noted for s in call.sizes]
            name = "in size classes" if classes and region.layout == "padded" else region.layout
            recording.fact("region", layout=name, steps=region.steps, sizes=sizes)
        rows = PackedRows(call.axis, dict(segments))
        arguments = []
        for x, m, size in zip(values, call.mapped, call.sizes_of, strict=True):
            if size is None:
                shape = list(jnp.shape(x))
                if m.axis is not None:
                    del shape[m.axis]
                arguments.append(Packed(x, tuple(shape), m.axis))
                continue
            x = with_room(x, m.value.axis, capacity_of(size.batch))
            shape = list(jnp.shape(x))
            shape[m.value.axis] = size.symbol
            x = Operation(None, rows.sizes).cut(x, shape)
            arguments.append(Packed(x, tuple(shape)))
        with recording.run(call.staged.jaxpr):
            outs = run_regions(rows, call.bounds, program, regions, arguments, classes)
        return [
            Operation(None, rows.sizes).cut(out.value, out.shape)
            if out.axis is None and has_symbols(out.shape)
            else out.value
            for out in outs
        ], [out.axis for out in outs]

    check = functools.partial(check_unbatched, call.axis, call.described)
    kept = _staged, lambda: (call.key(), layout, most)
    outs, axes = evaluated(run, call.values, call.traced, check, kept)
    results = []
    for x, shape, axis, output in zip(outs, call.shapes, axes, call.described, strict=True):
        if not has_symbols(shape):
            results.append(place(call.axis, output, jnp.asarray(x), axis))
        elif axis is not None:
            results.append(as_ragged(x, shape, call.sizes))
        else:
            size = next(s for s in call.sizes if s.symbol in shape)
            at = shape.index(size.symbol)
            results.append(Ragged(x, size.batch.lengths, size.bound, axis=at))
    return results
