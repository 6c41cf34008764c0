"""Rows of known lengths: in groups where that pays, without masks where all are equally long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.rows import size_classes

from support.oracle import at_once, example, same
from support.rows import check_rows, images, ragged

LENGTHS = (5, 11, 1, 11, 0, 3, 20, 11, 1, 6)
WEIGHTS = jnp.linspace(-1, 1, 6).reshape(3, 2)
TAIL = np.minimum(np.random.default_rng(0).lognormal(3.2, 0.8, 96), 256).astype(int) + 1


@pytest.fixture
def always(monkeypatch):
    """Groups cost nothing to compile, so that there are three, if any gain anything."""
    monkeypatch.setattr(size_classes, "_RUNS", float("inf"))
    monkeypatch.setattr(size_classes, "_MOST_GROUPS", 3)


def rows(*trailing, **options):
    return ragged(*trailing, **{"lengths": LENGTHS, **options})


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


def powers(x):
    """What is not finite where a row is filled up with zeros."""
    return jnp.tanh(x @ x.T) @ jnp.log(jnp.abs(x))


FUNCTIONS = {
    "arrays of pairs, sizes that are computed": lambda x: (powers(x)[1:], x @ x.T),
    "numbers, sorts": lambda x: (powers(x).sum(0), jnp.sort(x, 0), (attend(x) > 0).all()),
    "regions that alternate": lambda x: jnp.tanh(attend(jnp.tanh(x)) @ WEIGHTS).cumsum(0) + 1,
    "a scan": lambda x: lax.scan(lambda s, y: (s * y + 1, s), x.sum(0), jnp.sin(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(2)
def test_rows_in_groups_are_those_of_a_loop(name, always):
    check_rows(FUNCTIONS[name], rows(3), traced=False, layout="auto")


@pytest.mark.each_commit(1)
@pytest.mark.parametrize("lengths", [(7,) * 10, (0, 0, 7), (4, 4, 2, 2, 4)], ids=str)
def test_lengths_of_all_kinds(lengths, always):
    check_rows(powers, rows(2, lengths=lengths), traced=False)


def test_what_rows_have_of_their_own_and_share_and_another_size(always):
    def f(x, y, scale, w):
        pairs = jax.nn.softmax(jnp.sin(x @ y.T)).T
        return pairs @ (x * scale) @ jnp.sin(w), (y @ w).sum(0) * scale, jnp.cos(w)

    y = rows(3, lengths=LENGTHS[::-1], seed=1)
    axes = (0, 0, 0, None)
    check_rows(f, rows(3), y, jnp.linspace(0.1, 1, 10), WEIGHTS, in_axes=axes, traced=False)


SHAPES = ((2, 9), (9, 2), (0, 4), (3, 8), (8, 3), (2, 2), (9, 9), (8, 2), (1, 1), (3, 9))
KERNEL = np.random.default_rng(1).normal(size=(3, 2, 2, 2))


def filtered(x):
    dims = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.asarray(KERNEL, x.dtype)
    return lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=dims)[0]


IMAGES = {
    "packed between": lambda x: jnp.tanh(filtered(jnp.log(jnp.abs(filtered(x))))),
    "other shapes": lambda x: (
        jnp.cumsum(x, 1).swapaxes(0, 1),
        (x @ WEIGHTS[:2]).sum(1),
        x[1:, 2:],
    ),
    "numbers, pairs": lambda x: (filtered(x).sum(0), jnp.sort(x, 0).max((0, 1), initial=0.0)),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.each_commit(2)
def test_images_in_groups_are_those_of_a_loop(name, always):
    check_rows(IMAGES[name], images(2, shapes=SHAPES), traced=False, in_axes=bx.ragged("h", "w"))


def test_pairs_and_another_size_beside_images(always):
    def f(image, words):  # of shapes (h, w) and (w, 3)
        scores = jax.nn.softmax(image @ words, 0)
        return scores @ scores.T, scores.T @ jnp.sin(image), image.T @ image

    y = ragged(3, lengths=[w for _, w in SHAPES])
    check_rows(
        f, images(shapes=SHAPES), y, traced=False, in_axes=(bx.ragged("h", "w"), bx.ragged("w"))
    )


def test_random_keys_and_reductions(always):
    def f(key, x):
        drawn = jnp.sort(x, 0) * jax.random.normal(key, (2,))
        return drawn, jax.random.fold_in(key, 2), jnp.cumsum(x).sum(), WEIGHTS

    x, keys = rows(2), jax.random.split(jax.random.key(0), 10)
    out_axes = (bx.AUTO, bx.AUTO, bx.Reduce("mean"), None)

    def run(layout):
        drawn, *others = bx.vmap(f, out_axes=out_axes, layout=layout)(keys, x)
        return drawn.to_padded(), jax.random.key_data(others[0]), *others[1:], drawn.lengths

    got, expected = at_once(lambda: run("auto"), lambda: run("padded"))()
    same(got, expected, dict(rtol=1e-5))


def test_groups_under_other_transformations(always):
    x, scales = rows(3, poison=False), np.array([0.3, 0.5], float)

    def loss(w, scale, layout):
        out = bx.vmap(lambda row: powers(row * scale @ w).sum(0), layout=layout)(x)
        return (jnp.where(jnp.isfinite(out), out, 0) ** 2).sum()

    def run(layout):
        f = lambda w, scale: loss(w, scale, layout)
        slopes = jax.vmap(jax.grad(jax.checkpoint(f)), (None, 0))(WEIGHTS, scales)
        return slopes, jax.jvp(f, (WEIGHTS, 0.5), (WEIGHTS, 1.0))

    got, expected = at_once(lambda: run("auto"), lambda: run("padded"))()
    same(got, expected, dict(rtol=1e-3, atol=1e-4))


def program(fun, x, **options):
    """The program of a call whose lengths are known."""
    return str(jax.make_jaxpr(lambda data: bx.vmap(fun, **options)(x.with_data(data)))(x.data))


@pytest.mark.parametrize("layout", ["auto", "padded", "packed"])
def test_rows_that_are_known_to_be_equally_long_have_no_masks(layout):
    equal = bx.Ragged(example((12, 3)), [4, 4, 4])
    text = program(lambda x: (attend(x).mean(0), jnp.cumsum(x, 0), x @ x.T), equal, layout=layout)
    for masked in ("select_n", "iota", "gather", "safe_lanes"):
        assert masked not in text
    assert "select_n" in str(jax.make_jaxpr(bx.vmap(attend, layout=layout))(equal))
    check_rows(attend, equal, traced=False, eager=True, layout=layout)
    flipped = bx.Ragged(example((3, 12)), [4, 4, 4], axis=1)
    check_rows(lambda x: x @ jnp.sort(x.T, 0), flipped, traced=False, layout=layout)


def test_images_that_are_known_to_be_equally_large_have_no_masks():
    equal = images(shapes=((2, 3), (2, 3)), spare=0)
    equal = bx.Ragged(equal.data[:12], equal.lengths, equal.max_length, axis=(0, 1))
    f = lambda x: (x.mean(1), jnp.flip(x, 0) @ x.T)
    assert "select_n" not in program(f, equal)
    check_rows(f, equal, traced=False, derivatives=False)


def in_groups(fun, x, **options):
    """Whether rows of known lengths run in groups where nobody asked for it."""
    return f"[{len(x)},{x.max_length}" not in program(fun, x, **options)


def test_groups_are_chosen_where_they_cost_less():
    x = bx.Ragged(jnp.ones((int(TAIL.sum()), 32)), TAIL)
    assert in_groups(attend, x)
    assert not in_groups(lambda x: jnp.cumsum(x[:, 0]), x)  # not worth compiling it so often
    assert not in_groups(attend, x, layout="padded")
    assert not in_groups(lambda x: attend(x) + lax.psum(x.sum(), "i"), x, axis_name="i")
    assert not in_groups(lambda x: (attend(x), jax.debug.print(""))[0], x)
    bounded = bx.Ragged(x.data, TAIL, 10_000)  # nobody pays for the bound
    assert ",10000" not in program(attend, bounded)


def test_groups_of_images_have_a_size_along_each_axis():
    sizes = np.random.default_rng(0).choice([8, 64], (256, 2), p=[0.8, 0.2])
    pixels = jnp.ones((int(sizes.prod(1).sum()), 2))
    x = bx.Ragged(pixels, tuple(sizes.T), axis=(0, 1))
    text = program(lambda x: filtered(filtered(x)).mean((0, 1)), x)
    for each, rows in zip(*np.unique(sizes, axis=0, return_counts=True), strict=True):
        assert f"[{rows},{each[0]},{each[1]},2]" in text
    assert ",8,64,2]" not in program(filtered, x, layout="padded")


def test_outside_of_jit_one_bound_serves_all_rows(always):
    """There the operations of each group would be compiled by themselves."""
    x, seen = bx.Ragged(jnp.ones(103), [5, 90, 8]), []

    @bx.custom_vmap
    def looked_at(x):
        return x

    @looked_at.def_vmap
    def _(size, batched, x):
        seen.append(size)
        return x, batched[0]

    alone = lambda x: looked_at(jnp.cumsum(x[:, None] * x, 1).sum())
    f = lambda data: bx.vmap(alone)(x.with_data(data))
    jax.jvp(f, (x.data,), (x.data,))
    assert set(seen) == {len(x)}
    seen.clear()
    jax.make_jaxpr(f)(x.data)
    assert set(seen) == {1}  # each in a group of its own


def test_buckets_are_as_many_as_asked_for():
    x = bx.Ragged(jnp.ones((int(TAIL.sum()), 32)), TAIL)
    sizes = set(bx.bucket(x, 2).sizes)
    assert all(f",{n},{n}]" in program(attend, x, buckets=2) for n in sizes)
