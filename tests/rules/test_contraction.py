"""Contractions, ragged ones, and Fourier transforms, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.batches import SIZE, batch, positions
from support.operations import no_more_operations, operations
from support.oracle import agree, check, check_all, example, quickly, same

VALUES_ONLY = dict(derivatives=False, eager=False)
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


@pytest.mark.parametrize(
    ("name", "step"), [("matrix vector", 1), ("with a batch dimension", 3), ("scalars", 1)]
)
def test_every_position(name, step):
    fun, cases = contraction(name), {}
    for in_axes in positions(*(len(shape) for shape in DIMENSIONS[name][:2]))[::step]:
        args = operands(name, in_axes)
        no_more_operations(fun, *args, in_axes=in_axes)
        cases[str(in_axes)] = (fun, *args, dict(in_axes=in_axes))
    check_all(cases, derivatives=False)


@settings(max_examples=10)
@given(st.sampled_from(positions(4, 4)), st.integers(0, 2))
def test_several_batch_and_contracted_dimensions(in_axes, out_axis):
    ways = [v(contraction("two of each"), in_axes, out_axis) for v in (bx.vmap, jax.vmap)]
    agree(*ways, *operands("two of each", in_axes))


@pytest.mark.parametrize("name", ["matrix vector", "with a batch dimension"])
@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 0)])
def test_derivatives(name, in_axes):
    args = operands(name, in_axes)
    nested = name == "matrix vector"
    quickly(jax.jit(contraction(name)), *args, in_axes=in_axes, nested=nested)


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


def layers(sizes):
    """A network of one layer inside, and an example for each lane."""
    first, inside, last = sizes
    w1, w2 = batch((inside, first), None), batch((last, inside), None)
    b = batch((inside,), None)
    return lambda x: w2 @ jnp.tanh(w1 @ x + b), batch((first,), 0)


def test_long_layers_keep_the_batch_in_front():
    quickly(*layers((4, 5, 2)), second=True)
    network, x = layers((32, 35, 33))
    assert operations(bx.vmap(network), x)["transpose"] == 0
    gradient = jax.grad(lambda x: network(x).sum())
    assert operations(bx.vmap(gradient), x)["transpose"] == 0


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


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_out_sharding_gains_the_batch_axis(in_axes):
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.PartitionSpec
    args = operands("matrix vector", in_axes)
    expected = jax.device_get(jax.vmap(jnp.matmul, in_axes)(*args))
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, jax.NamedSharding(mesh, spec() if a is None else spec("x")))
            for x, a in zip(args, in_axes, strict=True)
        ]
        out = jax.NamedSharding(mesh, spec("y"))
        got = bx.vmap(contraction("matrix vector", out_sharding=out), in_axes)(*sharded)
        assert tuple(jax.typeof(got).sharding.spec) == ("x", "y")
        same(jax.device_get(got), expected)


# Operands in blocks, with a scale for each block of the contracted dimension.
SCALED = (((2,), (2,)), ((0,), (0,)))


@pytest.mark.parametrize(
    "in_axes",
    [(0, 0, 0, 0), (1, None, 0, None), (None, 0, None, None), (None, None, None, 2), (3, 0, 1, 2)],
)
def test_scaled_dot(in_axes):
    dtypes = (jnp.float8_e4m3fn,) * 2 + (jnp.float8_e8m0fnu,) * 2
    shapes = (2, 4, 8), (2, 5, 8), (2, 4, 2), (2, 5, 2)
    args = [
        batch(s, a, jnp.float32, seed=i, low=0.5, high=2.0).astype(d)
        for i, (s, a, d) in enumerate(zip(shapes, in_axes, dtypes, strict=True))
    ]

    def fun(x, y, x_scale, y_scale):
        return lax.scaled_dot(x, y, lhs_scale=x_scale, rhs_scale=y_scale, dimension_numbers=SCALED)

    check(jax.jit(fun), *args, in_axes=in_axes, **VALUES_ONLY)
    out = jax.eval_shape(bx.vmap(fun, in_axes), *args)
    assert out.shape == (SIZE, 2, 4, 5)


MODES = {
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


def contraction_of_ragged_contraction(mode):
    dims, ragged, groups = MODES[mode][0]
    numbers = lax.RaggedDotDimensionNumbers(dims, ragged, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def operands_of_ragged_contraction(mode, in_axes, sizes_differ=False):
    _, lhs, rhs, prefix = MODES[mode]
    arrays = []
    for i, (shape, a) in enumerate(((lhs, in_axes[0]), (rhs, in_axes[1]))):
        shape = shape if a is None else (*shape[:a], SIZE, *shape[a:])
        arrays.append(example(shape, seed=i))
    sizes = SIZES
    if sizes_differ:
        # Lane i, at place p of the prefix, has row i + p of SIZES.
        places = jnp.arange(SIZE).reshape(-1, *(1 for _ in prefix))
        places = places + jnp.arange(max(1, *prefix, 1) ** len(prefix)).reshape(prefix)
        sizes = SIZES[places % SIZE]
    sizes = sizes[0] if in_axes[2] is None else jnp.moveaxis(sizes, 0, in_axes[2])
    return [*arrays, sizes]


# Each operand batched or not, in front or elsewhere.
PATTERNS = [
    (0, 0, 0),
    (0, None, None),
    (None, 1, None),
    (None, None, 0),
    (1, None, 1),
    (2, 0, None),
    (2, None, 0),
    (None, 0, 0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.each_commit(3)
def test_every_pattern(mode):
    fun = jax.jit(contraction_of_ragged_contraction(mode))
    for in_axes in PATTERNS:
        args = operands_of_ragged_contraction(mode, in_axes)
        check(fun, *args, in_axes=in_axes, against_jax=False, **VALUES_ONLY)


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode][3]])
@pytest.mark.each_commit(2, "batch")
def test_sizes_that_differ_along_other_dimensions(mode):
    fun = jax.jit(contraction_of_ragged_contraction(mode))
    for in_axes in ((0, 0, 0), (1, None, None), (None, None, 1), (2, None, 0)):
        args = operands_of_ragged_contraction(mode, in_axes, sizes_differ=True)
        check(fun, *args, in_axes=in_axes, against_jax=False, **VALUES_ONLY)


def test_under_a_second_vmap():
    x, y, sizes = operands_of_ragged_contraction("free", (0, 0, 0))
    twice = bx.vmap(bx.vmap(lax.ragged_dot, in_axes=(0, None, None)), in_axes=(None, 0, 0))
    got = jax.jit(twice)(x, y, sizes)
    for i in range(SIZE):
        for j in range(SIZE):
            same(got[i, j], lax.ragged_dot(x[j], y[i], sizes[i]))


@pytest.mark.parametrize("in_axes", [(1, None, None), (None, 0, None), (0, None, 0)])
def test_derivatives_of_ragged_contraction(in_axes):
    fun = jax.jit(contraction_of_ragged_contraction("free"))
    args = operands_of_ragged_contraction("free", in_axes)
    quickly(fun, *args, in_axes=in_axes, against_jax=False)


def test_an_operand_that_all_lanes_share_is_not_repeated():
    x, y, sizes = operands_of_ragged_contraction("free", (0, None, 0))
    jaxpr = jax.make_jaxpr(
        bx.vmap(contraction_of_ragged_contraction("free"), in_axes=(0, None, 0))
    )(x, y, sizes)
    (eqn,) = jaxpr.eqns
    assert eqn.invars[1].aval.shape == y.shape


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
    kind, lengths, dtype = TRANSFORMS[name]
    return lambda x: lax.fft(x, kind, lengths), dtype


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_transform(name, axis):
    fun, dtype = transform(name)
    x = batch(SHAPE, axis, dtype)
    quickly(fun, x, in_axes=axis, out_axes=1, derivatives=False)
    no_more_operations(fun, x, in_axes=axis)


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft"])
def test_derivatives_of_fft(name):
    fun, dtype = transform(name)
    quickly(fun, batch(SHAPE, 3, dtype), in_axes=3, nested=True)
