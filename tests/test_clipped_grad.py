"""`clipped_grad`: the sum of clipped gradients is that of the loop, and gradients are nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.contractions import contracted

RANDOM = np.random.default_rng(0)
XS, YS = RANDOM.normal(size=(6, 4)), RANDOM.integers(0, 3, 6)
PARAMS = {"w": RANDOM.normal(size=(3, 4)), "b": np.zeros(3), "unused": np.ones(2)}


def loss(params, x, y):
    return -jax.nn.log_softmax(params["w"] @ x + params["b"])[y]


def by_loop(max_norm):
    """The oracle, in NumPy: the gradient of each example is ``(p - onehot) x``."""
    total = {k: np.zeros_like(v) for k, v in PARAMS.items()}
    clipped = 0
    for x, y in zip(XS, YS, strict=True):
        z = PARAMS["w"] @ x + PARAMS["b"]
        d = np.exp(z - z.max()) / np.exp(z - z.max()).sum() - np.eye(3)[y]
        g = {"w": np.outer(d, x), "b": d}
        norm = np.sqrt(sum((v**2).sum() for v in g.values()))
        clipped += norm > max_norm
        for k, v in g.items():
            total[k] += min(1, max_norm / norm) * v
    return total, len(XS), clipped


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 4}, {"mesh": "all"}, {"mesh": "all", "batch_size": 1}], ids=str
)
def test_the_sum_is_that_of_the_loop(options):
    call = jax.jit(lambda max_norm, *args: bx.clipped_grad(loss, max_norm, **options)(*args))
    for max_norm in (2.0, 1e6):
        expected = by_loop(max_norm)
        assert max_norm > 1e5 or 0 < expected[2] < 6
        got = call(max_norm, PARAMS, XS, YS)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
            tuple(got),
            expected,
        )
        assert got.count.dtype == got.clipped.dtype == jnp.int32


def test_calls_outside_of_jit_rewrite_their_program_once(monkeypatch):
    rewritten, run = [], contracted._Factoring.run
    counted = lambda *args: rewritten.append(args) or run(*args)
    monkeypatch.setattr(contracted._Factoring, "run", counted)
    jax.clear_caches()
    # Primitives alone: JAX may trace again what `jnp` functions with derivative rules call.
    square = lambda w, x: lax.dot(w, x) @ lax.dot(w, x)
    for first, scale in ((True, 1.0), (False, 2.0)):
        scales = jnp.full(4, scale)  # a new array, which the loss closes over
        scaled = bx.clipped_grad(lambda w, x, s=scales: square(w, s * x), 2.0)
        before = len(rewritten)
        got = scaled(PARAMS["w"], XS)
        assert (len(rewritten) > before) == first
        expected = bx.clipped_grad(square, 2.0)(PARAMS["w"], scale * XS)
        assert got.clipped == expected.clipped
        np.testing.assert_allclose(got.sum, expected.sum, rtol=1e-5, atol=1e-6)


@pytest.mark.compiles(160)
def test_arguments_by_keyword_other_places_and_a_traced_norm():
    total = bx.clipped_grad(loss, 2.0)(PARAMS, XS, YS).sum
    swapped = lambda x, params, y: loss(params, x, y)
    same = lambda a, b: jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), a, b)
    same(bx.clipped_grad(swapped, 2.0, argnums=1)(XS, PARAMS, YS).sum, total)
    same(bx.clipped_grad(swapped, 2.0, argnums=-2)(XS, PARAMS, YS).sum, total)
    same(bx.clipped_grad(loss, 2.0)(PARAMS, XS, y=YS).sum, total)
    same(bx.clipped_grad(loss, 2.0, (None, 1, 0))(PARAMS, XS.T, YS).sum, total)
    traced = jax.jit(lambda c, *args: bx.clipped_grad(loss, c)(*args).sum)
    same(traced(2.0, PARAMS, XS, YS), total)
    (pair,) = bx.clipped_grad(loss, 2.0, argnums=(0,))(PARAMS, XS, YS).sum
    same(pair, total)
    each = jax.vmap(lambda c: bx.clipped_grad(loss, c)(PARAMS, XS, YS).sum)(jnp.array([2.0, 9.0]))
    same(jax.tree.map(lambda x: x[0], each), total)


def test_a_gradient_of_zero_is_zero_and_one_that_is_nan_is_seen():
    f = jax.jit(bx.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0))
    np.testing.assert_array_equal(f(jnp.ones(2), jnp.zeros((3, 2))).sum, [0, 0])
    assert np.isnan(f(jnp.ones(2), jnp.array([[1.0, 1.0], [jnp.nan, 0.0]])).sum).all()
    assert f(jnp.ones(2), jnp.zeros((0, 2))).count == 0


def test_norms_of_numbers_of_16_bits_have_32_and_one_that_is_too_large_is_no_zero():
    """The square of 300 is infinite in float16; an example of that norm was left out."""
    call = jax.jit(bx.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0))
    of = lambda x, dtype: call(np.zeros(2, dtype), np.array([x, [0.0, 0.5]], dtype))
    for dtype in (np.dtype("float16"), jnp.dtype("bfloat16")):
        total, count, clipped = of([300.0, 0.0], dtype)
        assert (total.dtype, count, clipped) == (dtype, 2, 1)
        np.testing.assert_allclose(total.astype("float32"), [1.0, 0.5], rtol=1e-2)
    assert not np.isfinite(of([1e20, 0.0], np.float32).sum).any()
    assert jax.jit(bx.clipped_grad(lambda w, x: x, 1.0))({}, np.ones(3)) == ({}, 3, 0)


def test_no_gradient_of_an_example_is_in_memory():
    """Of a perceptron with biases: the gradients of 512 examples take 105 MB, these a few."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    params = {"w1": array(784, 64), "b1": array(64), "w2": array(64, 10), "b2": array(10)}

    def loss(p, x, y):
        logits = jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return -jax.nn.log_softmax(logits)[y]

    for options in ({}, {"batch_size": 64}):
        f = jax.jit(bx.clipped_grad(loss, 1.0, **options))
        made = f.lower(params, array(512, 784), jax.ShapeDtypeStruct((512,), np.int32)).compile()
        assert made.memory_analysis().temp_size_in_bytes < 4e6


def test_axes_by_name_also_of_keyword_arguments():
    scaled = lambda params, x, y, *, scale: scale * loss(params, x, y)
    sums = bx.clipped_grad(scaled, 1.0, {"scale": None}, batch_size=2)(PARAMS, XS, YS, scale=2.0)
    doubled = bx.clipped_grad(lambda *args: 2.0 * loss(*args), 1.0)(PARAMS, XS, YS)
    jax.tree.map(np.testing.assert_array_equal, sums[1:], doubled[1:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums[0], doubled[0])
    with pytest.raises(bx.ArgumentTypeError, match="in_axes=\\{'scale': None\\}"):
        bx.clipped_grad(scaled, 1.0)(PARAMS, XS, YS, scale="2")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: bx.clipped_grad(3, 1.0), TypeError, "clipped_grad expects a loss of one example"),
        (lambda: bx.clipped_grad(loss, "1"), TypeError, "max_norm must be a number, got '1'"),
        (lambda: bx.clipped_grad(loss, 0.0), ValueError, "max_norm must be positive, got 0.0"),
        (lambda: bx.clipped_grad(loss, 1.0, 0), TypeError, "in_axes of clipped_grad must be a tup"),
        (lambda: bx.clipped_grad(loss, 1.0, grad=1), TypeError, "grad of clipped_grad expects"),
        (
            lambda: bx.clipped_grad(loss, 1.0)({**PARAMS, "n": 3}, XS, YS),
            TypeError,
            r"for params\['n'\] of dtype int.*grad=equinox.filter_grad",
        ),
        (
            lambda: bx.clipped_grad(loss, 1.0)({**PARAMS, "f": jnp.tanh}, XS, YS),
            TypeError,
            r"has no gradient for params\['f'\] of type",
        ),
        (lambda: bx.clipped_grad(loss, 1.0, argnums="x"), TypeError, "argnums must be an int"),
        (
            lambda: bx.clipped_grad(loss, 1.0, (0, 0, 0))(PARAMS, XS, YS),
            ValueError,
            "in_axes gives 0 for params, which gradients are with respect to",
        ),
        (lambda: bx.clipped_grad(loss, 1.0)(PARAMS, XS, YS[:2]), ValueError, "y: shape"),
        (lambda: bx.clipped_grad(loss, 1.0, argnums=()), TypeError, "must name an argument"),
        (lambda: bx.clipped_grad(loss, 1.0, out_axes=0), TypeError, "Remove out_axes"),
        (
            lambda: bx.clipped_grad(loss, 1.0)(params=PARAMS, x=XS, y=YS),
            TypeError,
            "argnums is 0, and 0 arguments were passed by position",
        ),
        (
            lambda: bx.clipped_grad(loss, 1.0, argnums=(0, -3))(PARAMS, XS, YS),
            TypeError,
            "names an argument twice",
        ),
    ],
)
def test_mistakes(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert isinstance(caught.value, bx.BatchaxError)


VALUE, AUX = jax.value_and_grad, lambda f: jax.grad(lambda *xs: (f(*xs), 1.0), has_aux=True)


@pytest.mark.parametrize("grad", [VALUE, AUX], ids=["value_and_grad", "has_aux"])
def test_a_value_or_aux_beside_gradients_is_refused(grad):
    for w in (1.0, (1.0, 2.0), {"w": 1.0}, (1.0, (2.0, 3.0)), ({"w": 1.0}, {"w": 1.0})):
        sums = lambda w, x: x * sum(jax.tree.leaves(w))
        with pytest.raises(bx.errors.ArgumentTypeError, match=r"must return gradients alone.*\("):
            bx.clipped_grad(sums, 1.0, grad=grad)(w, jnp.ones(3))
        total = bx.clipped_grad(sums, 9.0, grad=lambda f: jax.grad(f))(w, jnp.ones(3)).sum
        assert jax.tree.structure(total) == jax.tree.structure(w)
    both = bx.clipped_grad(lambda a, b, x: a * b * x, 9.0, argnums=(0, 1), grad=jax.grad)
    assert both(1.0, 2.0, jnp.ones(3)).sum == (6.0, 3.0)


def test_options_that_there_are_not_are_refused_in_its_name():
    for options, says in (
        ({"chunk_size": 3}, "pass batch_size"),
        ({"has_aux": True}, "pass a loss without aux"),
        ({"value": True}, "It has max"),
    ):
        with pytest.raises(bx.errors.ArgumentTypeError, match=rf"clipped_grad\(\) .*{says}"):
            bx.clipped_grad(loss, 1.0, **options)
