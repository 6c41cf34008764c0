"""Which rows and elements are in which block, compared with a search."""

import jax
import numpy as np
import pytest

from batchax.kernel.axis import Axis
from batchax.rows.index import RowIndex
from batchax.rows.packed import PackedRows
from batchax.rows.size_classes import SizeClasses, _Moving

LENGTHS = np.array([7, 0, 3, 16, 1, 9, 4, 2, 8, 33, 5, 40, 2, 1, 0, 17], np.int32)
BOUND, SPARE = 40, 5


def found(lengths, padded):
    """The blocks of these rows, and where their elements are, packed or padded."""
    (n,) = jax.export.symbolic_shape("n")
    count, capacity = len(LENGTHS), int(LENGTHS.sum()) + SPARE
    classes = SizeClasses.of({"n": BOUND}, {"n": capacity}, count, 3, 1)

    def places(lengths):
        rows = PackedRows(Axis(count), {"n": RowIndex.of(lengths, capacity, BOUND)})
        move = _Moving(rows, classes)
        return move.blocks, move.blocks.places, move._places([n], (BOUND,) if padded else None)

    return classes, jax.tree.map(np.asarray, jax.jit(places)(lengths))


@pytest.mark.parametrize("padded", [False, True])
def test_each_row_and_element_is_in_a_block_that_has_room_for_it(padded):
    classes, (blocks, rows, elements) = found(LENGTHS, padded)
    assert all(x.dtype == np.int32 for x in jax.tree.leaves((blocks, rows, elements)))
    count, bounds = len(LENGTHS), np.array([each["n"] for each in classes.bounds])
    size = int((bounds * classes.rows).max())

    # Rows are in the last class that they fit, and of one class in each block.
    fits = [max(k for k, b in enumerate(bounds) if k == 0 or n <= b) for n in LENGTHS]
    np.testing.assert_array_equal(blocks.kind, fits)
    np.testing.assert_array_equal(blocks.number[blocks.block], fits)
    assert (blocks.slot < np.array(classes.rows)[fits]).all()
    assert len(set(zip(blocks.block.tolist(), blocks.slot.tolist(), strict=True))) == count
    used = np.bincount(blocks.block, minlength=classes.blocks)
    np.testing.assert_array_equal(blocks.held, used)
    empty = blocks.number == len(bounds)
    np.testing.assert_array_equal(empty, used == 0)
    assert not (np.diff(empty.astype(int)) < 0).any()  # empty ones are the last
    np.testing.assert_array_equal(blocks.row[blocks.block, blocks.slot], np.arange(count))
    for b in np.flatnonzero(~empty):  # in place of rows that a block misses its first row runs
        assert (blocks.row[b, used[b] :] == blocks.row[b, 0]).all()
    np.testing.assert_array_equal(rows.back[rows.at], np.arange(count))
    assert (rows.back >= 0).sum() == count

    at = np.full(len(elements.at), -1)
    starts = np.arange(count) * BOUND if padded else np.cumsum(LENGTHS) - LENGTHS
    for i, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        own = np.arange(start, start + length)
        first = blocks.block[i] * size + blocks.slot[i] * bounds[fits[i]]
        at[own] = first + np.arange(length)
    np.testing.assert_array_equal(elements.at, at)
    there, back = np.full(classes.blocks * size, -1), np.full(classes.blocks * size, -1)
    for b in range(classes.blocks):
        kind = min(int(blocks.number[b]), len(bounds) - 1)
        for s in range(classes.rows[kind]):
            row = int(blocks.row[b, s])
            length = min(int(LENGTHS[row]), int(bounds[kind]))
            own = b * size + s * bounds[kind] + np.arange(length)
            there[own] = starts[row] + np.arange(length)
            if s < used[b]:
                back[own] = there[own]
    np.testing.assert_array_equal(elements.there, there)
    np.testing.assert_array_equal(elements.back, back)
    assert ((there >= 0) & (back < 0)).any()
