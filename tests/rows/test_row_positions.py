"""Parts of rows that are moved: slices, joins, pads and reshapes by the row's own size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

LENGTHS = (4, 2)

# What runs in packed rows, in part: beside others, which share its row, it would be padded.
PACKED = {
    "turned": lambda x: (jnp.flip(x), jnp.rot90(x), jnp.swapaxes(x, 0, 1) * 2),
    "flat by columns": lambda x: x.T.reshape(-1),
    "as three rows": lambda x: jnp.sin(x.reshape(3, -1)) * x.T,
}
# What there is of an empty row too.
EMPTY = {
    "last three": lambda x: x[-3:],
    "halves": lambda x: (x[x.shape[0] // 2 :], x[: x.shape[0] // 2]),
    "every second": lambda x: (x[1::2], x[::-2]),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=0.5),
    **chosen(PACKED, ["turned", "flat by columns"]),
}
PADDED = {
    "between fixed bounds": lambda x: (x[1:-1], x[:2], x[2:5]),
    "roll by as much as data says": lambda x: jnp.roll(x, jnp.argmax(x[:, 0]), 0),
    "between constants": lambda x: jnp.concatenate([jnp.ones((1, 3)), x, x[1:], jnp.ones((2, 3))]),
    "pad by a variable": lambda x: lax.pad(x, x[0, 0], ((2, -1, 0), (0, 0, 0))),
    "one-sided window": lambda x: lax.pad(x[:1], 0.0, ((x.shape[0] - 1, 0, 0), (0, 0, 0))),
    "pairs to a square": lambda x: (
        jnp.outer(x[:, 0], x[:, 1]).reshape(-1).reshape(x.shape[0], x.shape[0]) @ x
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_parts_of_a_packed_row_are_where_its_own_size_puts_them(name):
    check_rows(PACKED[name], ragged(3, lengths=LENGTHS))


@pytest.mark.parametrize("names", shares(PADDED, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_parts_of_a_row_are_where_its_own_size_puts_them(names):
    check_rows_of_all(chosen(PADDED, names), ragged(3, lengths=LENGTHS))


@pytest.mark.parametrize("names", shares(EMPTY, 2), ids=" ".join)
@pytest.mark.each_commit(1)
def test_an_empty_row_among_others_has_the_parts_it_has_alone(names):
    check_rows_of_all(chosen(EMPTY, names), ragged(3, lengths=(0, *LENGTHS)))


SECOND_AXIS = {
    "difference": lambda x: x[:, 1:] - x[:, :-1],
    "reversed": lambda x: x[:, ::-1],
    "last": lambda x: x[:, -1],
    "in front of another": lambda x: jnp.concatenate([x, x[:1]], 0),
}


def test_a_row_may_be_ragged_in_another_axis_than_the_first():
    check_rows_of_all(SECOND_AXIS, ragged(3, lengths=LENGTHS, axis=1))


def test_rows_of_two_sizes_are_joined_and_multiplied():
    def both(x, y):
        joined = jnp.concatenate([x, y, x])
        return joined, (x[:, None] * y[None]).reshape(-1, 3), (x @ y.T)[::-1, 1:].sum(0)

    check_rows(both, ragged(3, lengths=LENGTHS), ragged(3, lengths=(1, 3), seed=1))


def test_integers_booleans_and_keys_are_moved_as_floats_are():
    def parts(x, flags, keys):
        joined = jnp.concatenate([x[1:], x[::-1]])
        drawn = jax.vmap(jax.random.uniform)(jnp.roll(keys, 1)[::-1][-2:])
        return joined, jnp.roll(flags, 1, 0), x.T.reshape(-1), drawn

    data = jax.random.split(jax.random.key(0), sum(LENGTHS))
    keys = bx.Ragged(data, np.array(LENGTHS, np.int32), 6)
    x = ragged(3, lengths=LENGTHS, dtype=np.int32)
    check_rows(parts, x, x.with_data(x.data > 1), keys)
