"""`vmap`: a function of one example becomes a function of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast

import jax

from batchax import _compat
from batchax.divergence.compact import Compact
from batchax.divergence.runner import check_divergence, is_explicit, lanes_at_a_time, runner_of
from batchax.errors import ArgumentTypeError
from batchax.execution.call import (
    Call,
    Pass,
    apply_passes,
    check_not_shared,
    execute,
    mapped_as_values,
)
from batchax.execution.chunked import Chunking, find_chunking
from batchax.execution.devices.placing import OnMesh, find_mesh
from batchax.execution.devices.processes import call_of_all
from batchax.execution.devices.shards import Shards
from batchax.execution.eager import error_of_a_lane, is_out_of_memory
from batchax.execution.on_devices import chunk_lanes, infer_mesh_from_arguments, shard_lanes
from batchax.frontend.advice import advise
from batchax.frontend.arguments import (
    FlatArguments,
    LaneIndices,
    MappedRows,
    check_axis_name,
    check_axis_size,
    find_axis_size,
    find_mesh_axis,
    flatten_arguments,
    mesh_axis_names,
    with_lane_indices,
)
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import LANES, check_in_axes, check_same
from batchax.frontend.options import (
    check_callable,
    check_flags,
    check_small_matrices,
    translate_argument_names,
    wraps,
)
from batchax.frontend.outputs import (
    FlatOutputs,
    check_out_axes,
    flatten_outputs,
)
from batchax.frontend.rows import FINDING, IN_SCOPE, RowOptions, SizesNeeded, find_row_options
from batchax.jaxprs.types import AxesTree, Tree, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.kernel.named_axes import are_on_a_mesh

if TYPE_CHECKING:
    from batchax.rows.buckets import Buckets

P = ParamSpec("P")
Out = TypeVar("Out")


class MoreOptions(TypedDict, total=False):
    """The options of `vmap` but `in_axes` and `out_axes`, for what takes them by name."""

    axis_name: Hashable | None
    axis_size: int | None
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None
    sum_match: bool
    batch_size: int | Literal["auto"] | None
    memory_limit: int | str | None
    residuals: Literal["recompute", "keep"]
    divergence: Literal["auto", "predicate", "compact", "serial"] | Compact
    small_matrices: Literal["auto", "library", "vectorized"]
    layout: Literal["auto", "packed", "padded", "grouped"]
    buckets: int | Buckets | None
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None
    progress: bool | Callable[[int, int], Any]


class Options(MoreOptions, total=False):
    """The options of `vmap` but `in_axes`, for what takes them by name."""

    out_axes: AxesTree


@_compat.api_boundary
@translate_argument_names
def vmap(
    fun: Callable[P, Out],
    in_axes: AxesTree = 0,
    out_axes: AxesTree = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None = None,
    sum_match: bool = False,
    *,
    batch_size: int | Literal["auto"] | None = None,
    memory_limit: int | str | None = None,
    residuals: Literal["recompute", "keep"] = "recompute",
    divergence: Literal["auto", "predicate", "compact", "serial"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    layout: Literal["auto", "packed", "padded", "grouped"] = "auto",
    buckets: int | Buckets | None = None,
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None = None,
    progress: bool | Callable[[int, int], Any] = False,
) -> Batched[P, Out, Any]:
    """Maps `fun`, a function of one example, over a batch.

    Example:
      >>> def predict(w, x):  # one example
      ...     return jnp.tanh(w @ x)
      >>> w, xs = jnp.ones((3, 5)), jnp.ones((8, 5))
      >>> bx.vmap(predict, in_axes=(None, 0))(w, xs).shape
      (8, 3)
      >>> bx.vmap(predict, (None, 0), bx.Reduce("mean"), batch_size=2)(w, xs).shape
      (3,)

    A drop-in for ``jax.vmap``: ``vmap(fun)(xs)[i] == fun(xs[i])`` for each lane (example) `i`.

    Args:
      fun: The function of one example. Arguments and results are pytrees of arrays. An argument
        with axis None may be any Python object.
      in_axes: The batch axis of each argument. Keyword arguments have the entry of their parameter,
        or 0. One of

        - an int for all arguments; negative ints count from the end. An int for a pytree is for its
          arrays; other objects in it, such as functions, reach `fun` unchanged.
        - None: the argument is shared by all lanes.
        - a tuple or list with an entry for each positional argument, each of which may be a prefix
          pytree of the argument.
        - a dict by parameter name; other parameters have 0.
        - a callable ``leaf -> int | None``.
        - ``batchax.ragged("n")``: the rows of a `Ragged` (as 0), with a name for their size.
        - ``batchax.tiles(size=64)``: blocks of an axis as lanes.
        - ``batchax.split_key``: one random key, from which each lane gets its own.
        - ``batchax.size("n", max_size=16)``: a size for each lane.
      out_axes: The batch axis of each output. A prefix pytree of the output, or a dict for some of
        its keys or fields, of

        - an int.
        - None: the output does not depend on the batch.
        - ``batchax.AUTO``: 0 if the output depends on the batch, else None.
        - ``batchax.Reduce("mean")``: the output is reduced over the batch.
        - ``batchax.tiles()``: blocks are joined along an axis.
        - ``batchax.ragged("n")``: the output is a `Ragged`.
        - a callable that returns one of these for a leaf.
      axis_name: A name of the axis for collectives such as ``jax.lax.psum``.
      axis_size: The number of lanes. Needed only if no argument is mapped.
      spmd_axis_name: The name or names of the mesh axis that the batch axis is sharded over. It is
        added to the sharding annotations inside `fun`.
      sum_match: Whether outputs with ``out_axes=None`` are summed over the batch if they depend on
        it. If False (default), such outputs raise.
      batch_size: The number of lanes that run at a time. The last chunk may be smaller.

        - None (default): all lanes.
        - an int: memory holds the intermediate values of one chunk, in reverse mode, too.
        - "auto": the size that the cost model predicts to be fastest, of those that fit
          `memory_limit` by XLA's memory analysis.
      memory_limit: Bytes, or a string such as "2GiB", for "auto". Default: the free memory of the
        device. `batch_size_choices` lists the choices.
      residuals: What reverse mode does in chunks.

        - "recompute" (default): recomputes a chunk when the backward pass reaches it.
        - "keep": stores the residuals of all chunks, which takes less time and more memory.
      divergence: What lanes do that have finished a loop or do not take a branch.

        - "auto" (default): lanes diverge where the cost model predicts no slowdown, in loops of
          expensive steps and in expensive branches, on CPUs and GPUs. Elsewhere they are masked.
        - "compact": finished lanes leave a loop, waiting lanes refill the freed slots, and a branch
          runs for the lanes that take it. `Compact` has options.
        - "predicate": all lanes take part, masked, until all are done, as in ``jax.vmap``.
        - "serial": lanes run sequentially, as in ``jax.lax.map``. With `mesh`, each device runs its
          own.
      small_matrices: How small matrices, one for each lane, are decomposed and multiplied.

        - "auto" (default): as "vectorized", except where the function reads results that are not
          unique, such as eigenvectors.
        - "library": by a call of a linear algebra library for each matrix.
        - "vectorized": on CPUs, an element of all lanes at a time, where that is faster.
      layout: How rows of `Ragged` arguments are stored while they are computed.

        - "auto" (default): packed or padded, for each part of the function the one with the lower
          estimated cost; grouped where the function cannot be computed exactly otherwise.
        - "packed": all elements follow one another, wherever possible.
        - "padded": arrays of one size, in which padding is masked.
        - "grouped": rows of one length run together. Lengths must be known.
      buckets: The number of groups of rows of similar length, or the groups of
        ``batchax.bucket(x)``. Each group is padded to its longest row. With traced lengths, an int:
        each row is padded to `max_length`, a half, a quarter, and so on, in at most that many
        sizes.
      mesh: The devices that lanes are sharded over. Each runs its lanes, `batch_size` at a time.

        - None (default): lanes stay where they are. If types of arguments carry a mesh that lanes
          are sharded over, loops, Fourier transforms, and similar operations run on each device's
          lanes.
        - "all": every device.
        - a ``jax.sharding.Mesh``, or a tuple of one and the name or names of its axes.

        If lanes do not divide evenly, the last is repeated, and counts once. With several
        processes, all make the call with the whole batch, or with their own rows as
        ``batchax.local(x)``.
      progress: Whether to show the number of finished chunks, the rate, and the time left; or a
        function of the finished and the total number of chunks. It needs `batch_size`, and works
        inside of `jit`.

    Returns:
      A function of the same parameters as `fun`, over batches. Outputs whose size depends on the
      length of a row are `Ragged`.

    Raises:
      AxisError: (a ValueError) Sizes disagree, an axis is out of range, a specification does not
        fit its argument or output, a parameter name is unknown, no argument is mapped and
        `axis_size` is missing, or an output with axis None depends on the batch.
      ArgumentTypeError: (a TypeError) `fun` is not callable, a mapped argument or an output is not
        an array, or an option has the wrong type or no effect.
      MemoryLimitError: (a ValueError) `memory_limit` is too small for one lane.
      OptionError: (a ValueError) An option is an unknown word or a number out of range.
      ProcessesError: (a RuntimeError) With `mesh`, outside of `jit`, the processes do not all make
        the same call.
      UnsupportedError: (a NotImplementedError) The function cannot be batched, or not in chunks.

    Warns:
      SmallerChunksWarning: Outside of `jit`, memory ran out with `batch_size` lanes, and the call
        continues with smaller chunks.
    """
    check_callable("vmap", "a function of one example", fun)
    options = dict(
        in_axes=in_axes, out_axes=out_axes, axis_name=axis_name, axis_size=axis_size,
        sum_match=sum_match, batch_size=batch_size, residuals=residuals, divergence=divergence,
        small_matrices=small_matrices, layout=layout, buckets=buckets, progress=progress,
        memory_limit=memory_limit, spmd_axis_name=spmd_axis_name, mesh=mesh,
    )  # fmt: skip
    # An option that is not given is not checked, and has no stage.
    given = {name: x for name, x in options.items() if x is not _USUAL[name]}
    if "in_axes" in given:
        check_in_axes(fun, in_axes)
    if "out_axes" in given:
        check_out_axes(out_axes)
    stages = _stages(fun, {**_USUAL, **given}) if given.keys() - _AXES else _PLAIN

    @wraps(fun)
    @_compat.api_boundary
    def batched(*args: Tree, **kwargs: Tree) -> Tree:
        flat = flatten_arguments(
            fun, in_axes, args, kwargs, on_mesh=stages.is_apart, spread=stages.mesh is not None
        )
        try:
            if stages.mesh is None:
                return batch(flat)
            arguments, devices = {"args": args, "kwargs": kwargs}, stages.mesh.devices[0]
            alike = {name: x for name, x in options.items() if name not in _OF_PROCESSES}
            with call_of_all(devices, fun, arguments, flat.mapped, alike) as (mapped, own):
                return batch(replace(flat, mapped=mapped), own)
        except jax.errors.JaxRuntimeError as failed:
            if is_out_of_memory(failed):
                raise
            values, axes = [m.value for m in flat.mapped], [m.axis for m in flat.mapped]
            error = error_of_a_lane(lambda xs: _called(fun, *flat.rebuild(xs)), values, axes)
            if error is None:
                raise
            raise error from None

    def batch(flat: FlatArguments, own: Sequence[range] = ()) -> Tree:
        mapped = flat.mapped
        size = find_axis_size(mapped, axis_size)
        values = [m.value for m in mapped]
        shards = None if stages.mesh is None else stages.mesh.shards(size, values, own)
        typed = are_on_a_mesh(values)
        mesh_axis, mesh = None, None
        if typed and not shards:
            mesh_axis, mesh = find_mesh_axis(mapped, stages.spmd_axis_name)
        spmd = None if mesh_axis is not None else stages.spmd_axis_name
        divergent = runner_of(divergence, values, spread=shards is not None)
        columns = bool({m.axis for m in mapped} - {None, 0})
        axis = Axis(
            size, axis_name, spmd, mesh_axis, divergent, None, small_matrices, False, columns, mesh
        )
        kinds = set(map(type, mapped))
        if LaneIndices in kinds:
            mapped = with_lane_indices(mapped, axis)

        def one_example(*examples: Value, again: bool = False) -> tuple[list[Any], FlatOutputs]:
            example_args, example_kwargs = flat.rebuild(examples)
            f = _compat.resolve_patched(fun) if _compat.traces_rows.get() else fun
            out = f(*example_args, **example_kwargs)
            arrays, outputs = flatten_outputs(out, out_axes, size, sum_match=sum_match)
            if outputs.objects and not again:
                check_same(outputs.objects, lambda: one_example(*examples, again=True)[1].objects)
            return arrays, outputs

        def finding_sizes(*examples: Value) -> tuple[list[Any], FlatOutputs]:
            return _finding_sizes(one_example, examples)

        def apart(call: Call) -> Call:
            runner = runner_of(divergence, call.values, spread=True)
            return replace(call, axis=replace(call.axis, divergence=runner))

        _compat.named_after(finding_sizes, fun)
        passes = []
        if MappedRows in kinds:
            passes.append(stages.in_rows(shards))
        elif stages.rows is not None:
            stages.rows.check_used()
        if shards is not None:
            passes.append(shard_lanes(shards))
        if stages.is_apart:
            passes.append(chunk_lanes(stages.chunking))
        elif typed:
            passes.append(infer_mesh_from_arguments(apart))
        call = Call(axis, finding_sizes, mapped)
        write = None
        chunking = stages.chunking
        if shards is not None or (chunking is not None and chunking.applies_to(size)):
            check_not_shared(flat.shared)
            call, write = mapped_as_values(call)
        try:
            results = execute(apply_passes(passes, call))
            outs, outputs = results if write is None else write(results)
        except Exception as error:
            advise(error, fun, mapped, flat.shared, LANES.each)
            raise
        if recording.is_on():
            types = [jax.tree.map(jax.typeof, x) for x in outs]
            recording.fact("outputs", described=outputs.described, types=types)
        return outputs.rebuild(outs)

    vars(batched)[_MADE_OF] = fun, options
    return cast(Any, batched)


_AS_IT_IS = nullcontext()
_USUAL = {name: p.default for name, p in inspect.signature(vmap).parameters.items()}
_AXES = {"in_axes", "out_axes"}
_OF_PROCESSES = {"memory_limit", "spmd_axis_name", "mesh"}  # may differ between processes


# Not inside of `vmap`: what that returns can be pickled, which a context variable cannot.
def _finding_sizes(
    one_example: Callable[..., tuple[list[Any], FlatOutputs]], examples: Sequence[Value]
) -> tuple[list[Any], FlatOutputs]:
    around, needed = FINDING.get(), SizesNeeded()
    has_symbols = around is not None and not isinstance(around, SizesNeeded)
    token = FINDING.set(needed)
    try:
        with IN_SCOPE(None) if has_symbols else _AS_IT_IS:
            returned = one_example(*examples)
        if not needed.is_noted:
            return returned
    except Exception:
        if not needed.is_noted:
            raise
    finally:
        FINDING.reset(token)
    # Imported here, since importing batchax would be slower with it.
    from batchax.rows.dynamic_sizes import call_with_sizes

    return call_with_sizes(one_example, examples)


@dataclass(frozen=True)
class _Stages:
    """Holds what a call passes through because of options; the defaults are a call without any."""

    rows: RowOptions | None = None
    chunking: Chunking | None = None
    mesh: OnMesh | None = None
    spmd_axis_name: tuple[Hashable, ...] | None = None
    is_apart: bool = False  # whether lanes run in chunks, on devices, or compacted

    def in_rows(self, shards: Shards | None) -> Pass:
        # Imported here, since importing batchax would be slower with it.
        from batchax.rows.run import in_rows

        return in_rows(self.rows or RowOptions(), shards, self.chunking)


_PLAIN = _Stages()


def _stages(fun: Callable[..., Any], options: dict[str, Any]) -> _Stages:
    """Checks options of `vmap` other than axes, and returns their stages."""
    check_axis_name(options["axis_name"])
    check_axis_size(options["axis_size"])
    check_flags(sum_match=options["sum_match"])
    spmd_axis_name = mesh_axis_names(options["spmd_axis_name"])
    check_divergence(options["divergence"])
    batch_size = lanes_at_a_time(options["divergence"], options["batch_size"])
    rows = find_row_options(options["layout"], options["buckets"], batch_size)
    check_small_matrices(options["small_matrices"])
    how = (options[name] for name in ("memory_limit", "residuals", "progress"))
    chunking = find_chunking(fun, batch_size, *how)
    mesh = find_mesh(options["mesh"])
    if mesh is not None and spmd_axis_name is not None:
        raise ArgumentTypeError(
            "mesh and spmd_axis_name both set the devices of lanes. Remove spmd_axis_name."
        )
    is_apart = chunking is not None or is_explicit(options["divergence"]) or mesh is not None
    return _Stages(rows, chunking, mesh, spmd_axis_name, is_apart)


_MADE_OF = "_batchax_made_of"


@dataclass(frozen=True)
class VmapInside:
    """A `vmap` that a function is made of, as `find_vmap` sees it.

    Attributes:
      fun: The function of one example; `whole` if that calls a `vmap`.
      options: What `vmap` was given: `in_axes`, `out_axes` and options that are not the default.
      whole: The function that was looked at, without a `jax.jit` around all of it, which would
        remember a program.
      jitted: Whether there was one.
      alone: Whether `whole` is what `vmap` returned. If not, it is its gradient, say.
    """

    fun: Callable[..., Any]
    options: dict[str, Any]
    whole: Callable[..., Any]
    jitted: bool
    alone: bool


def find_vmap(fun: Callable[..., Any], in_axes: AxesTree = 0) -> VmapInside | None:
    """The `vmap` in what `vmap` returned, or in what `jax.jit`, `jax.grad` and the like made of it.

    With `in_axes` None, which says that `fun` takes the whole batch, one that it calls, too. None
    if there is none to be seen from outside.
    """
    whole = inner = fun
    while (made := _made_by_vmap(inner)) is None:
        within = inner.func if isinstance(inner, partial) else getattr(inner, "__wrapped__", None)
        if within is None:
            if in_axes is not None:
                return None
            jitted = hasattr(fun, "lower")
            whole = getattr(fun, "__wrapped__", fun) if jitted else fun
            return VmapInside(whole, {"in_axes": None, "out_axes": 0}, whole, jitted, False)
        if whole is inner and hasattr(inner, "lower"):
            whole = within
        inner = within
    example, options = made
    given = {k: v for k, v in options.items() if k in _AXES or v is not _USUAL[k]}
    return VmapInside(example, given, whole, whole is not fun, _made_by_vmap(whole) is not None)


def _made_by_vmap(batched: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function of one example, and the options, of what `vmap` returned; else None."""
    made = getattr(batched, "__dict__", {}).get(_MADE_OF)
    # What wraps a function, as `jax.jit` does, gets its attributes, but another `__wrapped__`.
    return made if made is not None and made[0] is batched.__wrapped__ else None


def _called(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tree:
    return fun(*args, **kwargs)
