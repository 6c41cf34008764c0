"""Python functions on the host, for one lane or many."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import example, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])
THREADS = pytest.mark.parametrize("threads", [1, 3])


def moments(tree, y):
    assert isinstance(tree["x"], np.ndarray)
    assert tree["x"].shape == (3,)
    return {"dot": tree["x"] @ y, "sorted": np.sort(tree["x"])}


def types(tree, y):
    return {"dot": jax.ShapeDtypeStruct((), y.dtype), "sorted": tree["x"]}


def plain(tree, y):
    return {"dot": tree["x"] @ y, "sorted": jnp.sort(tree["x"])}


@VMAPS
@THREADS
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (1, 0)])
def test_batches(vmap, threads, axes):
    f = bx.host_function(moments, types, threads=threads)
    x = example((3, 3) if axes[0] is not None else (3,))
    y = example((3, 3) if axes[1] is not None else (3,), seed=1)
    run = lambda vmap, f: vmap(f, in_axes=({"x": axes[0]}, axes[1]))({"x": x}, y)
    same(run(vmap, f), run(jax.vmap, plain))
    same(jax.jit(lambda: run(vmap, f))(), run(jax.vmap, plain))


def test_one_example_and_chunks():
    f = bx.host_function(moments, types)
    same(f({"x": example((3,))}, example((3,))), plain({"x": example((3,))}, example((3,))))
    xs = example((5, 3))
    run = lambda f, **kw: bx.vmap(f, in_axes=({"x": 0}, None), **kw)({"x": xs}, xs[0])
    same(run(f, batch_size=2), run(plain))


@VMAPS
def test_the_host_is_called_once_for_a_batch_and_lanes_come_in_order(vmap):
    seen = []

    def note(x):
        seen.append(float(x))
        return x

    f = bx.host_function(note, jax.ShapeDtypeStruct((), jnp.float32))
    vmap(f)(jnp.arange(5.0)).block_until_ready()
    assert seen == [0, 1, 2, 3, 4]
    assert str(jax.make_jaxpr(vmap(f))(jnp.arange(5.0))).count("pure_callback[") == 1


def test_threads_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=120)

    def meet(x):
        meeting.wait()  # only if all three lanes are running
        return x

    f = bx.host_function(meet, jax.ShapeDtypeStruct((), jnp.float32), threads=3)
    x = jnp.arange(3, dtype=jnp.float32)
    same(bx.vmap(f)(x), x)


@VMAPS
def test_with_a_derivative(vmap):
    inspect.signature(np.exp2)  # of NumPy's own function, which keeps it
    exp2 = bx.custom_vmap(bx.host_function(np.exp2, lambda x: x))
    exp2.def_vmap(lambda n, b, x: (vmap(exp2.fun)(x), True))
    exp2.def_jvp(lambda p, t: (exp2(*p), exp2(p[0]) * t[0] * jnp.log(2.0)))
    same(vmap(jax.grad(exp2))(jnp.arange(3.0)), np.exp2(jnp.arange(3.0)) * jnp.log(2.0))
    sin = bx.custom_vmap(bx.host_function(np.sin, lambda x: x))
    sin.def_vmap(lambda n, b, x: (vmap(sin.fun)(x), True))
    sin.def_jvp(lambda p, t: (sin(*p), jnp.cos(p[0]) * t[0]))
    xs = jnp.arange(3.0)
    same(vmap(jax.grad(sin))(xs), jnp.cos(xs))
    same(jax.grad(lambda x: vmap(sin)(x).sum())(xs), jnp.cos(xs))


@THREADS
def test_an_exception_names_the_lane(threads):
    def fails(x):
        if x > 1:
            raise ValueError("too large")
        return x

    f = bx.host_function(fails, lambda x: x, threads=threads)
    with pytest.raises(Exception, match="too large"):
        jax.block_until_ready(bx.vmap(f)(jnp.arange(3.0)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: np.ones(3), r"array of shape \(2,\), but it was \(3,\)"),
        (lambda x: (x, x), "the structure"),
    ],
)
def test_results_that_do_not_fit(wrong, message):
    f = bx.host_function(wrong, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(bx.vmap(f)(jnp.ones((4, 2))))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: bx.host_function(3, None), bx.ArgumentTypeError, "expects a function"),
        (
            lambda: bx.host_function(abs, 1.0, threads=0),
            bx.OptionError,
            "threads must be a positive int",
        ),
        (lambda: bx.host_function(abs, 1.0, threads=2.0), bx.ArgumentTypeError, "positive int"),
        (lambda: bx.host_function(abs, 1.0, threads=True), bx.ArgumentTypeError, "positive int"),
        (
            lambda: bx.host_function(abs, jax.random.key(0))(1.0),
            bx.ArgumentTypeError,
            "out_type of host_function has the dtype key<fry>",
        ),
    ],
)
def test_wrong_options(make, error, message):
    with pytest.raises(error, match=message):
        make()
