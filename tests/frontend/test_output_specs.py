"""Outputs by name, and those that are summed or left alone."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.kinds_of_axis import check_kind
from support.oracle import example, same

X, W = example((6, 3), seed=1), example((3,), seed=2)


class Pair(NamedTuple):
    loss: Any
    state: Any


@jax.tree_util.register_dataclass
@dataclass
class Fields:
    loss: Any
    state: Any


class Model(Fields):
    """A pytree that may be called, as distributions of NumPyro and modules of Equinox."""

    def __call__(self, leaf):
        raise AssertionError("this is not a rule for leaves")


jax.tree_util.register_dataclass(Model, ["loss", "state"], [])


@pytest.mark.parametrize("axes", [Model(1, None), Model(None, {"a": 0}), {"m": Model(1, None)}])
def test_axes_in_a_pytree_that_may_be_called(axes):
    nested = isinstance(axes, dict)
    out = axes["m"] if nested else axes

    def fun(x, w):
        loss, state = (x * 2, w) if out.state is None else (w, {"a": x[0]})
        model = Model(loss, state)
        return {"m": model} if nested else model

    ours, theirs = (
        vmap(fun, in_axes=(0, None), out_axes=axes)(X, W) for vmap in (bx.vmap, jax.vmap)
    )
    same(ours, theirs)
    read = lambda model: model["m"].loss if nested else model.loss
    same(bx.vmap(read, (axes,), axis_size=6)(ours), jax.vmap(read, (axes,), axis_size=6)(theirs))
    chunked = bx.vmap(fun, in_axes=(0, None), out_axes=axes, batch_size=4)
    same(chunked(X, W), theirs)


def outputs(kind):
    return lambda x, w: kind(loss=(x @ w) ** 2, state={"x": jnp.sin(x), "w": w * 2})


@pytest.mark.parametrize("kind", [dict, Pair, Fields])
@pytest.mark.each_commit(2)
def test_by_name(kind):
    fun = outputs(kind)

    def make(**options):
        named = {"loss": bx.Reduce("mean"), "state": {"x": 1}}
        return bx.vmap(fun, (0, None), named, **options)

    def reference(x, w):
        each = jax.vmap(fun, (0, None))(x, w)
        loss, state = (each[k] if kind is dict else getattr(each, k) for k in ("loss", "state"))
        return kind(loss=loss.mean(), state={"x": state["x"].T, "w": state["w"]})

    check_kind(make, reference, X, W)


def test_all_names_mean_what_they_meant():
    fun = lambda x: {"a": x, "b": x}
    same(bx.vmap(fun, out_axes={"a": 1, "b": 0})(X), {"a": X.T, "b": X})
    assert bx.same_program(
        bx.vmap(fun, out_axes={"a": 1}), bx.vmap(fun, out_axes={"a": 1, "b": 0}), X
    )


def test_in_a_scan():
    step = lambda c, x: (c + x, {"c": c, "x": x})
    _, ys = bx.scan(step, out_axes={"c": 1})(jnp.zeros(3), X)
    _, expected = jax.lax.scan(step, jnp.zeros(3), X)
    same(ys, {"c": expected["c"].T, "x": X})


@pytest.mark.parametrize(
    ("fun", "named", "message"),
    [
        (outputs(dict), {"los": 1}, "names 'los', but the keys of out are 'loss', 'state'"),
        (outputs(Pair), {"a": 1}, "out_axes names 'a', but the fields of out are 'loss', 'state'"),
        (outputs(Fields), {"state": {"y": 1}}, "the keys of out.state are 'w', 'x'"),
        (lambda x, w: (x, w), {"a": 1}, "a dict with keys ['a'] there, but out is a tuple"),
        (lambda x, w: x, {"a": 1}, "but out is an array of shape (3,)"),
    ],
)
def test_a_name_that_is_none(fun, named, message):
    with pytest.raises(bx.AxisError, match=re.escape(message)):
        bx.vmap(fun, (0, None), named)(X, W)


def test_a_reduction_is_to_be_wrapped():
    reduction = bx.Reduction(jnp.add, 0)
    for out_axes in (reduction, {"a": reduction}, lambda leaf: reduction):
        with pytest.raises(bx.ArgumentTypeError, match=r"given as batchax\.Reduce\(batchax\.Reduc"):
            bx.vmap(lambda x: {"a": x}, out_axes=out_axes)(X)


# --- sums --------------------------------------------------------------------------------------


def some(x, w):
    """Outputs that depend on the batch, and those that do not."""
    return {"sum": x * w, "kept": w**2, "number": 3, "place": x + w}


AXES = {"sum": None, "kept": None, "number": None, "place": 0}


def test_sum_match_in_every_way():
    make = lambda **options: bx.vmap(some, (0, None), AXES, sum_match=True, **options)
    check_kind(make, jax.vmap(some, (0, None), AXES, sum_match=True), X, W)
    got = make()(X, W)
    assert got["number"] == 3
    assert isinstance(got["number"], int)


def test_sum_match_is_where_jax_has_it():
    """Also by position, after `spmd_axis_name`; dtypes are those of JAX."""
    args = ((0, None), None, None, None, None, True)
    small = jnp.ones((6,), jnp.int8)
    for x in (small, small.astype(bool), X, X.astype(jnp.bfloat16)):
        fun = lambda x, w: x
        ours, jaxs = (vmap(fun, *args)(x, W) for vmap in (bx.vmap, jax.vmap))
        assert ours.dtype == jaxs.dtype
        same(ours, jaxs)


def test_sum_match_of_keys():
    """There is no sum of keys: what all lanes share is left alone, and others are refused."""
    keys = jax.random.split(jax.random.key(0), 2)
    shared = bx.vmap(lambda k, x: k, (None, 0), None, sum_match=True)(keys[0], X)
    assert shared == keys[0]
    with pytest.raises(bx.AxisError, match="out depends on the batch"):
        bx.vmap(lambda k: k, 0, None, sum_match=True)(keys)


def test_a_reduction_that_leaves_alone_what_all_lanes_share():
    for kind in ("sum", "mean", "max", "min", "prod"):
        keep, copies = bx.Reduce(kind, unmapped="keep"), bx.Reduce(kind)
        fun = lambda x, w: (x, w)
        for options in ({}, {"batch_size": 4}):
            mapped, shared = bx.vmap(fun, (0, None), keep, **options)(X, W)
            same(mapped, bx.vmap(fun, (0, None), copies)(X, W)[0])
            same(shared, W)
    same(bx.vmap(lambda x, w: w, (0, None), bx.Reduce("sum"))(X, W), 6 * W)


def test_constants_are_arrays_where_they_are_not_returned_as_they_are():
    """Not of the types that JAX gives to numbers in a staged program."""
    constants = lambda x: (2.0, 3, True, 1j, np.ones(2), x)
    for options in ({}, {"batch_size": 2}, {"batch_size": "auto"}):
        for spec in (bx.AUTO, bx.Reduce("sum", unmapped="keep")):
            got = bx.vmap(constants, out_axes=spec, **options)(X[:, 0])
            assert all(isinstance(x, jax.Array) for x in got)
            jax.tree.map(same, got[:-1], jax.tree.map(jnp.asarray, constants(0.0)[:-1]))


IN_GROUPS = {"layout": "grouped"}, {"buckets": 2}, {"buckets": 2, "batch_size": 1}


@pytest.mark.parametrize("options", [{}, {"layout": "padded"}, *IN_GROUPS], ids=str)
def test_sum_match_of_rows(options):
    rows = bx.Ragged.from_rows([example((n,), seed=n) for n in (2, 4, 2)])
    fun = lambda row, w: (row.sum(), w * 2, 3.0, np.ones(2))
    expected = sum(row.sum() for row in rows.rows()), W * 2
    for spec in (None, bx.Reduce("sum", unmapped="keep")):
        got = bx.vmap(fun, (0, None), spec, sum_match=True, **options)(rows, W)
        same(got[:2], expected)
        same(jnp.asarray(got[2]), jnp.asarray(3.0))
    rest = bx.vmap(fun, (0, None), bx.AUTO, **options)(rows, W)[2:]
    assert [(x.shape, isinstance(x, jax.Array)) for x in rest] == [((), True), ((2,), True)]
    with pytest.raises(bx.AxisError, match="rows of different lengths cannot be reduced"):
        bx.vmap(lambda row: row * 2, 0, None, sum_match=True)(rows)
