"""Calls of Python and of foreign functions, and runtime checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import batchax as bx

from support.oracle import check, example, same

METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]


def calling(seen, method):
    """A function of an example that adds in Python, and records what shapes it was given."""

    def add(x, y):
        seen.append((np.shape(x), np.shape(y)))
        return np.asarray(x) + np.asarray(y)[..., None], np.asarray(y) * np.asarray(x)[..., 0]

    def fun(x, y):
        results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), y.dtype))
        return jax.pure_callback(add, results, x, y, vmap_method=method)

    return fun


@pytest.mark.parametrize("method", [*METHODS, "legacy_vectorized"])
@pytest.mark.parametrize("in_axes", [(0, 0), (1, 0), (0, None), (None, 0)])
@pytest.mark.each_commit(5)
def test_pure_callback(method, in_axes):
    if method == "legacy_vectorized" and None in in_axes:
        return  # that method leaves unbatched operands as they are: see below
    shapes = {0: ((4, 3), (4,)), 1: ((3, 4), (4,)), None: ((3,), ())}
    args = [example(shapes[a][i], seed=i) for i, a in enumerate(in_axes)]
    ours, theirs = [], []
    check(calling([], method), *args, in_axes=in_axes, derivatives=False)
    same(
        bx.vmap(calling(ours, method), in_axes)(*args),
        jax.vmap(calling(theirs, method), in_axes)(*args),
    )
    assert sorted(ours) == sorted(theirs)
    if method == "expand_dims":
        x_lanes, y_lanes = (1 if a is None else 4 for a in in_axes)
        assert ours == [((x_lanes, 3), (y_lanes,))]


def test_pure_callback_of_unbatched_values_runs_once():
    seen = []
    out = bx.vmap(calling(seen, None), None, None, axis_size=4)(jnp.ones(3), jnp.ones(()))
    same(out[0], 2 * jnp.ones(3))
    assert len(seen) == 1


def test_pure_callback_that_does_not_say_how():
    fun = calling([], None)
    with pytest.raises(bx.UnsupportedError, match=r"'add'.*vmap_method='sequential'"):
        bx.vmap(fun)(jnp.ones((4, 3)), jnp.ones(4))
    with pytest.raises(NotImplementedError):
        jax.vmap(fun)(jnp.ones((4, 3)), jnp.ones(4))


class Log:
    """Lists what a callback was called with; returns their sum, or nothing."""

    def __init__(self, returns=True):
        self.calls = []
        self.returns = returns

    def __call__(self, *args):
        self.calls.append(tuple(np.asarray(x).tolist() for x in args))
        return np.asarray(sum(np.sum(x) for x in args), SCALAR.dtype) if self.returns else None


SCALAR = jax.eval_shape(lambda: jnp.zeros(()))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_io_callback(ordered, jit):
    log = Log()
    fun = lambda x, y: io_callback(log, SCALAR, x, y, ordered=ordered)
    batched = bx.vmap(fun, (1, None))
    x = jnp.arange(8.0).reshape(2, 4)
    out = (jax.jit(batched) if jit else batched)(x, 1.0)
    jax.effects_barrier()
    same(out, x.sum(0) + 1.0)
    assert log.calls == [([i, i + 4.0], 1.0) for i in range(4)]
    if ordered:
        with pytest.raises(ValueError, match="ordered"):
            jax.vmap(fun, (1, None))(x, 1.0)


def test_ordered_calls_with_what_all_lanes_share_are_made_once_in_a_loop_in_which_they_differ():
    log = Log()

    def steps(z, x):  # of `z` each inner lane has its own, of `x` each outer one
        def step(i, z):
            jax.jit(lambda i, x, z: jax.debug.callback(log, i, x, ordered=True))(i, x, z)
            return jnp.sin(z)

        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, step(*c)), (0, z))[1]

    f = lambda x: bx.vmap(steps, (0, None))(jnp.arange(3.0) * x, x)
    bx.vmap(f)(jnp.arange(2.0))
    jax.effects_barrier()
    assert log.calls == [(i, x) for x in (0.0, 1.0) for i in (0, 1)]


def test_ordered_calls_are_each_lanes_own_where_it_differs_whether_they_are_made():
    log = Log()

    def fun(n):
        call = lambda i: jax.debug.callback(log, i, ordered=True)
        lax.while_loop(lambda i: i < n, lambda i: (call(7), i + 1)[1], 0)
        lax.cond(n > 1, lambda: call(8), lambda: None)
        return lax.scan(lambda n, x: (n + x, call(n)), n, np.arange(2))[0]

    bx.vmap(fun)(jnp.arange(3))
    jax.effects_barrier()
    assert [x for (x,) in log.calls] == [0, 0, 7, 1, 1, 7, 7, 8, 2, 2]


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"partitioned": True}], ids=str)
def test_debug_print(options, capsys):
    def fun(x):
        jax.debug.print("x={x:.1f} {}", 5, x=x, **options)
        jax.debug.print("once", **options)
        return x

    for f in (bx.vmap(fun), jax.jit(bx.vmap(fun)), bx.vmap(jax.jit(fun))):
        f(jnp.arange(3.0))
        jax.effects_barrier()
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines) == ["once", "x=0.0 5", "x=1.0 5", "x=2.0 5"]
        assert [line for line in lines if line != "once"] == ["x=0.0 5", "x=1.0 5", "x=2.0 5"]


@pytest.mark.parametrize("jit", [False, True])
def test_checks(jit):
    def fun(x, y):
        checkify.check(jnp.all(x > 0), "x is {x}, y is {y}", x=x, y=y)
        checkify.check(y < 5, "y is {}", y)
        return x * y

    batched = checkify.checkify(bx.vmap(fun, (0, None)))
    batched = jax.jit(batched) if jit else batched
    error, out = batched(jnp.array([1.0, 2.0, 3.0]), jnp.asarray(2.0))
    assert error.get() is None
    same(out, jnp.array([2.0, 4.0, 6.0]))
    error, _ = batched(jnp.array([1.0, -2.0, -3.0]), jnp.asarray(2.0))
    assert "x is -2.0, y is 2.0" in error.get()  # that of the first lane that fails
    error, _ = batched(jnp.array([1.0, 2.0, 3.0]), jnp.asarray(7.0))
    assert "y is 7.0" in error.get()


def test_checks_are_made_for_the_lanes_that_are_there():
    def f(x):
        def halved(x):
            checkify.check(x > 3, "x is {}", x)
            return x / 2

        half = lax.cond(x > 2, halved, lambda x: x, x)
        return half + lax.while_loop(lambda x: x > 3, halved, x)

    batched = jax.jit(checkify.checkify(bx.vmap(f)))
    assert batched(jnp.array([0.0, 4.0, -1.0, 9.0]))[0].get() is None
    assert "x is 2.5" in batched(jnp.array([0.0, 2.5, 9.0]))[0].get()


def test_calls_for_lanes_that_types_say_are_sharded():
    log = Log()

    def f(x):
        call = lambda x: io_callback(log, SCALAR, x)
        return jax.pure_callback(log, SCALAR, x, vmap_method="sequential"), lax.cond(
            x > 1, call, lambda x: x, x
        )

    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d")))
        out = jax.jit(bx.vmap(f))(x)
    jax.effects_barrier()
    assert [jax.typeof(y).sharding.spec for y in out] == [jax.P("d")] * 2
    same(out, (x, x))
    assert sorted(log.calls) == [(0.0,), (1.0,), (2.0,), (2.0,), (3.0,), (3.0,)]


def cholesky_call(method, **options):
    """LAPACK's factorization through the foreign function interface."""

    def fun(x):
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32),
        )
        layout = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)  # columns, as LAPACK has them
        info_layout = tuple(range(x.ndim - 2))
        call = jax.ffi.ffi_call(
            "lapack_spotrf_ffi",
            results,
            vmap_method=method,
            input_layouts=[layout],
            output_layouts=[layout, info_layout],
            **options,
        )
        return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0])

    return fun


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "legacy_vectorized"])
@pytest.mark.each_commit(5)
def test_ffi_call(method, aliased):
    x = example((4, 3, 3), jnp.float32)
    x = x @ x.swapaxes(1, 2) + 3 * jnp.eye(3, dtype=jnp.float32)
    jax.block_until_ready(jnp.linalg.eigh(x))  # loads LAPACK
    fun = cholesky_call(method, input_output_aliases={0: 0} if aliased else None)
    for in_axis in (0, 1, 2):
        moved = jnp.moveaxis(x, 0, in_axis)
        got = jax.jit(bx.vmap(fun, in_axis))(moved)
        same(got, jnp.linalg.cholesky(x))
    same(bx.vmap(bx.vmap(fun))(x[None])[0], jnp.linalg.cholesky(x))


def test_ffi_call_that_does_not_say_how():
    call = jax.ffi.ffi_call("unknown", jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(bx.UnsupportedError, match="foreign function 'unknown'"):
        bx.vmap(call)(jnp.ones(3))
