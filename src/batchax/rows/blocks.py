"""Which rows are in which block, where blocks of one class are of the same size.

On a CPU a short loop over rows finds that, which XLA compiles as one function. Running sums and a
scatter are twenty functions: to compile these took longer than to compile what is done with rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.slices import entry_of, put_entry
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import NoDerivative, Of, own_primitive


class Places(NamedTuple):
    """Where the elements of rows are in blocks, or where rows are among the slots of blocks."""

    at: Any  # the place in all blocks of each element; -1 for those of no row
    there: Any  # the element at each place of the blocks; -1 where there is none
    back: Any  # the same, and -1 for those of rows that are run in place of missing ones


class RowsOfBlocks(NamedTuple):
    """Which rows are in which block: first blocks in any order, at last empty ones."""

    kind: Any  # the class of each row
    block: Any  # where each row is
    slot: Any  # its place there
    number: Any  # the class of each block; as many as there are classes where it holds no row
    held: Any  # how many rows each block holds
    # The row in each slot of each block, shape (blocks, slots). In place of those that are missing
    # it is the first row of the block.
    row: Any

    @property
    def places(self) -> Places:
        slots = self.row.shape[1]
        own = np.arange(slots, dtype=np.int32)[None] < self.held[:, None]
        back = jnp.where(own, self.row, np.int32(-1))
        at = self.block * np.int32(slots) + self.slot
        return Places(at, self.row.reshape(-1), back.reshape(-1))


def find_blocks(kind: Value, capacity: Sequence[int], blocks: int) -> RowsOfBlocks:
    """The blocks of rows, at least one, of these classes, of each of which one holds `capacity`."""
    (kind,) = _compat.varying_alike([kind])
    found = rows_of_blocks_p.bind(kind, capacity=tuple(capacity), blocks=blocks)
    return RowsOfBlocks(kind, *found)


def _blocks(kind: Value, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    number, slots, count = len(capacity), capacity[-1], kind.shape[0]
    capacities = np.array(capacity, np.int32)
    is_kind = (kind[:, None] == np.arange(number, dtype=np.int32)[None]).astype(np.int32)
    so_far = jnp.cumsum(is_kind, 0, dtype=np.int32)  # the rows of each class, up to each row
    of_class, rank = so_far[-1], (so_far * is_kind).sum(1, dtype=np.int32) - np.int32(1)
    filled = lax.div(of_class + capacities - np.int32(1), capacities)
    ends = jnp.cumsum(filled, dtype=np.int32)
    first, room = ends - filled, taken(capacities, kind)
    block, slot = taken(first, kind) + lax.div(rank, room), lax.rem(rank, room)

    numbers = np.arange(blocks, dtype=np.int32)
    of_block = (numbers[:, None] >= ends[None]).sum(1, dtype=np.int32)
    own = jnp.minimum(of_block, np.int32(number - 1))
    before = (numbers - taken(first, own)) * taken(capacities, own)
    held = jnp.clip(taken(of_class, own) - before, np.int32(0), taken(capacities, own))
    row = jnp.zeros(blocks * slots, np.int32)
    row = row.at[block * np.int32(slots) + slot].set(np.arange(count, dtype=np.int32))
    return [block, slot, of_block, held, _with_first(row.reshape(blocks, slots), held)]


def _blocks_on_cpu(kind: Value, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    number, slots, count = len(capacity), capacity[-1], kind.shape[0]
    capacities, zero, one = np.array(capacity, np.int32), np.int32(0), np.int32(1)

    def place(i: Value, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """In the block of the row's class that is being filled; the next block, if it is full."""
        free, filling, left, block, slot, of_block, held, row = state
        i = lax.convert_element_type(i, np.int32)  # JAX counts steps in 64 bits, if there are such
        k = entry_of(kind, i)
        room, unfilled = entry_of(capacities, k), entry_of(left, k)
        full = unfilled == zero
        own = lax.select(full, free, entry_of(filling, k))
        to = lax.select(full, zero, room - unfilled)
        return (
            lax.select(full, free + one, free),
            put_entry(filling, own, k),
            put_entry(left, room - to - one, k),
            put_entry(block, own, i),
            put_entry(slot, to, i),
            put_entry(of_block, k - np.int32(number), own),
            put_entry(held, to + one, own),
            put_entry(row, i, own * np.int32(slots) + to),
        )

    # XLA makes a function for each array that it fills with a number. Those of rows are written to
    # the end, whatever they begin with; others begin with zero, as arrays that are alike are one.
    zeros = [lax.full((size,), 0, np.int32) for size in (number, blocks, blocks * slots)]
    state = zero, zeros[0], zeros[0], kind, kind, zeros[1], zeros[1], zeros[2]
    state = lax.fori_loop(zero, np.int32(count), place, state)
    _, _, _, block, slot, of_block, held, row = state
    of_block += np.int32(number)
    return [block, slot, of_block, held, _with_first(row.reshape(blocks, slots), held)]


def _with_first(row: Value, held: Value) -> jax.Array:
    """With the first row of a block in the place of those that are missing."""
    own = np.arange(row.shape[1], dtype=np.int32)[None] < held[:, None]
    return jnp.where(own, row, row[:, :1])


def _types(kind: Aval, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    of = lambda *shape: kind.update(shape=shape, dtype=np.dtype(np.int32))
    rows = of(*kind.shape)
    return [rows, rows, of(blocks), of(blocks), of(blocks, capacity[-1])]


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Positions]:
    return batch_function(axis, lambda kind: _blocks(kind, **params), args, axes)


def taken(x: Value, at: Value) -> Any:
    return jnp.take(x, at, axis=0, mode="clip")


rows_of_blocks_p = own_primitive(
    "rows_of_blocks",
    called="which rows are in which block",
    operations=_blocks,
    on_cpu=_blocks_on_cpu,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=Of(None),
    transpose=NoDerivative("rows of blocks are transposed, which is not linear."),
)
