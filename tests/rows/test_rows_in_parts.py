"""Rows that run in parts, by length or by device: each as if alone, whatever it shares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import at_once, same
from support.rows import attend, check_rows, check_rows_of_all, powers, ragged

# No, one and the most elements of a size bucket of three, one more, and one that has it for itself.
LENGTHS = (5, 11, 1, 11, 0, 3, 20, 11, 1, 6)
WEIGHTS = jnp.linspace(-1, 1, 6).reshape(3, 2)
# Options of `bx.vmap`, and whether lengths are traced.
PARTS = {
    "buckets": ({"buckets": 3}, False),
    "size buckets": ({"buckets": 3}, True),
    "groups": ({}, False),
    "one length": ({"layout": "grouped"}, False),
    "devices": ({"mesh": "all"}, True),
}
in_all_parts = pytest.mark.parametrize("part", PARTS)


pytestmark = pytest.mark.usefixtures("free_groups")


def rows(*trailing, **options):
    return ragged(*trailing, **{"lengths": LENGTHS, **options})


def check(part, fun, *args, all_of=check_rows, **options):
    own, traced = PARTS[part]
    all_of(fun, *args, traced=traced, reverse_traced=traced, **own, **options)


FUNCTIONS = {
    "attention between networks": lambda x: jnp.tanh(attend(jnp.tanh(x @ WEIGHTS)) @ WEIGHTS.T),
    "reduced": lambda x: (attend(x).sum(0), (attend(x) > 0).all(), x.sum()),
    "sorted and added up": lambda x: jnp.cumsum(jnp.sort(x - x.mean(0), 0), 0),
    "other sizes": lambda x: (powers(x)[1:], jnp.concatenate([attend(x), x]), x @ x.T),
    "of the shape alone": lambda x: (jnp.arange(x.shape[0]) * 2, jnp.asarray(x.shape[0])),
    "a scan": lambda x: lax.scan(lambda s, y: (jnp.sin(s + y), s), jnp.zeros(3), x),
    "a mask of all pairs": lambda x: jnp.where(jnp.abs(x @ x.T) > 1, x @ x.T, 0).sum(1),
}


@in_all_parts
def test_as_each_row_alone(part):
    check(part, FUNCTIONS, rows(3), all_of=check_rows_of_all)


@in_all_parts
@pytest.mark.parametrize(
    "lengths", [(7,) * 5, (0, 0, 7), (0, 0), (7,), (1, 2, 3, 4, 5, 6, 7, 8)], ids=str
)
@pytest.mark.each_commit(5)
def test_lengths_of_all_kinds(part, lengths):
    check(part, lambda x: (powers(x), x.sum(0), x[1:]), rows(2, lengths=lengths))


@in_all_parts
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.each_commit(3)
def test_the_ragged_axis_may_be_any(part, axis):
    check(part, lambda x: jnp.sort(x, axis) * 2, rows(2, 3, axis=axis))


@in_all_parts
def test_what_rows_have_of_their_own_what_they_share_and_another_size(part):
    def f(x, y, scale, w):
        pairs = jax.nn.softmax(jnp.sin(x @ y.T)).T
        return pairs @ (x * scale) @ jnp.sin(w), (y @ w).sum(0) * scale, jnp.cos(w)

    y = rows(3, lengths=LENGTHS[::-1], seed=1)
    args = rows(3), y, jnp.linspace(0.1, 1, 10), WEIGHTS
    check(part, f, *args, in_axes=(0, 0, 0, None), modes=("vjp",))


@in_all_parts
def test_outputs_go_where_out_axes_says(part):
    w, (options, traced) = jnp.ones(2), PARTS[part]
    reductions = tuple(map(bx.Reduce, ["sum", "mean", "max", "min", "prod"]))
    fun = lambda x: (attend(x).sum(0), jnp.sin(w), x, 2 * w, *[x.sum(0)] * 5)
    specs = dict(out_axes=(1, None, bx.AUTO, bx.AUTO, *reductions))
    x = rows(2, poison=False)
    every = [bx.vmap(fun, **specs, **options), bx.vmap(fun, layout="padded", **specs)]
    if traced:
        got, expected = at_once(*every)(x)
    else:
        got, expected = at_once(*(lambda data, f=f: f(x.with_data(data)) for f in every))(x.data)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)
    assert got[2].max_length == x.max_length


@in_all_parts
def test_random_keys(part):
    def f(key, x):
        folded = jax.random.key_data(jax.random.fold_in(key, 2))
        return jnp.sort(x, 0) * jax.random.normal(key, (3,)), folded

    check(part, f, jax.random.split(jax.random.key(0), 10), rows(3), derivatives=False)


@pytest.mark.parametrize("part", ["size buckets", "groups"])
@pytest.mark.each_commit(1, "groups")
def test_rows_under_other_transformations(part):
    x, (options, traced) = ragged(3, lengths=(1, 6, 2, 5, 3), poison=False), PARTS[part]
    scales = np.array([0.3, 0.5], x.data.dtype)

    def run(lengths, vmap=jax.vmap, **options):
        def loss(w, scale):
            f = lambda row: powers(row * scale @ w).sum(0)
            return (bx.vmap(f, **options)(bx.Ragged(x.data, lengths, x.max_length)) ** 2).sum()

        return [
            vmap(jax.grad(jax.checkpoint(loss), (0, 1)), (None, 0))(WEIGHTS, scales),
            jax.hessian(loss)(WEIGHTS, scales[0]),
            jax.jvp(loss, (WEIGHTS, scales[0]), (WEIGHTS, 1.0)),
        ]

    given = [jnp.asarray(x.lengths)] if traced else []
    got, under, expected = at_once(
        lambda n=x.lengths: run(n, **options),
        lambda n=x.lengths: run(n, bx.vmap, **options),
        lambda n=x.lengths: run(n, layout="padded"),
    )(*given)
    for each in (got, under):
        same(each, expected, dict(rtol=1e-3, atol=1e-4))


@pytest.mark.parametrize("part", ["buckets", "size buckets", "devices"])
def test_rows_without_any_elements(part):
    f = lambda x: (attend(x), x.sum(), x[1:], x.prod(0))
    check(part, f, ragged(3, lengths=(0, 0, 0), poison=False))
    check(part, attend, rows(0))
