"""Rows of traced lengths in size buckets: asked for by `buckets=`, or chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.rows.size_classes import SizeClasses

from support.oracle import example
from support.rows import attend, ragged

# No, one and the most elements of a class of three, one more, and one that has a class for itself.
LENGTHS = (5, 11, 1, 11, 0, 3, 20, 11, 1, 6)


def rows(*trailing, **options):
    return ragged(*trailing, **{"lengths": LENGTHS, **options})


def test_there_are_as_many_blocks_as_rows_need():
    generator = np.random.default_rng(0)
    for _ in range(300):
        count, bound = int(generator.integers(1, 40)), int(generator.integers(1, 70))
        kinds = [generator.integers(0, bound + 1, count), generator.geometric(0.2, count)]
        lengths = [np.minimum(kinds[int(generator.integers(2))], bound) for _ in range(2)]
        bounds = {"n": bound, "m": max(int(lengths[1].max()), 1)}
        room = {"n": int(lengths[0].sum()), "m": int(lengths[1].sum())}
        most, rows = int(generator.integers(1, 9)), int(generator.integers(1, 5))
        classes = SizeClasses.of(bounds, room, count, most, rows)
        of_row = [
            max(
                k
                for k, b in enumerate(classes.bounds)
                if k == 0 or (lengths[0][i] <= b["n"] and lengths[1][i] <= b["m"])
            )
            for i in range(count)
        ]
        filled = np.bincount(of_row, minlength=len(classes.rows))
        assert sum(-(-filled // np.array(classes.rows))) <= classes.blocks


@pytest.mark.parametrize(
    ("bound", "most", "greatest"), [(140, 4, 144), (140, 3, 140), (62, 4, 64), (22, 3, 22)]
)
def test_rows_of_each_class_fill_a_block_where_a_slightly_greater_bound_does(bound, most, greatest):
    classes = SizeClasses.of({"n": bound}, {"n": 10 * bound}, 100, most, 2)
    assert classes.bounds[0]["n"] == greatest
    elements = {r * b["n"] for r, b in zip(classes.rows, classes.bounds, strict=True)}
    assert len(elements) == 1 or bound == greatest


def test_each_class_computes_with_its_own_bound():
    x = rows(2)
    text = str(jax.make_jaxpr(bx.vmap(attend, buckets=3))(x))
    for number, bound in ((1, 22), (2, 11), (4, 5)):
        assert f"[{number},{bound},{bound}]" in text
    assert "[10,22,22]" not in text


def in_classes(fun, lengths, room, **options):
    """Whether rows are put in size buckets where nobody asked for it."""
    x = bx.Ragged(jnp.zeros((room, 32)), jnp.asarray(lengths), 256)
    text = str(jax.make_jaxpr(bx.vmap(fun, **options))(x))
    return "chunk_loop" in text


TAIL = np.minimum(np.random.default_rng(0).lognormal(3.2, 0.8, 96), 256).astype(int) + 1


TENS = jnp.array([0, 10])  # the same in each block


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "complex64"])
def test_blocks_of_any_type_and_of_nothing_are_read(dtype):
    x, nothing = rows(2, poison=False).astype(dtype), jnp.zeros((len(LENGTHS), 0))

    def fun(x, nothing):
        count = jnp.where(x != 0, 1, 0).sum()
        in_first = jnp.where(x[:, 0] != 0, 1, 0)
        tens = lax.scan(lambda sum, i: (sum + TENS[i], None), 0, in_first)[0]
        return x[::-1], count, jax.random.key(count), tens, nothing.sum()

    traced = bx.Ragged(x.data, jnp.asarray(x.lengths), x.max_length)
    back, counts, keys, tens, sums = jax.jit(bx.vmap(fun, buckets=2))(traced, nothing)
    assert (jax.random.key_data(keys)[:, -1] == counts).all()
    for row, reversed_row, count, ten in zip(x.rows(), back.rows(), counts, tens, strict=True):
        assert (reversed_row == row[::-1]).all()
        assert count == (row != 0).sum()
        assert ten == 10 * (row[:, 0] != 0).sum()
    assert (sums == 0).all()


def test_classes_of_scans_follow_from_what_steps_take_for_each_row():
    """Each block repeats what rows share, so a scan of which that is much has one bound."""
    w = jnp.ones((32, 32)) / 32

    def recurrent(x):
        step = lambda h, e: (jnp.tanh(w @ jnp.tanh(w @ h)) + e, None)
        return lax.scan(step, jnp.zeros(32), x)[0]

    def sharing(x):
        def step(state, e):
            h, s = state
            return (h * s[0] + e, jnp.tanh(w @ s)), None

        return lax.scan(step, (jnp.zeros(32), w), x)[0][0]

    lengths = np.full(256, 20)
    lengths[7] = 120
    assert in_classes(recurrent, lengths, int(lengths.sum()))
    assert not in_classes(sharing, lengths, int(lengths.sum()))


def test_classes_are_chosen_where_no_lengths_with_that_sum_would_lose_much():
    room = int(TAIL.sum())
    assert in_classes(attend, TAIL, room)
    assert not in_classes(attend, TAIL, 96 * 256)  # any row may be of the greatest length
    assert in_classes(attend, TAIL, 96 * 140)  # some must be shorter than half of it
    assert not in_classes(jnp.tanh, TAIL, room)  # nothing is padded
    cheap = lambda x: jnp.cumsum(x[:, 0])  # not worth compiling it so often
    assert not in_classes(cheap, TAIL, room)
    assert not in_classes(attend, TAIL, room, layout="padded")
    together = lambda x: attend(x) + lax.psum(x.sum(), "rows")
    assert not in_classes(together, TAIL, room, axis_name="rows")
    assert not in_classes(lambda x: (attend(x), jax.debug.print("")), TAIL, room)


def test_chosen_classes_compute_what_padded_rows_do():
    x = ragged(32, lengths=TAIL[:24], spare=0)
    w = example((32, 32)) / 6

    def loss(w, data, layout):
        out = bx.vmap(lambda row, w: attend(row @ w) @ w, (0, None), layout=layout)
        return (out(bx.Ragged(data, x.lengths, 256), w).data ** 2).sum()

    given = w, x.data
    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, layout=layout), (0, 1)))(*given)
        for layout in ("auto", "padded")
    )
    assert in_classes(lambda row: attend(row @ w) @ w, TAIL[:24], x.data.shape[0])
    tree_close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-4)
    jax.tree.map(tree_close, got, expected)


@pytest.mark.parametrize(
    ("match", "fun", "options"),
    [
        ("has a host callback", lambda x: jax.debug.print("{}", x.sum()), {}),
        ("batch_size splits rows into chunks", attend, {"batch_size": 2}),
        ("axis_name='rows'", attend, {"axis_name": "rows"}),
    ],
)
def test_what_needs_all_rows_or_their_order_is_refused(match, fun, options):
    with pytest.raises(bx.UnsupportedError, match=match):
        jax.jit(bx.vmap(fun, buckets=3, **options))(rows(3))
