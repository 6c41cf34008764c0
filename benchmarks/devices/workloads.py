"""Functions of one example on several devices, and what one would write by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import batchax as bx
from benchmarks.workload import normal
from benchmarks.workloads.networks import mlp, mlp_parameters

SHARDED, COPIED = PartitionSpec("devices"), PartitionSpec()


@dataclass(frozen=True)
class DeviceWorkload:
    """A function of parameters, which all lanes share, and of examples.

    Attributes:
      name: what reports call it.
      ours: from a mesh to the batched function.
      by_hand: the same with `shard_map`.
      data: from a number of lanes to the arguments: parameters, then arrays of examples.
      lanes: of a full measurement.
    """

    name: str
    ours: Callable[[Mesh], Callable[..., Any]]
    by_hand: Callable[[Mesh], Callable[..., Any]]
    data: Callable[[int], tuple[Any, ...]]
    lanes: int

    def placed(self, mesh: Mesh, lanes: int) -> tuple[Any, ...]:
        """The arguments where a loop over steps of training has them: on the devices."""
        even = lanes % mesh.size == 0
        parameters, *examples = self.data(lanes)
        spread = NamedSharding(mesh, SHARDED if even else COPIED)
        copied = jax.device_put(parameters, NamedSharding(mesh, COPIED))
        return copied, *(jax.device_put(x, spread) for x in examples)


def gelu(w: Any, x: Any) -> Any:
    return jax.nn.gelu(x * w) * jnp.exp(-(x**2))


def loss(parameters: Any, x: Any, y: Any) -> Any:
    return ((mlp(parameters, x) - y) ** 2).sum()


def attend(w: Any, x: Any) -> Any:
    """A row that needs more memory than its arguments: the reason to run in chunks."""
    return jax.nn.softmax((x @ w) @ x.T) @ x


def _filled(fun: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fun` of lanes that do not come out even: the last is repeated, and its results are cut."""

    def filled(parameters: Any, x: Any) -> Any:
        missing = -len(x) % mesh.size
        full = jnp.concatenate([x, *[x[-1:]] * missing])
        # Where the compiler may choose, it puts lanes together by exchanges between devices.
        everywhere = PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        full = lax.with_sharding_constraint(full, NamedSharding(mesh, everywhere))
        return fun(parameters, full)[: len(x)]

    return filled


def _on_devices(mesh: Mesh, fun: Callable[..., Any]) -> Callable[..., Any]:
    specs = COPIED, SHARDED
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=SHARDED, check_vma=False)


def _lanes_by_hand(mesh: Mesh) -> Callable[..., Any]:
    return _on_devices(mesh, lambda w, x: jax.vmap(gelu, (None, 0))(w, x))


def _gradient_by_hand(mesh: Mesh) -> Callable[..., Any]:
    def mean_gradient(parameters: Any, x: Any, y: Any) -> Any:
        def total(parameters: Any) -> Any:
            return jax.vmap(loss, (None, 0, 0))(parameters, x, y).sum() / (len(x) * mesh.size)

        return lax.psum(jax.value_and_grad(total)(parameters), "devices")

    specs = COPIED, SHARDED, SHARDED
    return jax.shard_map(
        mean_gradient, mesh=mesh, in_specs=specs, out_specs=COPIED, check_vma=False
    )


def _gradient_of_all_by_hand(mesh: Mesh) -> Callable[..., Any]:
    def mean(parameters: Any, x: Any, y: Any) -> Any:
        losses = jax.vmap(loss, (None, 0, 0))(parameters, x, y)
        return lax.psum(losses.sum(), "devices") / (len(x) * mesh.size)

    specs = COPIED, SHARDED, SHARDED
    return jax.value_and_grad(
        jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=COPIED, check_vma=False)
    )


def _gradient(mesh: Mesh) -> Callable[..., Any]:
    batched = bx.vmap(lambda *args: loss(*args), (None, 0, 0), bx.Reduce("mean"), mesh=mesh)
    return jax.value_and_grad(batched)


def _gradients_by_hand(mesh: Mesh) -> Callable[..., Any]:
    def mean_gradient(parameters: Any, x: Any, y: Any) -> Any:
        each = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(parameters, x, y)
        sums = lax.psum(jax.tree.map(lambda x: x.sum(0), each), "devices")
        return jax.tree.map(lambda total: total / (len(x) * mesh.size), sums)

    specs = COPIED, SHARDED, SHARDED
    return jax.shard_map(
        mean_gradient, mesh=mesh, in_specs=specs, out_specs=COPIED, check_vma=False
    )


def _gradients(mesh: Mesh) -> Callable[..., Any]:
    each = lambda *args: jax.value_and_grad(loss)(*args)
    return bx.vmap(each, (None, 0, 0), bx.Reduce("mean"), mesh=mesh)


def _chunks_by_hand(size: int) -> Callable[[Mesh], Callable[..., Any]]:
    def by_hand(mesh: Mesh) -> Callable[..., Any]:
        in_chunks = lambda w, x: lax.map(lambda x: attend(w, x), x, batch_size=size)
        return _on_devices(mesh, in_chunks)

    return by_hand


def _ours(fun: Callable[..., Any], **options: Any) -> Callable[[Mesh], Callable[..., Any]]:
    return lambda mesh: bx.vmap(lambda *args: fun(*args), (None, 0), mesh=mesh, **options)


def _elementwise(lanes: int) -> tuple[Any, ...]:
    return normal(256), normal(lanes, 256)


def _network(lanes: int) -> tuple[Any, ...]:
    return mlp_parameters(64, 128, 10), normal(lanes, 64), normal(lanes, 10)


def _rows(lanes: int) -> tuple[Any, ...]:
    return normal(16, 16), normal(lanes, 64, 16)


WORKLOADS = {
    w.name: w
    for w in (
        DeviceWorkload("elementwise", _ours(gelu), _lanes_by_hand, _elementwise, 4096),
        DeviceWorkload(
            "elementwise, uneven",
            _ours(gelu),
            lambda mesh: _filled(_lanes_by_hand(mesh), mesh),
            _elementwise,
            4095,
        ),
        DeviceWorkload(
            "mean and gradient of a network", _gradient, _gradient_by_hand, _network, 2048
        ),
        DeviceWorkload(
            "the same, of all by hand", _gradient, _gradient_of_all_by_hand, _network, 2048
        ),
        DeviceWorkload(
            "mean of gradients of a network", _gradients, _gradients_by_hand, _network, 2048
        ),
        DeviceWorkload(
            "attention in chunks", _ours(attend, batch_size=16), _chunks_by_hand(16), _rows, 512
        ),
        DeviceWorkload(
            "attention in chunks, uneven",
            _ours(attend, batch_size=16),
            lambda mesh: _filled(_chunks_by_hand(16)(mesh), mesh),
            _rows,
            509,
        ),
    )
}
