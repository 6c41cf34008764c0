"""Sorting rows: what is padded comes last, after NaN and whatever else sorts last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.rows import check_rows, ragged

LENGTHS = (4, 3)


ORDERS = {
    "argsort": lambda x: jnp.argsort(x, 0),
    "argsort downwards": lambda x: jnp.argsort(x, 0, descending=True),
    "lexsort": lambda x: jnp.lexsort((x[:, 0], x[:, 1])),
    "places of the greatest": lambda x: lax.top_k(jnp.append(x[:, 0], x[:2, 1]), 1),
    "sort": lambda x: jnp.sort(x, 0),
}


def hard_rows(dtype):
    """Rows of what is equal, and of what sorts last: that, too, is before the padding."""
    if dtype == np.bool_:
        values = [True, False, True, True, True, False, True]
    elif np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        values = [info.max, 0, info.max, info.min, 1, info.max, 1]
    else:
        values = [np.nan, 1, np.inf, -np.nan, np.inf, -np.inf, np.nan]
    data = np.stack([values, values[::-1], np.roll(values, 2)], 1).astype(dtype)
    rows = ragged(3, lengths=LENGTHS, poison=False)
    return rows.with_data(jnp.asarray(data))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16, np.bool_, np.complex64])
def test_padding_comes_after_whatever_sorts_last(dtype):
    names = ["argsort", "lexsort", "sort"] if dtype == np.complex64 else list(ORDERS)
    if dtype == np.bool_:
        names.remove("places of the greatest")  # JAX takes no booleans there
    orders = lambda x: [ORDERS[name](x) for name in names]
    check_rows(orders, hard_rows(dtype), derivatives=False)


def test_an_empty_row_is_sorted_among_others():
    def function(x):
        return jnp.sort(x, 0), jnp.argsort(x, 0), jnp.sort(x, None)[::-1]

    check_rows(function, ragged(3, lengths=(0, 3)))


def test_the_gradient_taken_of_a_sort_is_that_of_the_row_alone():
    def weighted(x):
        ordered = jnp.sort(x[:, 0])
        return (ordered * jnp.arange(x.shape[0])).sum() ** 2 + jnp.median(x[:, 1])

    check_rows(jax.grad(weighted), ragged(3, lengths=LENGTHS))
