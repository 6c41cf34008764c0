"""Which rows and elements are in which block: loops of a CPU, sums and sorts, and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from batchax.rows import size_classes as places
from batchax.rows.size_classes import SizeClasses

LENGTHS = np.array([7, 0, 3, 16, 1, 9, 4, 2, 8, 33, 5, 40, 2, 1, 0, 17], np.int32)


def test_blocks_are_the_same_however_they_are_computed():
    count, bound, capacity = len(LENGTHS), 40, int(LENGTHS.sum()) + 5
    classes = SizeClasses.of({"n": bound}, {"n": capacity}, count, 3, 1)
    limits = tuple((each["n"],) for each in classes.bounds)
    how = {"limits": limits, "rows": classes.rows, "blocks": classes.blocks}
    starts = (np.cumsum(LENGTHS) - LENGTHS).astype(np.int32)
    of_elements = np.full(capacity, count, np.int32)
    of_elements[: LENGTHS.sum()] = np.repeat(np.arange(count), LENGTHS)
    within = np.arange(capacity, dtype=np.int32) - np.append(starts, LENGTHS.sum())[of_elements]
    packed = starts, of_elements, [LENGTHS], [within.astype(np.int32)]
    rows, at = np.indices((count, bound), np.int32)
    first = np.arange(count, dtype=np.int32) * np.int32(bound)
    padded = first, rows.reshape(-1), [LENGTHS], [at.reshape(-1)]
    widths = (tuple(each["n"] for each in classes.bounds),)
    size = max(a * b for a, b in zip(classes.rows, widths[0], strict=True))
    room = {"widths": widths, "room": (bound,), "size": size}

    def both(lengths, packed, padded):
        blocks = places.RowsOfBlocks(*places.find_positions("blocks", [lengths], **how))
        found = [blocks]
        for starts, of_elements, sizes, within in (packed, padded):
            operands = [*blocks, starts, of_elements, *sizes, *within]
            elements = places.find_positions("elements", operands, **room)
            found.append(places.PlacesOfElements(*elements))
        return found

    def side_by_side(lengths, packed, padded):
        blocks = places._blocks(jnp, lengths, **how)
        run = functools.partial(places._elements, jnp, *blocks, **room)
        return [blocks, *(run(*each[:2], *each[2], *each[3]) for each in (packed, padded))]

    known = both(LENGTHS, packed, padded)
    assert all(isinstance(x, np.ndarray) and x.dtype == np.int32 for x in jax.tree.leaves(known))
    every = jax.jit(lambda *xs: (both(*xs), side_by_side(*xs)))(LENGTHS, packed, padded)
    for outs in every:
        assert len(jax.tree.leaves(outs)) == len(jax.tree.leaves(known))
        for x, expected in zip(jax.tree.leaves(outs), jax.tree.leaves(known), strict=True):
            np.testing.assert_array_equal(x, expected)

    # Each element has a place of its own, in the block of its row, which has room for its row.
    blocks, elements, _ = known
    used = elements.at[elements.at >= 0]
    assert len(set(used.tolist())) == len(used) == LENGTHS.sum()
    np.testing.assert_array_equal(elements.back[used], np.arange(len(used)))
    assert all(np.array(widths[0])[blocks.kind] >= LENGTHS)
    np.testing.assert_array_equal(blocks.number[blocks.block], blocks.kind)
    np.testing.assert_array_equal(used // size, blocks.block[of_elements[: len(used)]])
    # In place of rows that a block misses its first row runs again.
    stand_ins = (elements.there >= 0) & (elements.back < 0)
    assert stand_ins.any()
