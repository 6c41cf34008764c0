"""Types of which JAX has been told what a batch of them is: sparse matrices, and others."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse
from jax.interpreters import batching

import batchax as bx

from support.oracle import same

DENSE = jnp.arange(24.0).reshape(3, 2, 4) % 3
VECTORS = jnp.arange(12.0).reshape(3, 4)


def of_dense(kind, x, n_batch=0):
    return kind.fromdense(x, n_batch=n_batch, nse=8)


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}])
def test_sparse_matrices(kind, options):
    """Passed in, made inside, returned; alone and in a tree; and shared by all lanes."""
    batch, one = of_dense(kind, DENSE, 1), of_dense(kind, DENSE[0])
    product = lambda m, x: m @ x
    same(bx.vmap(product, **options)(batch, VECTORS), jax.vmap(product)(batch, VECTORS))
    same(jax.jit(bx.vmap(product, **options))(batch, VECTORS), jax.vmap(product)(batch, VECTORS))
    shared, back = bx.vmap(lambda m, x: (m @ x, m), (None, 0), (0, None), **options)(one, VECTORS)
    same(shared, VECTORS @ DENSE[0].T)
    same(back.todense(), DENSE[0])
    made = bx.vmap(lambda x: {"m": of_dense(kind, x)}, **options)(DENSE)["m"]
    assert type(made) is kind
    assert made.shape == DENSE.shape
    same(made.todense(), DENSE)
    tree = bx.vmap(lambda p: (p[1] @ p[0]).sum(), **options)((VECTORS, batch))
    same(tree, jnp.einsum("bij,bj->b", DENSE, VECTORS))


def test_sparse_matrices_are_differentiated_and_nested():
    batch = of_dense(sparse.BCOO, DENSE, 1)

    def loss(vmap):
        def total(data, x):
            m = sparse.BCOO((data, batch.indices), shape=batch.shape)
            return (vmap(lambda m, x: m @ x)(m, x) ** 2).sum()

        return jax.jit(jax.grad(total, (0, 1)))(batch.data, VECTORS)

    same(loss(bx.vmap), loss(jax.vmap))
    same(loss(lambda f: bx.vmap(f, batch_size=2)), loss(jax.vmap))
    deep = jnp.stack([DENSE, DENSE + 1])
    twice = of_dense(sparse.BCOO, deep, 2)
    product = lambda m, x: m @ x
    expected = jnp.einsum("cbij,bj->cbi", deep, VECTORS)
    for outer in (bx.vmap, jax.vmap):
        for inner in (bx.vmap, jax.vmap):
            same(outer(inner(product), (0, None))(twice, VECTORS), expected)
    last = bx.vmap(lambda m: m.todense(), 1)(twice)
    same(last, jnp.moveaxis(deep, 1, 0))
    same(bx.vmap(lambda m: m.todense(), -3)(twice), jnp.moveaxis(deep, 1, 0))


def test_a_type_that_computes_as_it_is_taken_apart():
    """Handlers may bind primitives, and ask for the index of the lane."""

    class Scaled:
        def __init__(self, x):
            self.x = x

    batching.register_vmappable(
        Scaled,
        int,
        int,
        lambda cont, index, value, axis: Scaled(cont(value.x * 2, axis) + index()),
        lambda cont, size, value, axis: Scaled(jnp.sin(cont(size, value.x, axis)) / size),
        None,
    )
    got = bx.vmap(lambda s: Scaled(s.x * s.x))(Scaled(VECTORS))
    same(got.x, jnp.sin((VECTORS * 2 + jnp.arange(3.0)[:, None]) ** 2) / 3)


REFUSED = {
    "no batch axis": (
        lambda m: bx.vmap(lambda m: m, 2)(m),
        bx.AxisError,
        r"in_axes gives 2 for args\[0\], which it refuses: Cannot map in_axis=2",
    ),
    "no such place": (
        lambda m: bx.vmap(lambda m: m, 0, 1)(m),
        bx.AxisError,
        "out_axes gives 1 for out, which it refuses",
    ),
    "another kind of axis": (
        lambda m: bx.vmap(lambda m: m, 0, bx.AUTO)(m),
        bx.ArgumentTypeError,
        "the batch axis of a BCOO is given by a int",
    ),
    "depends on the batch": (
        lambda m: bx.vmap(lambda m: {"m": m}, 0, None)(m),
        bx.AxisError,
        r"out\['m'\].* depend.* on the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sparse_matrices_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(of_dense(sparse.BCOO, DENSE, 1))


def test_ranks():
    deep = jnp.stack([DENSE, DENSE + 1])
    matrices = of_dense(sparse.BCOO, deep, 2)
    product = bx.auto_vmap(2, 1)(lambda m, x: m @ x)
    expected = jnp.einsum("cbij,bj->cbi", deep, VECTORS)
    same(product(matrices, VECTORS), expected)
    same(product(matrices, VECTORS[None]), expected)
    same(product(of_dense(sparse.BCOO, DENSE[0]), VECTORS), VECTORS @ DENSE[0].T)
    made = bx.auto_vmap(2)(lambda x: of_dense(sparse.BCOO, x))
    for x in (DENSE[0], DENSE, deep, deep[:1]):
        assert made(x).shape == x.shape
        same(made(x).todense(), x)
    with pytest.raises(bx.AxisError, match="batch dimension -2 of m has one element"):
        product(of_dense(sparse.BCOO, deep[:1], 2), jnp.ones((2, 3, 4)))
