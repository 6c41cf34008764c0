"""A sharded batch axis: each device runs chunks of the lanes it has."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.oracle import example, plainly, same

W = example((2, 3), seed=1)
X = example((3, 16), seed=2)


def predict(w, x):
    return jnp.tanh(w @ x), jnp.sum(x) ** 2


def largest(x):
    return jnp.max(x)


def outputs(w, x, **options):
    """Outputs along an axis, a mean and a maximum over the batch."""
    y, mean = bx.vmap(predict, (None, 1), (1, bx.Reduce("mean")), **options)(w, x)
    return y, mean, bx.vmap(largest, 1, bx.Reduce("max"), **options)(x)


loss = lambda w, x, **options: sum(jnp.sum(jnp.sin(y)) for y in outputs(w, x, **options))
gradient = lambda w, x, **options: jax.grad(functools.partial(loss, **options), (0, 1))(w, x)
mesh_of = lambda axis_type, count=4: jax.make_mesh((count,), ("d",), axis_types=(axis_type,))


def sharded(mesh):
    """The weights on every device, and the lanes spread over all of them."""
    return (
        jax.device_put(W, NamedSharding(mesh, P())),
        jax.device_put(X, NamedSharding(mesh, P(None, "d"))),
    )


def set_mesh(mesh, axis_type):
    """Arrays whose types tell of a mesh are differentiated under it; that is JAX's rule."""
    return jax.set_mesh(mesh) if axis_type is AxisType.Explicit else contextlib.nullcontext()


COLLECTIVE = r" (all-[a-z]+|collective-[a-z]+)(?:-start)?\("


def collectives(compiled):
    return re.findall(COLLECTIVE, compiled.as_text())


# Of the last, a shard has fewer lanes than a chunk.
@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"batch_size": 3}, {"batch_size": 6, "residuals": "keep"}]
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.compiles(100)
@pytest.mark.each_commit(2)
def test_sharded_arrays_outside_jit(axis_type, options):
    expected = outputs(W, X), gradient(W, X)
    mesh = mesh_of(axis_type)
    args = sharded(mesh)
    with set_mesh(mesh, axis_type):
        got = outputs(*args, **options), gradient(*args, **options)
    same(jax.device_get(got), expected)
    assert got[0][0].sharding.spec == P(None, "d")


@pytest.mark.parametrize("residuals", ["recompute", "keep"])
def test_types_tell_of_the_mesh_under_jit(residuals):
    expected = outputs(W, X), gradient(W, X)
    mesh = mesh_of(AxisType.Explicit)
    args = sharded(mesh)

    def both(w, x):
        options = dict(batch_size=2, residuals=residuals)
        return outputs(w, x, **options), gradient(w, x, **options)

    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(*args).compile()
        same(jax.device_get(compiled(*args)), expected)
    # No lane leaves its device: what is reduced over the batch is all that is sent.
    sent = [line for line in compiled.as_text().splitlines() if re.search(COLLECTIVE, line)]
    assert sent
    for line in sent:
        sizes = [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"f(?:32|64)\[([\d,]+)\]", line)
        ]
        assert all(size < X.size // 4 for size in sizes), line


def test_spmd_axis_name_tells_of_a_mesh_that_types_do_not():
    expected = bx.vmap(predict, (None, 1), (1, bx.Reduce("mean")))(W, X)
    mesh = mesh_of(AxisType.Auto)
    args = sharded(mesh)
    chunked = bx.vmap(predict, (None, 1), (1, bx.Reduce("mean")), batch_size=2, spmd_axis_name="d")
    with jax.set_mesh(mesh):
        compiled = jax.jit(chunked).lower(*args).compile()
        same(jax.device_get(compiled(*args)), expected)
    assert collectives(compiled) == ["all-reduce"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_collectives_and_indices_span_all_shards(axis_type):
    def meet(x):
        mean = jax.lax.pmean(x, "i")
        index = jax.lax.axis_index("i")
        return x - mean, mean, index, jax.lax.all_gather(x, "i")[index // 2]

    expected = jax.vmap(meet, 1, axis_name="i")(X)
    _, x = sharded(mesh_of(axis_type))
    same(jax.device_get(bx.vmap(meet, 1, axis_name="i", batch_size=2)(x)), expected)


def test_lanes_that_the_devices_do_not_divide_run_unsharded():
    mesh = mesh_of(AxisType.Auto)
    x = jax.device_put(X[:, :14], NamedSharding(mesh, P()))
    same(jax.device_get(bx.vmap(jnp.sum, 1, batch_size=4)(x)), bx.vmap(jnp.sum, 1)(X[:, :14]))


def test_an_array_that_is_sharded_otherwise_is_refused_by_shape():
    mesh = mesh_of(AxisType.Explicit, 3)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, P(None, "d")))
        x = jax.device_put(X[:, :12], NamedSharding(mesh, P(None, "d")))
        with pytest.raises(bx.UnsupportedError, match=r"shape \(2, 3\) .* sharded by its type"):
            bx.vmap(predict, (None, 1), batch_size=2)(w, x)


def test_an_array_that_is_closed_over_is_refused_by_shape():
    mesh = mesh_of(AxisType.Explicit)
    w, x = sharded(mesh)
    with jax.set_mesh(mesh), pytest.raises(bx.UnsupportedError, match="Pass it as an argument"):
        bx.vmap(lambda x: predict(w, x), 1, batch_size=2)(x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(None, "d"), P()], ids=str)
def test_a_batch_size_is_chosen_where_only_arrays_know_their_mesh(axis_type, spec):
    x = jax.device_put(X, NamedSharding(mesh_of(axis_type), spec))
    options = dict(in_axes=(None, 1), out_axes=1, batch_size="auto", memory_limit="1MiB")

    def f(w, x):
        return jnp.tanh(w @ x)

    for run in (bx.vmap(f, **options), jax.jit(bx.vmap(f, **options))):
        same(run(W, x), plainly(jax.vmap(f, (None, 1), 1), W, X))
