"""Sorting rows: what is padded comes last, after NaN and whatever else sorts last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

LENGTHS = (4, 3)

FUNCTIONS = {
    "sort": lambda x: jnp.sort(x, 0),
    "sort each element": lambda x: jnp.sort(x, 1),
    "sort all": lambda x: jnp.sort(x, None),
    "sort downwards": lambda x: jnp.sort(x, 0, descending=True),
    "sort without order among equals": lambda x: lax.sort(x, dimension=0, is_stable=False),
    "sort by two keys": lambda x: lax.sort((jnp.round(x[:, 0]), x[:, 1], x[:, 2]), num_keys=2),
    "median": lambda x: jnp.median(x),
    "median of columns": lambda x: jnp.median(x, 0),
    "quantiles": lambda x: jnp.quantile(x, jnp.array([0.1, 0.6]), axis=0),
    "lower quantile": lambda x: jnp.quantile(x, 0.3, axis=0, method="lower"),
    "nanmedian": lambda x: jnp.nanmedian(x),
    "top of each element": lambda x: lax.top_k(x, 2)[0],
    "greatest": lambda x: lax.top_k(x[:, 0], 1)[0],
    "top of a longer row": lambda x: lax.top_k(jnp.append(x[:, 0], jnp.zeros(2)), 2)[0],
}


# What runs in packed rows, in part: beside others, which share its row, it would be padded.
PACKED = ["sort each element", "greatest", "top of a longer row"]
PADDED = [name for name in FUNCTIONS if name not in PACKED]


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_row_is_sorted_as_if_alone(name):
    check_rows(FUNCTIONS[name], ragged(3, lengths=LENGTHS))


@pytest.mark.parametrize("names", shares(PADDED, 2), ids=" ".join)
def test_a_row_is_sorted_as_if_alone(names):
    check_rows_of_all(chosen(FUNCTIONS, names), ragged(3, lengths=LENGTHS))


ORDERS = {
    "argsort": lambda x: jnp.argsort(x, 0),
    "argsort downwards": lambda x: jnp.argsort(x, 0, descending=True),
    "lexsort": lambda x: jnp.lexsort((x[:, 0], x[:, 1])),
    "ranks": lambda x: jnp.argsort(jnp.argsort(x[:, 0])),
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


def test_a_row_that_is_ragged_in_its_second_axis_is_sorted_along_it():
    check_rows(lambda x: jnp.sort(x, 1), ragged(3, lengths=LENGTHS, axis=1))
