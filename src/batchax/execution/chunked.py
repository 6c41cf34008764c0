"""A few lanes at a time: what `batch_size` asks for, and the way to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.call import Call, Way
from batchax.execution.devices.shards import Shards
from batchax.execution.devices.telling import lanes_for_all
from batchax.execution.loop_progress import LoopProgress, find_progress
from batchax.execution.memory import Auto, parse_limit
from batchax.execution.references import shared_reference
from batchax.execution.section_runner import SectionRunner
from batchax.frontend.in_axes import is_position
from batchax.frontend.options import check_one_of, is_word
from batchax.jaxprs.spoken import brief, name_of, show
from batchax.jaxprs.words import Value
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

    def runner(self, call: Call, shards: Shards | None = None) -> SectionRunner:
        """What runs a call, or that part of it which one of several shards has."""
        how = self.batch_size, self.keep, call.staged, call.values, call.positions
        return SectionRunner(call.axis, *how, call.described, shards, self.progress)


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
    check_one_of("residuals", residuals, "recompute", "keep")
    if memory_limit is not None and not is_word(batch_size, "auto"):
        raise ArgumentTypeError(
            f'memory_limit goes with batch_size="auto"; batch_size is {brief(batch_size)}.'
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
                f"progress is {brief(progress)}, but batch_size is None: all lanes run at once, "
                "and there are no chunks to count. Give batch_size, or leave progress out."
            )
        return None
    if is_word(batch_size, "auto"):
        name = name_of(fun)
        return Chunking(Auto(parse_limit(memory_limit), name), residuals == "keep", told)
    if not is_position(batch_size):
        raise ArgumentTypeError(
            f'batch_size must be a positive int, "auto" or None, got {show(batch_size)}.'
        )
    if batch_size < 1:
        raise AxisError(
            f"batch_size is {batch_size}, but at least one lane must run at a time. Give a "
            "positive int; None runs all lanes at once, as 0 does in jax.lax.map."
        )
    return Chunking(int(batch_size), residuals == "keep", told)


@dataclass(frozen=True)
class InChunks(Way):
    """Lanes in chunks, section by section, one chunk after another."""

    chunking: Chunking

    @property
    def memo(self) -> Memo | None:  # a choice of chunk size is noted for each call
        return None if isinstance(self.chunking.batch_size, Auto) else kept_in_chunks

    def prepared(self, call: Call) -> Call:
        """The call with lanes that chunks are taken from as from any axis, even if sharded.

        Where the function calls ``shard_map``, and `spmd_axis_name` spreads a chunk over devices in
        there, `batch_size` is how many lanes one of the devices runs at a time.
        """
        check_no_references((*call.staged.consts, *call.values))
        axis, chunking = call.axis, self.chunking
        parts, values = lanes_for_all(axis, call.values, call.positions, call.staged.jaxpr)
        if parts > 1 and not isinstance(chunking.batch_size, Auto) and axis.size % parts == 0:
            chunking = replace(chunking, batch_size=parts * chunking.batch_size)
        elif parts > 1:
            axis = replace(axis, spmd_name=None)
        axis = replace(axis, mesh_axis=None)
        return replace(call.with_values(values), axis=axis, way=InChunks(chunking))

    def passes_constants(self, call: Call) -> bool:
        return not call.traced

    def run(self, call: Call) -> tuple[list[Any], None]:
        return self.chunking.runner(call).outputs()[0], None


kept_in_chunks = Memo("calls outside of jit, cut into sections and batched", most=64)


def check_no_references(values: Iterable[Value]) -> None:
    """Refuses references that the function closes over: chunks and devices would share them."""
    if any(map(_compat.is_reference, values)):
        raise UnsupportedError(shared_reference("a value that the function closes over"))
