"""Sums over lanes as contractions, against the loop over examples."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import batchax as bx

from support.compiled import compiled_bytes
from support.oracle import example, same

LANES = 7
TOTAL = bx.Reduce("sum")
WAYS = {
    "at once": {},
    "chunks, and fewer lanes in the last": dict(batch_size=3),
    "shards, with lanes that repeat others": dict(mesh="all"),
    "chunks that are kept": dict(batch_size=2, residuals="keep"),
}


def clipped(g):
    return g / jnp.maximum(1, jnp.linalg.norm(g))


def gradient(a, b):
    return jax.jit(jax.grad(lambda w: jnp.sum(jnp.tanh(a @ w) * b)))(jnp.full((5, 4), 0.3))


def convolved(x, kernel):
    """A 3x3 kernel slid over an image of one channel, to two."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x[None, ..., None], kernel, (1, 1), "SAME", None, None, numbers)


def of_kernel(x, by=1.0):
    """The gradient of a kernel, which is more numbers as a product of matrices."""
    kernel = jnp.full((3, 3, 1, 2), 0.2, x.dtype)
    return jax.grad(lambda k: jnp.sum(jnp.sin(convolved(x, k)) * by))(kernel)


def optax_clipped(g):
    """As ``optax.clip_by_global_norm`` has it, whose norm adds squares of an imaginary part."""
    norm = jnp.sqrt(0.0 + jnp.sum(jnp.square(g) + jnp.square(jnp.zeros_like(g))))
    return lax.select(norm < 1, g, (g / norm) * 2.0)


def raveled(a, b, m, s, t):
    """Gradients of a matrix, a vector and another matrix as one vector, and how to unravel it."""
    return ravel_pytree([jnp.outer(a, b), (a, jnp.outer(b, -b))])


def flat_clipped(*xs):
    flat, unravel = raveled(*xs)
    return unravel(flat * jnp.minimum(1, 2 / jnp.linalg.norm(flat)))


def finite(g, other=0.0):
    return jnp.where(jnp.isfinite(jnp.vdot(g, g)), g, other)


def twice(x):
    return x + x


# Of vectors of 5 and 4 numbers, a matrix of 5 times 4, and sequences of 3 of such vectors.
CASES = {
    "outer product": lambda a, b, m, s, t: jnp.outer(a, b),
    "clipped": lambda a, b, m, s, t: clipped(jnp.outer(a, b)),
    "clipped in jit": lambda a, b, m, s, t: jax.jit(clipped)(jnp.outer(a, b)),
    "gradient": lambda a, b, m, s, t: clipped(gradient(a, b)),
    "by vdot": lambda a, b, m, s, t: jnp.outer(a, b) / jnp.sqrt(jnp.vdot(*[jnp.outer(a, b)] * 2)),
    "sequence": lambda a, b, m, s, t: s.T @ t,
    "clipped sequence": lambda a, b, m, s, t: clipped(s.T @ t),
    "heads": lambda a, b, m, s, t: jnp.einsum("th,tj->htj", s, t),
    "several terms": lambda a, b, m, s, t: jnp.outer(a, b) - 3 * jnp.outer(a[:1] * a, b) + 1,
    "weight decay": lambda a, b, m, s, t: -jnp.outer(a, b) + jnp.arange(20.0).reshape(5, 4),
    "rows scaled": lambda a, b, m, s, t: jnp.outer(a, b) * a[:, None] / (2 + b[0]),
    "repeated": lambda a, b, m, s, t: jnp.broadcast_to(jnp.outer(a, b), (3, 5, 4)),
    "one factor is shared": lambda a, b, m, s, t: jnp.outer(a, jnp.arange(4.0)) * b[0],
    "only a scale is not": lambda a, b, m, s, t: jnp.ones((5, 4)) * b[0],
    "all is shared": lambda a, b, m, s, t: jnp.outer(jnp.arange(5.0), jnp.arange(4.0)),
    "an argument": lambda a, b, m, s, t: m,
    "scaled": lambda a, b, m, s, t: m * b.sum(),
    "by element": lambda a, b, m, s, t: jnp.sin(m) * b,
    "three factors": lambda a, b, m, s, t: a[:, None, None] * b[:, None] * a[:3],
    "one dimension is in both": lambda a, b, m, s, t: s[:, :, None] * t[:, None],
    "and added up": lambda a, b, m, s, t: jnp.sum(s[:, :, None] * t[:, None], 0),
    "transposed": lambda a, b, m, s, t: jnp.outer(a, b).T.reshape(4, 1, 5),
    "raveled": lambda a, b, m, s, t: jnp.outer(a, b).ravel(),
    "matrix times vector": lambda a, b, m, s, t: m @ b,
    "squares": lambda a, b, m, s, t: jnp.outer(a, a) * jnp.outer(a, a).T,
    "where": lambda a, b, m, s, t: jnp.outer(a, b) * jnp.where(a[0] > b[0], 1 / (2 + a[0]), 1.0),
    "clipped by optax": lambda a, b, m, s, t: optax_clipped(jnp.outer(a, b)),
    "finite": lambda a, b, m, s, t: finite(jnp.outer(a, b)),
    "one of two": lambda a, b, m, s, t: lax.select(a[0] > 0, jnp.outer(a, b), 2 * m),
    "one by element": lambda a, b, m, s, t: jnp.where(m > 0, jnp.outer(a, b), 0.0),
    "flat": lambda *xs: raveled(*xs)[0] * xs[0][0] - 2.0,
    "flat by element": lambda *xs: raveled(*xs)[0] * jnp.arange(41.0),
    "flat twice": lambda *xs: raveled(*xs)[0] * raveled(*xs)[0] + jnp.arange(41.0),
    "flat and unraveled": flat_clipped,
    "a part of it": lambda *xs: raveled(*xs)[0][3:30],
    "columns": lambda a, b, m, s, t: jnp.concatenate([jnp.outer(a, b), m, jnp.outer(a, a)], 1),
    "blocks": lambda a, b, m, s, t: jnp.block([[jnp.outer(a, b), m], [m.T @ m, jnp.outer(b, b)]]),
    "rows of columns": lambda a, b, m, s, t: jnp.outer(a, b)[1:3, :2],
    "reshaped": lambda a, b, m, s, t: jnp.outer(a, b).reshape(5, 2, 2).transpose(1, 0, 2),
    "reshaped twice": lambda a, b, m, s, t: (
        jnp.outer(a, b).ravel().reshape(2, 10) * jnp.arange(10.0)
    ).reshape(4, 5),
    "sums of sums": lambda a, b, m, s, t: functools.reduce(
        lambda x, _: twice(x), range(6), m @ m.T
    ),
    "of a kernel": lambda a, b, m, s, t: of_kernel(m, b[0]),
    "of a kernel, clipped": lambda a, b, m, s, t: clipped(of_kernel(m)),
    "of a kernel, twice": lambda a, b, m, s, t: [of_kernel(m), 2 * of_kernel(m)],
    "convolved": lambda a, b, m, s, t: convolved(m, jnp.ones((3, 3, 1, 2), m.dtype)),
    "by kernels of lanes": lambda a, b, m, s, t: convolved(
        jnp.ones((5, 4), m.dtype), m[:3, :3, None, None]
    ),
    "a number": lambda a, b, m, s, t: a @ a,
    "nothing": lambda a, b, m, s, t: jnp.outer(a[:0], b),
}


def every_case(*xs):
    return {name: f(*xs) for name, f in CASES.items()}


def arrays(dtype=np.float32, lanes=LANES):
    shapes = [(5,), (4,), (5, 4), (3, 5), (3, 4)]
    return [example((lanes, *s), jnp.dtype(dtype), seed=k) for k, s in enumerate(shapes)]


def loop(f, xs, kind=np.sum):
    """What is made of the outputs of examples, one after another, in double precision."""
    rows = [f(*row) for row in zip(*xs, strict=True)]
    wide = lambda *outs: kind(np.stack([np.asarray(x, np.float64) for x in outs]), 0)
    return jax.tree.map(wide, *rows)


@functools.cache
def expected(dtype):
    return loop(jax.jit(every_case), arrays(dtype))


def close(got, wanted, tolerance):
    for (path, x), want in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        atol = tolerance * max(1, np.abs(want).max(initial=0))
        np.testing.assert_allclose(np.asarray(x, np.float64), want, atol=atol, err_msg=str(path))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_commit(2)
def test_every_case(way):
    got = jax.jit(bx.vmap(every_case, out_axes=TOTAL, **WAYS[way]))(*arrays())
    close(got, expected("float32"), 2e-6)


def test_every_case_in_double_precision():
    with jax.enable_x64(True):
        got = jax.jit(bx.vmap(every_case, out_axes=TOTAL, batch_size=4))(*arrays(np.float64))
        close(got, loop(jax.jit(every_case), arrays(np.float64)), 1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.each_commit(1)
def test_small_floats_are_added_up_in_float32(dtype, tolerance):
    batched = bx.vmap(every_case, out_axes=TOTAL)
    got = jax.jit(batched)(*arrays(dtype))
    one = jax.eval_shape(every_case, *(x[0] for x in arrays(dtype)))
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(one)]
    close(got, expected(dtype), tolerance)
    # 1 + 1/512 + 1/512 and so on stays 1 in bfloat16.
    steps = jnp.full((513, 2), 1 / 512, dtype).at[0].set(1)
    same(bx.vmap(lambda x: x, out_axes=TOTAL)(steps), jnp.full(2, 2, dtype))


def test_weak_types_and_other_numbers_are_as_the_sum_has_them():
    def f(a, b):
        return {
            "weak": jnp.broadcast_to(jnp.sum(a) * 0 + 1.0, (2,)) * 2.0,
            "shared": jnp.full(3, 2.0),
            "complex": jnp.outer(a + 1j * a, b) * (b[0] + 1j),
            "int32": jnp.outer(jnp.int32(9 * a), jnp.int32(9 * b)) * 2**28,
            "int8": jnp.outer(jnp.int8(40 * a), jnp.int8(3 * b)),
            "bool": jnp.outer(a, b) > 0,
        }

    a, b, *_ = arrays()
    got = jax.jit(bx.vmap(f, out_axes=TOTAL))(a, b)
    lanes = jax.vmap(f)(a, b)
    want = jax.tree.map(lambda x: jnp.sum(x, 0), lanes)
    same(got, want, dict(rtol=1e-5, atol=1e-5))
    assert [x.weak_type for x in got.values()] == [x.weak_type for x in want.values()]


def test_derivatives():
    names = [
        "clipped",
        "clipped by optax",
        "flat and unraveled",
        "one of two",
        "gradient",
        "clipped sequence",
        "several terms",
        "by element",
        "scaled",
        "of a kernel",
    ]
    some = lambda *xs: {name: CASES[name](*xs) for name in names}
    value = lambda batched, xs: sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(batched(*xs)))
    plain = lambda *xs: jax.tree.map(lambda x: x.sum(0), jax.vmap(some)(*xs))
    ways = [plain, bx.vmap(some, out_axes=TOTAL), bx.vmap(some, out_axes=TOTAL, batch_size=3)]
    of = lambda xs: [jax.grad(functools.partial(value, f))(xs) for f in ways]
    theirs, *ours = jax.jit(of)(arrays())
    for each in ours:
        same(each, theirs, dict(rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("way", list(WAYS)[:3])
@pytest.mark.each_commit(1)
def test_what_is_not_finite_is_where_the_sum_has_it(way):
    a, b = (np.array(x) for x in arrays()[:2])
    a[1, 2], a[2, 0], a[3, 1], b[3, 0], b[4, 3] = np.inf, -np.inf, np.nan, 0, np.inf
    scale = np.array([1, 0, 1, 2, 0, 1, 1], np.float32)

    def f(a, b, s):
        g = jnp.outer(a, b)
        chosen = lax.select(jnp.isfinite(jnp.vdot(g, g)), g, jnp.outer(s * a, s * b))
        return s * g, clipped(g), g[1:], optax_clipped(g), finite(g), finite(2 * g, g), chosen

    # The last examples by themselves: shards repeat them, and must not add them up again.
    for rows in (slice(None), slice(2, 3), slice(4, None), slice(5, None)):
        xs = [x[rows] for x in (a, b, scale)]
        got = jax.jit(bx.vmap(f, out_axes=TOTAL, **WAYS[way]))(*xs)
        with np.errstate(invalid="ignore"):
            want = loop(jax.jit(f), xs)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("large", [1e25, 1e-25, 1.0])
def test_a_norm_overflows_where_its_product_does(large):
    a, b = (np.array(x) for x in arrays()[:2])
    a, b = a * np.float32(large), b / np.float32(large)
    a[1] = 0
    norm = lambda a, b: jnp.outer(a, b) * jnp.linalg.norm(jnp.outer(a, b))
    got = jax.jit(bx.vmap(norm, out_axes=TOTAL))(a, b)
    np.testing.assert_allclose(got, loop(jax.jit(norm), (a, b)), rtol=1e-5)


@pytest.mark.parametrize("clip", [clipped, optax_clipped, finite, lambda g: clipped(g.ravel())])
def test_no_lane_has_an_array_of_its_own(clip):
    a, b = (example((64, n), seed=n) for n in (96, 80))
    f = lambda a, b: clip(jnp.outer(a, b))
    theirs = compiled_bytes(lambda a, b: jax.vmap(f)(a, b).sum(0), a, b)
    for options in ({}, dict(batch_size=24)):
        assert compiled_bytes(bx.vmap(f, out_axes=TOTAL, **options), a, b) < theirs / 10


def test_no_lane_has_a_kernel_of_its_own():
    x = example((64, 9, 9))
    text = jax.jit(bx.vmap(of_kernel, out_axes=TOTAL)).lower(x).compile().as_text()
    assert not re.findall(r"f32\[(?:64,3,3|576,)", text)


@pytest.mark.compiles(150)
@pytest.mark.parametrize("double", [False, True])
def test_rows_are_added_up_likewise(double):
    """Of a matrix over rows, and of a kernel over images: of no row there is one of its own."""
    with jax.enable_x64(double):
        dtype = jnp.zeros(()).dtype
        lengths, heights = np.array([3, 0, 5, 1, 4]), np.array([4, 2, 3, 5, 1])
        x = example((int(lengths.sum()) + 2, 5), dtype)
        images = example((int((heights * lengths).sum()) + 3,), dtype, seed=1)
        w, others = example((5, 4), dtype, seed=2), example((5, 6), dtype, seed=3)

        def f(row, image, own):
            weight = jax.grad(lambda w: jnp.sum(jnp.tanh(row @ w)))(w)
            return weight, of_kernel(image.astype(jnp.float32)), own, own.sum() * weight[0]

        def run(x, images, lengths, heights):
            rows = bx.Ragged(x, lengths, 6)
            ragged = bx.Ragged(images, (heights, lengths), (5, 6), axis=(0, 1))
            return bx.vmap(f, (0, bx.ragged("h", "n"), 0), out_axes=TOTAL)(rows, ragged, others)

        compiled = jax.jit(run).lower(x, images, lengths, heights).compile()
        got = compiled(x, images, lengths, heights)
        ends, last = np.cumsum(lengths), np.cumsum(heights * lengths)
        want = [
            f(x[e - n : e], images[i - h * n : i].reshape(h, n), own)
            for e, n, i, h, own in zip(ends, lengths, last, heights, others, strict=True)
        ]
        same(got, jax.tree.map(lambda *xs: sum(xs), *want), dict(rtol=1e-4, atol=1e-5))
        assert not re.findall(r"f(?:32|64)\[(?:5,5,4|5,3,3)", compiled.as_text())
        same(run(x, images, lengths, heights), got)
        scaled = jax.jit(jax.vmap(lambda s: run(s * x, images, lengths, heights)))
        both = scaled(jnp.ones(2, dtype))
        same(both, jax.tree.map(lambda y: jnp.stack([y, y]), got), dict(rtol=1e-4, atol=1e-5))


def test_of_no_lanes_and_of_a_reduction_of_ones_own():
    f = lambda a, b, *_: jnp.outer(a, b)
    same(bx.vmap(f, out_axes=TOTAL)(*arrays(lanes=0)), jnp.zeros((5, 4), np.float32))
    own = bx.Reduction(jnp.add, 0, finish=lambda total, n: total / n)
    got = bx.vmap(f, out_axes=bx.Reduce(own), batch_size=3)(*arrays())
    np.testing.assert_allclose(got, loop(f, arrays(), np.mean), rtol=1e-5, atol=1e-6)
