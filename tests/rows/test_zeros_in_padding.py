"""Zeros in padding: which arrays are masked, and what the padding computes meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.rows import ragged

LENGTHS = (5, 1, 0, 9, 3, 12, 2)


def pair_energy(x):
    away = x[:, None] - x
    square = jnp.sum(away**2, -1)
    inverse = 1 / jnp.where(jnp.eye(x.shape[0], dtype=bool), 1.0, square) ** 2
    return jnp.sum(jnp.where(jnp.eye(x.shape[0], dtype=bool), 0.0, inverse - square)) / 2


def forces(x):
    return jax.value_and_grad(pair_energy)(x)


def scaled(x):
    """A factor for each element, of products with an infinite one in the same row."""
    factor = jnp.log(x[:, 0] - 1e9 * (x[:, 0] == 2.5))
    return jnp.sum(factor[:, None] * (2 * x), 0), jnp.sum(-(factor[:, None] * x) / 3.0, 0)


def shifted(x):
    """Factors that are infinite or no number in padding of zeros."""
    return (jnp.sum((1 / x[:, 0])[:, None] * jnp.log(jnp.abs(x)) * x, 0),)


def data(special):
    x = np.array(ragged(3, lengths=LENGTHS).data)
    x[7] = special  # of the fourth row
    return bx.Ragged(jnp.asarray(x), jnp.asarray(LENGTHS, jnp.int32), 13)


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"buckets": 2}, {}], ids=str)
@pytest.mark.parametrize("special", [1.0, np.inf, np.nan])
@pytest.mark.parametrize("fun", [forces, scaled, shifted])
def test_as_each_row_alone(fun, special, options):
    rows = data(special)
    got = jax.jit(bx.vmap(lambda x: fun(x), **options))(rows)
    alone = [jax.jit(fun)(row) for row in rows.rows()]
    for k, out in enumerate(got):
        given = out.rows() if isinstance(out, bx.Ragged) else out
        for a, each in zip(given, alone, strict=True):
            np.testing.assert_allclose(a, each[k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("special", [1.0, np.inf, np.nan])
@pytest.mark.parametrize("fun", [pair_energy, lambda x: shifted(x)[0].sum()])
def test_derivatives_as_of_each_row_alone(fun, special):
    rows = data(special)
    total = lambda rows: jnp.nansum(bx.vmap(fun, layout="padded")(rows))
    got = jax.jit(jax.grad(total, allow_int=True))(rows)
    gradient = jax.jit(jax.grad(lambda x: jnp.nansum(fun(x))))
    alone = [gradient(row) for row in rows.rows()]
    expected = np.concatenate([np.asarray(x) for x in alone])
    np.testing.assert_allclose(got.data[: len(expected)], expected, rtol=1e-4, atol=1e-4)


def masked_arrays(fun, *shape):
    rows = bx.Ragged(ragged(*shape, lengths=LENGTHS).data, jnp.asarray(LENGTHS, jnp.int32), 12)
    jaxpr = jax.make_jaxpr(bx.vmap(fun, layout="padded"))(rows)
    return [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "select_n"]


def test_no_mask_is_between_a_product_and_its_sums():
    def fun(x):
        ends = jnp.tanh(x[:, None, 0] - x[:, 0])
        product = ends[..., None] * (x[:, None] - x)
        return product.sum(0) - (-product).sum(1)

    # Its factors are masked, once for both sums.
    assert masked_arrays(fun, 3).count((len(LENGTHS), 12, 12, 3)) == 1


def test_sums_of_what_is_zero_already_are_not_masked():
    masked = masked_arrays(lambda x: jnp.sum(jnp.sin(-x) ** 2 / 3, 0), 3)
    assert masked == []


def test_an_axis_added_to_rows_needs_no_mask_in_reverse():
    rows = bx.Ragged(jnp.ones(34), jnp.asarray(LENGTHS, jnp.int32), 12)
    jaxpr = jax.make_jaxpr(bx.vmap(lambda x: jnp.tanh(x)[:, None], layout="padded"))(rows)
    cut = [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "safe_lanes"]
    assert (len(LENGTHS), 12, 1) not in cut
