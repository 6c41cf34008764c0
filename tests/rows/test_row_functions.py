"""Functions of JAX that ask for a length as a number, by one program for rows of any length."""

import jax
import jax.numpy as jnp
import jax.scipy.signal
import numpy as np
import pytest

import batchax as bx

from support.rows import check_rows, ragged


def chosen(x):
    return {
        "differences of differences": jnp.diff(x, n=2),
        "cov": jnp.cov(jnp.stack([x, jnp.cos(x)])),
        "same as the row": jax.scipy.signal.convolve(x, jnp.ones(3, x.dtype), "same"),
        "same as the other": jax.scipy.signal.convolve(jnp.arange(4.0, dtype=x.dtype), x, "same"),
    }


@pytest.mark.nightly
def test_elements_are_chosen_and_placed_as_of_the_row_alone():
    check_rows(chosen, ragged(lengths=(3, 5, 1, 4)))


def test_a_covariance_of_no_observations_is_none():
    check_rows(lambda x: jnp.cov(x), ragged(lengths=(3, 0, 1)), derivatives=False)


def test_parts_of_any_row_that_differ_by_an_element():
    x = ragged(lengths=(4, 17, 2, 0, 9))
    parts = jax.jit(bx.vmap(lambda x: jnp.array_split(jnp.stack([x, 2 * x]), 3, axis=1)))(x)
    for i, row in enumerate(x.rows()):
        alone = np.array_split(np.stack([row, 2 * row]), 3, axis=1)
        for part, expected in zip(parts, alone, strict=True):
            np.testing.assert_array_equal(part[i], expected)


def test_parts_of_one_size_are_of_rows_that_have_so_many():
    x = bx.Ragged(np.zeros(40), [4, 36])
    with pytest.raises(bx.UnsupportedError, match=r"\(<lambda>\).*use `jnp\.array_split`"):
        jax.jit(bx.vmap(lambda x: jnp.split(x, 2)))(x)


def groups_of_elements(x):
    n = jnp.asarray(x.shape[0], jnp.int32)
    sizes = jnp.stack([jnp.minimum(n, 2), jnp.maximum(n - 2, 0)])
    weights = np.sin(np.arange(6)).reshape(2, 1, 3).astype(x.dtype)
    of_three = jnp.array([1, 2, 0], jnp.int32)
    a_group_each = jnp.ones_like(x, dtype=jnp.int32)
    return {
        "free": jax.lax.ragged_dot(x[:, None], weights, sizes),
        "contracted": jax.lax.ragged_dot(weights[0].T * x, jnp.stack([x[:, None]] * 3), of_three),
        "groups": jax.lax.ragged_dot(x[:, None], x[:, None, None], a_group_each),
    }


def test_products_with_groups_of_elements():
    check_rows(groups_of_elements, ragged(lengths=(3, 1)))


NEED_A_LENGTH = {
    "poly": lambda x: jnp.poly(x),
    "windows": lambda x: x * jnp.hanning(x.shape[0]),
    "polyfit": lambda x: jnp.polyfit(x, x, 1),
}


@pytest.mark.parametrize("name", NEED_A_LENGTH)
def test_functions_that_need_a_length_raise_for_traced_lengths(name):
    x = ragged(lengths=(4, 36), spare=0)
    with pytest.raises(bx.UnsupportedError, match=r"\(<lambda>\)(.|\n)*lengths are known"):
        jax.make_jaxpr(bx.vmap(NEED_A_LENGTH[name]))(x)
