"""What windows are made of: loops of few operations, and parts of arrays."""

import jax
import numpy as np
import pytest
from jax import lax

from batchax.execution.slices import part_of, put_part
from batchax.kernel.inner import while_loop


def test_a_loop_closes_over_values_in_its_predicate_and_in_its_step():
    @jax.jit
    def run(limit, step):
        start = np.int32(0), np.int32(1)
        return while_loop(
            lambda s: lax.lt(s[0], limit), lambda s: (s[0] + step, s[1] * np.int32(2)), start
        )

    assert [int(x) for x in run(np.int32(10), np.int32(3))] == [12, 16]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_cut_along_an_axis(axis):
    x = np.arange(24.0).reshape(4, 6)
    np.testing.assert_array_equal(part_of(x, np.int32(1), axis, 2), x.take([1, 2], axis))
    np.testing.assert_array_equal(put_part(x, -x[:2], np.int32(2))[2:], -x[:2])
