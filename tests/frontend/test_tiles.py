"""`tiles`: blocks of an axis as lanes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.kinds_of_axis import check_kind
from support.oracle import agree, example, same

X = example((12, 5), seed=1)


def running(block):
    """A row depends on those before it in its block; the shape is kept."""
    return jnp.cumsum(jnp.sin(block), 0) * block.sum()


def in_blocks(f, x, size, axis=0):
    """`f` of each block, by a Python loop; the last block may be short."""
    starts = range(0, x.shape[axis], size)
    parts = [f(lax.slice_in_dim(x, i, min(i + size, x.shape[axis]), axis=axis)) for i in starts]
    return jnp.concatenate(parts, axis)


@pytest.mark.parametrize("spec", [bx.tiles(size=4), bx.tiles(count=3)])
def test_blocks_in_every_way(spec):
    check_kind(
        lambda **options: bx.vmap(running, spec, bx.tiles(), **options),
        lambda x: in_blocks(running, x, 4),
        X,
    )


@pytest.mark.parametrize(("axis", "out"), [(1, 1), (-1, 0), (0, -1), (-2, 1)])
@pytest.mark.each_commit(2)
def test_of_any_axis(axis, out):
    x = example((8, 6), seed=2)
    fun = lambda block: jnp.tanh(block).T if (axis % 2) != (out % 2) else jnp.tanh(block)

    def reference(x):
        blocks = jnp.split(x, x.shape[axis] // 2, axis)
        return jnp.concatenate([fun(b) for b in blocks], out)

    make = lambda **options: bx.vmap(fun, bx.tiles(2, axis=axis), bx.tiles(axis=out), **options)
    check_kind(make, reference, x)


def test_blocks_beside_other_kinds():
    """Blocks of one argument, lanes of another, a dict by name, and reductions of blocks."""
    y, w = example((4,), seed=3), example((5,), seed=4)
    fun = lambda x, y, w: {"scaled": x * y, "norm": (x @ w).sum(), "first": x[0]}

    def make(**options):
        in_axes = {"x": bx.tiles(3), "w": None}
        out_axes = {"scaled": bx.tiles(size=3), "norm": bx.Reduce("mean")}
        return bx.vmap(fun, in_axes, out_axes, **options)

    def reference(x, y, w):
        each = [fun(x[3 * i : 3 * i + 3], y[i], w) for i in range(4)]
        return {
            "scaled": jnp.concatenate([e["scaled"] for e in each]),
            "norm": jnp.stack([e["norm"] for e in each]).mean(),
            "first": jnp.stack([e["first"] for e in each]),
        }

    check_kind(make, reference, X, y, w)


@pytest.mark.parametrize("size", [5, 7, 12, 20])
@pytest.mark.compiles(60)
@pytest.mark.each_commit(2)
def test_a_short_last_block(size):
    """The last block has its own length; also where blocks turn out to fit."""
    spec, out = bx.tiles(size, last="short"), bx.tiles(last="short")
    check_kind(
        lambda **options: bx.vmap(running, spec, out, **options),
        lambda x: in_blocks(running, x, size),
        X,
        ways={"all at once": {}, "chunks": {"batch_size": 2}, "compact": {"divergence": "compact"}},
    )


def test_nothing_is_copied():
    """The same program as a reshape by hand."""
    x = example((64, 8), seed=8)
    by_hand = lambda x: jax.vmap(running)(x.reshape(8, 8, 8)).reshape(64, 8)
    assert bx.same_program(bx.vmap(running, bx.tiles(8), bx.tiles()), by_hand, x)


def test_no_elements_and_all_in_one():
    assert bx.vmap(running, bx.tiles(4), bx.tiles())(jnp.zeros((0, 5))).shape == (0, 5)
    totals = bx.vmap(lambda block, k: block.sum() + k, (bx.tiles(count=3), 0))
    same(totals(jnp.zeros(0), jnp.arange(3.0)), jnp.arange(3.0))  # three blocks of no elements
    agree(bx.vmap(running, bx.tiles(12), bx.tiles()), running, X)
    agree(bx.vmap(running, bx.tiles(1), bx.tiles()), lambda x: in_blocks(running, x, 1), X)
    (only,) = jax.jit(bx.vmap(running, bx.tiles(50, last="short")))(X).rows()
    same(only, jax.jit(running)(X))
    assert bx.vmap(running, bx.tiles(50, last="short"))(X).max_length == 12  # padded to no more


def test_scan_over_blocks():
    def step(carry, block):
        carry = carry + block.sum(0)
        return carry, block * carry

    init = jnp.zeros(5)
    got = bx.scan(step, bx.tiles(4), bx.tiles())(init, X)
    carry, ys = lax.scan(step, init, X.reshape(3, 4, 5))
    same(got, (carry, ys.reshape(12, 5)))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_on_a_mesh(options):
    """Blocks of shards, where types say how arrays are sharded and where they do not."""
    devices = jax.devices()[:4]
    x = example((32, 3), seed=9)
    expected = in_blocks(running, x, 4)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("d",), (kind,), devices=devices)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
            got = jax.jit(bx.vmap(running, bx.tiles(4), bx.tiles(), **options))(sharded)
            same(jax.device_get(got), expected)


def test_tiles_that_devices_cannot_have_equal_shares_of_are_refused():
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(example((8,)), NamedSharding(mesh, P("d")))
        with pytest.raises(bx.UnsupportedError, match="equal shares of 2 tiles"):
            bx.vmap(running, bx.tiles(4))(x)
        with pytest.raises(bx.UnsupportedError, match=r"\(tiles of 3, the last of 2\).*reshard"):
            bx.vmap(running, bx.tiles(3, last="short"))(x)


REFUSED = {
    "does not divide": (
        lambda: bx.vmap(running, bx.tiles(5))(X),
        "block, of shape (12, 5): axis 0 has 12 elements, which do not make tiles of 5. Pass "
        'what divides 12, or last="short" for a last tile of 2.',
    ),
    "count": (lambda: bx.vmap(running, bx.tiles(count=5))(X), "which do not make 5 tiles"),
    "axis": (lambda: bx.vmap(running, bx.tiles(4, axis=2))(X), "Pass an axis in [-2, 2)"),
    "neither": (lambda: bx.vmap(running, bx.tiles())(X), "Pass the size of a tile, or count"),
    "lanes differ": (
        lambda: bx.vmap(jnp.add, (bx.tiles(4), 0))(X, X),
        "args[0] (tiles of 4): shape (3, 4, 5), axis 0, size 3",
    ),
    "of no array": (lambda: bx.vmap(running, bx.tiles(4))("text"), "tiles are blocks of an array"),
    "of rows": (
        lambda: bx.vmap(running, bx.tiles(2))(bx.Ragged.from_rows([X, X[:3]])),
        "which is a batch of rows",
    ),
    "an output of another size": (
        lambda: bx.vmap(lambda b: b[:2], bx.tiles(4), bx.tiles(4))(X),
        "axis 0 has 2 elements, not 4",
    ),
    "an output of another count": (
        lambda: bx.vmap(running, bx.tiles(4), bx.tiles(count=4))(X),
        "but there are 3 lanes to be joined",
    ),
    "an output without axes": (
        lambda: bx.vmap(jnp.sum, bx.tiles(4), bx.tiles())(X),
        "which has shape (): it has no axis",
    ),
    "tiles of rows": (
        lambda: jax.jit(bx.vmap(bx.vmap(jnp.sum, bx.tiles(2))))(bx.Ragged.from_rows([X, X[:6]])),
        "whose axis 0 has a symbolic size",
    ),
    "both": (lambda: bx.tiles(4, count=3), "pass count or size, not both"),
    "a short last of so many": (lambda: bx.tiles(count=3, last="short"), "count or last"),
    "size": (lambda: bx.tiles(0), "size must be a positive int, got 0"),
    "last": (lambda: bx.tiles(4, last="none"), 'last must be "error" or "short"'),
    "an axis that is none": (lambda: bx.tiles(4, axis=1.5), "axis must be an int"),
}


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(
        (bx.AxisError, bx.ArgumentTypeError, bx.OptionError), match=re.escape(message)
    ):
        call()
