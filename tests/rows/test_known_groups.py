"""Rows of known lengths: in groups where that pays, without masks where all are equally long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.rows import regions

from support.oracle import example
from support.rows import attend, check_rows, images

WEIGHTS = jnp.linspace(-1, 1, 6).reshape(3, 2)
TAIL = np.minimum(np.random.default_rng(0).lognormal(3.2, 0.8, 96), 256).astype(int) + 1


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
def test_images_in_groups_are_those_of_a_loop(name, free_groups):
    # JAX's tangent of a maximum of no elements is NaN; here it is 0.
    modes = ("vjp",) if name == "numbers, pairs" else ("jvp", "vjp")
    options = dict(traced=False, modes=modes, in_axes=bx.ragged("h", "w"))
    check_rows(IMAGES[name], images(2, shapes=SHAPES), **options)


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


def test_outside_of_jit_one_bound_serves_all_rows(free_groups):
    """There the operations of each group would be compiled by themselves."""
    x, seen = bx.Ragged(jnp.ones(135), [5, 90, 40]), []

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


@pytest.mark.parametrize("fun", [attend, lambda x: jnp.tanh(jnp.exp(jnp.sin(jnp.tan(x))))])
def test_random_keys_next_to_numbers_have_spare_room(fun, free_groups, monkeypatch):
    """In groups, and where long arrays are made even."""
    monkeypatch.setattr(regions, "_MANY", 100)
    lengths = np.array([3, 90, 1, 9, 9, 2, 9, 80])
    keys = jax.random.split(jax.random.key(0), int(lengths.sum()) + 4)  # odd
    x = bx.Ragged(example((len(keys), 4)), lengths, 100)
    both = bx.vmap(lambda x, k: (fun(x), jax.vmap(jax.random.bits)(k), k[::-1]))
    run = jax.jit(lambda data, keys: both(x.with_data(data), x.with_data(keys))[1:])
    bits, back = run(x.data, keys)
    for got, of_keys, row in zip(back.rows(), bits.rows(), x.with_data(keys).rows(), strict=True):
        assert (got == row[::-1]).all()
        assert (of_keys == jax.vmap(jax.random.bits)(row)).all()
