"""Ragged arguments of `auto_vmap`: their rows are a batch dimension."""

import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import same
from support.rows import ragged

WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)), float)


def test_each_row_may_have_an_array_of_its_own():
    x, w = ragged(3), np.stack([WEIGHTS * k for k in range(1, 5)])
    got = bx.auto_vmap(2, 2)(lambda x, w: (x @ w).sum(0))(x, w)
    same(got, jnp.stack([(row @ v).sum(0) for row, v in zip(x.rows(), w, strict=True)]))


@pytest.mark.parametrize("rank", [0, 1])
def test_places_in_the_row_are_batch_dimensions_beyond_the_rank(rank):
    x = ragged(3)
    got = bx.auto_vmap(rank)(lambda x: jnp.tanh(x).sum())(x)
    assert isinstance(got, bx.Ragged)
    for mine, row in zip(got.rows(), x.rows(), strict=True):
        same(mine, jnp.tanh(row).sum(-1) if rank else jnp.tanh(row))


def test_a_signature_names_the_size_of_a_row():
    x = ragged(3)
    got = bx.auto_vmap("(n,d),(d,k)->(n,k)")(lambda x, w: x @ w)(x, WEIGHTS)
    for mine, row in zip(got.rows(), x.rows(), strict=True):
        same(mine, row @ WEIGHTS)


def test_what_does_not_broadcast_with_the_rows_is_named():
    with pytest.raises(bx.AxisError, match="5 in batch dimension -1, where there are 4 rows"):
        bx.auto_vmap(2, 2)(lambda x, w: x @ w)(ragged(3), np.stack([WEIGHTS] * 5))
    with pytest.raises(bx.AxisError, match="batch dimensions are 2, not at most 1"):
        bx.auto_vmap(2, 2)(lambda x, w: x @ w)(ragged(3), np.ones((2, 4, 3, 2)))
    with pytest.raises(bx.AxisError, match="fewer dimensions than one example"):
        bx.auto_vmap(3)(lambda x: x)(ragged(3))
