"""Types of the user's whose batch axis is not an array axis."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_in_and_out():
    seen = []

    def fun(x):
        seen.append((x.names, x.data.shape))
        return Named(jnp.sin(x.data).sum(0), x.names[1:])

    for position in range(3):
        names = ["time", "space"]
        names.insert(position, "batch")
        got = bx.vmap(fun, BATCH, BATCH)(Named(X, tuple(names)))
        assert got.names == ("batch", "space")
        same(got.data, jnp.sin(jnp.moveaxis(X, position, 0)).sum(1))
    assert seen == [(("time", "space"), s) for s in ((3, 4), (2, 4), (2, 3))]


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
    def fun(row):
        return row.table[row.index], Rows(row.table * 2, row.index + 1)

    rows = Rows(X[0], jnp.array([2, 0]))
    got, after = bx.vmap(fun)(rows)
    same(got, X[0][jnp.array([2, 0])])
    same(after.table, jnp.stack([X[0] * 2] * 2))  # out_axes says 0 for all of it
    same(after.index, jnp.array([3, 1]))
    got = bx.vmap(fun, np.int64(0))(rows)[0]
    same(got, X[0][jnp.array([2, 0])])


def test_nested_and_transformed():
    x = Named(X, ("a", "b", "c"))

    def fun(x):
        return Named(jnp.sin(x.data), x.names)

    twice = bx.vmap(bx.vmap(fun, Name("a"), Name("a")), Name("c"), Name("c"))(x)
    assert twice.names == ("c", "a", "b")
    same(twice.data, jnp.sin(X.transpose(2, 0, 1)))

    total = lambda data: bx.vmap(fun, Name("b"), BATCH)(Named(data, x.names)).data.sum()
    same(jax.grad(total)(X), jnp.cos(X))
    same(jax.jit(total)(X), jnp.sin(X).sum())


def test_errors():
    x = Named(X, ("a", "batch", "c"))
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\].*a Named is given by a Name"):
        bx.vmap(lambda x: x.data)(x)
    with pytest.raises(bx.ArgumentTypeError, match=r"out_axes gives 0.*a Named is given by a Name"):
        bx.vmap(lambda x: x, BATCH)(x)
    with pytest.raises(bx.ArgumentTypeError, match=r"AUTO.*a Named is given by a Name"):
        bx.vmap(lambda x: x, BATCH, bx.AUTO)(x)
    with pytest.raises(bx.ArgumentTypeError, match="another registered container"):
        bx.vmap(lambda x: x, BATCH)(jnp.ones(3))
    with pytest.raises(bx.AxisError, match=r"args\[0\] \(array 0\): shape \(2, 3, 4\), axis 1"):
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
        with pytest.raises(bx.ArgumentTypeError, match="meaning of its own"):
            bx.register_container(Wrong, spec_type=spec_type, **ways)
    bx.register_container(Wrong, **ways)
    with pytest.raises(bx.ArgumentTypeError, match=r"`to_arrays`.*1 axes for the 2 arrays"):
        bx.vmap(lambda x: 1.0)(Wrong())
