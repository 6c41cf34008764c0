"""Symbolic sizes: how large they may be, and how large they are in a row."""

import jax
import numpy as np
import pytest

import batchax as bx
from batchax.rows.sizes import Sizes

N, M = jax.export.symbolic_shape("n, m")

EXPRESSIONS = {
    "n": lambda n, m: n,
    "less": lambda n, m: n - 1,
    "half": lambda n, m: n // 2,
    "rest": lambda n, m: n % 3,
    "both": lambda n, m: n * m + 2,
    "apart": lambda n, m: n - m,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_no_row_is_larger_than_the_bound_and_some_row_is_as_large(name):
    expression = EXPRESSIONS[name]
    dim = expression(N, M)
    found = [max(expression(n, m), 0) for n in range(7) for m in range(5)]
    assert Sizes({"n": 6, "m": 4}, {}).bound(dim) == max(found)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_size_in_a_row_is_never_negative(name):
    expression = EXPRESSIONS[name]
    sizes = Sizes({"n": 6, "m": 4}, {"n": np.int32(0), "m": np.int32(4)})
    assert int(sizes.size(expression(N, M))) == max(expression(0, 4), 0)
    assert int(sizes.value(expression(N, M))) == expression(0, 4)


def test_bounds_of_very_long_rows():
    sizes = Sizes({"n": 10**7, "m": 10**7}, {})
    assert sizes.bound(N) == 10**7
    assert sizes.bound(2 * N - 1) == 2 * 10**7 - 1
    assert sizes.bound(N + M) == 2 * 10**7
    for dim in (N // 2, N - M):
        with pytest.raises(bx.UnsupportedError, match="greatest value cannot be found"):
            sizes.bound(dim)
