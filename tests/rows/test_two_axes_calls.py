"""Functions of rows that are ragged along two axes, or that return such: against each row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import same, shares
from support.rows import LENGTHS, SHAPES, check_rows, check_rows_of_all, images, ragged, ways

HW = bx.ragged("h", "w")
X = images()
CHANNELS = images(2)
KERNEL = np.random.default_rng(1).normal(size=(3, 2, 2, 2)).astype(np.float32)


def convolved(x, padding="SAME", strides=(1, 1)):
    kernel = jnp.asarray(KERNEL, x.dtype)
    dims = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x[None], kernel, strides, padding, dimension_numbers=dims)
    return out[0]


ELEMENTWISE = {
    "scaled": lambda x: 2 * x + 1,
    "by rows and columns": lambda x: jnp.arange(x.shape[0])[:, None] * x - jnp.arange(x.shape[1]),
    "chosen": lambda x: jnp.where(x > 0, x, jnp.exp(x)),
}
REDUCED = {
    "sum of all": lambda x: x.sum(),
    "sums": lambda x: (x.sum(0), x.sum(1)),
    "means": lambda x: (x.mean(0), x.mean(1), x.mean()),
    "greatest": lambda x: (x.max(0), x.max(1), x.min(), jnp.argmax(x, 1)),
    "softmax": lambda x: (jax.nn.softmax(x, 0), jax.nn.softmax(x, 1)),
    "cumulative": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)),
}
CONTRACTED = {
    "gram": lambda x: (x @ x.T, x.T @ x),
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "with the identity": lambda x: x @ jnp.eye(x.shape[1]) + jnp.eye(x.shape[0]) @ x,
}
MOVED = {
    "transposed": lambda x: x.T,
    "flipped": lambda x: (x[::-1], x[:, ::-1], jnp.flip(x)),
    "sorted": lambda x: (jnp.sort(x, 0), jnp.sort(x, 1)),
    "with a border": lambda x: jnp.pad(x, ((1, 0), (2, 1))),
    "in one row": lambda x: x.ravel(),
}
FAMILIES = {
    "elementwise": ELEMENTWISE,
    "reduced": REDUCED,
    "contracted": CONTRACTED,
    "moved": MOVED,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_along_either_axis(family):
    check_rows_of_all(FAMILIES[family], X, in_axes=HW)


def test_convolutions_and_windows():
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (1, 1, 1), "SAME")
    functions = {
        "same": convolved,
        "explicit": lambda x: convolved(x, [(2, 2), (1, 1)]),
        "activated": lambda x: jax.nn.relu(convolved(jnp.tanh(convolved(x)))).mean((0, 1)),
        "pooled": pool,
    }
    check_rows_of_all(functions, CHANNELS, in_axes=HW)


def test_sizes_of_several_arguments_together():
    y, w = ragged(3), np.ones((3,))
    x = bx.Ragged.from_rows(
        [
            np.arange(n * m, dtype=float).reshape(n, m)
            for n, (_, m) in zip(LENGTHS, SHAPES, strict=True)
        ],
        axis=(0, 1),
    )

    def f(x, y, w):
        return x.T @ y, (y @ w)[:, None] * x, x.sum(1) + y.sum(1), x[:, :, None] * y[:, None]

    in_axes = (bx.ragged("n", "m"), bx.ragged("n"), None)
    check_rows(f, x, y, w, in_axes=in_axes)
    check_rows(f, x, y, w, in_axes=(0, 0, None), traced=False, derivatives=False)


EVERYTHING = {**REDUCED, **CONTRACTED, "flipped": MOVED["flipped"], "scaled": ELEMENTWISE["scaled"]}


def everything(x):
    return {name: f(x) for name, f in EVERYTHING.items()}


@pytest.mark.parametrize("way", ["chunks", "padded", "packed"])
@pytest.mark.each_commit(1, "packed")
def test_ways_to_run(way):
    check_rows(everything, X, in_axes=HW, ways=ways(way), derivatives=False)


@pytest.mark.parametrize("layout", ["auto", "grouped"])
def test_known_lengths_and_outside_of_jit(layout):
    f = lambda x: (jax.nn.softmax(x, 1) @ x.T, x.sum(0), jnp.sort(x, 0))
    options = dict(eager=layout == "auto", derivatives=False, layout=layout)
    check_rows(f, X, in_axes=HW, traced=False, **options)


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.each_commit(1)
def test_rows_on_devices(chunks):
    x = images(shapes=((3, 2), (1, 4), (0, 3), (2, 1), (4, 3), (2, 0), (5, 1)))
    y = bx.Ragged(jnp.arange(17.0), x.lengths[0], x.max_length[0])
    f = lambda x, y: (x @ x.T, x.T, x.sum(1) + y, x.mean(), (y[:, None] + x)[::-1])
    in_axes = (HW, bx.ragged("h"))
    plain = jax.device_get(jax.jit(bx.vmap(f, in_axes))(x, y))
    spread = jax.device_get(jax.jit(bx.vmap(f, in_axes, mesh="all", batch_size=chunks))(x, y))
    for i in range(len(x)):
        same([each[i] for each in spread], [each[i] for each in plain])


def test_out_axes_that_ask_for_rows():
    same_size = jax.device_get(bx.vmap(lambda x: jnp.ones((2, 3)), HW, bx.ragged("a", "b"))(X))
    assert [row.shape for row in same_size.rows()] == [(2, 3)] * len(X)
    with pytest.raises(bx.AxisError, match="which is an array of one axis for each lane"):
        bx.vmap(lambda x: jnp.ones(2), HW, bx.ragged("a", "b"))(X)


def test_names_are_checked():
    wrong = {(): "got none", **{(name,): f"got {name!r}" for name in ("b c", "2n", "mod", 1)}}
    for names, shown in wrong.items():
        with pytest.raises(bx.ArgumentTypeError, match=f"takes a name .*{shown}"):
            bx.ragged(*names)
    assert repr(bx.ragged("h", "w")) == "batchax.ragged('h', 'w')"


def test_buckets_by_both_sizes():
    x = images(shapes=[(2, 9), (9, 2), (3, 8), (8, 3), (0, 5), (9, 9)], spare=0)
    buckets = bx.bucket(x, 3)
    assert sorted(buckets.sizes) == [(3, 9), (9, 3), (9, 9)]
    assert sorted(map(sorted, (rows.tolist() for rows in buckets.rows))) == [[0, 2, 4], [1, 3], [5]]
    assert buckets.waste == (3 * 27 + 2 * 27 + 81) / (18 + 18 + 24 + 24 + 81)
    assert "in one size of 9 x 9" in repr(buckets)
    assert bx.bucket(x.lengths, 2, multiple_of=4).sizes[-1] == (12, 12)
    parts = buckets.split(x)
    assert [part.max_length for part in parts] == list(buckets.sizes)
    f = lambda x: (x @ x.T, x.sum(0), x.sum())
    plain = jax.device_get(jax.jit(lambda: bx.vmap(f, HW)(x))())
    for given in (buckets, 3):
        got = jax.device_get(jax.jit(lambda given=given: bx.vmap(f, HW, buckets=given)(x))())
        assert got[0].max_length == (9, 9)
        for i in range(len(x)):
            for mine, theirs in zip(got, plain, strict=True):
                np.testing.assert_allclose(mine[i], theirs[i], 1e-5, 1e-5)
    again = jax.device_get(buckets.join(parts))
    for mine, theirs in zip(again.rows(), jax.device_get(x).rows(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(bx.AxisError, match="buckets were made for other lengths than those of x"):
        bx.vmap(f, HW, buckets=buckets)(X)
    with pytest.raises(bx.AxisError, match="made for other lengths than those of x"):
        buckets.split(bx.Ragged(x.data, x.lengths[::-1], axis=(0, 1)))


IN_CLASSES = {
    "gram": lambda x, y: jnp.tanh(x @ x.T),
    "turned": lambda x, y: x.T + y,
    "pairs": lambda x, y: y[:, None] * y * x.sum(),
    "softmax": lambda x, y: jax.nn.softmax(x, 1) + y[:, None],
    "one longer": lambda x, y: jnp.pad(x, ((1, 0), (2, 1))),
}


@pytest.mark.parametrize("names", shares(IN_CLASSES, 3), ids=" ".join)
@pytest.mark.each_commit(1)
def test_size_classes_of_traced_sizes(names):
    """A row in each class: full, one more, long and thin, without elements."""
    x = images(shapes=[(2, 3), (1, 4), (0, 2), (3, 0), (7, 8), (5, 3), (1, 8), (3, 4)], spare=0)
    y = ragged(lengths=x.lengths[0].tolist(), spare=0)
    together = lambda x, y: [IN_CLASSES[name](x, y) for name in names]
    in_axes = (HW, bx.ragged("h"))
    check_rows(together, x, y, in_axes=in_axes, buckets=3, modes=("vjp",), reverse_traced=True)
    spoilt = x.with_data(x.data.at[0].set(np.nan))
    got = jax.jit(bx.vmap(together, in_axes, buckets=3))(spoilt, y)
    for each in jax.tree.leaves(jax.device_get(got), is_leaf=lambda x: isinstance(x, bx.Ragged)):
        assert np.isnan(each[0]).any() or not np.isnan(y[0]).any()
        assert not any(np.isnan(each[i]).any() for i in range(1, len(x)))


def _softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True, initial=-9))
    return e / e.sum(axis, keepdims=True)


def of_arrays(x, numpy, softmax):
    """By JAX or by NumPy, of rows of shape (h, 2, w) that may have no elements."""
    return (
        numpy.transpose(x, (2, 1, 0)),
        numpy.einsum("hcw,kcw->hk", x, x),
        numpy.einsum("hcw,hcv->wv", x, x),
        x.sum(0),
        x.sum(2),
        numpy.max(x, 2, initial=-9),
        x[::-1],
        numpy.flip(x, (0, 2)),
        numpy.cumsum(x, 2),
        numpy.sort(x, 0),
        x[1:] - x[:-1],
        numpy.pad(x, ((1, 0), (0, 0), (0, 2))),
        softmax(1.0 * x, 2),
        softmax(1.0 * x, 0),
        numpy.reshape(x, (-1,)) if numpy is np else x.ravel(),
        numpy.where(x > 0, x, numpy.arange(x.shape[2])),
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
@pytest.mark.each_commit(1)
def test_rows_of_drawn_sizes_are_as_each_alone(dtype):
    generator, dtype = np.random.default_rng(5), jax.dtypes.canonicalize_dtype(dtype)
    batched = jax.jit(
        bx.vmap(lambda x: of_arrays(x, jnp, lambda x, k: jax.nn.softmax(x, k)), bx.ragged("h", "w"))
    )
    for _ in range(20):  # of one program
        shapes = generator.choice([0, 1, 1, 2, 3, 5], (6, 2))
        rows = [(4 * generator.normal(size=(h, 2, w))).astype(dtype) for h, w in shapes]
        x = bx.Ragged.from_rows(rows, (5, 5), axis=(0, 2)).with_capacity(150)
        got = jax.device_get(batched(x))
        for i, row in enumerate(rows):
            for mine, theirs in zip(got, of_arrays(row, np, _softmax), strict=True):
                assert mine[i].shape == theirs.shape
                np.testing.assert_allclose(mine[i], theirs, 2e-5, 2e-5)


WEIGHTS = np.random.default_rng(2).normal(size=(2, 3)).astype(np.float32)
ON_ELEMENTS = {
    "network": lambda x, s: jnp.tanh(x @ jnp.asarray(WEIGHTS, x.dtype)) * s,
    "centred": lambda x, s: x - x.sum((0, 1)) / 9,
    "greatest": lambda x, s: jnp.max(x, (0, 1), initial=-9),
    "softmax": lambda x, s: jax.nn.softmax(x * s, -1).sum((0, 1)),
    "reshaped": lambda x, s: x[:, :, None] * jnp.ones((3, 1), x.dtype),
    "joined": lambda x, s: jnp.concatenate([x, jnp.cumsum(x, 2)], 2),
    "some channels": lambda x, s: x[..., :1] * x.reshape(*x.shape[:2], 1, 2)[:, :, 0],
    "again": jax.checkpoint(lambda x, s: jnp.sin(x) * s),
    "by place": lambda x, s: (x[:, :, 0] * s).sum(0) + x.sum((0, 1))[0],
}


def on_elements(x, s):
    return [f(x, s) for f in ON_ELEMENTS.values()]


def test_packed_along_two_axes():
    """Operations on each element run packed, whatever runs padded between them."""
    s = np.arange(1.0, 5.0, dtype=np.float32)
    check_rows(on_elements, CHANNELS, s, in_axes=(HW, 0), ways=ways("packed"), modes=("vjp",))
    told = bx.explain(bx.vmap(on_elements, (HW, 0), layout="packed"), compile=False)(CHANNELS, s)
    rules = [(e.primitive, e.rule) for e in told.walk()]
    padded = {"gather", "reduce_sum", "reshape", "concatenate", "cumsum"}
    assert {p for p, rule in rules if rule == "rows.padded"} == padded
    assert ("dot_general", "rows.packed") in rules
    spoilt = CHANNELS.with_data(CHANNELS.data.at[0].set(np.nan))
    got = jax.device_get(jax.jit(bx.vmap(on_elements, (HW, 0), layout="packed"))(spoilt, s))
    for each in got:
        assert np.isnan(each[0]).any()
        assert not any(np.isnan(each[i]).any() for i in range(1, len(SHAPES)))


def test_most_of_a_program_runs_packed_where_that_costs_less():
    sizes = np.random.default_rng(0).lognormal(3, 1, (40, 2)).astype(int) + 1
    x = bx.Ragged.from_rows([np.zeros((h, w, 4), np.float32) for h, w in sizes], axis=(0, 1))
    f = lambda x: jnp.tanh(jnp.tanh(x @ jnp.ones((4, 32))) @ jnp.ones((32, 4))).max(0)
    told = bx.explain(f, in_axes=HW, compile=False)(x)
    rules = [(e.primitive, e.rule) for e in told.walk()]
    assert rules.count(("dot_general", "rows.packed")) == 2
    assert ("reduce_max", "rows.padded") in rules
