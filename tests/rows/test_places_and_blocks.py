"""Where conditions are true, and rows in blocks: the loop of a CPU, sums and scatters, Python's."""

import jax
import numpy as np
import pytest

from batchax.rows.blocks import RowsOfBlocks, _blocks, find_blocks
from batchax.rows.places_where import _places, places_where


@pytest.mark.parametrize("size", [1, 3, 7])
def test_places_where_a_condition_is_true(size):
    conditions = np.array([[0, 1, 1, 0, 1, 0, 1], [0] * 7, [1] * 7, [1, 0, 0, 0, 0, 0, 0]], bool)
    one = lambda x: places_where(x, size)
    both = lambda x: (one(x), _places(x, size=size), jax.vmap(one)(x))
    for got in jax.jit(both)(conditions):
        for row, condition in zip(got, conditions, strict=True):
            true = [i for i, is_true in enumerate(condition) if is_true][:size]
            assert row.dtype == np.int32
            assert row.tolist() == true + [0] * (size - len(true))


def test_places_in_nothing():
    assert jax.jit(lambda x: places_where(x, 2))(np.zeros(0, bool)).tolist() == [0, 0]


@pytest.mark.parametrize("kind", [[0, 2, 2, 1, 2, 0, 2, 2, 2, 1], [1] * 9, [2]])
def test_rows_are_in_blocks_of_their_class(kind):
    capacity, blocks, kind = (1, 2, 4), 12, np.array(kind, np.int32)
    others = lambda kind: RowsOfBlocks(kind, *_blocks(kind, capacity=capacity, blocks=blocks))
    for find in (lambda kind: find_blocks(kind, capacity, blocks), others):
        found = jax.tree.map(np.asarray, jax.jit(find)(kind))
        assert (found.row[found.block, found.slot] == np.arange(len(kind))).all()
        assert (found.number[found.block] == kind).all()
        assert (found.slot < found.held[found.block]).all()
        assert found.held.sum() == len(kind)
        # All but the last block of each class are full, and empty ones are behind the others.
        for k, room in enumerate(capacity):
            held = sorted(found.held[found.number == k])
            assert held[1:] == [room] * (len(held) - 1)
        empty = found.held == 0
        assert (np.sort(empty) == empty).all()
        assert (found.number[empty] == len(capacity)).all()
        for row, held in zip(found.row, found.held, strict=True):
            assert (row[held:] == row[0]).all()


def test_steps_that_jax_counts_in_64_bits():
    with jax.enable_x64(True):
        places = places_where(np.array([False, True, True]), 2)
        blocks = find_blocks(np.array([0, 1, 0], np.int32), (2, 4), 3)
    assert places.tolist() == [1, 2]
    assert blocks.held.sum() == 3
