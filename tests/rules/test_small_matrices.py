"""Decompositions of small matrices, an element of all lanes at a time, in every way of batching."""

import functools
import math

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg as ll
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.linalg import pays
from batchax.linalg.table import DECOMPOSITIONS

from support.oracle import same

LANES = 1024
LOOSE = dict(rtol=2e-3, atol=2e-3)
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def many_calls(monkeypatch):
    """As many as few small matrices need, to make up for what compiling takes."""
    monkeypatch.setattr(pays, "CALLS", 4000)


def definite(*lead, n=2):
    x = rng.standard_normal((*lead, n, n)).astype("float32")
    return x @ x.swapaxes(-1, -2) + np.eye(n, dtype="float32")


# For each decomposition a function of one matrix that has it.
FUNCTIONS = {
    "cholesky": lambda a: jnp.linalg.cholesky(a) @ jnp.arange(1.0, 3.0, dtype=a.dtype),
    "lu": lambda a: ll.lu(a)[0] @ jnp.arange(1.0, 3.0, dtype=a.dtype),
    "triangular_solve": lambda a: jsl.solve_triangular(
        a, jnp.arange(1.0, 3.0, dtype=a.dtype) + a[0], lower=True
    ),
    # The results do not depend on the signs of vectors.
    "eigh": lambda a: of_values(*reversed(jnp.linalg.eigh(a))),
    "qr": lambda a: jnp.linalg.qr(a)[1] @ jnp.arange(1.0, 3.0, dtype=a.dtype),
    "svd": lambda a: of_values(*jnp.linalg.svd(a, full_matrices=False)[:2]),
    "dot_general": lambda a: (wide(a) @ wide(jnp.sin(a)).T)[:2, 1],
}


def wide(a):
    return jnp.concatenate([jnp.concatenate([a, a + 1], 1), jnp.concatenate([2 * a, a.T], 1)])


def of_values(vectors, values):
    return (vectors * jnp.sin(values)) @ vectors.T @ jnp.arange(1.0, 3.0, dtype=vectors.dtype)


def primitives(fun, *args):
    return str(jax.make_jaxpr(fun)(*args))


def test_every_decomposition_has_a_function():
    assert set(FUNCTIONS) == set(DECOMPOSITIONS)


def loss(f):
    return lambda a: (jnp.sin(f(a)) ** 2).sum()


# Where vectors are read, too.
vectorized = functools.partial(bx.vmap, small_matrices="vectorized")

WAYS = {
    "call": lambda v, f: v(f),
    "gradient of a lane": lambda v, f: v(jax.grad(loss(f))),
    "gradient of all": lambda v, f: jax.grad(lambda xs: v(loss(f))(xs).sum()),
    "tangents": lambda v, f: lambda xs: jax.jvp(v(f), (xs,), (jnp.cos(xs),))[1],
    "second derivative": lambda v, f: v(
        lambda a: jax.jvp(jax.grad(loss(f)), (a,), (jnp.ones_like(a),))[1]
    ),
    "of two axes": lambda v, f: lambda xs: v(v(f))(xs.reshape(2, -1, 2, 2)),
    "jax.vmap inside": lambda v, f: lambda xs: v(jax.vmap(f))(xs.reshape(64, -1, 2, 2)),
    "jax.vmap around": lambda v, f: lambda xs: jax.vmap(v(f), 1)(xs.reshape(-1, 2, 2, 2)),
    "jacobian around": lambda v, f: lambda xs: jax.jacfwd(v(f))(xs[:LANES]).sum(-3),
}
OURS = {
    "in chunks": lambda f: vectorized(f, batch_size=600),
    "compact": lambda f: vectorized(f, divergence="compact"),
    "not first": lambda f: lambda xs: vectorized(f, 1)(xs.swapaxes(0, 1)),
    "library": lambda f: bx.vmap(f, small_matrices="library"),
}


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(4)
def test_every_way_is_what_jax_computes(name, part):
    f, xs = FUNCTIONS[name], jnp.asarray(definite(LANES))

    pairs = {way: (make(vectorized, f), make(jax.vmap, f)) for way, make in WAYS.items()}
    pairs |= {way: (make(f), jax.vmap(f)) for way, make in OURS.items()}
    chunks = lambda xs: OURS["in chunks"](loss(f))(xs).sum()
    pairs["in chunks, gradient"] = jax.grad(chunks), WAYS["gradient of all"](jax.vmap, f)
    pairs = {way: pairs[way] for way in [*pairs][part::4]}
    # The products that `jax.vmap` batches are one product of many matrices, which is XLA's.
    of_library = {"jax.vmap inside"} if name == "dot_general" else set()
    for way in (WAYS.keys() - of_library) & pairs.keys():
        assert "small_matrices" in primitives(pairs[way][0], xs), way
    shapes = [jax.eval_shape(theirs, xs).shape for _, theirs in pairs.values()]
    most = max(map(math.prod, shapes))
    flat = lambda fun: lambda xs: (lambda y: jnp.pad(y, (0, most - len(y))))(fun(xs).ravel())
    # One at a time, as calls of the library wait for each other.
    each = [fun for pair in pairs.values() for fun in map(flat, pair)]
    run = jax.jit(lambda i, xs: lax.switch(i, each, xs))
    for k, way in enumerate(pairs):
        same(run(2 * k, xs), run(2 * k + 1, xs), LOOSE, where=f"{way}: ")


def test_on_meshes():
    f, xs = jnp.linalg.cholesky, jnp.asarray(definite(4 * LANES))
    expected = jnp.asarray(np.linalg.cholesky(xs))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    on_devices = jax.shard_map(bx.vmap(f), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    for fun in (bx.vmap(f, mesh="all"), on_devices, bx.vmap(f, spmd_axis_name="d")):
        same(jax.jit(fun)(xs), expected, LOOSE)
    explicit = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        same(jax.jit(bx.vmap(f))(jax.device_put(xs, P("d"))), expected, LOOSE)


def test_lanes_that_a_compiler_divides_among_devices_stay_there():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    like = jax.ShapeDtypeStruct((4 * LANES, 2, 2), "float32", sharding=NamedSharding(mesh, P("d")))
    fun = bx.vmap(lambda a: jnp.linalg.qr(jnp.linalg.cholesky(jnp.linalg.inv(a)))[1])
    program = jax.jit(fun).lower(like).compile()
    assert "all-gather" not in program.as_text()
    assert program.output_shardings.spec == P("d")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_of_one_lane_is_no_other_lanes(name):
    # Vectors of values that are alike have no derivative, whoever computes it: these differ.
    f, xs = FUNCTIONS[name], definite(LANES) + np.diag(np.array([0, 9], "float32"))
    xs[7, 1, 0] = np.nan
    out = np.asarray(jax.jit(vectorized(jax.grad(loss(f))))(xs))
    np.testing.assert_array_equal(np.isnan(out).any((1, 2)), np.arange(LANES) == 7)


def test_where_it_is_used():
    f, xs = jnp.linalg.cholesky, jnp.asarray(definite(LANES))
    uses = lambda fun, *args: "small_matrices" in primitives(fun, *args)
    assert uses(bx.vmap(f), xs)
    assert not uses(bx.vmap(f), xs[:2])
    assert uses(bx.vmap(jnp.linalg.inv), xs)
    assert not uses(bx.vmap(jnp.linalg.inv), xs[:100])
    assert not uses(bx.vmap(f), jnp.zeros((LANES, 100, 100)))
    assert not uses(bx.vmap(f), jnp.zeros((LANES, 0, 0)))
    assert not uses(bx.vmap(f, small_matrices="library"), xs)
    in_a_loop = bx.vmap(lambda a: jax.lax.fori_loop(0, 9, lambda _, x: x @ a, a))
    for rows in (3, 4, 7, 8):
        assert uses(in_a_loop, jnp.zeros((4096, rows, rows))) == (rows in (4, 7))
    assert not uses(bx.vmap(f, spmd_axis_name="d"), xs)
    assert not uses(bx.auto_vmap(2, small_matrices="library")(f), xs)
    assert uses(bx.auto_vmap(2)(f), xs.reshape(2, -1, 2, 2))


LA = jnp.linalg
READS = {
    # Signs, and bases of spaces, are read.
    "vectors": (False, LA.eigh),
    "vectors only": (False, lambda a: LA.eigh(a)[1]),
    "singular vectors": (False, LA.svd),
    "right singular vectors": (False, lambda a: LA.svd(a, full_matrices=False)[2]),
    "both factors": (False, LA.qr),
    "first factor": (False, lambda a: LA.qr(a)[0]),
    "second factor": (False, lambda a: LA.qr(a, mode="r")),  # not unique beyond the rank
    "least squares": (False, lambda a: LA.lstsq(a, a[0])[0]),
    # On the way back they are, which are not unique where values are alike.
    "gradient of values": (False, jax.grad(lambda a: LA.eigvalsh(a)[0])),
    # Only values are.
    "values": (True, LA.eigvalsh),
    "values of both": (True, lambda a: LA.eigh(a)[0]),
    "values in calls": (True, jax.jit(lambda a: jax.checkpoint(LA.eigh)(a)[0])),
    "values in steps": (True, lambda a: lax.fori_loop(0, 2, lambda _, a: a / LA.eigvalsh(a), a)),
    "singular values": (True, LA.svdvals),
    "singular values of all": (True, lambda a: LA.svd(a)[1]),
    "rank": (True, LA.matrix_rank),
    "spectral norm": (True, lambda a: LA.norm(a, 2)),
    "pseudoinverse": (True, LA.pinv),
    "gradient of it": (True, jax.grad(lambda a: LA.pinv(a).sum())),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_not_unique_is_the_librarys_where_it_is_read(name):
    unique, f = READS[name]
    xs = jax.ShapeDtypeStruct((10_000, 3, 3), "float32")
    operations = lambda **options: str(jax.make_jaxpr(bx.vmap(f, **options))(xs))
    for size in (None, 5000):
        assert ("small_matrices[" in operations(batch_size=size)) == unique
    assert "small_matrices[" not in operations(small_matrices="library")
    assert "small_matrices[" in operations(small_matrices="vectorized")


def test_derivatives_of_what_was_asked_for_are_computed_so():
    xs = jax.ShapeDtypeStruct((10_000, 3, 3), "float32")

    def calls(option):
        f = bx.vmap(LA.eigvalsh, small_matrices=option)
        program = str(jax.make_jaxpr(jax.grad(lambda xs: f(xs).sum()))(xs))
        return "small_matrices[" in program

    assert calls("vectorized")
    assert not calls("auto")


def test_lanes_that_are_not_finite_get_what_the_library_makes_of_them():
    draws = np.random.default_rng(5)
    xs = draws.standard_normal((3 * LANES, 3, 3)).astype("float32")
    bad = np.arange(3 * LANES) % 3 > 0
    for i in np.flatnonzero(bad):
        xs[(i, *draws.integers(0, 3, (2, 2)))] = draws.choice([np.nan, np.inf, -np.inf])

    def every(a):
        near = jnp.where(jnp.eye(3, dtype=bool), 9, a)
        signs = LA.slogdet(a), LA.det(a), LA.inv(a), LA.solve(a, jnp.arange(3, dtype=a.dtype))
        return ll.lu(a), signs, LA.cholesky(near), LA.qr(a, mode="r")

    run = lambda xs=xs, **options: jax.tree.leaves(jax.jit(bx.vmap(every, **options))(xs))
    together, library = run(), run(small_matrices="library")
    for x, y in zip(together, library, strict=True):
        if jnp.issubdtype(x.dtype, jnp.integer):
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x[bad], y[bad], **LOOSE)
    # The other lanes do not see them.
    finite = run(np.where(bad[:, None, None], np.eye(3, dtype="float32"), xs))
    for x, y in zip(finite, together, strict=True):
        np.testing.assert_array_equal(x[~bad], y[~bad])


def test_outside_of_jit_and_with_jit_disabled():
    f, xs = jnp.linalg.cholesky, jnp.asarray(definite(LANES))
    expected = np.linalg.cholesky(xs)
    same(bx.vmap(f)(xs), jnp.asarray(expected), LOOSE)
    with jax.disable_jit():
        same(bx.vmap(f)(xs), jnp.asarray(expected), LOOSE)
