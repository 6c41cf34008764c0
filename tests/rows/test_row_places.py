"""Where rows of traced lengths are: the loop of a CPU, sums and scatters, and a Python loop."""

import functools

import jax
import numpy as np
import pytest

from batchax.rows.index import _row_places, row_places

LENGTHS = np.array([3, 0, 40, -2, 16, 32, 0, 1, 17], np.int32)


def one_after_another(lengths, capacity, bound):
    starts, sizes, rows, places = [], [], [], []
    for row, length in enumerate(lengths):
        size = min(max(length, 0), bound, capacity - len(rows))
        starts.append(len(rows))
        sizes.append(size)
        rows += [row] * size
        places += range(row * bound, row * bound + size)
    return starts, sizes, rows, places


def agree(outs, lengths, capacity, bound):
    starts, sizes, rows, places = one_after_another(lengths, capacity, bound)
    assert all(x.dtype == np.int32 for x in outs)
    assert outs[0].tolist() == starts
    assert outs[1].tolist() == sizes
    rest = capacity - len(rows)
    assert outs[2].tolist() == rows + [len(lengths)] * rest
    assert outs[3][: len(places)].tolist() == places
    assert all(np.asarray(outs[3][len(places) :]) >= len(lengths) * bound)


@pytest.mark.parametrize(("capacity", "bound"), [(120, 40), (40, 33), (90, 60), (3, 2), (0, 5)])
def test_rows_follow_one_another(capacity, bound):
    run = functools.partial(row_places, capacity=capacity, bound=bound)
    others = functools.partial(_row_places, capacity=capacity, bound=bound)
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    outs = jax.jit(lambda x: (run(x[0]), others(x[0]), jax.vmap(run)(x)))(lengths)
    agree(outs[0], LENGTHS, capacity, bound)
    agree(outs[1], LENGTHS, capacity, bound)
    for k in (0, 1):
        agree([x[k] for x in outs[2]], lengths[k], capacity, bound)


def test_no_rows():
    outs = jax.jit(lambda x: row_places(x, 2, 3))(np.zeros(0, np.int32))
    assert [x.shape for x in outs] == [(0,), (0,), (2,), (2,)]
