"""Reading and writing at indices, of which the row's own size says what is out of bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

LENGTHS = (4, 2)
PLACES = jnp.array([0, -1, 3, -2, 1])  # of which one row has all, the other a few
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2)), float)


def bins(x):
    return (x[:, 0] * 2).astype(int)


READS = {
    "places, NaN where there is none": lambda x: jnp.take(x, PLACES, axis=0),
    "a fixed place that some rows lack": lambda x: x.at[3].get(mode="fill", fill_value=0.5),
    "a place far out": lambda x: x.at[jnp.array(9)].get(),
    "a column far out": lambda x: (x[:, jnp.array(7)], x.T[jnp.array(-9)]),
    "the greatest": lambda x: x[jnp.argmax(x[:, 0])],
    "places in each column": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "single elements": lambda x: x[jnp.array([0, -1]), jnp.array([1, 2])],
    "small unsigned indices": lambda x: x[jnp.array([0, 3], np.uint8)],
    "embedding": lambda x: TABLE[bins(x)],
    "window that moves": lambda x: lax.dynamic_slice(
        x, (jnp.argmax(x[:, 0]), 0), (x.shape[0] - 1, 3)
    ),
}

WRITES = {
    "set a fixed place that some rows lack": lambda x: x.at[jnp.array([3])].set(1.0),
    "add to a slice": lambda x: x.at[1:].add(x[:-1]),
    "set a slice": lambda x: x.at[:-1].set(x[1:] * 2),
    "set the last two": lambda x: x.at[-2:].set(0.5),
    "permuted": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x, unique_indices=True),
    "set parts of a square": lambda x: (x @ x.T).at[:-1, 1:].add(1.0) @ x,
    "greatest in bins": lambda x: jax.ops.segment_max(x, jnp.abs(bins(x)), num_segments=3),
    "updated by a window": lambda x: lax.dynamic_update_slice(x, x[1:] * 2, (1, 0)),
    "updated where data says": lambda x: lax.dynamic_update_slice(
        x, jnp.ones((1, 3)), (jnp.argmax(x[:, 0]), 0)
    ),
}


# What there is of an empty row too.
EMPTY = {
    "places of the row's own": lambda x: x[jnp.argsort(x[:, 1])],
    "embedding bag": lambda x: TABLE[bins(x)].sum(0),
    "sum into bins": lambda x: jax.ops.segment_sum(x, bins(x), num_segments=3),
    "each element reads in itself": lambda x: bx.vmap(lambda y, i: y[i])(x, jnp.argmax(x, 1)),
}


@pytest.mark.parametrize("names", shares(READS, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_indices_are_those_of_the_row(names):
    check_rows_of_all(chosen(READS, names), ragged(3, lengths=LENGTHS))


@pytest.mark.parametrize("names", shares(WRITES, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_what_is_written_is_within_the_row(names):
    check_rows_of_all(chosen(WRITES, names), ragged(3, lengths=LENGTHS))


def test_as_many_columns_as_the_row_has_elements():
    """Behind them are those of the operand, which is no padding of its own."""
    check_rows(lambda x: jnp.sin(x)[:, : x.shape[0]].sum(1), ragged(5, lengths=LENGTHS))


def test_columns_from_the_size_of_the_row_on():
    functions = {
        "those behind": lambda x: jnp.sin(x)[:, x.shape[0] :],
        "the last": lambda x: x[:, -x.shape[0] :].sum(1),
        "some": lambda x: x[:, 1 : x.shape[0]].sum(1),
        "at places": lambda x: x[jnp.array([1, 0])][:, x.shape[0] :],
    }
    check_rows_of_all(functions, ragged(5, lengths=(4, 2, 1), spare=0))


def test_a_table_that_rows_share_gets_nothing_from_padding():
    def looked_up(x, table):
        return jnp.log(table[bins(x)]) * x[:, :2], table.at[bins(x)].add(x[:, :2])

    check_rows(looked_up, ragged(3, lengths=LENGTHS), jnp.abs(TABLE), in_axes=(0, None))


def test_indices_that_are_rows_read_and_write_what_rows_share_and_what_they_own():
    def function(x, at, table):
        read = table[at], x[at], x.at[at].get(mode="fill", fill_value=0.0)
        return *read, table.at[at].add(1.0), x.at[at].set(2.0)

    at = ragged(lengths=(3, 2), dtype=np.int32, seed=2)
    check_rows(function, ragged(3, lengths=LENGTHS), at, TABLE, in_axes=(0, 0, None))


@pytest.mark.parametrize("name", EMPTY)  # one by one, as some run in packed rows
def test_an_empty_row_is_indexed_as_it_is_alone(name):
    check_rows(EMPTY[name], ragged(3, lengths=(0, *LENGTHS)))
