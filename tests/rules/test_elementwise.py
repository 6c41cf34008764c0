"""Primitives that act on elements, against the loop over examples."""

import jax.numpy as jnp
import pytest
from jax import lax

from support.oracle import check, example

UNARY = {
    "abs": lax.abs,
    "exp": lax.exp,
    "tanh": lax.tanh,
    "neg": lax.neg,
}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(("in_axes", "out_axes"), [(0, 0), (1, 0), (-1, -1)])
def test_unary(name, in_axes, out_axes):
    check(UNARY[name], example((4, 3)), in_axes=in_axes, out_axes=out_axes, nested=True)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, 1), (None, 0), (1, None)])
def test_binary(in_axes):
    shape = {0: (4, 3), 1: (3, 4), None: (3,)}
    args = [example(shape[a], seed=i) for i, a in enumerate(in_axes)]
    check(lax.add, *args, in_axes=in_axes, nested=True, second=True)


def test_number_per_lane_against_vector():
    check(lambda s, v: jnp.add(s, v), example((4,)), example((3,)), in_axes=(0, None))
