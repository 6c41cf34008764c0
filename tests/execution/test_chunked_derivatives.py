"""Derivatives in chunks: right in every mode and order, in the memory of one chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.compiled import compiled_bytes
from support.derivative_rules import tripled_jvp
from support.high_operations import normalized
from support.oracle import agree, example, same

LANES = 5
X = example((LANES, 3), seed=1)
Y = example((LANES, 3), seed=4)
W = example((3,), seed=2)
RESIDUALS = ("recompute", "keep")


def model(x, w):
    return jnp.tanh(jnp.outer(x, w)) @ w


@pytest.fixture(params=RESIDUALS)
def chunked(request):
    """`bx.vmap` in chunks of two lanes, keeping residuals or not."""
    return functools.partial(bx.vmap, batch_size=2, residuals=request.param)


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f, 1), (0, 1)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 1), (0, 1)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.each_commit(6)
def test_transformations(name, chunked):
    options = dict(in_axes=(0, None), out_axes=1)
    ours, plain = (v(model, **options) for v in (chunked, bx.vmap))
    transformation = TRANSFORMATIONS[name]
    tolerance = dict(rtol=1e-4, atol=1e-5)
    agree(transformation(ours), transformation(plain), X, W, tolerance=tolerance)


# --- functions with derivative rules of their own ----------------------------------------------


def tripled_vjp(closed=None):
    @jax.custom_vjp
    def f(x, y):
        return jnp.sin(x) * y

    def bwd(residuals, c):
        x, y = residuals
        scale = 3 if closed is None else closed
        return scale * c * jnp.cos(x) * y, scale * c * jnp.sin(x)

    f.defvjp(lambda x, y: (f(x, y), (x, y)), bwd)
    return f


@pytest.mark.parametrize("make", [tripled_jvp, tripled_vjp])
def test_rules_that_close_over_values_from_before_a_collective(make, chunked):
    def per_example(x, p):
        q = jnp.cos(p) + 2
        mean = lax.pmean(x, "i")
        r = q * 2  # known before the collective, needed after it
        return make(q + r)(x - mean, x).sum()

    gradient = lambda v: jax.grad(lambda x: v(per_example, axis_name="i")(x, Y).sum())
    agree(gradient(chunked), gradient(bx.vmap), X)


def test_rules_that_close_over_values_of_different_sizes(chunked):
    # Outside of jit one compiled program must not serve for both.
    for size in (2, 4):
        per_example = lambda x, p: tripled_jvp(jnp.cos(p).sum() + 2)(x, x).sum()
        p = example((LANES, size))
        gradient = lambda v: jax.grad(lambda x: v(per_example)(x, p).sum())
        same(gradient(chunked)(X), gradient(bx.vmap)(X))


# --- memory -------------------------------------------------------------------------------------


def wide(x, w):
    """A 256 x 64 intermediate value for each lane; what the design measures."""
    h = jnp.tanh(jnp.outer(x, jnp.arange(1.0, 65.0)) / 64)
    h = jnp.sin(h @ w)
    return (h**2).sum()


def gradient(batch_size, **options):
    total = lambda x, w: bx.vmap(wide, (0, None), batch_size=batch_size, **options)(x, w).sum()
    return jax.grad(total, (0, 1))


def test_temporaries_of_a_gradient_do_not_grow_with_the_number_of_lanes():
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = [jax.ShapeDtypeStruct((n, 256), jnp.float32) for n in (256, 512)]
    few, many = (compiled_bytes(gradient(32), xs, w) for xs in x)
    assert many <= few + 64
    second = lambda x, w: jax.jvp(lambda w: gradient(32)(x, w)[1], (w,), (w,))[1]
    few, many = (compiled_bytes(second, xs, w) for xs in x)
    assert many <= few + 64


@jax.custom_vjp
def _unread(a, b):
    return jnp.sin(b)


_unread.defvjp(lambda a, b: (jnp.sin(b), (a, b)), lambda r, ct: (ct * r[0], ct * jnp.cos(r[1])))


@jax.custom_jvp
def _unread_forward(a, b):
    return jnp.sin(b)


_unread_forward.defjvp(lambda xs, ts: (jnp.sin(xs[1]), ts[0] * xs[0] + jnp.cos(xs[1]) * ts[1]))


@pytest.mark.parametrize("rule", [_unread, _unread_forward])
def test_a_rule_for_an_argument_that_no_value_depends_on(rule):
    """The value is the same for all examples, and the derivative is not."""
    calls = {
        "alone": lambda x, y: rule(x * 2, y),
        "mapped": lambda x, y: lax.map(lambda t: rule(x * 2, t), y[None])[0],
        "chosen": lambda x, y: lax.cond(y > 0, lambda: rule(x * 2, y), lambda: y),
    }
    weights = jnp.cos(jnp.arange(5.0))

    def gradients(mapped):
        loss = lambda f: jax.grad(lambda x, y: weights @ mapped(f)(x, y), (0, 1))
        return lambda x, y: {name: loss(f)(x, y) for name, f in calls.items()}

    ways = {"batch_size": 1}, {"batch_size": 2}, {"mesh": "all", "batch_size": 1}, {}
    ours = {str(way): gradients(lambda f, way=way: bx.vmap(f, (0, None), **way)) for way in ways}
    expected = gradients(lambda f: lambda x, y: lax.map(lambda x: f(x, y), x))
    agree(ours, expected, jnp.arange(1.0, 6.0), jnp.asarray(0.5, float))


@pytest.mark.parametrize("step", [jnp.sin, lambda x: jnp.max(x, 0)], ids=["sine", "maximum"])
@pytest.mark.compiles(100)
def test_steps_over_rows_that_do_not_read_the_row(step):
    """Each step is the same for all rows, and how many there are is not."""
    lengths, x = np.array([3, 1, 4, 2]), jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    weights = jnp.cos(jnp.arange(10.0))
    fun = lambda row, x: lax.map(lambda _: step(x), row)

    def loss(x, **options):
        rows = bx.Ragged(jnp.arange(10.0), jnp.asarray(lengths), 5)
        out = bx.vmap(fun, (0, None), **options)(rows, x).data
        return jnp.sum(out * weights.reshape(-1, *[1] * (out.ndim - 1)))

    def alone(x):
        parts = np.split(np.arange(10), np.cumsum(lengths)[:-1])
        each = [(fun(jnp.ones(n), x), weights[p]) for n, p in zip(lengths, parts, strict=True)]
        return sum(jnp.sum(y * w.reshape(-1, *[1] * (y.ndim - 1))) for y, w in each)

    for options in ({}, {"batch_size": 1}, {"batch_size": 2}, {"batch_size": 3}):
        same(jax.jit(jax.grad(lambda x, o=options: loss(x, **o)))(x), jax.grad(alone)(x))


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"divergence": "serial"}], ids=str)
@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: f], ids=["jit", "remat", ""])
def test_a_call_that_does_not_read_an_argument(call, options):
    """The norm has no finite derivative here, and nothing depends on it."""

    def scaled(x, w):
        return call(lambda unread: jnp.abs(w)[1:] * x)(jnp.linalg.norm(w))

    def gradient(vmap, **options):
        return jax.grad(lambda w: vmap(scaled, (0, None), **options)(X[:, :2], w).sum())(w)

    w = jnp.array([np.inf, 3.0, 0.5])
    np.testing.assert_allclose(gradient(bx.vmap, **options), gradient(jax.vmap), rtol=1e-5)


@pytest.mark.parametrize("out_axes", [0, bx.Reduce("sum")], ids=["lanes", "loss"])
@pytest.mark.parametrize("fun", [lambda x, y: lax.stop_gradient(y) * x, lambda x, y: jnp.floor(y)])
def test_an_operand_without_a_derivative_may_be_made_without_reverse_mode(fun, out_axes):
    x = jnp.arange(1.0, 9)
    grow = lambda x: lax.while_loop(lambda y: y.sum() < 90, lambda y: y * 1.5, x)
    total = lambda batched: jax.grad(lambda x: jnp.sum(batched(x, grow(x))))
    chunked = bx.vmap(fun, out_axes=out_axes, batch_size=3)
    np.testing.assert_allclose(total(chunked)(x), total(jax.vmap(fun))(x), rtol=1e-6)


@jax.custom_vjp
def _tripled(x):
    return jnp.sin(x)


_tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct * jnp.cos(x),))

IN_REVERSE_ALONE = {
    "of another library": lambda x, w: x * normalized(w)[0] + normalized(x)[0],
    "in jit": lambda x, w: jax.jit(lambda w: normalized(w)[0])(w) * x,
    "in a loop": lambda x, w: lax.fori_loop(0, 3, lambda _, y: normalized(y + x)[0], w),
    "in a bounded loop": lambda x, w: bx.bounded_while(
        lambda y: y[0] < 2, lambda y: normalized(y)[0] + x + 1, w, max_steps=3
    ),
    "in a branch": lambda x, w: lax.cond(x[0] > 2, lambda: normalized(w)[0], lambda: w) * x,
    "in jax.vmap": lambda x, w: jax.vmap(_tripled)(x) * jax.vmap(_tripled)(w),
    "in remat": lambda x, w: jax.checkpoint(jax.vmap(_tripled))(w) * x,
}


@pytest.mark.parametrize("name", IN_REVERSE_ALONE)
def test_operations_without_a_forward_mode(name):
    """Chunks and bounded loops transpose forward mode, which these do not have.

    Nor has ``jax.vmap`` of a ``custom_vjp`` function, with JAX 0.10 and its ``jax_custom_vjp3``.
    """
    fun, w = IN_REVERSE_ALONE[name], jnp.linspace(0.2, 1.0, 3)
    x = jnp.linspace(-1.0, 2.0, 15).reshape(5, 3)
    gradients = lambda f: jax.grad(lambda x, w: jnp.sum(jnp.cos(f(x, w))), (0, 1))
    chunked = gradients(bx.vmap(fun, (0, None), batch_size=2))
    same(chunked(x, w), gradients(lambda x, w: jnp.stack([fun(row, w) for row in x]))(x, w))
