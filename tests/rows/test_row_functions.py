"""Functions of JAX that ask for a length as a number, by one program for rows of any length."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import numpy as np
import pytest

import batchax as bx

from support.rows import check_rows, ragged


def chosen(x):
    n = x.shape[0]
    return {
        "partition": jnp.partition(x, 0),
        "partition, at the end": jnp.partition(x, -1),
        "argpartition": jnp.argpartition(x, 0),
        "place": jnp.place(x, x > 0, jnp.array([1.0, 2.0], x.dtype) * x.sum(), inplace=False),
        "resize": jnp.resize(x, (3 * n + 1,)),
        "diagflat": jnp.diagflat(x, 1).sum(0),
        "iterable": jnp.iterable(x),
        "differences of differences": jnp.diff(x, n=2),
        "setxor1d": jnp.setxor1d(x, jnp.append(x, 0.5), size=2),
        "matrix_rank": jnp.linalg.matrix_rank(jnp.stack([x, 2 * x, x + 1], 1)),
        "cov": jnp.cov(jnp.stack([x, jnp.cos(x)])),
        "kaiser": jnp.kaiser(n, x.sum()),
        "hanning": jnp.hanning(n) * x,
    }


def transformed(x):
    n = x.shape[0]
    return {
        "poly": jnp.poly(x),
        "polydiv": jnp.polydiv(x, jnp.array([2.0, 1.0], x.dtype)),
        "polydiv, by a row": jnp.polydiv(jnp.convolve(x, x), x),
        "polyfit": jnp.polyfit(jnp.arange(n) + 0.5, x, 0, w=jnp.exp(x)),
        "roots": jnp.roots(jnp.where(x > 1, 0, x), strip_zeros=False),
        "welch": jax.scipy.signal.welch(x, 2.0, nperseg=n),
        "csd": jax.scipy.signal.csd(x, jnp.cos(x), nperseg=n),
        "eigh_tridiagonal": jax.scipy.linalg.eigh_tridiagonal(x, x[1:] + 2, eigvals_only=True),
    }


@pytest.mark.nightly
def test_elements_are_chosen_and_placed_as_of_the_row_alone():
    check_rows(chosen, ragged(lengths=(3, 5, 1, 4)))


def test_a_covariance_of_no_observations_is_none():
    check_rows(lambda x: jnp.cov(x), ragged(lengths=(3, 0, 1)), derivatives=False)


@pytest.mark.nightly
@pytest.mark.parametrize("lengths", [(3, 5, 1, 4), (2, 7)])
def test_polynomials_and_spectra_are_those_of_the_row_alone(lengths):
    check_rows(transformed, ragged(lengths=lengths), derivatives=False)
    names = "poly", "polydiv", "polyfit", "welch", "csd"
    differentiable = lambda x: {k: y for k, y in transformed(x).items() if k in names}
    check_rows(differentiable, ragged(lengths=lengths))


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


SHORT = {
    "partition": lambda x: jnp.partition(x, 2),
    "argpartition": lambda x: jnp.argpartition(x, -3),
    "polyfit": lambda x: jnp.polyfit(jnp.arange(x.shape[0]) + 0.5, x, 1),
    "polydiv": lambda x: jnp.polydiv(jnp.ones(3, x.dtype), x),
    "place": lambda x: jnp.place(jnp.ones(2, x.dtype), np.ones(2, bool), x, inplace=False),
}


def test_rows_that_a_function_does_not_take_have_no_result():
    x = ragged(lengths=(4, 0, 5), poison=False, spare=40)
    every = lambda x: {name: f(x) for name, f in SHORT.items()}
    traced = jax.jit(lambda n: bx.vmap(every)(bx.Ragged(x.data, n, 45)))(x.lengths)
    alone = [jax.jit(every)(x[i]) for i in (0, 2)]
    for name, y in traced.items():
        leaves = jax.tree.leaves(y, is_leaf=lambda y: isinstance(y, bx.Ragged))
        for k, leaf in enumerate(leaves):
            for i, row in enumerate(alone):
                expected = jax.tree.leaves(row[name])[k]
                np.testing.assert_allclose(leaf[2 * i], expected, 1e-4, err_msg=name)
            assert not np.any(np.asarray(leaf[1]) == np.asarray(leaf[1])), name


@pytest.mark.parametrize("name", SHORT)
def test_rows_of_known_lengths_that_a_function_does_not_take_raise_what_jax_raises(name):
    with pytest.raises(Exception) as alone:
        SHORT[name](jnp.zeros(0))
    with pytest.raises(type(alone.value)):
        bx.vmap(SHORT[name])(ragged(lengths=(4, 0, 5)))
