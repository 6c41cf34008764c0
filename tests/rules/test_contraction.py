"""Contractions, ragged ones, and Fourier transforms, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.batches import batch
from support.operations import operations
from support.oracle import check_all, same

DIMENSIONS = {
    # name: (lhs, rhs, dimension numbers)
    "matrix vector": ((2, 4), (4,), (((1,), (0,)), ((), ()))),
    "matrix matrix": ((2, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "with a batch dimension": ((5, 2, 4), (4, 5), (((2,), (0,)), ((0,), (1,)))),
    "two of each": ((4, 2, 5, 2), (5, 4, 2, 2), (((0, 2), (1, 0)), ((1, 3), (3, 2)))),
    "outer": ((2,), (4,), (((), ()), ((), ()))),
    "inner": ((4,), (4,), (((0,), (0,)), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
}


def contraction(name, **options):
    return lambda x, y: lax.dot_general(x, y, DIMENSIONS[name][2], **options)


def operands(name, in_axes, dtypes=(jnp.float32, jnp.float32)):
    shapes = DIMENSIONS[name][:2]
    return [
        batch(s, a, d, i) for i, (s, a, d) in enumerate(zip(shapes, in_axes, dtypes, strict=True))
    ]


DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.bfloat16, {"preferred_element_type": jnp.float32}),
    "float16": (jnp.float16, jnp.float16, {}),
    "complex": (jnp.complex64, jnp.complex64, {}),
    "complex and real": (jnp.complex64, jnp.float32, {}),
    "integers": (jnp.int8, jnp.int8, {"preferred_element_type": jnp.int32}),
    "unsigned": (jnp.uint32, jnp.uint32, {}),
    "int4": (jnp.int4, jnp.int4, {}),
    "booleans": (jnp.bool_, jnp.bool_, {}),
    "float8": (jnp.float8_e4m3fn, jnp.float8_e5m2, {"preferred_element_type": jnp.float32}),
    "precision": (jnp.float32, jnp.float32, {"precision": ("high", "default")}),
    "algorithm": (jnp.float32, jnp.float32, {"precision": lax.DotAlgorithmPreset.F32_F32_F32}),
}


@pytest.mark.parametrize("kind", DTYPES)
def test_dtypes_and_precision(kind):
    lhs, rhs, options = DTYPES[kind]
    fun = contraction("matrix vector", **options)
    cases = {
        str(in_axes): (fun, *operands("matrix vector", in_axes, (lhs, rhs)), dict(in_axes=in_axes))
        for in_axes in ((0, 0), (None, 0))
    }
    check_all(cases, derivatives=False)


@pytest.mark.parametrize("size", [31, 32])  # long vectors come first, to stay rows
def test_precisions_stay_with_their_operands(size):
    high, default = lax.Precision.HIGH, lax.Precision.DEFAULT
    fun = contraction("matrix vector", precision=(high, default))
    for in_axes, expected in (((0, None), (high, default)), ((None, 0), (default, high))):
        args = batch((size, 40), in_axes[0]), batch((40,), in_axes[1])
        eqn = jax.make_jaxpr(bx.vmap(fun, in_axes))(*args).eqns[0]
        turned = in_axes == (None, 0) and size == 32
        assert eqn.params["precision"] == (expected if turned else (high, default))
        assert [v.aval.shape for v in eqn.invars] == [x.shape for x in args][:: 1 - 2 * turned]


def test_a_matrix_times_a_batch_of_vectors_is_one_product_of_matrices():
    weights, vectors = batch((32, 40), None), batch((40,), 0)
    counts = operations(bx.vmap(jnp.matmul, in_axes=(None, 0)), weights, vectors)
    assert counts == {"dot_general": 1}
    assert operations(bx.vmap(jnp.matmul, in_axes=(0, None)), vectors, weights.T) == counts
    # Short vectors are columns, which are as wide as there are lanes.
    weights, vectors = batch((31, 40), None), batch((40,), 0)
    counts = operations(bx.vmap(jnp.matmul, in_axes=(None, 0)), weights, vectors)
    assert counts == {"dot_general": 1, "transpose": 1}


def layers_of_scans(layers, width, lanes):
    """The gradients of each lane by weights, of a scan with so many layers in a step."""

    def steps(w, x):
        def step(x, _):
            for _ in range(layers):
                x = jnp.tanh(w @ x)
            return x, None

        return lax.scan(step, x, None, length=2)[0].sum()

    w = batch((width, width), None)
    x = np.linspace(-1, 1, width * lanes, dtype=w.dtype).reshape(lanes, width)
    return bx.vmap(jax.grad(steps), (None, 0)), jax.vmap(jax.grad(steps), (None, 0)), w, x


def shapes_handed_on(gradients, w, x):
    """Of what the scan and its way back hand on and return, except for the weights."""
    scans = [e for e in jax.make_jaxpr(gradients)(w, x).eqns if e.primitive.name == "scan"]
    return [{v.aval.shape for v in e.outvars if v.aval.shape} for e in scans]


def test_few_products_in_a_step_have_lanes_last():
    ours, theirs, w, x = layers_of_scans(2, 5, 205)
    same(ours(w, x), theirs(w, x))
    forth, _ = shapes_handed_on(ours, w, x)
    assert forth == {(5, 205), (2, 5, 205)}
    x, y = batch((5,), 0), batch((5,), 1)
    outer = lambda x, y: lax.fori_loop(0, 2, lambda i, z: z + jnp.outer(x, y), jnp.zeros((5, 5)))
    same(bx.vmap(outer, (0, 1))(x, y), 2 * np.einsum("bi,jb->bij", x, y))


@pytest.mark.parametrize(("layers", "lanes"), [(4, 205), (1, 204)])
def test_many_products_in_a_step_and_short_columns_are_as_jax_has_them(layers, lanes):
    """Columns would be read from too many places, or be too short to gain anything."""
    ours, theirs, w, x = layers_of_scans(layers, 5, lanes)
    same(ours(w, x), theirs(w, x))
    assert shapes_handed_on(ours, w, x) == shapes_handed_on(theirs, w, x)


@pytest.mark.parametrize(("width", "state"), [(32, (64, 32)), (16, (16, 64))])
def test_products_that_meet_in_a_step_have_lanes_in_one_place(width, state):
    """A long state has lanes first, a short one last, and short inputs are as the state is."""

    def last(into, inner, xs):
        def step(h, x):
            a, b = jnp.split(into @ x, 3), jnp.split(inner @ h, 3)
            reset, update = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
            new = jnp.tanh(a[2] + reset * b[2])
            return new + update * (h - new), None

        return lax.scan(step, jnp.zeros(width, xs.dtype), xs)[0]

    weights = batch((3 * width, 4), None) / 2, batch((3 * width, width), None) / width
    args = (*weights, batch((5, 4), 0, size=64))
    ours, theirs = bx.vmap(last, (None, None, 0)), jax.vmap(last, (None, None, 0))
    same(ours(*args), theirs(*args))
    total = lambda fun: jax.grad(lambda *xs: jnp.mean(fun(*xs) ** 2), (0, 1, 2))
    same(total(ours)(*args), total(theirs)(*args))
    each = lambda vmap: vmap(jax.grad(lambda *xs: last(*xs).sum(), (0, 1)), (None, None, 0))
    same(each(bx.vmap)(*args), each(jax.vmap)(*args))
    (scan,) = (e for e in jax.make_jaxpr(ours)(*args).eqns if e.primitive.name == "scan")
    inside = [e.primitive.name for e in scan.params["jaxpr"].jaxpr.eqns]
    assert "transpose" not in inside
    assert inside.count("dot_general") == 2
    assert scan.outvars[0].aval.shape == state


def test_products_that_meet_in_a_step_of_a_loop_that_lanes_leave_have_lanes_first():
    """Such a loop carries them first. Short inputs of a long state are as the state is."""
    into, inner = batch((66, 4), None) / 2, batch((66, 33), None) / 33
    inputs = batch((8, 4), None)

    def last(n, x):
        def step(carry):
            i, h = carry
            a, b = jnp.split(into @ inputs[i % 8] + inner @ (h + x), 2)
            return i + 1, h + jax.nn.sigmoid(a) * jnp.tanh(b)

        return lax.while_loop(lambda carry: carry[0] < n, step, (0, jnp.zeros(33, x.dtype)))[1]

    n, x = jnp.arange(64) % 5, batch((), 0, size=64)
    ours, theirs = bx.vmap(last, divergence="predicate"), jax.vmap(last)
    same(ours(n, x), theirs(n, x))
    moved = lambda fun: jax.jvp(lambda x: fun(n, x), (x,), (x,))[1]
    same(moved(ours), moved(theirs))
    (loop,) = (e for e in jax.make_jaxpr(ours)(n, x).eqns if e.primitive.name == "while")
    eqns = loop.params["body_jaxpr"].jaxpr.eqns
    shapes = [e.outvars[0].aval.shape for e in eqns if e.primitive.name == "dot_general"]
    assert shapes == [(64, 66)] * 2
    assert "transpose" not in [e.primitive.name for e in eqns]


# Operands in blocks, with a scale for each block of the contracted dimension.
SCALED = (((2,), (2,)), ((0,), (0,)))


RAGGED = {
    # name: (dimension numbers, lhs, rhs, the dimensions along which sizes may differ)
    "free": (((((1,), (1,)), ((), ())), [0], [0]), (6, 4), (3, 4, 5), ()),
    "free, with others": (
        ((((3,), (2,)), ((0,), (1,))), [2], [0]),
        (2, 2, 6, 4),
        (3, 2, 4, 5),
        (2, 2),
    ),
    "contracted": (((((1,), (1,)), ((0,), (0,))), [1], []), (2, 6, 4), (2, 6, 5), (2,)),
    "contracted, with others": (
        ((((1, 2), (1, 0)), ((), ())), [2], []),
        (4, 2, 6),
        (6, 2, 5),
        (2,),
    ),
    "batch": (((((2,), (1,)), ((0, 1), (0, 2))), [1], []), (2, 6, 4), (2, 4, 6), (2,)),
}
SIZES = jnp.array([[2, 3, 1], [1, 1, 4], [0, 6, 0]])


def ragged_contraction(mode):
    dims, ragged, groups = RAGGED[mode][0]
    numbers = lax.RaggedDotDimensionNumbers(dims, ragged, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


SHAPE = (2, 4, 6)
TRANSFORMS = {
    "fft": (lax.FftType.FFT, (6,), jnp.complex64),
    "ifft of two": (lax.FftType.IFFT, (4, 6), jnp.complex64),
    "rfft": (lax.FftType.RFFT, (6,), jnp.float32),
    "rfft of three": (lax.FftType.RFFT, (2, 4, 6), jnp.float32),
    "irfft": (lax.FftType.IRFFT, (4, 10), jnp.complex64),
    "irfft of odd length": (lax.FftType.IRFFT, (11,), jnp.complex64),
}


def transform(name):
    kind, lengths, _ = TRANSFORMS[name]
    return lambda x: lax.fft(x, kind, lengths)
