"""Windows along rows, and convolutions: they reach as far beyond the row as they do alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

LENGTHS = (5, 4)
LOOSE = {"rtol": 1e-4, "atol": 1e-4}  # one over a small number
KERNEL = jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, 3)), float)


def windows(initial, combine, size, step, padding, **options):
    def function(x):
        return lax.reduce_window(x, initial, combine, (size, 1), (step, 1), padding, **options)

    return function


POOLS = {
    "sum, as long": windows(0.0, lax.add, 3, 1, "SAME"),
    "sum, every second, as long": windows(0.0, lax.add, 3, 2, "SAME"),
    "mean": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID") / 2,
    "greatest": windows(-jnp.inf, lax.max, 2, 2, "VALID"),
    "least, one-sided": windows(jnp.inf, lax.min, 2, 1, ((1, 0), (0, 0))),
    "sum, dilated": windows(
        0.0, lax.add, 2, 1, "VALID", base_dilation=(2, 1), window_dilation=(2, 1)
    ),
}


@pytest.mark.parametrize("names", shares(POOLS, 2), ids=" ".join)
def test_windows_are_those_of_the_row_alone(names):
    check_rows_of_all(chosen(POOLS, names), ragged(3, lengths=LENGTHS))


def test_no_row_is_as_long_as_a_window():
    whole = lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "VALID")
    check_rows(whole, ragged(3, lengths=(2, 0, 1), spare=0))


def convolved(step, padding, **options):
    def function(x):
        return lax.conv_general_dilated(x.T[None], KERNEL, (step,), padding, **options)[0]

    return function


CONVOLUTIONS = {
    "same": convolved(1, "SAME"),
    "every second, same": convolved(2, "SAME"),
    "dilated": convolved(1, ((2, 2),), lhs_dilation=(2,), rhs_dilation=(2,)),
    "cut off": convolved(1, ((-1, 1),), lhs_dilation=(2,)),
    "of each channel": lambda x: lax.conv_general_dilated(
        x.T[None], KERNEL[:1].reshape(3, 1, 3), (1,), "SAME", feature_group_count=3
    ),
    "by the row": lambda x: lax.conv_general_dilated(
        jnp.ones((1, 1, 9)), x.T[:1, None], (1,), ((0, 0),)
    )[0, 0],
}


# One by one: alone each runs in packed rows, in part; together they would be padded.
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.each_commit(5)
def test_a_convolution_over_a_row_sees_nothing_of_its_padding(name):
    check_rows(CONVOLUTIONS[name], ragged(3, lengths=LENGTHS))


def test_a_kernel_that_rows_share_gets_nothing_from_padding():
    def function(x, kernel):
        return jnp.log(jnp.abs(lax.conv_general_dilated(x.T[None], kernel, (1,), "SAME")))[0]

    check_rows(function, ragged(3, lengths=LENGTHS), KERNEL, in_axes=(0, None), tolerance=LOOSE)


def test_a_gradient_taken_of_windows_is_that_of_the_row_alone():
    loss = lambda x: (POOLS["greatest"](x) ** 2).sum()
    check_rows(jax.grad(loss), ragged(3, lengths=LENGTHS))


def test_a_forward_derivative_taken_of_the_greatest_in_windows_is_that_of_the_row_alone():
    def function(x):
        return jax.jvp(POOLS["greatest"], (x,), (jnp.cos(x),))[1]

    check_rows(function, ragged(3, lengths=LENGTHS))


def test_an_empty_row_has_the_windows_it_has_alone():
    def function(x):
        return POOLS["sum, as long"](x), CONVOLUTIONS["same"](x), POOLS["mean"](x)

    check_rows(function, ragged(3, lengths=(0, 4)))


@pytest.mark.usefixtures("longer_rows")
def test_windows_of_a_size_of_the_row_s_own_are_refused_by_name_where_lengths_are_traced():
    def function(x):
        return lax.reduce_window(jnp.tile(x, (2, 1)), 0.0, lax.add, x.shape, (1, 1), "VALID")

    with pytest.raises(bx.UnsupportedError, match=r"`reduce_window_sum`.*windows have n "):
        jax.jit(bx.vmap(function))(ragged(3, lengths=LENGTHS))


def grouped(x, kernel, **groups):
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", **groups)


def twice(x):
    return jnp.concatenate([x, 3 * x])


AS_MANY_GROUPS = {
    "channels": lambda x: grouped(x[None], twice(x)[:, None, :2], feature_group_count=x.shape[0]),
    "rows": lambda x: grouped(x[:, None], x[:, None, 1:], batch_group_count=x.shape[0]),
}
LARGER_GROUPS = {
    "feature_group_count=2 makes": lambda x: grouped(
        twice(x)[None], jnp.stack([x[:, :2], x[:, 1:]]), feature_group_count=2
    ),
    "batch_group_count=2 makes": lambda x: grouped(
        twice(x)[:, None], x[:1, None, :2].repeat(2, 0), batch_group_count=2
    ),
}


def test_as_many_groups_of_a_convolution_as_the_row_has_elements():
    check_rows_of_all(AS_MANY_GROUPS, ragged(3, lengths=LENGTHS))


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("told", LARGER_GROUPS)
def test_groups_of_a_convolution_that_differ_in_size_are_refused_or_run_by_length(told):
    x = ragged(3, lengths=LENGTHS)
    with pytest.raises(bx.UnsupportedError, match=told):
        jax.jit(bx.vmap(LARGER_GROUPS[told]))(x)
    check_rows(LARGER_GROUPS[told], x, traced=False, derivatives=False)
