"""Rows of traced lengths in size buckets: asked for by `buckets=`, or chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.rows.size_classes import SizeClasses

from support.oracle import agree, at_once, example, same
from support.rows import check_rows, layouts, ragged

# No, one and the most elements of a class of three, one more, and one that has a class for itself.
LENGTHS = (5, 11, 1, 11, 0, 3, 20, 11, 1, 6)
WEIGHTS = jnp.linspace(-1, 1, 6).reshape(3, 2)
check = functools.partial(check_rows, reverse_traced=True)
in_three = functools.partial(check, buckets=3)


def rows(*trailing, **options):
    return ragged(*trailing, **{"lengths": LENGTHS, **options})


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


def powers(x):
    """What is not finite where a row is filled up with zeros, and compiles faster."""
    return jnp.tanh(x @ x.T) @ jnp.log(jnp.abs(x))


def other_sizes(x):
    y = attend(x)
    return y[1:], jnp.concatenate([y, x])


def reduced(x):
    y = attend(x)
    return y.sum(0), (y > 0).all()


def normed(x):
    return (x - x.mean(0)) / jnp.sqrt(1 + x.var(0))


FUNCTIONS = {
    "attention": attend,
    "attention between networks": lambda x: jnp.tanh(attend(jnp.tanh(x @ WEIGHTS)) @ WEIGHTS.T),
    "reduced": reduced,
    "sorted and added up": lambda x: jnp.cumsum(jnp.sort(normed(x), 0), 0),
    "other sizes": other_sizes,
    "of the shape alone": lambda x: (jnp.arange(x.shape[0]) * 2, jnp.asarray(x.shape[0])),
    "a scan": lambda x: lax.scan(lambda s, y: (jnp.sin(s + y), s), jnp.zeros(3), x),
    "a mask of all pairs": lambda x: jnp.where(jnp.abs(x @ x.T) > 1, x @ x.T, 0).sum(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(2, "other sizes")
def test_rows_in_classes_are_those_of_a_loop(name):
    in_three(FUNCTIONS[name], rows(3), ways=layouts("auto", "packed", "padded"))


@pytest.mark.parametrize(
    "lengths",
    [(7,) * 10, (1,) * 10, (0, 0), (7,), (0, 0, 7), (1, 2, 3, 4, 5, 6, 7, 8)],
    ids=str,
)
@pytest.mark.each_commit(1)
def test_lengths_of_all_kinds(lengths):
    numbers = {f"{n} classes": {"buckets": n} for n in (1, 2, 50)}
    check(powers, rows(2, lengths=lengths), ways=numbers)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.each_commit(1)
def test_the_ragged_axis_may_be_any(axis):
    def f(x):
        return normed(jnp.moveaxis(x, axis, 0)) * 2, jnp.sort(x, axis)

    in_three(f, rows(2, 3, axis=axis), layout="padded")


@pytest.mark.nightly
def test_what_rows_have_of_their_own_and_what_they_share():
    def f(x, scale, w):
        y = attend(x * scale)
        return y @ jnp.sin(w), (y @ w).sum(0) * scale, jnp.cos(w)

    in_three(f, rows(3), jnp.linspace(0.1, 1, 10), WEIGHTS, in_axes=(0, 0, None))


def test_arrays_without_elements():
    in_three(attend, rows(0))
    in_three(attend, rows(2, lengths=(0, 0), poison=False))
    in_three(attend, rows(2, lengths=(0, 0), spare=0))
    in_three(
        lambda x, y: (x * y.sum(0), attend(y)), rows(2), rows(2, lengths=(0,) * 10, poison=False)
    )


def test_loops_that_end_at_their_own_step():
    def f(x):
        more = lambda s: ((s[0] ** 2).sum() < 100) & (s[1] < 9)
        return attend(x), lax.while_loop(more, lambda s: (s[0] * 1.5 + 1, s[1] + 1), (x, 0))[1]

    ways = {divergence: {"divergence": divergence} for divergence in ("predicate", "compact")}
    in_three(f, rows(2), modes=("jvp",), ways=ways)


def test_two_sizes_that_differ():
    x, y = rows(3), rows(3, lengths=LENGTHS[::-1], seed=1)
    f = lambda x, y: jax.nn.softmax(jnp.sin(x @ y.T)).sum(0) + 1
    in_three(lambda x, y: (f(x, y), jnp.cumsum(y, 0).sum(0) * x.sum()), x, y)


def test_random_keys():
    def f(key, x):
        return jnp.sort(x, 0) * jax.random.normal(key, (3,)), jax.random.fold_in(key, 2)

    x, keys = rows(3), jax.random.split(jax.random.key(0), 10)

    def run(**options):
        drawn, folded = bx.vmap(f, **options)(keys, x)
        return drawn.to_padded(), jax.random.key_data(folded)

    agree(lambda: run(buckets=3), run, tolerance=dict(rtol=1e-6))


def test_outputs_go_where_out_axes_says():
    w = jnp.ones(2)
    reductions = tuple(map(bx.Reduce, ["sum", "mean", "max", "min", "prod"]))
    fun = lambda x: (attend(x).sum(0), jnp.sin(w), x, jnp.sin(w), *[attend(x).sum(0)] * 5)
    options = dict(out_axes=(1, None, bx.AUTO, bx.AUTO, *reductions))
    x = rows(2, poison=False)
    got, expected = at_once(bx.vmap(fun, buckets=3, **options), bx.vmap(fun, **options))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)
    assert got[2].max_length == x.max_length


@pytest.mark.nightly
def test_rows_under_other_transformations():
    x = ragged(3, lengths=(1, 6, 2, 5, 3), poison=False)
    each = np.array([0.3, 0.5], x.data.dtype), np.stack([x.lengths, x.lengths[::-1]])

    def run(vmap, **options):
        def loss(w, scale, lengths):
            f = lambda row: powers(row * scale @ w).sum(0)
            return (bx.vmap(f, **options)(bx.Ragged(x.data, lengths, x.max_length)) ** 2).sum()

        slopes, one = jax.grad(loss, (0, 1)), (each[0][0], each[1][0])
        return [
            vmap(slopes, (None, 0, None))(WEIGHTS, each[0], one[1]),
            vmap(slopes, (None, 0, 0))(WEIGHTS, *each),
            jax.hessian(loss)(WEIGHTS, *one),
            jax.grad(jax.checkpoint(loss), (0, 1))(WEIGHTS, *one),
        ]

    *got, expected = at_once(
        lambda: run(jax.vmap, buckets=2), lambda: run(bx.vmap, buckets=2), lambda: run(jax.vmap)
    )()
    for each_way in got:
        same(each_way, expected, dict(rtol=1e-3, atol=1e-4))


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


def test_classes_are_chosen_where_no_lengths_with_that_sum_would_lose_much():
    room = int(TAIL.sum())
    assert in_classes(attend, TAIL, room)
    assert not in_classes(attend, TAIL, 96 * 256)  # any row may be of the greatest length
    assert in_classes(attend, TAIL, 96 * 140)  # some must be shorter than half of it
    assert not in_classes(lambda x: jnp.sort(x[:, 0]), TAIL, room)  # padding is sorted at once
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


REFUSED = {
    "a callback": (
        lambda x: jax.debug.print("{}", x.sum()),
        {},
        "has a host callback",
    ),
    "chunks": (attend, {"batch_size": 2}, "batch_size was given, too"),
    "a named axis": (attend, {"axis_name": "rows"}, "axis_name='rows'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_rows_or_their_order_is_refused(name):
    fun, options, match = REFUSED[name]
    with pytest.raises(bx.UnsupportedError, match=match):
        jax.jit(bx.vmap(fun, buckets=3, **options))(rows(3))
