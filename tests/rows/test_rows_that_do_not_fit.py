"""Integers of 64 bits in rows that JAX would cut to 32: refused, not wrapped."""

import jax
import numpy as np
import pytest

import batchax as bx

LARGE = np.array([2**40 + 5, 7])
SPLITS = np.array([0, 1, 2])


def from_arrow(values):
    pyarrow = pytest.importorskip("pyarrow")
    return bx.Ragged.from_arrow(pyarrow.array([[int(x)] for x in values]))


WAYS = {
    "data": lambda values: bx.Ragged(values, [1, 1]),
    "from_rows": lambda values: bx.Ragged.from_rows([values[:1], values[1:]]),
    "from_padded": lambda values: bx.Ragged.from_padded(values[:, None], [1, 1]),
    "from_offsets": lambda values: bx.Ragged.from_offsets(values, SPLITS),
    "from_arrow": from_arrow,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_integer_that_does_not_fit_is_refused(way):
    if jax.config.jax_enable_x64:
        np.testing.assert_array_equal(WAYS[way](LARGE).data, LARGE)
    else:
        with pytest.raises(OverflowError, match=r"Ragged: .*int64 does not fit into int32"):
            WAYS[way](LARGE)
    np.testing.assert_array_equal(WAYS[way](LARGE % 1000).data, LARGE % 1000)
