"""`vmap`: a function of one example becomes a function of a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast

import jax

from batchax import _compat
from batchax.divergence.compact import Compact
from batchax.divergence.option import check_divergence, is_asked, parted, parting_ways
from batchax.errors import ArgumentTypeError
from batchax.execution.call import Call, apply_passes, check_not_shared, execute, mapped_as_values
from batchax.execution.chunked import find_chunking
from batchax.execution.devices.placing import find_mesh
from batchax.execution.devices.processes import call_of_all
from batchax.execution.eager import error_of_a_lane, is_out_of_memory
from batchax.execution.on_devices import chunk_lanes, infer_mesh_from_arguments, shard_lanes
from batchax.frontend.advice import named_in_errors
from batchax.frontend.arguments import (
    FlatArguments,
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
)
from batchax.frontend.outputs import (
    FlatOutputs,
    check_out_axes,
    flatten_outputs,
)
from batchax.frontend.rows import find_row_options, finding_sizes, pass_of_rows
from batchax.kernel import recording
from batchax.kernel.axis import Axis

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
    divergence: Literal["auto", "predicate", "compact"] | Compact
    small_matrices: Literal["auto", "library", "vectorized"]
    layout: Literal["auto", "packed", "padded", "grouped"]
    buckets: int | Buckets | None
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None
    progress: bool | Callable[[int, int], Any]


class Options(MoreOptions, total=False):
    """The options of `vmap` but `in_axes`, for what takes them by name."""

    out_axes: Any


@_compat.api_boundary
@translate_argument_names
def vmap(
    fun: Callable[P, Out],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None = None,
    sum_match: bool = False,
    *,
    batch_size: int | Literal["auto"] | None = None,
    memory_limit: int | str | None = None,
    residuals: Literal["recompute", "keep"] = "recompute",
    divergence: Literal["auto", "predicate", "compact"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    layout: Literal["auto", "packed", "padded", "grouped"] = "auto",
    buckets: int | Buckets | None = None,
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None = None,
    progress: bool | Callable[[int, int], Any] = False,
) -> Batched[P, Out, Any]:
    """Batches `fun`, a function of one example, over an axis of its arguments.

    A drop-in for ``jax.vmap``: ``vmap(fun)(xs)[i] == fun(xs[i])`` for each lane
    `i`, computed for all lanes at once.

    Args:
      fun: the per-example function. Its arguments and results are pytrees of
        arrays; an argument with axis None may be any Python object.
      in_axes: where the batch axis of each argument is. An int for all of them;
        None for "the same for every lane"; a tuple or list with an entry for
        each positional argument, which may be a tree that is a prefix of the
        argument; a dict by parameter name, which also reaches keyword arguments
        (those not named: 0); or, in place of an int, a callable
        ``leaf -> int | None`` that is asked for each leaf below. Negative axes
        count from the end of the batched array. An int for a whole tree is for its
        arrays: objects that are none, such as functions, reach `fun` as they are. An
        argument given by keyword has the entry of its parameter in a tuple, and 0 if there is
        none. A `Ragged` is mapped over
        its rows by 0, or by ``batchax.ragged("n")``, which names the size of a row. Beside a
        position there may be ``batchax.tiles(size=64)``, blocks of an axis as lanes;
        ``batchax.split_key``, one random key, of which each lane gets one of its own; and
        ``batchax.size("n", max_size=16)``, a size for each lane.
      out_axes: where the batch axis of each output goes: an int, None for an
        output that does not depend on the batch, ``batchax.AUTO``,
        ``batchax.Reduce("mean")``, ``batchax.tiles()``, ``batchax.ragged("n")``, a
        callable that returns one of those for each leaf, or a tree of those that is a
        prefix of the output. A dict may name some of the keys of a dict, or of the fields
        of a NamedTuple or dataclass; the others have 0. An object in a tree that is no
        array comes out as it is, if it is the same each time that `fun` is traced.
      axis_name: a name for the axis, for collectives such as ``jax.lax.psum``.
      axis_size: number of lanes; needed only when no argument is mapped.
      spmd_axis_name: name, or names, of the mesh axis that the batch axis is
        sharded over: it is added to the sharding annotations inside `fun`.
      sum_match: whether outputs that depend on the batch are summed over it where `out_axes` says
        None, and others left alone; if not, the former are an error. For one output
        ``batchax.Reduce("sum", unmapped="keep")`` says the same.
      batch_size: how many lanes run at a time. None: all. An int: at most so many,
        in a loop that needs memory for the intermediate values of one chunk, in
        reverse mode too. "auto": of those that fit `memory_limit`, by the compiler's account, as
        many as the cost model predicts to be fastest, for the program as it is used: forward or
        as a derivative.
      memory_limit: bytes, or a string such as "2GiB", for "auto"; if not given, what
        the device has free. `batch_size_choices` says what was chosen and why.
      residuals: what reverse mode does in chunks. "recompute" computes each chunk
        again when its cotangents are known; "keep" stores what all chunks computed, which
        can take less time, and takes at least as much memory as without chunks.
      divergence: what lanes do that are done with a loop, or do not take a branch. "predicate":
        they take part until all are done, masked, as in ``jax.vmap``. "compact": lanes that are
        done leave a loop, others take their places, and a branch runs for the lanes that take
        it. `Compact` sets how. "auto": so it is where it surely pays, on CPUs: in loops of
        expensive steps, and expensive branches. All else is masked.
      small_matrices: how small matrices are decomposed and multiplied, of which each lane has its
        own. "library": by a call of a library of linear algebra for each. "vectorized": on
        CPUs, an element of all lanes at a time, for sizes and numbers of lanes for which that
        takes less time. "auto": as "vectorized", except where the function reads results that
        are not unique, such as eigenvectors. Those are the library's at any batch size.
      layout: how rows of `Ragged` arguments are held while they are computed. "packed": one
        after another, wherever each element of a row is computed by itself, or the row is
        reduced. "padded": as arrays of one size, in which padding is masked. "grouped": rows of
        one length together, for which lengths must be known. "auto": packed and padded, for
        each part of the function what costs less; grouped for a function that cannot be
        computed exactly otherwise; in a program, padded to several sizes where that costs less:
        in groups of known lengths, in size buckets, as `buckets` says, of traced ones.
      buckets: rows of `Ragged` arguments run in groups of similar length, each padded to its
        longest only: at most so many groups, or those of ``batchax.bucket(x)``. Where lengths are
        traced, an int: each row is padded to the least that it fits of `max_length`, half of it,
        a quarter and so on, in at most so many sizes.
      mesh: the devices to spread lanes over, each of which runs its lanes, `batch_size` of them at
        a time. "all": every device. A ``jax.sharding.Mesh``: all axes of it; a tuple of one and the
        name of an axis, or of names: those, and what is sharded over others stays as it is. Types
        of results tell of it where ``jax.set_mesh`` has set it, or types of arguments do. Where
        lanes do not come out even the last is repeated, and counts once. On several processes,
        all of which make the call, arrays of NumPy are the whole batch; ``batchax.local(x)`` is a
        process's own rows. None: lanes stay where they are. Where arguments tell of a mesh that
        lanes are spread over, each device runs its own then, too, if that spares exchanges: in
        loops, Fourier transforms and the like.
      progress: whether to show how many chunks are done, at what rate, and the time left, in a
        terminal or notebook; or a function that is called with the chunks done and those there
        are, from a thread of JAX. It goes with `batch_size`, and is for inside of `jit`, too.

    Returns:
      A function of the same parameters as `fun`, over batches. Outputs whose size depends on the
      length of a row are `Ragged`.

    Raises:
      AxisError: (a ValueError) sizes that disagree, an axis out of range, a
        specification that does not fit its argument or output, an unknown
        parameter name, nothing mapped and no `axis_size`, or an output that
        depends on the batch where `out_axes` says None.
      ArgumentTypeError: (a TypeError) `fun` is not callable, an argument to be
        mapped or an output is not an array, or an option has the wrong type, or no effect.
      MemoryLimitError: (a ValueError) `memory_limit` is too little for one lane.
      ProcessesError: (a RuntimeError) with `mesh`, outside of `jit`, not all processes make the
        call, or not the same.
      UnsupportedError: (a NotImplementedError) the function cannot be batched, or
        not in chunks: the message says what of it.

    Warns:
      SmallerChunksWarning: memory ran out, outside of `jit`, with chunks of `batch_size`
        lanes, and the call continues with fewer.

    Example:
      >>> def predict(w, x):  # of one example
      ...     return jnp.tanh(w @ x)
      >>> w, xs = jnp.ones((3, 5)), jnp.ones((8, 5))
      >>> bx.vmap(predict, in_axes=(None, 0))(w, xs).shape
      (8, 3)
      >>> bx.vmap(predict, (None, 0), bx.Reduce("mean"), batch_size=2)(w, xs).shape
      (3,)
    """
    check_callable("vmap", "a function of one example", fun)
    check_in_axes(fun, in_axes)
    check_out_axes(out_axes)
    check_axis_name(axis_name)
    check_axis_size(axis_size)
    check_flags(sum_match=sum_match)
    spmd_axis_name = mesh_axis_names(spmd_axis_name)
    import batchax.rows  # noqa: F401  # runs rows, and costs a fifth of importing this package

    rows = find_row_options(layout, buckets, batch_size)
    check_divergence(divergence)
    check_small_matrices(small_matrices)
    chunking = find_chunking(fun, batch_size, memory_limit, residuals, progress)
    some_at_a_time = chunking is not None or is_asked(divergence)
    on_mesh = find_mesh(mesh)
    spread = on_mesh is not None
    if on_mesh is not None and spmd_axis_name is not None:
        raise ArgumentTypeError(
            "mesh and spmd_axis_name both say which devices lanes are spread over. Pass mesh alone."
        )

    said = dict(
        in_axes=in_axes, out_axes=out_axes, axis_name=axis_name, axis_size=axis_size,
        sum_match=sum_match, batch_size=batch_size, residuals=residuals, divergence=divergence,
        small_matrices=small_matrices, layout=layout, buckets=buckets, progress=progress,
    )  # fmt: skip

    @functools.wraps(fun)
    @_compat.api_boundary
    def batched(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_arguments(
            fun, in_axes, args, kwargs, on_mesh=some_at_a_time or spread, spread=spread
        )
        if on_mesh is None:
            try:
                return batch(flat)
            except jax.errors.JaxRuntimeError as failed:
                if is_out_of_memory(failed):
                    raise
                values, axes = [m.value for m in flat.mapped], [m.axis for m in flat.mapped]
                error = error_of_a_lane(lambda xs: _called(fun, *flat.rebuild(xs)), values, axes)
                if error is None:
                    raise
                raise error from None
        given = {"args": args, "kwargs": kwargs}
        with call_of_all(on_mesh.devices[0], fun, given, flat.mapped, said) as (mapped, own):
            return batch(replace(flat, mapped=mapped), own)

    def batch(flat: FlatArguments, own: Sequence[range] = ()) -> Any:
        size = find_axis_size(flat.mapped, axis_size)
        values = [m.value for m in flat.mapped]
        shards = None if on_mesh is None else on_mesh.shards(size, values, own)
        no_mesh = None, None
        mesh_axis, mesh = no_mesh if shards else find_mesh_axis(flat.mapped, spmd_axis_name)
        spmd = None if mesh_axis is not None else spmd_axis_name
        parting = parted(divergence, values, spread=shards is not None)
        columns = any(m.axis for m in flat.mapped)
        axis = Axis(
            size, axis_name, spmd, mesh_axis, parting, None, small_matrices, False, columns, mesh
        )
        mapped = with_lane_indices(flat.mapped, axis)

        def one_example(*examples: Any) -> tuple[list[Any], FlatOutputs]:
            def traced() -> tuple[list[Any], FlatOutputs]:
                example_args, example_kwargs = flat.rebuild(examples)
                out = _compat.resolve_patched(fun)(*example_args, **example_kwargs)
                return flatten_outputs(out, out_axes, size, sum_match=sum_match)

            arrays, outputs = traced()
            check_same(outputs.objects, lambda: traced()[1].objects)
            return arrays, outputs

        _compat.named_after(one_example, fun)
        passes = [
            pass_of_rows(rows, mapped, shards, chunking),
            shard_lanes(shards),
            *(
                []
                if some_at_a_time or spread
                else [infer_mesh_from_arguments(parting_ways(divergence, True))]
            ),
            chunk_lanes(chunking),
        ]
        call = Call(axis, finding_sizes(one_example), mapped)
        write = lambda results: results
        if shards is not None or (chunking is not None and chunking.applies_to(size)):
            check_not_shared(flat.shared)
            call, write = mapped_as_values(call)
        with named_in_errors(fun, mapped, flat.shared, LANES.each):
            outs, outputs = write(execute(apply_passes(passes, call)))
        if recording.is_on():
            types = [jax.tree.map(jax.typeof, x) for x in outs]
            recording.fact("outputs", described=outputs.described, types=types)
        return outputs.rebuild(outs)

    rest = dict(memory_limit=memory_limit, spmd_axis_name=spmd_axis_name, mesh=mesh)
    vars(batched)[_MADE_OF] = fun, said | rest
    return cast(Any, batched)


_MADE_OF = "_batchax_made_of"


@dataclass(frozen=True)
class VmapInside:
    """A `vmap` that a function is made of, as `find_vmap` sees it.

    Attributes:
      fun: The function of one example.
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


def find_vmap(fun: Any) -> VmapInside | None:
    """The `vmap` in what `vmap` returned, or in what `jax.jit`, `jax.grad` and the like made of it.

    None if there is none to be seen from outside.
    """
    whole = inner = fun
    while (made := _made_by_vmap(inner)) is None:
        within = inner.func if isinstance(inner, partial) else getattr(inner, "__wrapped__", None)
        if within is None:
            return None
        if whole is inner and hasattr(inner, "lower"):
            whole = within
        inner = within
    example, options = made
    usual = inspect.signature(vmap).parameters
    axes = "in_axes", "out_axes"
    given = {k: v for k, v in options.items() if k in axes or v is not usual[k].default}
    return VmapInside(example, given, whole, whole is not fun, _made_by_vmap(whole) is not None)


def _made_by_vmap(batched: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function of one example, and the options, of what `vmap` returned; else None."""
    made = getattr(batched, "__dict__", {}).get(_MADE_OF)
    # What wraps a function, as `jax.jit` does, gets its attributes, but another `__wrapped__`.
    return made if made is not None and made[0] is batched.__wrapped__ else None


def _called(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return fun(*args, **kwargs)
