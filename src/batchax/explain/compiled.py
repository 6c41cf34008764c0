"""What is read of the compiled program: memory, work, and what devices exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from batchax.execution.devices.shards import Shards
from batchax.execution.memory import memory_of
from batchax.explain.account import Collective, Devices, Memory, Work
from batchax.explain.findings.operations import FindingContext
from batchax.explain.listing import Names, value_of
from batchax.staging import Staged


def find_memory(compiled: jax.stages.Compiled) -> Memory:
    """Finds the memory that a compiled program takes."""
    account = memory_of(compiled)
    return Memory(account.bytes, account.arguments, account.outputs, account.temporaries)


def counted_by_compiler(compiled: jax.stages.Compiled) -> Work | None:
    try:
        counts = compiled.cost_analysis() or {}
    except NotImplementedError:
        return None
    if "flops" not in counts:
        return None
    # XLA counts exp, log and their like apart. Here they are one operation each.
    flops = counts["flops"] + counts.get("transcendentals", 0.0)
    return Work(flops, counts.get("bytes accessed", 0.0))


_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)


def find_devices(
    context: FindingContext, staged: Staged, names: Names, shards: Shards, shared: Sequence[Any]
) -> Devices:
    """Describes what the lanes are spread over; lanes share the variables `shared`."""
    given = dict(zip(staged.paths, staged.arrays, strict=True))
    axis = context.recorder.programs[0].axis
    copies = (value_of(names.of(v), v.aval, None, axis) for v in shared)
    return Devices(
        axes=tuple(map(str, shards.names)),
        count=shards.count,
        each=shards.each,
        repeated=shards.count * shards.each - shards.lanes,
        replicated=tuple(
            # What the function closes over has no name that a user would know.
            x if x.name in given else replace(x, name=f"a closed-over {x.example}")
            for x in copies
            if not _is_sharded(given, x.name)
        ),
        collectives=None if context.module is None else tuple(_collectives(context)),
    )


def _is_sharded(given: Mapping[str, Any], name: str) -> bool:
    """Whether an argument is known to be spread over another mesh axis: no device has all of it."""
    sharding = getattr(given.get(name), "sharding", None)
    return sharding is not None and not sharding.is_fully_replicated


def _collectives(context: FindingContext) -> Iterator[Collective]:
    for instruction in context.instructions():
        # An asynchronous collective is two instructions, of which the second has its result.
        kind = instruction.opcode.removesuffix("-done")
        if kind in _COLLECTIVES:
            yield Collective(kind, instruction.shape.bytes, context.number_of(instruction))
