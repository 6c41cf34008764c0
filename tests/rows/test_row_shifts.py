"""Rows that are a few elements shorter than others, and indices into a row, packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.jaxprs.bodies import with_inside
from batchax.rows.layouts import Costs, choose_packed, flatten
from batchax.rows.sizes import Sizes

from support.oracle import same
from support.rows import check_rows_of_all, ragged, ways

LONG = (2, 5, 3, 9)  # of a single element there is no difference to compare with
BOTH = ways("packed", "auto")

FUNCTIONS = {
    "differences": lambda x: jnp.diff(x, axis=0),
    "of logarithms": lambda x: jnp.log(jnp.abs(x[1:]) / jnp.abs(x[:-1])).sum(0),
    "gradient of differences": jax.grad(lambda x: jnp.sum(jnp.sin(jnp.diff(x, axis=0)))),
    "in another order": lambda x: x[jnp.argsort(x[:, 0])],
    "out of bounds": lambda x: jnp.take(x, jnp.arange(x.shape[0]) + 1, 0, mode="clip"),
    "filled": lambda x: x.at[jnp.arange(x.shape[0]) + 1].get(mode="fill", fill_value=7),
    "added": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 1]) // 2].add(jnp.sin(x)),
    "dropped": lambda x: x.at[jnp.arange(x.shape[0]) + 2].mul(3.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shifts_give_what_each_row_alone_gives(name):
    check_rows_of_all({name: FUNCTIONS[name]}, ragged(3, lengths=LONG), ways=BOTH)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_shorter_than_a_shift_have_nothing_left(layout):
    x = ragged(3, lengths=(0, 1, 2, 4, 0, 1))
    for by in (1, 2, 3):
        out = jax.jit(bx.vmap(lambda x, by=by: x[by:] - x[:-by], layout=layout))(x)
        for got, row in zip(out.rows(), x.rows(), strict=True):
            same(got, row[by:] - row[: max(len(row) - by, 0)])


@pytest.mark.parametrize("name", ["differences", "in another order", "added"])
def test_they_need_no_padding(name):
    (n,) = jax.export.symbolic_shape("n")
    staged = jax.make_jaxpr(FUNCTIONS[name])(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    program = flatten(staged, {"n": 100})
    costs = Costs(Sizes({"n": 1000}, {}), Sizes({"n": 100}, {}), 64)
    chosen = choose_packed(program, [True], costs)
    moves = {"gather", "slice", "scatter-add", "sub"}
    steps = zip(program.steps, chosen, strict=True)
    assert {packed for step, packed in steps if step.eqn.primitive.name in moves} == {True}


FOUND = np.random.default_rng(1)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.5, 1.0])
def test_what_is_found_among_many_elements(share):
    there = FOUND.random((5, 700)) < share
    x = jnp.asarray(FOUND.normal(size=(5, 700)), float)

    def f(there, x):
        (at,) = bx.nonzero(there)
        return at, jnp.sum(jnp.sin(x[at]) * at), x[at][1:]

    at, total, rest = jax.jit(bx.vmap(f))(there, x)
    for k in range(5):
        (own,) = np.nonzero(there[k])
        np.testing.assert_array_equal(at[k], own)
        np.testing.assert_allclose(total[k], np.sum(np.sin(x[k][own]) * own), 1e-4, 1e-2)
        np.testing.assert_array_equal(rest[k], x[k][own][1:])
    loss = lambda x: bx.vmap(lambda t, x: jnp.sum(jnp.sin(bx.compress(t, x))))(there, x).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), np.where(there, np.cos(x), 0), 1e-5)


def test_few_that_are_found_run_with_little_room():
    def f(x):
        return jnp.sum(jnp.sin(bx.compress(x > 2, x)))

    program = jax.make_jaxpr(bx.vmap(f))(jnp.zeros((5, 1600)))
    every = list(with_inside(program.eqns))
    sines = {e.outvars[0].aval.shape for e in every if e.primitive.name == "sin"}
    assert sines == {(5, 100), (1, 1600)}
    assert "cond" in {e.primitive.name for e in every}
