"""Types of which JAX has been told what a batch of them is: sparse matrices, and others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.interpreters import batching

import batchax as bx

from support.oracle import same

FLOAT = jax.dtypes.canonicalize_dtype(float)
DENSE = np.arange(24, dtype=FLOAT).reshape(3, 2, 4) % 3
VECTORS = np.arange(12, dtype=FLOAT).reshape(3, 4)


def of_dense(kind, x, n_batch=0):
    """A sparse matrix, made by one program."""
    return jax.jit(lambda x: kind.fromdense(x, n_batch=n_batch, nse=8))(x)


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}])
@pytest.mark.each_commit(3)
def test_sparse_matrices(kind, options):
    """Passed in, made inside, returned; alone and in a tree; and shared by all lanes."""
    batch, one = of_dense(kind, DENSE, 1), of_dense(kind, DENSE[0])
    product = bx.vmap(lambda m, x: m @ x, **options)

    @jax.jit
    def everything(batch, one):
        both = bx.vmap(lambda m, x: (m @ x, m), (None, 0), (0, None), **options)
        shared, back = both(one, VECTORS)
        made = bx.vmap(lambda x: {"m": of_dense(kind, x)}, **options)(DENSE)["m"]
        assert type(made) is kind
        assert made.shape == DENSE.shape
        tree = bx.vmap(lambda p: (p[1] @ p[0]).sum(), **options)((VECTORS, batch))
        return product(batch, VECTORS), shared, back.todense(), made.todense(), tree

    products = np.einsum("bij,bj->bi", DENSE, VECTORS)
    expected = products, VECTORS @ DENSE[0].T, DENSE[0], DENSE, products.sum(1)
    same(everything(batch, one), expected)
    same(product(batch, VECTORS), products, where="outside of jit")


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
        r"in_axes gives 2 for m, which rejects it: Cannot map in_axis=2",
    ),
    "no such place": (
        lambda m: bx.vmap(lambda m: m, 0, 1)(m),
        bx.AxisError,
        "out_axes gives 1 for out, which rejects it",
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
    deep = np.stack([DENSE, DENSE + 1])
    matrices, one = of_dense(sparse.BCOO, deep, 2), of_dense(sparse.BCOO, DENSE[0])
    product = bx.auto_vmap(2, 1)(lambda m, x: m @ x)
    made = bx.auto_vmap(2)(lambda x: of_dense(sparse.BCOO, x))
    dense = DENSE[0], DENSE, deep, deep[:1]

    @jax.jit
    def everything(matrices, one):
        products = product(matrices, VECTORS), product(matrices, VECTORS[None])
        each = [made(x) for x in dense]
        assert [m.shape for m in each] == [x.shape for x in dense]
        return [*products, product(one, VECTORS), *[m.todense() for m in each]]

    expected = np.einsum("cbij,bj->cbi", deep, VECTORS)
    same(everything(matrices, one), [expected, expected, VECTORS @ DENSE[0].T, *dense])
    same(product(one, VECTORS), VECTORS @ DENSE[0].T, where="outside of jit")
    with pytest.raises(bx.AxisError, match="batch dimension -2 of m has one element"):
        product(of_dense(sparse.BCOO, deep[:1], 2), jnp.ones((2, 3, 4)))
