"""Rows of equal length run together, each as if alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.known_lengths import with_known_lengths
from support.mistakes import check_raises, raising
from support.rows import check_rows, ragged

LENGTHS = (3, 5, 1, 3, 5, 3)
WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2)), float)


def rows(*trailing, lengths=LENGTHS, **options):
    return ragged(*trailing, lengths=lengths, **options)


def grouped(fun, **options):
    return with_known_lengths(bx.vmap(fun, layout="grouped", **options))


def polynomial(x):
    """Of a degree that Python chooses by the length."""
    return x**2 if len(x) > 3 else x @ x.T @ x


FUNCTIONS = {
    "eigenvalues": lambda x: jnp.linalg.eigvalsh(x @ x.T + jnp.diag(jnp.arange(len(x)) * 1.0)),
    "a branch on the length": polynomial,
    "a loop over the length": lambda x: sum((x[i] * i for i in range(len(x))), jnp.zeros(3)),
    "halves": lambda x: x[: len(x) // 2],
    "several outputs": lambda x: {"sum": x.sum(), "rows": (x, x.argmax(0))},
}


DIFFERENTIATED = {"fourier transform", "eigenvalues", "a branch on the length", "halves"}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(6)
def test_a_row_is_computed_as_if_alone(name):
    ways = dict(traced=False, derivatives=name in DIFFERENTIATED, eager=name == "several outputs")
    check_rows(FUNCTIONS[name], rows(3), layout="grouped", **ways)


# What outputs are like does not depend on which lengths a batch has.

KINDS = {
    "several lengths": LENGTHS,
    "one length": (3, 3),
    "one row": (4,),
    "rows of no elements": (0, 2, 0),
    "all empty": (0, 0),
    "no rows": (),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_changes_with_the_length_is_ragged_in_any_batch(name):
    x = rows(3, lengths=KINDS[name])

    def fun(x):
        n = x.shape[0]
        return x, x[: n // 2, 0], jnp.arange(n), x.sum(0), jnp.zeros(n, bool), jnp.float32(n)

    outs = grouped(fun)(x)
    assert [isinstance(out, bx.Ragged) for out in outs] == [True, True, True, False, True, False]
    assert outs[0].max_length == x.max_length
    outs = jax.device_get(outs)
    every = jax.jit(lambda: [fun(x[i]) for i in range(len(x))])()
    for i, alone in enumerate(every):
        for out, expected in zip(outs, alone, strict=True):
            assert out[i].dtype == expected.dtype
            np.testing.assert_allclose(out[i], expected, rtol=1e-6)
    assert outs[3].shape == (len(x), 3)


def test_none_is_for_what_all_rows_share():
    x = rows(3)
    w = jnp.asarray(WEIGHTS)
    got = grouped(lambda x: (jnp.sin(w), x.sum()), out_axes=(None, 0))(x)[0]
    np.testing.assert_array_equal(got, jnp.sin(w))
    for depends in (lambda x: x.sum(), lambda x: w * x.shape[0], lambda x: jnp.sum(w[: len(x)])):
        with pytest.raises(bx.AxisError, match=r"out depends on the batch.*out_axes says None"):
            grouped(depends, out_axes=None)(x)
    assert grouped(lambda x: (x.sum(), 7), out_axes=(0, None))(x)[1] == 7
    with pytest.raises(bx.AxisError, match=r"1 for one length and 3 for another.*None for it"):
        grouped(lambda x: (x.sum(), len(x)), out_axes=(0, None))(x)


def refused(fun, **options):
    return lambda: grouped(fun, **options)(rows())


REFUSED = {
    bx.UnsupportedError: {
        "uses the axis 'rows', whose lanes are all rows": refused(
            lambda x: x.sum() - jax.lax.pmean(x.sum(), "rows"), axis_name="rows"
        ),
        "same number of arrays": refused(lambda x: (x, x) if len(x) > 3 else (x,)),
        r"int8\[\] for a row of length 1, and float(32|64)\[\] for one of length 5": refused(
            lambda x: x.sum() if len(x) > 3 else jnp.int8(x.argmax())
        ),
    },
    bx.AxisError: {
        r"Reduce\('sum'\) for out": refused(jnp.sin, out_axes=bx.Reduce("sum")),
        "None for out": refused(jnp.sin, out_axes=None),
    },
}


@raising(REFUSED)
def test_what_groups_cannot_do_is_refused(call, error, match):
    check_raises(call, error, match)


def test_traced_lengths_are_refused_with_what_to_do():
    with pytest.raises(bx.UnsupportedError, match=r"lengths are traced here.*outside of jit"):
        jax.jit(grouped(lambda x: x.sum()))(rows())


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
def test_a_reference_of_the_size_of_a_row_is_refused_or_grouped(layout):
    def fun(x):
        ref = jax.new_ref(x * 2.0)
        ref[0] = 7.0
        return ref[...]

    batched = bx.vmap(fun, layout=layout)
    with pytest.raises(bx.UnsupportedError, match=r"(?s)`new_ref`.*lengths are traced here"):
        jax.jit(batched)(jax.tree.map(jnp.asarray, rows()))
    got = with_known_lengths(batched)(rows())
    for mine, row in zip(got.rows(), rows().rows(), strict=True):
        np.testing.assert_array_equal(mine, (row * 2).at[0].set(7))


def test_a_reference_that_has_a_part_for_each_row_is_refused():
    fun = lambda x, ref: x.sum() + ref[0]
    with pytest.raises(bx.UnsupportedError, match=r"ref is a reference.*in groups"):
        bx.vmap(fun, layout="grouped")(rows(), jax.new_ref(jnp.ones((6, 2))))


def test_what_a_function_raises_for_a_length_no_row_has_does_not_matter():
    def fun(x):
        assert len(x) <= 5, "too long"
        return x[:2].sum(), x

    total, same = grouped(fun)(rows())
    assert total.shape == (6,)
    np.testing.assert_array_equal(same.data, rows().data[:20])


# Taking apart and putting together.
