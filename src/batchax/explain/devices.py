"""What lanes are spread over: how many run where, what each device holds, what they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchax.execution.devices.shards import Shards
from batchax.explain.account import Collective, Devices
from batchax.explain.findings.draft import Draft
from batchax.explain.listing import value_of
from batchax.explain.naming import Names
from batchax.staging import Staged

_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)


def find_devices(
    draft: Draft, staged: Staged, names: Names, shards: Shards, shared: Sequence[Any]
) -> Devices:
    """What the lanes are spread over.

    Args:
      draft: the explanation so far.
      staged: the batched function, with what it was given.
      names: what values are called.
      shards: what the lanes are spread over.
      shared: the variables, of the program of one example, that all lanes share.
    """
    given = dict(zip(staged.paths, staged.arrays, strict=True))
    axis = draft.recorder.programs[0].axis
    copies = (value_of(names.of(v), v.aval, None, axis) for v in shared)
    return Devices(
        axes=tuple(map(str, shards.names)),
        count=shards.count,
        each=shards.each,
        repeated=shards.count * shards.each - shards.lanes,
        replicated=tuple(
            x if x.name in given else replace(x, name=f"a closed-over {x.example}")
            for x in copies
            if not _is_sharded(given, x.name)
        ),
        collectives=None if draft.module is None else tuple(_collectives(draft)),
    )


def _is_sharded(given: Mapping[str, Any], name: str) -> bool:
    """Whether it is known of an argument that no device has all of it: over another mesh axis."""
    sharding = getattr(given.get(name), "sharding", None)
    return sharding is not None and not sharding.is_fully_replicated


def _collectives(draft: Draft) -> Iterator[Collective]:
    for instruction in draft.instructions():
        # One that runs beside others is two instructions, of which the second has its result.
        kind = instruction.opcode.removesuffix("-done")
        if kind in _COLLECTIVES:
            yield Collective(kind, instruction.shape.bytes, draft.number_of(instruction))
