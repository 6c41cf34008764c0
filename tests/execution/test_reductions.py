"""What is true of every reduction over the batch, in every way that lanes run."""

import functools
import pickle
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.frontend.reductions import REDUCTIONS, Kind

from support.chunks import computed
from support.oracle import agree, at_once, example, plainly, same, same_type

LANES = 7
NAMED = {**{kind: getattr(jnp, kind, None) for kind in REDUCTIONS}, "logsumexp": jax.nn.logsumexp}
SMOOTH = ("sum", "mean", "max", "min", "prod", "logsumexp", "var")


def composed(first, second):
    """Of two affine functions one after another: not the same the other way round."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def and_the_next(x):
    return x, x + 1


def difference(state, n):
    return state[0] - state[1]


OWN = {
    "norm": (
        bx.Reduction(jnp.add, 0, lane=jnp.square, finish=lambda total, n: jnp.sqrt(total)),
        lambda x, axis: jnp.sqrt(jnp.sum(x**2, axis)),
    ),
    "range": (
        bx.Reduction(
            jnp.maximum, -jnp.inf, lane=lambda x: (x, -x), finish=lambda s, n: s[0] + s[1]
        ),
        lambda x, axis: jnp.max(x, axis) - jnp.min(x, axis),
    ),
    "affine": (
        bx.Reduction(composed, (1, 0), lane=lambda x: (x, jnp.cos(x)), finish=lambda s, n: s[1]),
        lambda x, axis: functools.reduce(
            composed, [(row, jnp.cos(row)) for row in jnp.moveaxis(x, axis, 0)]
        )[1],
    ),
    "by index, of all in a lane": (
        bx.Reduction(
            jnp.add,
            0,
            lane=lambda x, i: (x.sum() * i, i),
            index=True,
            finish=lambda s, n: s[0] / s[1],
        ),
        lambda x, axis: jnp.average(
            jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).sum(1),
            weights=jnp.arange(x.shape[axis]),
        ),
    ),
}
ALL = {kind: bx.Reduce(kind) for kind in NAMED} | {
    name: bx.Reduce(r) for name, (r, _) in OWN.items()
}
REFERENCES = NAMED | {name: reference for name, (_, reference) in OWN.items()}
WAYS = {
    "at once": {},
    "chunks": dict(batch_size=3),
    "chunks that are kept": dict(batch_size=2, residuals="keep"),
    "chunks of a size that is chosen": dict(batch_size="auto"),
    "shards": dict(mesh="all"),
    "chunks of shards": dict(mesh="all", batch_size=1),
}


def test_each_name_is_known_to_type_checkers():
    assert get_args(Kind) == tuple(REDUCTIONS)


def reduced(names, **options):
    """The function of a tree of arrays that reduces each in all ways `names`."""
    specs = {name: ALL[name] for name in names}

    return bx.vmap(lambda xs: dict.fromkeys(names, computed(xs)), out_axes=specs, **options)


def references(names, xs, axis=0):
    of = lambda name: jax.tree.map(lambda x: REFERENCES[name](x, axis=axis), xs)
    return {name: of(name) for name in names}


def odd_numbers():
    x = np.array(example((LANES, 8), np.float32))
    x[:, 1] = -np.inf
    x[3, 2] = np.nan
    x[5, 3] = np.inf
    x[[2, 5], 4] = 7
    x[:3, 5] = -np.inf  # a chunk that has nothing else
    x[:, 6] += 100
    x[:, 7] = -1000
    x[:6, 7] = -np.inf
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_commit(2, "at once", "chunks of shards")
def test_every_kind_of_every_dtype(way):
    xs = {
        dtype: example((LANES, 2, 3), jnp.dtype(dtype), high=3, seed=1)
        for dtype in ("bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "float64")
    }
    xs |= {"odd": odd_numbers(), "none true": np.zeros((LANES, 2), bool)}
    names = [name for name in ALL if name not in OWN]
    complex_names = [name for name in names if name[:3] not in ("arg", "max", "min")]
    zs = example((LANES, 3), jnp.complex64)
    floats = {"float": xs["float32"]}

    def ours(xs, zs, floats):
        of = functools.partial(reduced, **WAYS[way])
        return of(names)(xs), of(complex_names)(zs), of(OWN)(floats)

    def theirs(xs, zs, floats):
        return references(names, xs), references(complex_names, zs), references(OWN, floats)

    got, expected = at_once(ours, theirs)(xs, zs, floats)
    same(got, expected)
    jax.tree.map(same_type, *(jax.eval_shape(f, xs, zs, floats) for f in (ours, theirs)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_commit(1, "chunks of a size that is chosen")
def test_every_kind_has_its_derivatives(way):
    names = [*SMOOTH, *OWN]
    x = {"x": example((LANES, 3), seed=3)}
    masked = {"masked": jnp.asarray(odd_numbers()[:, [0, 5, 7]], float)}
    tangent = lambda x: jax.tree.map(lambda x: jnp.cos(jnp.where(jnp.isfinite(x), x, 0)), x)

    def derivatives(f, x, names):
        def total(x):
            weighted = [
                i * jnp.sum(jnp.sin(y)) for i, y in enumerate(jax.tree.leaves(f(names)(x)), 1)
            ]
            return sum(weighted)

        gradient = jax.grad(total)(x)
        forward = jax.jvp(f(names), (x,), (tangent(x),))
        return forward, gradient

    def all_of(f):
        return lambda x, masked: (
            derivatives(f, x, names),
            derivatives(f, masked, ["logsumexp"]),
            jax.jvp(
                jax.grad(lambda x: jnp.sum(f(["var"])(x)["var"]["x"] ** 2)), (x,), (tangent(x),)
            ),
        )

    ours = all_of(lambda names: reduced(names, **WAYS[way]))
    theirs = all_of(lambda names: functools.partial(references, names))
    got, expected = at_once(ours, theirs)(x, masked)
    same(got, expected)


ROWS = [example((n,), seed=n) for n in (3, 5, 1, 4, 5, 2)]
OF_ROWS = {
    "packed": {},
    "padded": dict(layout="padded"),
    "padded, in chunks": dict(layout="padded", batch_size=4),
    "grouped": dict(layout="grouped"),
    "buckets": dict(buckets=2),
    "devices": dict(mesh="all"),
}


@pytest.mark.compiles(110)
@pytest.mark.parametrize("way", OF_ROWS)
@pytest.mark.each_commit(2)
def test_of_rows_of_different_lengths(way):
    rows = bx.Ragged.from_rows(ROWS)
    of_row = lambda row: jnp.stack([row.sum(), (row**2).max()])
    specs = {name: ALL[name] for name in ALL}
    ours = bx.vmap(lambda row: {name: of_row(row) for name in ALL}, out_axes=specs, **OF_ROWS[way])
    got = ours(rows) if way in ("grouped", "buckets") else jax.jit(ours)(rows)
    same(got, jax.jit(functools.partial(references, ALL))(jnp.stack(list(map(of_row, ROWS)))))


# --- what all lanes share, and nothing ---------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(batch_size=3)], ids=str)
def test_of_what_all_lanes_share(options):
    x, w = example((LANES,)), example((3,), seed=5)
    specs = ALL | {"x": bx.Reduce("var")}

    def ours(x, w):
        fun = lambda x, w: dict.fromkeys(ALL, w) | {"x": x}
        return bx.vmap(fun, (0, None), specs, **options)(x, w)

    theirs = lambda x, w: references(ALL, jnp.broadcast_to(w, (LANES, 3))) | {"x": jnp.var(x)}
    same(*at_once(ours, theirs)(x, w))
    keep = bx.Reduce("logsumexp", unmapped="keep")
    same(bx.vmap(lambda x, w: w, (0, None), keep, **options)(x, w), w)


def test_of_no_lanes():
    empty = jnp.zeros((0, 3))
    refused = "max", "min", "argmax", "argmin"
    names = [name for name in ALL if name not in refused and name not in OWN]
    for options in ({}, dict(batch_size=2)):
        same(reduced(names, **options)(empty), references(names, empty))
        for kind in refused:
            with pytest.raises(bx.AxisError, match=f"{kind} of no values"):
                reduced([kind], **options)(empty)
    total, last = (bx.vmap(lambda x: x, out_axes=ALL[name])(empty) for name in ("norm", "affine"))
    same((total, last), (jnp.zeros(3), jnp.zeros(3)))
    first = bx.Reduction(lambda a, b: a, 0, of_nothing=False)
    with pytest.raises(bx.AxisError, match=r"batchax\.Reduction.* of no values"):
        bx.vmap(lambda x: x, out_axes=bx.Reduce(first))(empty)


# --- numerics ----------------------------------------------------------------------------------


def test_a_variance_neither_cancels_nor_drifts():
    """The difference of a mean of squares and a squared mean would be noise."""
    x = np.stack([4096 + np.arange(6002) % 2, 4096 + np.linspace(0, 1, 6002)], 1).astype(np.float32)
    ways = {way: options for way, options in WAYS.items() if "chosen" not in way}
    got = at_once(*(bx.vmap(computed, out_axes=bx.Reduce("var"), **o) for o in ways.values()))(x)
    np.testing.assert_allclose(got, [np.var(x.astype(float), 0)] * len(ways), rtol=1e-4)


def test_the_memory_of_a_variance_does_not_grow_with_the_number_of_lanes():
    """As of gradients, of which each is large."""

    def needed(lanes):
        one = lambda x, w: jnp.outer(x, w) @ w
        f = bx.vmap(
            jax.grad(lambda w, x: one(x, w).sum()), (None, 0), bx.Reduce("var"), batch_size=2
        )
        x, w = np.ones((lanes, 8), np.float32), np.ones(256, np.float32)
        return jax.jit(f).lower(w, x).compile().memory_analysis().temp_size_in_bytes

    assert needed(200) <= needed(20) + 200 * 8 * 4


# --- derivatives in chunks ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("residuals", ["recompute", "keep"])
@pytest.mark.compiles(60)
@pytest.mark.each_commit(1)
def test_ties_share_the_derivative(kind, residuals):
    sign = 1.0 if kind == "max" else -1.0
    x = sign * jnp.array([[3.0, 1.0], [2.0, 1.0], [3.0, 0.0], [1.0, 1.0], [3.0, 1.0]])
    f = bx.vmap(computed, 0, bx.Reduce(kind), batch_size=2, residuals=residuals)
    g = lambda x: NAMED[kind](x, axis=0)
    for wrap in (lambda h: h, jax.jit):
        same(wrap(jax.jacrev(f))(x), plainly(jax.jacrev(g), x))
        same(wrap(jax.jacfwd(f))(x), plainly(jax.jacfwd(g), x))
    tangent = jnp.arange(10.0).reshape(5, 2)
    same(jax.jvp(f, (x,), (tangent,)), jax.jvp(g, (x,), (tangent,)))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("residuals", ["recompute", "keep"])
def test_the_derivative_of_an_extreme_that_is_nan_is_nan(kind, residuals):
    x = jnp.array([[3.0, 1.0], [2.0, 1.0], [np.nan, 0.0], [1.0, 1.0], [3.0, 1.0]])
    f = bx.vmap(computed, 0, bx.Reduce(kind), batch_size=2, residuals=residuals)
    g = lambda x: NAMED[kind](x, axis=0)
    expected = plainly(jax.jacrev(g), x)
    assert np.isnan(expected[0]).any()
    same(jax.jit(jax.jacrev(f))(x), expected)
    same(jax.jit(jax.jacfwd(f))(x), plainly(jax.jacfwd(g), x))


def test_derivatives_of_extremes_of_what_all_lanes_share():
    x, w = example((LANES, 3), seed=1), example((3,), seed=2)
    one = lambda x, w: jnp.sin(x * w).sum()
    of = lambda **how: lambda w: bx.vmap(one, (0, None), bx.Reduce("max"), **how)(x, w)
    same(jax.grad(of(batch_size=3))(w), plainly(jax.grad(of()), w))
    agree(jax.hessian(of(batch_size=3)), jax.hessian(of()), w)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.each_commit(1)
def test_products_with_zeros(zeros):
    x = jnp.array([2.0, 3.0, 5.0, 0.5, 4.0]).at[jnp.arange(zeros) * 3].set(0.0)
    for residuals in ("recompute", "keep"):
        f = bx.vmap(computed, 0, bx.Reduce("prod"), batch_size=2, residuals=residuals)
        same(f(x), jnp.prod(x))
        agree(jax.grad(f), jax.grad(jnp.prod), x)
        agree(jax.jacfwd(f), jax.grad(jnp.prod), x)
        agree(jax.hessian(f), jax.hessian(jnp.prod), x)


# --- mistakes ----------------------------------------------------------------------------------

MISTAKES = {
    "combine of a Reduction must be a function": lambda: bx.Reduction("sum", 0),
    "fold of a Reduction must be a function": lambda: bx.Reduction(jnp.add, 0, fold="sum"),
    "index of a Reduction must be True or False": lambda: bx.Reduction(jnp.add, 0, index=1),
    "index of a Reduction is True, but there is no lane": lambda: bx.Reduction(
        jnp.add, 0, index=True
    ),
    "neutral of a Reduction must be numbers, or functions": lambda: bx.Reduction(jnp.add, "0"),
    "neutral of a Reduction must be .*; got an array of shape": lambda: bx.Reduction(
        jnp.add, np.zeros(3)
    ),
    "combine of .* must return a state as it takes them, float32\\[3\\] for out, and returns "
    "\\(float32\\[3\\], float32\\[3\\]\\)": bx.Reduction(lambda a, b: (a, b), 0),
    "combine of .* returns float32\\[\\]": bx.Reduction(lambda a, b: (a + b).sum(), 0),
    "fold of .* must return a state": bx.Reduction(lambda a, b: a + b, 0, fold=lambda s: s),
    "neutral of .* is \\(0, 1\\), but a state of out is float32": bx.Reduction(jnp.add, (0, 1)),
    "lane, without finish, of .* must return an array": bx.Reduction(
        jnp.add, 0, lane=lambda x: (x, x)
    ),
    "finish of .* must return an array": bx.Reduction(jnp.add, 0, finish=lambda s, n: (s, s)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_told_by_the_name_of_its_parameter(message):
    made = MISTAKES[message]
    x = np.zeros((4, 3), np.float32)
    make = made if callable(made) else lambda: bx.vmap(lambda x: x, out_axes=bx.Reduce(made))(x)
    with pytest.raises(bx.ArgumentTypeError, match=message):
        make()


def test_what_has_no_such_reduction_is_refused():
    z = example((4, 3), jnp.complex64)
    with pytest.raises(
        bx.ArgumentTypeError, match=r"Reduce\('argmax'\) for out, of dtype complex64"
    ):
        bx.vmap(lambda z: z, out_axes=bx.Reduce("argmax"))(z)
    with pytest.raises(
        bx.ArgumentTypeError, match=r'"logsumexp".* or a batchax.Reduction of your own'
    ):
        bx.Reduce(np.zeros(3))

    least = bx.Reduction(jnp.maximum, -jnp.inf)
    with pytest.raises(
        bx.ArgumentTypeError,
        match=r"neutral of .* is -inf, which is not a value of int8, the dtype",
    ):
        bx.vmap(lambda x: x, out_axes=bx.Reduce(least))(np.zeros(3, np.int8))

    def scaled(w):
        total = bx.Reduction(jnp.add, 0, lane=lambda x: x * w)
        return bx.vmap(lambda x: x, out_axes=bx.Reduce(total))(jnp.ones(3))

    with pytest.raises(bx.ArgumentTypeError, match="close over a value that is traced"):
        jax.grad(scaled)(2.0)


def test_it_can_be_sent_to_other_processes():
    total = bx.Reduction(jnp.add, (0, 0), lane=and_the_next, finish=difference)
    again = pickle.loads(pickle.dumps(bx.Reduce(total)))
    same(bx.vmap(jnp.sin, out_axes=again, batch_size=2)(jnp.zeros(3)), jnp.asarray(-3.0))


def test_how_it_is_shown():
    assert repr(bx.Reduce("var")) == "batchax.Reduce('var')"
    assert repr(bx.Reduce("sum", "keep")) == "batchax.Reduce('sum', unmapped='keep')"
    shown = "batchax.Reduce(batchax.Reduction(combine=add, lane=square, finish=<lambda>))"
    assert repr(ALL["norm"]) == shown
