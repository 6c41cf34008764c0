"""A staged program run for all lanes, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, BatchaxError, UnsupportedError
from batchax.execution.loop_progress import LoopProgress, find_progress
from batchax.execution.memory import Auto, parse_limit
from batchax.execution.mesh import placed, puts_traced
from batchax.execution.processes import of_several_processes
from batchax.execution.section_runner import SectionRunner
from batchax.execution.shards import Shards, check_shared, lanes_for_all, on_shards
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import FlatOutputs
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.captured import MappedProgram
from batchax.kernel.inner import example_aval
from batchax.kernel.lasting import call_key, evaluated
from batchax.kernel.looking import WHOLE, in_jit, unseen
from batchax.memo import Memo


@dataclass(frozen=True)
class Chunking:
    """How lanes are to be run.

    Attributes:
      batch_size: at most that many at a time.
      keep: whether reverse mode keeps what each chunk computed, rather than compute it
        again.
      progress: who is told how many chunks are done.
    """

    batch_size: int | Auto
    keep: bool
    progress: LoopProgress | None = None

    def applies_to(self, size: Any) -> bool:
        """Whether a batch of that size has more than one chunk, or may have."""
        if not isinstance(size, int):
            raise UnsupportedError(
                f"batch_size was given, but the number of lanes is {size}, a symbolic size. Leave "
                "batch_size out; or have the size known: export the function for one, or, if it "
                "is the length of a row whose lengths are traced, call it outside of jit."
            )
        if self.progress is not None:  # of one chunk, too
            return size > 0
        return size > 1 if isinstance(self.batch_size, Auto) else size > self.batch_size


def find_chunking(
    fun: Callable[..., Any],
    batch_size: Any,
    memory_limit: Any,
    residuals: Any,
    progress: Any = False,
) -> Chunking | None:
    """What the options of `vmap` ask for; None if all lanes are to run at once.

    Raises:
      ArgumentTypeError: an option has the wrong type.
      AxisError: `batch_size` is less than one.
    """
    if residuals not in ("recompute", "keep"):
        raise ArgumentTypeError(f'residuals must be "recompute" or "keep", got {residuals!r}.')
    if memory_limit is not None and batch_size != "auto":
        raise ArgumentTypeError(
            f'memory_limit goes with batch_size="auto"; batch_size is {batch_size!r}.'
        )
    told = find_progress(progress, fun, "chunks")
    if batch_size is None:
        if residuals != "recompute":
            raise ArgumentTypeError(
                f"residuals is {residuals!r}, but batch_size is None: all lanes run at once, and "
                "what they computed is kept. Give batch_size, or leave residuals out."
            )
        if told is not None:
            raise ArgumentTypeError(
                f"progress is {progress!r}, but batch_size is None: all lanes run at once, and "
                "there are no chunks to count. Give batch_size, or leave progress out."
            )
        return None
    if batch_size == "auto":
        name = getattr(fun, "__name__", type(fun).__name__)
        return Chunking(Auto(parse_limit(memory_limit), name), residuals == "keep", told)
    if not is_position(batch_size):
        raise ArgumentTypeError(
            f'batch_size must be a positive int, "auto" or None, got {batch_size!r} of type '
            f"{type(batch_size).__name__}."
        )
    if batch_size < 1:
        raise AxisError(
            f"batch_size is {batch_size}, but at least one lane must run at a time. Give a "
            "positive int; None runs all lanes at once."
        )
    return Chunking(int(batch_size), residuals == "keep", told)


def run_in_chunks(
    chunking: Chunking,
    program: MappedProgram,
    outputs: FlatOutputs,
    stage: Callable[[Sequence[Any]], tuple[_compat.ClosedJaxpr, FlatOutputs]],
    shards: Shards | None,
) -> list[Any]:
    """The outputs of a staged program for all lanes, where they are wanted.

    Args:
      chunking: how lanes are to be run.
      program: the program and its arguments.
      outputs: what describes its outputs.
      stage: stages the program again, for examples of these types.
      shards: what the arguments are spread over, if each device is to run chunks of its lanes.

    Raises:
      AxisError: an output depends on the batch where it must not.
      UnsupportedError: the program cannot run in chunks.
    """
    _check_no_references((*program.staged.consts, *program.args))
    if shards is None:
        chunking, program = _of_all_lanes(chunking, program)
    else:
        shared = [x for x, a in zip(program.args, program.axes, strict=True) if a is None]
        check_shared(shared, program.staged.consts)
        recording.fact("shards", shards=shards, shared=_shared_variables(program))
    traced = program.traced
    held, consts = program, []
    passes = not traced or (shards is not None and puts_traced(shards.mesh))
    if passes and not recording.is_on():
        program, consts = _with_constants_passed(program, shards)
    axis, positions = program.axis, program.axes

    def run(*args: Any) -> tuple[list[Any], None]:
        if shards is None:
            how = chunking.batch_size, chunking.keep
            more = outputs.described, shards, chunking.progress
            runner = SectionRunner(axis, *how, program.staged, args, positions, *more)
            return runner.outputs()[0], None
        shard = OneShard(chunking, axis, positions, shards, stage, consts)
        return on_shards(shards, shard.run, args, positions)[0], None

    def key() -> Hashable:
        specs = tuple(output.spec for output in outputs.described)
        places = zip(map(jax.typeof, program.args), positions, strict=True)
        return call_key(axis, program.staged, shards, chunking, specs, *places)

    # A choice of chunk size is noted for each call.
    kept = None if isinstance(chunking.batch_size, Auto) else (_staged, key)

    def evaluate(*args: Any) -> list[Any]:
        return evaluated(run, args, traced, kept=kept)[0]

    try:
        return unseen(evaluate, program.args, WHOLE)
    except _OtherConstants:
        program, consts, positions = held, [], held.axes
        kept = None
        return unseen(evaluate, program.args, WHOLE)


def _check_no_references(values: Iterable[Any]) -> None:
    if any(map(_compat.is_reference, values)):
        raise UnsupportedError(
            "batch_size or mesh was given, but the function is given, or closes over, a reference "
            "(jax.new_ref). Create it inside the function, or leave them out."
        )


def _shared_variables(program: MappedProgram) -> list[Any]:
    """The variables that all lanes share, of which each device has a copy."""
    jaxpr = program.staged.jaxpr
    own = zip(jaxpr.invars, program.axes, strict=True)
    return [*jaxpr.constvars, *(v for v, a in own if a is None)]


class _OtherConstants(Exception):
    """A function that does not hold the same values each time it is staged."""


def run_on_shards(
    chunking: Chunking,
    axis: Axis,
    args: Sequence[Any],
    positions: Sequence[AxisPosition],
    stage: Callable[[Sequence[Any]], tuple[_compat.ClosedJaxpr, FlatOutputs]],
    shards: Shards,
) -> tuple[list[Any], FlatOutputs]:
    """The outputs of traced arguments for all lanes, and what describes them.

    The function is staged once, for a lane of one shard.

    Args:
      chunking: how many lanes a device runs at a time.
      axis: the axis of all lanes.
      args: the arguments.
      positions: where they have that axis.
      stage: stages the function for examples of these types.
      shards: what the arguments are spread over.
    """

    def checked(avals: Sequence[Any]) -> tuple[_compat.ClosedJaxpr, FlatOutputs]:
        staged, outputs = stage(avals)
        _check_no_references(staged.consts)
        check_shared([], staged.consts)
        return staged, outputs

    _check_no_references(args)
    check_shared([x for x, a in zip(args, positions, strict=True) if a is None], [])
    shard = OneShard(chunking, axis, positions, shards, checked)
    compiled = not in_jit()

    def run(*args: Any) -> tuple[list[Any], FlatOutputs]:
        return on_shards(shards, shard.run, args, positions, compiled)

    try:
        return unseen(run, args, WHOLE)
    except (NotImplementedError, ValueError) as error:
        if not isinstance(error, BatchaxError):  # of JAX's: is it of what the function closes over?
            whole = [
                example_aval(axis, jax.typeof(x), a) for x, a in zip(args, positions, strict=True)
            ]
            check_shared([], stage(whole)[0].consts)
        raise


@dataclass(frozen=True, eq=False)
class OneShard:
    """What one device does: the lanes that it has, some at a time.

    Attributes:
      chunking: how many.
      axis: the axis of all lanes.
      positions: where the arguments have it.
      shards: what they are spread over.
      stage: stages the function, and describes its outputs.
      consts: what the function holds, if these are the first arguments.
    """

    chunking: Chunking
    axis: Axis
    positions: Sequence[AxisPosition]
    shards: Shards
    stage: Callable[[Sequence[Any]], tuple[_compat.ClosedJaxpr, FlatOutputs]]
    consts: Sequence[Any] = ()

    def run(self, *xs: Any) -> tuple[list[Any], list[AxisPosition], FlatOutputs]:
        """The outputs, where they have the batch axis, and what describes them."""
        count, positions = len(self.consts), self.positions
        axis = replace(self.axis, spmd_name=None, mesh_axis=None)
        local = replace(axis, size=self.shards.each)
        # Types may be others in here, where axes of the mesh are manual: it is staged here.
        args, positions = xs[count:], positions[count:]
        types = [
            example_aval(local, jax.typeof(x), a) for x, a in zip(args, positions, strict=True)
        ]
        staged, outputs = self.stage(types)
        if count:
            if list(map(_kind, staged.consts)) != list(map(_kind, self.consts)):
                raise _OtherConstants
            staged = _compat.close(staged.jaxpr, list(xs[:count]))
        size, keep = self.chunking.batch_size, self.chunking.keep
        if isinstance(size, Auto):
            size = replace(size, together=of_several_processes(self.shards.mesh))
        described = outputs.described
        more = described, self.shards, self.chunking.progress
        runner = SectionRunner(axis, size, keep, staged, args, positions, *more)
        return *runner.outputs(), outputs


_staged = Memo("calls outside of jit, cut into sections and batched", most=64)


def _kind(x: Any) -> Any:
    """The type of an array, wherever it is."""
    return jax.typeof(x).shape, jax.typeof(x).dtype, jax.typeof(x).weak_type


def _with_constants_passed(
    program: MappedProgram, shards: Shards | None
) -> tuple[MappedProgram, Sequence[Any]]:
    """The same, of a program that holds no values; and those, its first arguments now."""
    (staged,), consts = _compat.hoist_constants(program.staged)
    none: list[AxisPosition] = [None] * len(consts)
    if shards is not None:
        consts = placed(shards, ["a value that the function closes over"] * len(none), consts, none)
    args, axes = [*consts, *program.args], [*none, *program.axes]
    return replace(program, staged=staged, args=args, axes=axes), consts


def _of_all_lanes(chunking: Chunking, program: MappedProgram) -> tuple[Chunking, MappedProgram]:
    """For lanes that chunks are taken from as from any axis, even if they are sharded.

    Where the function calls ``shard_map``, and `spmd_axis_name` spreads a chunk over devices in
    there, `batch_size` is how many lanes one of the devices runs at a time.
    """
    axis, jaxpr = program.axis, program.staged.jaxpr
    parts, args = lanes_for_all(axis, program.args, program.axes, jaxpr)
    if parts > 1 and not isinstance(chunking.batch_size, Auto) and axis.size % parts == 0:
        chunking = replace(chunking, batch_size=parts * chunking.batch_size)
    elif parts > 1:
        axis = replace(axis, spmd_name=None)
    return chunking, replace(program, axis=replace(axis, mesh_axis=None), args=args)
