"""The oracle: what a batched function must equal, lane by lane.

`check` runs a per-example function through `batchax.vmap` and compares it with
a plain Python loop over the examples and with `jax.vmap`: values, dtypes, weak
types, derivatives of both modes, and nestings with itself and `jax.vmap`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx


def check(
    fun,
    *args,
    in_axes=0,
    out_axes=0,
    axis_name=None,
    against_jax=True,
    derivatives=True,
    second=False,
    nested=False,
    jit=True,
    tolerance=None,
):
    """Compares `bx.vmap(fun)` with the loop over examples, and with `jax.vmap`.

    in_axes: an int, None, or a tuple of those, one for each argument.
    out_axes: an int, or a tree of ints (None where the output is unbatched).
    against_jax: False where `jax.vmap` does not support the function.
    derivatives: also jvp and vjp with respect to every inexact argument.
    second: also forward over reverse.
    nested: also under a second vmap, of batchax and of JAX, in both orders.
    """
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(args)
    options = dict(in_axes=in_axes, out_axes=out_axes)
    if axis_name is not None:
        options["axis_name"] = axis_name
    batched = bx.vmap(fun, **options)
    got = batched(*args)
    if axis_name is None:
        same(got, loop(fun, args, in_axes, out_axes), tolerance, "loop")
    if against_jax:
        expected = jax.vmap(fun, **options)(*args)
        same(got, expected, tolerance, "jax.vmap")
        jax.tree.map(same_type, got, expected)
    if jit:
        same(jax.jit(batched)(*args), got, tolerance, "jit outside")
        same(bx.vmap(jax.jit(fun), **options)(*args), got, tolerance, "jit inside")
    reference = jax.vmap(fun, **options) if against_jax else loop_function(fun, in_axes, out_axes)
    if derivatives:
        check_derivatives(batched, reference, args, second, tolerance)
    if nested:
        check_nested(fun, args, options, tolerance)


def quickly(fun, *args, **options):
    """`check` of the compiled function: far fewer operations to compile one by one."""
    check(jax.jit(fun), *args, jit=False, **options)


def loop_function(fun, in_axes, out_axes):
    """The Python loop over examples as a function of batches."""
    return lambda *args: loop(fun, args, in_axes, out_axes)


def loop(fun, args, in_axes, out_axes=0):
    """`fun` called for each example, the results stacked at `out_axes`."""
    size = next(
        x.shape[a]
        for arg, a in zip(args, in_axes, strict=True)
        if a is not None
        for x in jax.tree.leaves(arg)
    )
    outs = []
    for i in range(size):
        example = [
            arg if a is None else jax.tree.map(lambda x, a=a: lane(x, i, a), arg)
            for arg, a in zip(args, in_axes, strict=True)
        ]
        outs.append(fun(*example))
    structure = jax.tree.structure(outs[0])
    axes = jax.tree.leaves(
        jax.tree.broadcast(out_axes, outs[0], is_leaf=lambda x: x is None)
        if out_axes is not None
        else [None] * structure.num_leaves,
        is_leaf=lambda x: x is None,
    )
    leaves = [
        parts[0] if a is None else jnp.stack([jnp.asarray(p) for p in parts], a)
        for a, parts in zip(axes, zip(*map(jax.tree.leaves, outs), strict=True), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def lane(x, i, axis):
    """Example `i` of `x`."""
    return x[(slice(None),) * (axis % x.ndim) + (i,)]


def check_derivatives(batched, reference, args, second=False, tolerance=None):
    """jvp and vjp (and jvp of vjp) of `batched` against those of `reference`."""
    diff = [i for i, arg in enumerate(args) if all(map(is_inexact, jax.tree.leaves(arg)))]
    if not diff:
        return
    points = [args[i] for i in diff]

    def only(f):
        def g(*xs):
            full = list(args)
            for i, x in zip(diff, xs, strict=True):
                full[i] = x
            return [y for y in jax.tree.leaves(f(*full)) if is_inexact(y)]

        return g

    f, r = only(batched), only(reference)
    if not jax.eval_shape(r, *points):
        return
    tangents = [direction(x, 1) for x in points]
    same(jax.jvp(f, points, tangents), jax.jvp(r, points, tangents), tolerance, "jvp")
    cotangents = [direction(y, 2) for y in r(*points)]

    def pull(h):
        return lambda *xs: jax.vjp(h, *xs)[1](cotangents)

    same(pull(f)(*points), pull(r)(*points), tolerance, "vjp")
    if second:
        same(
            jax.jvp(pull(f), points, tangents)[1],
            jax.jvp(pull(r), points, tangents)[1],
            tolerance,
            "jvp of vjp",
        )


def check_nested(fun, args, options, tolerance=None):
    """Two vmaps of which batchax does one or both."""
    doubled = [
        jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1] if x.ndim else x]), a) for a in args
    ]
    expected = jax.vmap(jax.vmap(fun, **options))(*doubled)
    for outer, inner in ((bx.vmap, bx.vmap), (bx.vmap, jax.vmap), (jax.vmap, bx.vmap)):
        got = outer(inner(fun, **options))(*doubled)
        same(got, expected, tolerance, f"{outer.__module__} of {inner.__module__}")


def same(got, expected, tolerance=None, where=""):
    """Equal structure, shapes, dtypes and values (within rounding), NaN included."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), where
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        g, e = jnp.asarray(g), jnp.asarray(e)
        assert g.dtype == e.dtype, (where, g.dtype, e.dtype)
        assert g.shape == e.shape, (where, g.shape, e.shape)
        np.testing.assert_allclose(
            plain(g), plain(e), **(tolerance or tolerances(e.dtype)), err_msg=where
        )


def same_type(got, expected):
    """Equal types, weak type included."""
    assert jax.typeof(got) == jax.typeof(expected), (jax.typeof(got), jax.typeof(expected))


def plain(x):
    """A NumPy array of a dtype NumPy can compare."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape)
    if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
        return np.asarray(x)
    if x.dtype.kind not in "biufc" or x.dtype.itemsize < 2:
        return np.asarray(x.astype(jnp.float32))
    return np.asarray(x)


def tolerances(dtype):
    """Rounding to allow for: lanes may be summed in another order than alone."""
    if jnp.issubdtype(dtype, jnp.inexact):
        eps = float(jnp.finfo(dtype).eps)
        return dict(rtol=100 * eps, atol=100 * eps)
    return dict(rtol=0, atol=0)


def is_inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def direction(tree, seed):
    """A fixed direction of the shape of `tree`."""

    def one(x):
        values = np.random.default_rng(seed).normal(size=jnp.shape(x))
        return jnp.asarray(values).astype(jnp.result_type(x))

    return jax.tree.map(one, tree)


def example(shape, dtype=float, seed=0, low=None, high=None):
    """A fixed random array: normal for inexact dtypes, else in [low, high).

    dtype: Python's `float` is float64 where x64 is enabled, elsewhere float32.
    """
    rng = np.random.default_rng(seed)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(low or 0, 5 if high is None else high, shape)).astype(dtype)
    x = rng.normal(size=shape) if low is None else rng.uniform(low, high, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return jnp.asarray(x).astype(dtype)
