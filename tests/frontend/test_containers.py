"""Types of the user's whose batch axis is not an array axis."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import batchax as bx

from support.oracle import same


@dataclass(frozen=True)
class Name:
    """The axis of a `Named` that counts the batch."""

    name: str


@dataclass(frozen=True)
class Named:
    """An array whose axes have names, in any order."""

    data: Any
    names: tuple[str, ...]


bx.register_container(
    Named,
    spec_type=Name,
    to_arrays=lambda x, spec: ([x.data], [x.names.index(spec.name)]),
    to_example=lambda x, spec, arrays: Named(
        arrays[0], tuple(n for n in x.names if n != spec.name)
    ),
    from_example=lambda x, spec: [x.data],
    to_batch=lambda x, spec, arrays: Named(
        arrays[0], x.names if spec is None else (spec.name, *x.names)
    ),
)


@dataclass(frozen=True)
class Rows:
    """Rows of one table: a batch of them is a table and row numbers."""

    table: Any
    index: Any


bx.register_container(
    Rows,
    to_arrays=lambda x, axis: ((x.table, x.index), (None, axis)),
    to_example=lambda x, axis, arrays: Rows(*arrays),
    from_example=lambda x, axis: (x.table, x.index),
    to_batch=lambda x, axis, arrays: Rows(arrays[0], arrays[1]),
)

BATCH = Name("batch")
X = jnp.arange(24.0).reshape(2, 3, 4)


def test_among_other_arguments():
    def fun(tree, y, *, scale):
        return {"named": Named(tree["x"].data * y * scale, tree["x"].names), "y": y}

    x = Named(X, ("time", "batch", "space"))
    got = bx.vmap(fun, ({"x": BATCH}, 0), {"named": BATCH, "y": 0})(
        {"x": x}, jnp.arange(3.0), scale=jnp.ones(3)
    )
    assert got["named"].names == ("batch", "time", "space")
    same(got["named"].data, jnp.moveaxis(X, 1, 0) * jnp.arange(3.0)[:, None, None])
    by_name = bx.vmap(lambda a, b: a.data.sum() + b, {"a": BATCH, "b": None})
    same(by_name(x, 1.0), X.sum((0, 2)) + 1)
    by_leaf = bx.vmap(
        lambda a, b: a.data.sum() + b, lambda leaf: BATCH if isinstance(leaf, Named) else 0
    )
    same(by_leaf(x, jnp.ones(3)), X.sum((0, 2)) + 1)


def test_not_batched():
    """Closed over when an argument has None; as it is when an output has."""
    x = Named(X, ("a", "b", "c"))

    def fun(x, y):
        assert x.names == ("a", "b", "c")
        return Named(x.data + 1, x.names), x.data.sum() * y

    whole, products = bx.vmap(fun, (None, 0), (None, 0))(x, jnp.ones(2))
    assert whole.names == x.names
    same(whole.data, X + 1)
    same(products, jnp.full(2, X.sum()))
    batched, _ = bx.vmap(fun, (None, 0), (BATCH, 0))(x, jnp.ones(2))
    assert batched.names == ("batch", "a", "b", "c")
    same(batched.data, jnp.stack([X + 1] * 2))
    with pytest.raises(bx.AxisError, match="depends on the batch"):
        bx.vmap(lambda x, y: Named(x.data * y, x.names), (None, 0), None)(x, jnp.ones(2))


def test_several_arrays_some_of_them_shared():
    fun = lambda row: (row.table[row.index], Rows(row.table * 2, row.index + 1))
    rows = Rows(X[0], jnp.array([2, 0]))
    got, after = bx.vmap(fun)(rows)
    same(got, X[0][jnp.array([2, 0])])
    same(after.table, jnp.stack([X[0] * 2] * 2))  # out_axes says 0 for all of it
    same(after.index, jnp.array([3, 1]))
    got = bx.vmap(fun, np.int64(0))(rows)[0]
    same(got, X[0][jnp.array([2, 0])])


def test_errors():
    x = Named(X, ("a", "batch", "c"))
    with pytest.raises(bx.ArgumentTypeError, match=r"for x.*a Named is given by a Name"):
        bx.vmap(lambda x: x.data)(x)
    with pytest.raises(bx.ArgumentTypeError, match=r"out_axes gives 0.*a Named is given by a Name"):
        bx.vmap(lambda x: x, BATCH)(x)
    with pytest.raises(bx.ArgumentTypeError, match=r"AUTO.*a Named is given by a Name"):
        bx.vmap(lambda x: x, BATCH, bx.AUTO)(x)
    with pytest.raises(bx.ArgumentTypeError, match="another registered container"):
        bx.vmap(lambda x: x, BATCH)(jnp.ones(3))
    with pytest.raises(bx.AxisError, match=r"x \(array 0\): shape \(2, 3, 4\), axis 1"):
        bx.vmap(lambda x, y: y, (BATCH, 0))(x, jnp.ones(7))
    with pytest.raises(bx.ArgumentTypeError, match="not an array"):
        bx.vmap(lambda x: Named("text", ()), BATCH, BATCH)(x)


def test_registration_that_does_not_fit():
    class Wrong:
        pass

    ways = dict(
        to_arrays=lambda x, spec: ([X, X], [0]),
        to_example=lambda x, spec, arrays: x,
        from_example=lambda x, spec: [],
        to_batch=lambda x, spec, arrays: x,
    )
    for spec_type in (tuple, list, dict, type(None), bool):
        with pytest.raises(bx.ArgumentTypeError, match="another meaning"):
            bx.register_container(Wrong, spec_type=spec_type, **ways)
    bx.register_container(Wrong, **ways)
    with pytest.raises(bx.ArgumentTypeError, match=r"`to_arrays`.*1 axes for the 2 arrays"):
        bx.vmap(lambda x: 1.0)(Wrong())


def named_twice(x):
    return Named(jnp.sin(x.data) * 2, x.names)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}])
def test_in_every_way_of_running(options):
    def run(data):
        batched = bx.vmap(named_twice, Name("b"), BATCH, **options)
        return batched(Named(data, ("a", "b", "c"))).data

    expected = lambda data: jnp.moveaxis(jnp.sin(data) * 2, 1, 0)
    same(run(X), expected(X))
    same(jax.jit(run)(X), expected(X))
    for derive in (jax.grad, lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1])):
        total = lambda f: derive(lambda data: (f(data) ** 2).sum())
        same(jax.jit(total(run))(X), total(expected)(X))
    same(jax.vmap(run)(jnp.stack([X, X + 1])), jnp.stack([expected(X), expected(X + 1)]))


@dataclass(frozen=True)
class Couple:
    """Two containers, of which the second one may be shared by all lanes."""

    first: Any
    second: Any


bx.register_container(
    Couple,
    to_arrays=lambda x, axis: ([x.first, x.second], [BATCH, None if axis else BATCH]),
    to_example=lambda x, axis, parts: Couple(*parts),
    from_example=lambda x, axis: [x.first, x.second],
    to_batch=lambda x, axis, parts: Couple(*parts),
    batch_axes=lambda x, axis: [BATCH, BATCH],
)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_containers_hold_containers(options):
    couple = Couple(Named(X, ("batch", "t", "s")), Named(X + 1, ("t", "batch", "s")))
    seen = []

    def fun(x, y):
        seen.append((x.first.names, x.second.names))
        return Couple(Named(x.first.data * y, x.first.names), Named(y * x.second.data, ("a", "b")))

    sparse_too = Couple(Named(X[:2], ("batch", "t", "s")), Named(X[:, :2], ("t", "batch", "s")))
    got = bx.vmap(fun, **options)(sparse_too, jnp.arange(2.0))
    assert set(seen) == {(("t", "s"), ("t", "s"))}
    assert (got.first.names, got.second.names) == (("batch", "t", "s"), ("batch", "a", "b"))
    same(got.first.data, X[:2] * jnp.arange(2.0)[:, None, None])
    same(got.second.data, jnp.moveaxis(X[:, :2], 1, 0) * jnp.arange(2.0)[:, None, None])
    shared = bx.vmap(lambda x: x.first.data.sum() + x.second.data.sum(), 1, **options)(couple)
    same(shared, X.sum((1, 2)) + (X + 1).sum())


@pytest.mark.compiles(100)
def test_rows_and_sparse_matrices_in_a_container():
    dense = jnp.arange(24.0).reshape(2, 3, 4) % 3

    class Both:
        def __init__(self, rows, matrix):
            self.rows, self.matrix = rows, matrix

    bx.register_container(
        Both,
        to_arrays=lambda x, axis: ([x.rows, x.matrix], [0, 0]),
        to_example=lambda x, axis, parts: Both(*parts),
        from_example=lambda x, axis: [x.rows, x.matrix],
        to_batch=lambda x, axis, parts: Both(*parts),
    )
    rows = bx.Ragged.from_rows([jnp.arange(3.0), jnp.arange(4.0)])
    batch = Both(rows, sparse.BCOO.fromdense(dense, n_batch=1))
    got = bx.vmap(lambda x: Both(x.rows * 2, x.matrix * x.rows.sum()))(batch)
    same(got.rows.data, rows.data * 2)
    same(got.matrix.todense(), dense * jnp.array([3.0, 6.0])[:, None, None])
    bx.unregister_container(Both)
    with pytest.raises(bx.ArgumentTypeError, match=r"x is to be mapped, but it is of type"):
        bx.vmap(lambda x: x)(batch)


@dataclass(frozen=True)
class Columns:
    """A matrix whose lanes are its columns, wherever it comes from."""

    data: Any


def test_where_the_batch_axis_is_to_be_written():
    """A container that wants its lanes last gets them there, and transposes nothing."""
    seen = []
    bx.register_container(
        Columns,
        to_arrays=lambda x, axis: ([x.data], [-1]),
        to_example=lambda x, axis, arrays: Columns(arrays[0]),
        from_example=lambda x, axis: [x.data],
        to_batch=lambda x, axis, arrays: seen.append(arrays[0].shape) or Columns(arrays[0]),
        batch_axes=lambda x, axis: [-1],
    )
    x = X[0]
    batched = bx.vmap(lambda c: Columns(jnp.tanh(c.data)))
    same(batched(Columns(x)).data, jnp.tanh(x))
    same(bx.vmap(lambda c: Columns(jnp.tanh(c.data)), batch_size=3)(Columns(x)).data, jnp.tanh(x))
    assert set(seen) == {x.shape}
    assert bx.same_program(lambda x: batched(Columns(x)).data, jnp.tanh, x)
    bx.unregister_container(Columns)
    with pytest.raises(bx.ArgumentTypeError, match="Columns is not a registered container"):
        bx.unregister_container(Columns)


def test_jax_vmap_maps_over_a_container_too():
    x = Named(X, ("a", "b", "c"))
    for vmap in (bx.vmap, jax.vmap):  # JAX takes the number of lanes from arrays, or is told
        got = vmap(named_twice, in_axes=Name("b"), out_axes=BATCH, axis_size=3)(x)
        assert got.names == ("batch", "a", "c")
        same(got.data, jnp.moveaxis(jnp.sin(X) * 2, 1, 0))
    for outer, inner in itertools.product((jax.vmap, bx.vmap), repeat=2):
        once = inner(named_twice, Name("a"), Name("a"), axis_size=2)
        twice = outer(once, Name("c"), Name("c"), axis_size=4)(x)
        assert twice.names == ("c", "a", "b")
        same(twice.data, (jnp.sin(X) * 2).transpose(2, 0, 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """A pytree that is registered as a container, with axes that are no ints."""

    a: Any
    b: Any


def test_jax_vmap_maps_a_pytree_as_before():
    bx.register_container(
        Tree,
        spec_type=Name,
        to_arrays=lambda x, spec: ([x.a, x.b], [0, None]),
        to_example=lambda x, spec, arrays: Tree(*arrays),
        from_example=lambda x, spec: [x.a, x.b],
        to_batch=lambda x, spec, arrays: Tree(*arrays),
    )
    tree = Tree(jnp.arange(3.0), jnp.arange(3.0) + 1)
    fun = lambda t: Tree(t.a * 2, t.b * t.a)
    got = jax.vmap(fun)(tree)
    same((got.a, got.b), (tree.a * 2, tree.a * tree.b))
    mine = bx.vmap(fun, in_axes=BATCH, out_axes=BATCH)(tree)
    same(mine.b, jnp.outer(tree.a, tree.b))
    bx.unregister_container(Tree)
    same(jax.vmap(fun)(tree).a, tree.a * 2)


def test_ranks_of_containers_that_have_none():
    with pytest.raises(bx.ArgumentTypeError, match="x is a Named, which has its axis given by a"):
        bx.auto_vmap(1)(lambda x: x)(Named(X, ("a", "b", "c")))
    with pytest.raises(bx.ArgumentTypeError, match="x is a Rows, which has no shape"):
        bx.auto_vmap(1)(lambda x: x)(Rows(X, jnp.arange(2)))


class Grid:
    """Points a step apart, that nobody stores."""

    def __init__(self, start, step, index=None):
        self.start, self.step, self.index = start, step, index


@pytest.fixture
def grids():
    bx.register_container(
        Grid,
        to_arrays=lambda g, axis: ([g.step, bx.LANE_INDEX], [axis, 0]),
        to_example=lambda g, axis, arrays: Grid(g.start, *arrays),
        from_example=lambda g, axis: [g.start, g.step],
        to_batch=lambda g, axis, arrays: Grid(*arrays),
    )
    yield
    bx.unregister_container(Grid)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"mesh": "all"}], ids=str)
def test_the_index_of_each_lane_in_a_container(grids, options):
    steps = jnp.arange(1.0, 6.0)
    expected = np.array([10 + s * i for i, s in enumerate(steps)])
    f = lambda g, x: (g.start + g.step * g.index) * x
    in_grid = lambda steps, x: bx.vmap(f, (0, None), **options)(Grid(10.0, steps), x)
    np.testing.assert_array_equal(in_grid(steps, 1.0), expected)
    gradient = jax.jit(jax.grad(lambda steps: in_grid(steps, 1.0).sum()))
    np.testing.assert_array_equal(gradient(steps), np.arange(5.0))
    twice = bx.vmap(lambda x: in_grid(steps, x))(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(twice, [expected, 2 * expected])
    of_jax = jax.vmap(f, (0, None), axis_size=5)
    np.testing.assert_array_equal(of_jax(Grid(10.0, steps), 1.0), expected)
    assert repr(bx.LANE_INDEX) == "batchax.LANE_INDEX"
